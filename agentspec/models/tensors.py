"""The model's parameters: canonical names, shapes, shards, dtypes, and which are quantised. All are derived from a
TextConfig alone.

Canonical names are the flat text-only names of Qwen3.5 (`model.layers.N...`, `lm_head.weight`, `mtp...`), with q, k, v,
z, b and a unpacked and experts fused, whatever the checkpoint's own layout is. `checkpoint_layout.py` maps checkpoints
to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.models.quantization import Quantization, Scheme, is_convertible
from agentspec.models.shards import (
    SINGLE_RANK,
    Rank,
    Shard,
    expert_shard,
    row_alignment,
    shard_shape,
    split_region,
    width_shard,
    width_units,
)

HEAD = "lm_head.weight"
_STACKED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
"""Modules with the same input, whose rows are multiplied as one matrix."""
_RANDOM_SLICE = 2**26
"""Number of float32 values from which random quantised experts are made at a time."""
_LARGE = 2**28
"""Values of a matrix that is made in such pieces too: a head."""

_Drawn = dict[tuple[Scheme, tuple[int, ...]], kernels.Weight]
"""A few matrices that stacks repeat, by scheme and shape."""

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


def parameter_forms(config: TextConfig, num_ranks: int = 1) -> Parameters:
    """Every parameter of the text model and its MTP head, in checkpoint order, as so many ranks share it."""
    hidden = config.hidden_size
    found: Parameters = {"model.embed_tokens.weight": Parameter((config.vocab_size, hidden))}
    for i, layer_type in enumerate(config.layer_types):
        found |= _layer(config, f"model.layers.{i}.", num_ranks, linear=layer_type == "linear_attention")
    found["model.norm.weight"] = Parameter((hidden,))
    if not config.tied:
        found[HEAD] = _rows(hidden, (config.vocab_size, 1), what="rows")
    if config.has_mtp:
        found["mtp.fc.weight"] = _pair_projection(config, num_ranks)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            found[f"mtp.{name}.weight"] = Parameter((hidden,))
        found |= _layer(config, "mtp.layers.0.", num_ranks, linear=False)
    return found


def _rows(
    depth: int, *parts: tuple[int, int], what: str = "heads", surplus: Literal["repeat"] | None = None
) -> Parameter:
    """A matrix split by rows. parts, what, surplus: as in Shard."""
    return Parameter((sum(num_units * size for num_units, size in parts), depth), Shard(0, parts, what, surplus))


def _columns(num_rows: int, num_heads: int, size: int) -> Parameter:
    """A matrix split by columns: products with a rank's part are partial sums."""
    return Parameter((num_rows, num_heads * size), Shard(1, ((num_heads, size),), "heads"))


def _pair_projection(config: TextConfig, num_ranks: int) -> Parameter:
    """Split by columns if they can be shared equally; else every rank has all."""
    width = 2 * config.hidden_size
    is_equal = width_units(config, width)[0] % num_ranks == 0
    return Parameter((config.hidden_size, width), width_shard(config, 1, width) if is_equal else None)


def _layer(config: TextConfig, prefix: str, num_ranks: int, *, linear: bool) -> Parameters:
    norm = Parameter((config.hidden_size,))
    mixer = _gated_delta(config, f"{prefix}linear_attn.") if linear else _attention(config, f"{prefix}self_attn.")
    return (
        {f"{prefix}input_layernorm.weight": norm, f"{prefix}post_attention_layernorm.weight": norm}
        | mixer
        | _ffn(config, f"{prefix}mlp.", num_ranks)
    )


