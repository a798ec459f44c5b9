"""The model's parameters: canonical names, shapes, shards, dtypes, and which are quantised. All are derived from a
TextConfig alone.

Canonical names are the flat text-only names of Qwen3.5 (`model.layers.N...`, `lm_head.weight`, `mtp...`), with q, k, v,
z, b and a unpacked and experts fused, whatever the checkpoint's own layout is. `checkpoint_layout.py` maps checkpoints
to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.models.quantization import is_convertible
from agentspec.models.shards import Shard

_STACKED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
"""Modules with the same input, whose rows are multiplied as one matrix."""
_RANDOM_SLICE = 2**26
"""Number of float32 values from which random 8-bit experts are made at a time."""

_FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's shape, and how ranks share it."""

    shape: tuple[int, ...]
    """Of the whole parameter, not of a rank's part."""
    shard: Shard | None = None
    """None: every rank holds all of it."""


Parameters = dict[str, Parameter]


def parameter_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    return {name: parameter.shape for name, parameter in parameter_forms(config).items()}


def parameter_forms(config: TextConfig) -> Parameters:
    """Every parameter of the text model and its MTP head, in checkpoint order."""
    hidden = config.hidden_size
    found: Parameters = {"model.embed_tokens.weight": Parameter((config.vocab_size, hidden))}
    for i, layer_type in enumerate(config.layer_types):
        found |= _layer(config, f"model.layers.{i}.", linear=layer_type == "linear_attention")
    found["model.norm.weight"] = Parameter((hidden,))
    if not config.tied:
        found["lm_head.weight"] = _rows(hidden, (config.vocab_size, 1))
    if config.has_mtp:
        found["mtp.fc.weight"] = Parameter((hidden, 2 * hidden))
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            found[f"mtp.{name}.weight"] = Parameter((hidden,))
        found |= _layer(config, "mtp.layers.0.", linear=False)
    return found


def _rows(depth: int, *parts: tuple[int, int], may_repeat: bool = False) -> Parameter:
    """A matrix split by rows. parts: as in Shard."""
    return Parameter((sum(num_units * size for num_units, size in parts), depth), Shard(0, parts, may_repeat))


def _columns(num_rows: int, num_units: int, size: int) -> Parameter:
    """A matrix split by columns: products with a rank's part are partial sums."""
    return Parameter((num_rows, num_units * size), Shard(1, ((num_units, size),)))


def _layer(config: TextConfig, prefix: str, *, linear: bool) -> Parameters:
    norm = Parameter((config.hidden_size,))
    mixer = _gated_delta(config, f"{prefix}linear_attn.") if linear else _attention(config, f"{prefix}self_attn.")
    return (
        {f"{prefix}input_layernorm.weight": norm, f"{prefix}post_attention_layernorm.weight": norm}
        | mixer
        | _ffn(config, f"{prefix}mlp.")
    )


def _gated_delta(config: TextConfig, prefix: str) -> Parameters:
    """Value heads are split between ranks, together with the key heads that they read."""
    hidden = config.hidden_size
    keys, values, heads = (
        (config.num_key_heads, config.key_dim),
        (config.num_value_heads, config.value_dim),
        (config.num_value_heads, 1),
    )
    of_heads = Parameter((config.num_value_heads,), Shard(0, (heads,)))
    return {
        f"{prefix}in_proj_qkv.weight": _rows(hidden, keys, keys, values),
        f"{prefix}in_proj_z.weight": _rows(hidden, values),
        f"{prefix}in_proj_b.weight": _rows(hidden, heads),
        f"{prefix}in_proj_a.weight": _rows(hidden, heads),
        f"{prefix}conv1d.weight": Parameter((config.conv_channels, 1, CONV_TAPS), Shard(0, (keys, keys, values))),
        f"{prefix}A_log": of_heads,
        f"{prefix}dt_bias": of_heads,
        f"{prefix}norm.weight": Parameter((config.value_dim,)),
        f"{prefix}out_proj.weight": _columns(hidden, *values),
    }


