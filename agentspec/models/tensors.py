"""The model's parameters: canonical names, shapes, dtypes and which are in 8 bits, as they follow from a TextConfig alone.

Canonical names are the flat text-only names of Qwen3.5 (`model.layers.N...`, `lm_head.weight`, `mtp...`), with q, k, v, z, b and a
unpacked and experts fused, whatever the checkpoint's own layout is. How checkpoints map to them is `weights.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.models.quantization import is_convertible
from agentspec.models.weight_regions import empty_weight, fill

Shapes = dict[str, tuple[int, ...]]

_STACKED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
"""Modules of one input whose rows are multiplied as one matrix."""
_RANDOM_SLICE = 2**26
"""Values that random 8-bit experts are made of at a time, in float32."""

_FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


def parameter_shapes(config: TextConfig) -> Shapes:
    """Every parameter of the text model and its MTP head, in checkpoint order."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i, layer_type in enumerate(config.layer_types):
        shapes |= _layer(config, f"model.layers.{i}.", linear=layer_type == "linear_attention")
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.has_mtp:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
        shapes |= _layer(config, "mtp.layers.0.", linear=False)
    return shapes


def _layer(config: TextConfig, prefix: str, *, linear: bool) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {f"{prefix}input_layernorm.weight": (hidden,), f"{prefix}post_attention_layernorm.weight": (hidden,)}
    if linear:
        heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
        shapes |= {
            f"{prefix}linear_attn.in_proj_qkv.weight": (config.conv_channels, hidden),
            f"{prefix}linear_attn.in_proj_z.weight": (values, hidden),
            f"{prefix}linear_attn.in_proj_b.weight": (heads, hidden),
            f"{prefix}linear_attn.in_proj_a.weight": (heads, hidden),
            f"{prefix}linear_attn.conv1d.weight": (config.conv_channels, 1, CONV_TAPS),
            f"{prefix}linear_attn.A_log": (heads,),
            f"{prefix}linear_attn.dt_bias": (heads,),
            f"{prefix}linear_attn.norm.weight": (config.value_dim,),
            f"{prefix}linear_attn.out_proj.weight": (hidden, values),
        }
    else:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (2 * queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (config.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (config.head_dim,),
        }
    return shapes | _ffn(config, f"{prefix}mlp.")


def _ffn(config: TextConfig, prefix: str) -> Shapes:
    hidden, moe = config.hidden_size, config.moe
    if moe is None:
        assert config.intermediate_size is not None
        return _swiglu(prefix, hidden, config.intermediate_size)
    return {
        f"{prefix}gate.weight": (moe.num_experts, hidden),
        f"{prefix}experts.gate_up_proj": (moe.num_experts, 2 * moe.intermediate_size, hidden),
        f"{prefix}experts.down_proj": (moe.num_experts, hidden, moe.intermediate_size),
        f"{prefix}shared_expert_gate.weight": (1, hidden),
        **_swiglu(f"{prefix}shared_expert.", hidden, moe.shared_intermediate_size),
    }


def _swiglu(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for the recurrence's control tensors, whatever the checkpoint stores; `dtype` for the rest."""
    return torch.float32 if name.endswith(_FLOAT32_SUFFIXES) else dtype


def block_scaled_names(config: TextConfig) -> frozenset[str]:
    """The parameters in 8-bit floats: every convertible one that the config doesn't exclude.

    Raises UnsupportedModelError for exclusions that split what is computed as one matrix, and for packed rows in 8 bits."""
    if config.quantization is None:
        return frozenset()
    names = [name for name in parameter_shapes(config) if is_convertible(name)]
    scaled = frozenset(name for name in names if not _is_excluded(name, config, config.quantization.excluded))
    for first, *others in _STACKED:
        for name in names:
            if not name.endswith(f".{first}.weight"):
                continue
            parts = {name, *(name.replace(f".{first}.", f".{other}.") for other in others)}
            if parts & scaled and parts - scaled:
                raise UnsupportedModelError(
                    f"quantization_config excludes {', '.join(sorted(parts - scaled))} but not {', '.join(sorted(parts & scaled))}: "
                    "their rows are one matrix here, so all of them or none"
                )
    return scaled


def _is_excluded(name: str, config: TextConfig, excluded: frozenset[str]) -> bool:
    """Whether the exclusion list names a convertible parameter, in any layout of a checkpoint."""
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    if config.packed_projections and last in ("in_proj_qkv", "in_proj_z"):
        if f"{prefix}.in_proj_qkvz" not in excluded:
            raise UnsupportedModelError(
                f"{prefix}.in_proj_qkvz: packed projections in 8 bits are not supported (rows of q, k, v and z share multipliers); "
                "quantization_config must exclude it"
            )
        return True
    if not prefix.endswith(".experts"):
        return f"{prefix}.{last}" in excluded
    if prefix in excluded or name in excluded:
        return True
    assert config.moe is not None
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    modules = {f"{prefix}.{expert}.{part}" for expert in range(config.moe.num_experts) for part in parts}
    if modules & excluded and modules - excluded:
        raise UnsupportedModelError(f"quantization_config excludes {min(modules & excluded)} but not {min(modules - excluded)}: all experts or none")
    return modules <= excluded


def random_parameters(config: TextConfig, *, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, kernels.Weight]:
    """Untrained parameters of sane scale, made on the device; the same seed gives the same values on one device type.

    What the config has in 8 bits lies as `empty_weight` says."""
    generator = torch.Generator(device).manual_seed(seed)
    scaled = block_scaled_names(config)
    return {
        name: _random_blocks(shape, device, dtype, generator) if name in scaled else _random_tensor(name, shape, device, dtype, generator)
        for name, shape in parameter_shapes(config).items()
    }


def _random_tensor(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    tensor = torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device)
    if name.endswith("A_log"):
        return tensor.uniform_(1.0, 16.0, generator=generator).log_()
    if name.endswith("dt_bias"):
        # softplus of it is a step between 0.001 and 0.1, log-uniform, as state-space models are initialised
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("linear_attn.norm.weight"):
        return tensor.fill_(1.0)
    if len(shape) == 1:
        return tensor.zero_()
    fan_in = CONV_TAPS if name.endswith("conv1d.weight") else shape[-1]
    return tensor.normal_(0.0, fan_in**-0.5, generator=generator)


def _random_blocks(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> kernels.Weight:
    """A matrix, or a stack of them a few at a time: a stack in float32 would take four times its room."""
    weight = empty_weight(shape, device=device, dtype=dtype)
    num_matrices = max(1, _RANDOM_SLICE // (shape[-2] * shape[-1])) if len(shape) == 3 else shape[0]
    for first in range(0, shape[0], num_matrices):
        part = slice(first, min(first + num_matrices, shape[0]))
        values = torch.empty((part.stop - first, *shape[1:]), dtype=torch.float32, device=device)
        fill(weight, (part,), kernels.quantize_blocks(values.normal_(0.0, shape[-1] ** -0.5, generator=generator)))
    return weight


class ParameterScope:
    """Hands each parameter to the layer that owns it, exactly once."""

    def __init__(self, parameters: Mapping[str, kernels.Weight], prefix: str = "") -> None:
        self._parameters = parameters if isinstance(parameters, dict) else dict(parameters)
        self._prefix = prefix

    def under(self, prefix: str) -> ParameterScope:
        """The same parameters, seen from one module: shares what has been taken."""
        return ParameterScope(self._parameters, self._prefix + prefix)

    def take(self, name: str) -> kernels.Weight:
        return self._parameters.pop(self._prefix + name)

    def take_tensor(self, name: str) -> Tensor:
        """A parameter that is never block-scaled."""
        parameter = self.take(name)
        assert isinstance(parameter, Tensor), f"{self._prefix}{name} is block-scaled"
        return parameter

    def take_tensor_rows(self, *names: str) -> Tensor:
        """`take_rows` of parameters that are never block-scaled."""
        return torch.cat([self.take_tensor(name) for name in names])

    def take_rows(self, *names: str) -> kernels.Weight:
        """Several projections of the same input, stacked into one."""
        return kernels.stack_rows([self.take(name) for name in names])

    def finish(self) -> None:
        """Raise if a parameter was loaded that no layer uses."""
        if self._parameters:
            raise CheckpointError(f"parameters that no layer uses: {', '.join(sorted(self._parameters))}")