def _gated_delta(config: TextConfig, prefix: str) -> Parameters:
    """Value heads are split between ranks, together with the key heads that they read."""
    hidden = config.hidden_size
    keys, values, heads = (
        (config.num_key_heads, config.key_dim),
        (config.num_value_heads, config.value_dim),
        (config.num_value_heads, 1),
    )
    of_heads = Parameter((config.num_value_heads,), Shard(0, (heads,), "heads"))
    return {
        f"{prefix}in_proj_qkv.weight": _rows(hidden, keys, keys, values),
        f"{prefix}in_proj_z.weight": _rows(hidden, values),
        f"{prefix}in_proj_b.weight": _rows(hidden, heads),
        f"{prefix}in_proj_a.weight": _rows(hidden, heads),
        f"{prefix}conv1d.weight": Parameter(
            (config.conv_channels, 1, CONV_TAPS), Shard(0, (keys, keys, values), "heads")
        ),
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
        f"{prefix}k_proj.weight": _rows(hidden, keys, surplus="repeat"),
        f"{prefix}v_proj.weight": _rows(hidden, keys, surplus="repeat"),
        f"{prefix}o_proj.weight": _columns(hidden, config.num_heads, config.head_dim),
        f"{prefix}q_norm.weight": norm,
        f"{prefix}k_norm.weight": norm,
    }


def _ffn(config: TextConfig, prefix: str, num_ranks: int) -> Parameters:
    """An FFN is split by its width. Experts that are too narrow for that are split by expert: then the shared one is
    on as many ranks as it has blocks."""
    hidden, moe = config.hidden_size, config.moe
    if moe is None:
        assert config.intermediate_size is not None
        return _swiglu(config, prefix, config.intermediate_size)
    num_experts, width = moe.num_experts, moe.intermediate_size
    gate_up, down = expert_shard(config, 1, num_ranks, num_parts=2), expert_shard(config, 2, num_ranks)
    return {
        f"{prefix}gate.weight": Parameter((num_experts, hidden)),
        f"{prefix}experts.gate_up_proj": Parameter((num_experts, 2 * width, hidden), gate_up),
        f"{prefix}experts.down_proj": Parameter((num_experts, hidden, width), down),
        f"{prefix}shared_expert_gate.weight": Parameter((1, hidden)),
        **_swiglu(config, f"{prefix}shared_expert.", moe.shared_intermediate_size, surplus="zeros"),
    }


def _swiglu(config: TextConfig, prefix: str, width: int, surplus: Literal["zeros"] | None = None) -> Parameters:
    hidden = config.hidden_size
    rows = Parameter((width, hidden), width_shard(config, 0, width, surplus=surplus))
    return {
        f"{prefix}gate_proj.weight": rows,
        f"{prefix}up_proj.weight": rows,
        f"{prefix}down_proj.weight": Parameter((hidden, width), width_shard(config, 1, width, surplus=surplus)),
    }


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for the recurrence's control tensors, whatever the checkpoint's dtype; `dtype` for the rest."""
    return torch.float32 if name.endswith(_FLOAT32_SUFFIXES) else dtype


def quantized_schemes(config: TextConfig) -> dict[str, Scheme]:
    """How the parameters are stored that are quantised in the checkpoint and in memory: every convertible one that the
    config doesn't exclude, and a head in a form that GPUs multiply, which a device may still expand (`holds_head`).

    Raises UnsupportedModelError for exclusions that split a matrix of _STACKED, for quantised packed projections, and
    for columns that aren't whole groups."""
    if config.quantization is None:
        return {}
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if is_convertible(name)}
    schemes = {name: _scheme(name, config, config.quantization) for name in shapes}
    for parts in stacked_parts(shapes):
        refuse_unlike_parts({part: schemes[part] for part in parts})
    found = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if (head := head_scheme(config)) is not None:
        found[HEAD] = head
    shapes = parameter_shapes(config)
    for name, scheme in found.items():
        refuse_part_blocks(name, shapes[name], scheme)
    return found


def head_scheme(config: TextConfig) -> Scheme | None:
    """How a quantised head is stored in a form that GPUs multiply; None: there is none."""
    if config.tied or config.quantization is None or config.quantization.is_official:
        return None
    scheme = config.quantization.scheme("lm_head")
    return None if scheme is None else scheme.for_head()


