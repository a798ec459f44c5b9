"""How the published checkpoint layouts store the canonical parameters of `tensors.py`: tensor names, shapes, and which
part of a tensor fills which parameter.

Handles fused and per-expert experts, Qwen3-Next's packed projections, and the place of quantisation multipliers. Maps
names to names; opens no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.quantization import Scheme, StoredTensor, is_convertible
from agentspec.models.shards import Shard
from agentspec.models.tensors import HEAD, Parameters, parameter_forms, quantized_schemes, refuse_part_blocks

_SIDE = kernels.SCALE_BLOCK
"""Of a matrix that every scheme can store."""
_PER_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")

Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Target:
    """The parameter that a checkpoint tensor, or a part of it, fills."""

    parameter: str
    region: kernels.Region = ()
    """The region of the parameter that is filled."""
    pick: Pick | None = None
    """Extracts the part from the checkpoint's tensor, or from a rank's part of it; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class Source:
    """A weight that the checkpoint must contain: one tensor, or those of its scheme."""

    shape: tuple[int, ...]
    targets: tuple[Target, ...]
    scheme: Scheme | None = None
    """How it is stored; None: as plain floats."""
    shard: Shard | None = None
    """The cut of a tensor whose targets pick: from a rank's part of it they pick the rank's parts. None: the targets'
    parameters say what is read."""

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """The tensors of a quantised source, by name; its own name is `name`."""
        return {} if self.scheme is None else self.scheme.tensors(name, self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one checkpoint stores all parameters."""

    parameters: Parameters
    """Every parameter, by canonical name."""
    sources: dict[str, Source]
    """Every weight that the checkpoint must contain. One that isn't quantised is a tensor of this name."""
    schemes: dict[str, Scheme]
    """Of the parameters that are quantised in memory."""
    block_rows: dict[str, int]
    """For each of these, the number of rows that may share a multiplier. Smaller than in the checkpoint where joined
    parts don't fill whole blocks."""


def roots_with_split_experts(present: set[str]) -> set[str]:
    """The parts of a model, `model` and `mtp`, that have a separate tensor for each expert."""
    return {name.split(".")[0] for name in present if _PER_EXPERT.search(name)}


def checkpoint_layout(config: TextConfig, present: set[str], num_ranks: int = 1) -> Layout:
    """The tensors that a checkpoint must contain. The layout of the experts is detected from `present`, separately for
    `model` and `mtp`.

    present: canonical names of the tensors that it contains. num_ranks: as in `parameter_forms`. Raises
    UnsupportedModelError for quantised weights that can't be read (`quantized_schemes`)."""
    by_expert = roots_with_split_experts(present)
    parameters = parameter_forms(config, num_ranks)
    quantized = _without_plain_mtp(quantized_schemes(config), config, present)
    if HEAD in quantized and _expanded(HEAD, parameters[HEAD].shape, config, present) is None:
        del quantized[HEAD]  # plain although the config doesn't exclude it
    sources: dict[str, Source] = {}
    for name, parameter in parameters.items():
        shape, scheme = parameter.shape, quantized.get(name) or _expanded(name, parameter.shape, config, present)
        if ".mlp.experts." in name and name.split(".")[0] in by_expert:
            sources |= _per_expert(name, shape, scheme)
        elif config.packed_projections and ".linear_attn.in_proj_" in name:
            if name.endswith("in_proj_qkv.weight"):
                sources |= _packed(config, name.removesuffix("in_proj_qkv.weight"))
        else:
            sources[name] = Source(shape, (Target(name),), scheme)
    block_rows = dict.fromkeys(quantized, kernels.SCALE_BLOCK)
    for source in sources.values():
        for target in source.targets:
            if target.parameter in quantized:
                starts = [index.start for index in target.region if isinstance(index, slice)]
                block_rows[target.parameter] = math.gcd(block_rows[target.parameter], *starts)
    return Layout(parameters, sources, quantized, block_rows)


def _without_plain_mtp(schemes: dict[str, Scheme], config: TextConfig, present: set[str]) -> dict[str, Scheme]:
    """The schemes of what the checkpoint stores: formats other than the official one are written by tools that don't
    know the MTP head, so it may be plain as a whole although no list excludes it."""
    mtp = {name: scheme for name, scheme in schemes.items() if name.startswith("mtp.")}
    if config.quantization is None or config.quantization.is_official or not mtp:
        return schemes
    beside = {tensor for scheme in mtp.values() for tensor in _beside_weight(scheme)}
    if any(name.startswith("mtp.") and name.rpartition(".")[2] in beside for name in present):
        return schemes
    return {name: scheme for name, scheme in schemes.items() if name not in mtp}


def _beside_weight(scheme: Scheme) -> set[str]:
    """The tensors that a module has only if it is quantised, by their names in it."""
    return scheme.tensors("weight", (_SIDE, _SIDE)).keys() - {"weight", "bias"}


def _expanded(name: str, shape: tuple[int, ...], config: TextConfig, present: set[str]) -> Scheme | None:
    """The scheme of a parameter that is quantised in the checkpoint, and may be plain in memory: the head, or a
    projection that only other formats quantise. Config and tensors must both say so."""
    if config.quantization is None or config.quantization.is_official or len(shape) != 2 or is_convertible(name):
        return None
    scheme = config.quantization.scheme(name.removesuffix(".weight"))
    if scheme is None or not {name.removesuffix("weight") + tensor for tensor in _beside_weight(scheme)} & present:
        return None
    refuse_part_blocks(name, shape, scheme)
    return scheme


def _per_expert(name: str, shape: tuple[int, ...], scheme: Scheme | None) -> dict[str, Source]:
    prefix, kind = name.rsplit(".", 1)
    num_experts, rows, columns = shape
    if kind == "down_proj":
        return {
            f"{prefix}.{e}.down_proj.weight": Source((rows, columns), (Target(name, (e,)),), scheme)
            for e in range(num_experts)
        }
    width = rows // 2
    sources = {}
    for e in range(num_experts):
        sources[f"{prefix}.{e}.gate_proj.weight"] = Source(
            (width, columns), (Target(name, (e, slice(0, width))),), scheme
        )
        sources[f"{prefix}.{e}.up_proj.weight"] = Source(
            (width, columns), (Target(name, (e, slice(width, rows))),), scheme
        )
    return sources


def _packed(config: TextConfig, prefix: str) -> dict[str, Source]:
    """Sources of Qwen3-Next's packed projections. Their rows are grouped by key head: q, k, then that head's share of v
    and z; in the other tensor its share of b and a."""
    key_heads, key_dim = config.num_key_heads, config.key_dim
    share = config.num_value_heads // key_heads
    values = share * config.value_dim
    qkvz_sizes, ba_sizes = [key_dim, key_dim, values, values], [share, share]

    def heads(sizes: list[int]) -> Shard:
        return Shard(0, ((key_heads, sum(sizes)),), "key heads")

    def part(sizes: list[int], which: tuple[int, ...]) -> Pick:
        def pick(packed: Tensor) -> Tensor:
            parts = torch.split(torch.unflatten(packed, 0, (-1, sum(sizes))), sizes, 1)
            return torch.cat([parts[i].flatten(0, 1) for i in which])

        return pick

    return {
        f"{prefix}in_proj_qkvz.weight": Source(
            (key_heads * sum(qkvz_sizes), config.hidden_size),
            (
                Target(f"{prefix}in_proj_qkv.weight", (), part(qkvz_sizes, (0, 1, 2))),
                Target(f"{prefix}in_proj_z.weight", (), part(qkvz_sizes, (3,))),
            ),
            shard=heads(qkvz_sizes),
        ),
        f"{prefix}in_proj_ba.weight": Source(
            (key_heads * sum(ba_sizes), config.hidden_size),
            (
                Target(f"{prefix}in_proj_b.weight", (), part(ba_sizes, (0,))),
                Target(f"{prefix}in_proj_a.weight", (), part(ba_sizes, (1,))),
            ),
            shard=heads(ba_sizes),
        ),
    }