def _attention(config: TextConfig, prefix: str) -> Parameters:
    """Query heads are split between ranks, together with the key/value heads that they read."""
    hidden, norm, keys = config.hidden_size, Parameter((config.head_dim,)), (config.num_kv_heads, config.head_dim)
    return {
        f"{prefix}q_proj.weight": _rows(hidden, (config.num_heads, 2 * config.head_dim)),
        f"{prefix}k_proj.weight": _rows(hidden, keys, may_repeat=True),
        f"{prefix}v_proj.weight": _rows(hidden, keys, may_repeat=True),
        f"{prefix}o_proj.weight": _columns(hidden, config.num_heads, config.head_dim),
        f"{prefix}q_norm.weight": norm,
        f"{prefix}k_norm.weight": norm,
    }


def _ffn(config: TextConfig, prefix: str) -> Parameters:
    hidden, moe = config.hidden_size, config.moe
    if moe is None:
        assert config.intermediate_size is not None
        return _swiglu(config, prefix, config.intermediate_size)
    num_experts, width, units = moe.num_experts, moe.intermediate_size, _width_units(config, moe.intermediate_size)
    return {
        f"{prefix}gate.weight": Parameter((num_experts, hidden)),
        f"{prefix}experts.gate_up_proj": Parameter((num_experts, 2 * width, hidden), Shard(1, (units, units))),
        f"{prefix}experts.down_proj": Parameter((num_experts, hidden, width), Shard(2, (units,))),
        f"{prefix}shared_expert_gate.weight": Parameter((1, hidden)),
        **_swiglu(config, f"{prefix}shared_expert.", moe.shared_intermediate_size),
    }


def _swiglu(config: TextConfig, prefix: str, width: int) -> Parameters:
    rows = _rows(config.hidden_size, _width_units(config, width))
    return {
        f"{prefix}gate_proj.weight": rows,
        f"{prefix}up_proj.weight": rows,
        f"{prefix}down_proj.weight": _columns(config.hidden_size, *_width_units(config, width)),
    }


def _width_units(config: TextConfig, width: int) -> tuple[int, int]:
    """An FFN's width as (units, entries per unit): columns with a common multiplier stay together."""
    size = kernels.SCALE_BLOCK if config.quantization is not None and width % kernels.SCALE_BLOCK == 0 else 1
    return width // size, size


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for the recurrence's control tensors, whatever the checkpoint's dtype; `dtype` for the rest."""
    return torch.float32 if name.endswith(_FLOAT32_SUFFIXES) else dtype


def quantized_names(config: TextConfig) -> frozenset[str]:
    """The parameters that are quantised in the checkpoint: every convertible one that the config doesn't exclude.

    Raises UnsupportedModelError for exclusions that split a matrix of _STACKED, and for quantised packed
    projections."""
    if config.quantization is None:
        return frozenset()
    names = [name for name in parameter_shapes(config) if is_convertible(name)]
    quantized = frozenset(name for name in names if not _is_excluded(name, config, config.quantization.excluded))
    for first, *others in _STACKED:
        for name in names:
            if not name.endswith(f".{first}.weight"):
                continue
            parts = {name, *(name.replace(f".{first}.", f".{other}.") for other in others)}
            if parts & quantized and parts - quantized:
                raise UnsupportedModelError(
                    f"quantization_config excludes {', '.join(sorted(parts - quantized))} "
                    f"but not {', '.join(sorted(parts & quantized))}: "
                    "their rows are one matrix here, so all of them or none"
                )
    return quantized


def _is_excluded(name: str, config: TextConfig, excluded: frozenset[str]) -> bool:
    """Whether the exclusion list names a convertible parameter, in any checkpoint layout."""
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    if config.packed_projections and last in ("in_proj_qkv", "in_proj_z"):
        if f"{prefix}.in_proj_qkvz" not in excluded:
            raise UnsupportedModelError(
                f"{prefix}.in_proj_qkvz: packed projections in 8 bits are not supported "
                "(rows of q, k, v and z share multipliers); quantization_config must exclude it"
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
        raise UnsupportedModelError(
            f"quantization_config excludes {min(modules & excluded)} but not {min(modules - excluded)}: "
            "all experts or none"
        )
    return modules <= excluded


def random_parameters(
    config: TextConfig, *, device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, kernels.Weight]:
    """Untrained parameters with realistic scales, made on the device. One seed gives the same values on one device
    type.

    Parameters that the config quantises have the form of `empty_parameter`."""
    generator = torch.Generator(device).manual_seed(seed)
    quantized = dict.fromkeys(quantized_names(config), kernels.SCALE_BLOCK)
    found = {}
    for name, shape in parameter_shapes(config).items():
        found[name] = weight = empty_parameter(
            config, name, shape, device=device, dtype=dtype, block_rows=quantized.get(name)
        )
        if name in quantized:
            _fill_quantized(config, weight, generator)
        else:
            _fill_plain(name, weight.tensor, generator)
    return found


def empty_parameter(
    config: TextConfig,
    name: str,
    shape: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_rows: int | None,
) -> kernels.Weight:
    """An uninitialised parameter. A quantised one has the form that the config's quantisation has on the device
    (Quantization.empty).

    block_rows: as in Quantization.empty; None for a parameter that isn't quantised."""
    if block_rows is not None:
        assert config.quantization is not None
        return config.quantization.empty(shape, device=device, dtype=dtype, block_rows=block_rows)
    return kernels.Plain(torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device))