def stacked_parts(names: Iterable[str]) -> Iterator[list[str]]:
    """The lists of parameters whose rows are one matrix, for those of `names` that begin one."""
    for name in names:
        for first, *others in _STACKED:
            if name.endswith(f".{first}.weight"):
                yield [name, *(name.replace(f".{first}.", f".{other}.") for other in others)]


def refuse_unlike_parts(parts: Mapping[str, Scheme | None]) -> None:
    """Raise UnsupportedModelError if parts of one matrix are stored differently."""
    plain = sorted(name for name, scheme in parts.items() if scheme is None)
    quantized = sorted(parts.keys() - plain)
    if plain and quantized:
        raise UnsupportedModelError(
            f"quantization_config excludes {', '.join(plain)} but not {', '.join(quantized)}: "
            "their rows are one matrix here, so all of them or none"
        )
    if len({*parts.values()}) > 1:
        raise UnsupportedModelError(
            f"{', '.join(quantized)} are stored in different forms; their rows are one matrix here, so all in one form"
        )


def refuse_part_blocks(name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
    """Raise UnsupportedModelError if a row isn't whole blocks, where it must be."""
    if not scheme.has_part_blocks and shape[-1] % scheme.column_block:
        raise UnsupportedModelError(
            f"{name}: its {shape[-1]} columns aren't whole groups of {scheme.column_block}, which share a scale"
        )


def _scheme(name: str, config: TextConfig, quantization: Quantization) -> Scheme | None:
    """How a convertible parameter is stored, in any checkpoint layout; None: in full precision."""
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    if config.packed_projections and last in ("in_proj_qkv", "in_proj_z"):
        packed = quantization.scheme(f"{prefix}.in_proj_qkvz")
        if packed is not None:
            raise UnsupportedModelError(
                f"{prefix}.in_proj_qkvz: packed projections in {packed.bits} bits are not supported "
                "(rows of q, k, v and z share multipliers); quantization_config must exclude it"
            )
        return None
    if not prefix.endswith(".experts"):
        return quantization.scheme(f"{prefix}.{last}")
    assert config.moe is not None
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    modules = [f"{prefix}.{expert}.{part}" for expert in range(config.moe.num_experts) for part in parts]
    schemes = {module: quantization.scheme(module) for module in modules}
    if len({*schemes.values()}) > 1:
        excluded = sorted(module for module, scheme in schemes.items() if scheme is None)
        if excluded:
            raise UnsupportedModelError(
                f"quantization_config excludes {excluded[0]} but not {min(schemes.keys() - excluded)}: "
                "all experts or none"
            )
        first = schemes[modules[0]]
        other = next(module for module, scheme in schemes.items() if scheme != first)
        raise UnsupportedModelError(
            f"{modules[0]} and {other} are stored in different forms; all experts of a layer must have one"
        )
    return schemes[modules[0]]


def random_parameters(
    config: TextConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    rank: Rank = SINGLE_RANK,
    repeated: bool = False,
) -> dict[str, kernels.Weight]:
    """A rank's part of untrained parameters with realistic scales, made on the device. One seed gives the same values
    on one device type, whatever the number of ranks: each parameter is made whole and then cut.

    Quantised parameters have the form of `empty_parameter`. repeated: only the first few experts of the first quantised
    stack of each shape are drawn; its others, and those of other layers, repeat them. For benchmarks, whose steps read
    as many bytes of as many experts then: copying takes far less time than drawing and quantising."""
    # From 2.13 on, torch completes its generators in a module that the engine's process left out (engine/start.py).
    from torch._prims import rng_prims  # noqa: F401

    generator = torch.Generator(device).manual_seed(seed)
    schemes, forms = quantized_schemes(config), parameter_forms(config, rank.count)
    drawn: _Drawn = {}

    def empty(name: str, rank: Rank) -> kernels.Weight:
        return empty_parameter(name, forms[name], schemes.get(name), device=device, dtype=dtype, rank=rank)

    # All at first: memory that filling takes would else be left in pieces between them, too small for state.
    found = {name: empty(name, rank) for name in forms}
    for name, parameter in forms.items():
        is_cut = parameter.shard is not None and rank.count > 1
        whole = empty(name, SINGLE_RANK) if is_cut else found[name]
        if name in schemes and repeated and len(whole.shape) == 3:
            _fill_repeated(schemes[name], whole, generator, drawn, dtype)
        elif name in schemes:
            _fill_quantized(schemes[name], whole, generator)
        else:
            _fill_plain(name, whole.tensor, generator)
        if is_cut:
            for region, taken in split_region(name, (), parameter.shard, rank):
                found[name].fill(region, whole, taken)
    return found


def empty_parameter(
    name: str,
    parameter: Parameter,
    scheme: Scheme | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_rows: int = kernels.SCALE_BLOCK,
    rank: Rank = SINGLE_RANK,
) -> kernels.Weight:
    """A rank's part of a parameter: zeros where another rank holds its unit, uninitialised otherwise.

    scheme: of a quantised parameter; its form on the device is that of Scheme.empty. block_rows: as there, for the
    whole parameter."""
    shape, shard = shard_shape(name, parameter.shape, parameter.shard, rank), parameter.shard
    if scheme is None or (name == HEAD and not holds_head(scheme, shape, device)):
        weight: kernels.Weight = kernels.Plain(torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device))
    else:
        block_rows = math.gcd(block_rows, row_alignment(name, parameter.shape, shard, rank))
        weight = scheme.empty(shape, device=device, dtype=dtype, block_rows=block_rows)
    if shard is not None and shard.is_zero(rank):
        zeros = torch.zeros(shape, device=device)
        weight.fill((), kernels.Plain(zeros) if scheme is None else scheme.quantize(zeros))
    return weight


