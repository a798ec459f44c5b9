"""The model's parameters: canonical names, shapes and dtypes, as they follow from a TextConfig alone.

Canonical names are the flat text-only names of Qwen3.5 (`model.layers.N...`, `lm_head.weight`, `mtp...`), with q, k, v, z, b and a
unpacked and experts fused, whatever the checkpoint's own layout is. How checkpoints map to them is `weights.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError
from agentspec.models.hf_config import CONV_TAPS, TextConfig

Shapes = dict[str, tuple[int, ...]]

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


def random_parameters(config: TextConfig, *, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, kernels.Weight]:
    """Untrained parameters of sane scale, made on the device; the same seed gives the same values on one device type."""
    generator = torch.Generator(device).manual_seed(seed)
    parameters: dict[str, kernels.Weight] = {}
    for name, shape in parameter_shapes(config).items():
        tensor = torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device)
        if name.endswith("A_log"):
            tensor.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            # softplus of it is a step between 0.001 and 0.1, log-uniform, as state-space models are initialised
            step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            tensor = step + torch.log(-torch.expm1(-step))
        elif name.endswith("linear_attn.norm.weight"):
            tensor.fill_(1.0)
        elif len(shape) == 1:
            tensor.zero_()
        elif name.endswith("conv1d.weight"):
            tensor.normal_(0.0, CONV_TAPS**-0.5, generator=generator)
        else:
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        parameters[name] = tensor
    return parameters


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