def _fill_plain(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):
        tensor.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias"):
        # softplus(dt_bias) is log-uniform between 0.001 and 0.1, the usual initialisation of state-space models
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        step += torch.log(-torch.expm1(-step))
    elif name.endswith("linear_attn.norm.weight"):
        tensor.fill_(1.0)
    elif tensor.ndim == 1:
        tensor.zero_()
    else:
        fan_in = CONV_TAPS if name.endswith("conv1d.weight") else tensor.shape[-1]
        tensor.normal_(0.0, fan_in**-0.5, generator=generator)


def _fill_quantized(config: TextConfig, weight: kernels.Weight, generator: torch.Generator) -> None:
    """Fill a matrix, or a stack of matrices a few at a time: the whole stack in float32 would take four times its
    size."""
    assert config.quantization is not None
    shape = weight.shape
    num_matrices = max(1, _RANDOM_SLICE // (shape[-2] * shape[-1])) if len(shape) == 3 else shape[0]
    for first in range(0, shape[0], num_matrices):
        part = slice(first, min(first + num_matrices, shape[0]))
        values = torch.empty((part.stop - first, *shape[1:]), dtype=torch.float32, device=weight.device)
        weight.fill((part,), config.quantization.quantize(values.normal_(0.0, shape[-1] ** -0.5, generator=generator)))


class ParameterScope:
    """Gives each parameter to the layer that owns it, exactly once."""

    def __init__(self, parameters: Mapping[str, kernels.Weight], prefix: str = "") -> None:
        self._parameters = parameters if isinstance(parameters, dict) else dict(parameters)
        self._prefix = prefix

    def under(self, prefix: str) -> ParameterScope:
        """The scope of one module, on the same remaining parameters."""
        return ParameterScope(self._parameters, self._prefix + prefix)

    def take(self, name: str) -> kernels.Weight:
        return self._parameters.pop(self._prefix + name)

    def take_tensor(self, name: str) -> Tensor:
        """Take a parameter that is never quantised."""
        return self.take(name).tensor

    def take_rows(self, *names: str) -> kernels.Weight:
        """Take several projections of the same input, stacked into one."""
        first, *others = (self.take(name) for name in names)
        return first.stack(others)

    def finish(self) -> None:
        """Raise CheckpointError if a parameter is left that no layer uses."""
        if self._parameters:
            raise CheckpointError(f"parameters that no layer uses: {', '.join(sorted(self._parameters))}")