def holds_head(scheme: Scheme, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether a device keeps a quantised head as it is. CPUs expand it: they would do so in each step."""
    return device.type != "cpu" and scheme.cpu_only(HEAD, shape) is None


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


def _fill_quantized(scheme: Scheme, weight: kernels.Weight, generator: torch.Generator) -> None:
    """Fill a matrix, or a stack of matrices a few at a time: the whole stack in float32 would take four times its
    size."""
    shape = weight.shape
    num_matrices = _matrices_at_a_time(shape) if len(shape) == 3 else shape[0]
    if len(shape) == 2 and shape.numel() > _LARGE:
        num_matrices = _RANDOM_SLICE // shape[1] // kernels.SCALE_BLOCK * kernels.SCALE_BLOCK  # rows
    for first in range(0, shape[0], num_matrices):
        part = slice(first, min(first + num_matrices, shape[0]))
        weight.fill((part,), _draw(scheme, (part.stop - first, *shape[1:]), weight.device, generator))


def _fill_repeated(
    scheme: Scheme, weight: kernels.Weight, generator: torch.Generator, drawn: _Drawn, dtype: torch.dtype
) -> None:
    """Fill a stack of matrices with copies of a few, which are drawn if `drawn` has none of this scheme and shape.

    dtype: as in Scheme.empty."""
    num_matrices = min(_matrices_at_a_time(weight.shape), weight.shape[0])
    shape = (num_matrices, *weight.shape[1:])
    if (few := drawn.get((scheme, shape))) is None:
        # In the stack's form, so that nothing is converted again for each copy.
        few = scheme.empty(shape, device=weight.device, dtype=dtype, block_rows=kernels.SCALE_BLOCK)
        few.fill((), _draw(scheme, shape, weight.device, generator))
        drawn[scheme, shape] = few
    for first in range(0, weight.shape[0], num_matrices):
        part = slice(first, min(first + num_matrices, weight.shape[0]))
        weight.fill((part,), few, (slice(0, part.stop - first),))


def _draw(scheme: Scheme, shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> kernels.Weight:
    values = torch.empty(shape, dtype=torch.float32, device=device)
    return scheme.quantize(values.normal_(0.0, shape[-1] ** -0.5, generator=generator))


def _matrices_at_a_time(shape: tuple[int, ...]) -> int:
    return max(1, _RANDOM_SLICE // (shape[-2] * shape[-1]))


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
