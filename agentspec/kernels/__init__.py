"""Device operations with one signature per operation, whatever implements it.

A `Backend` has every operation of a forward (over prompts and over decode windows) and of a decode step.
`backend(device)` picks one. The reference backend, in `reference/`, is plain torch and runs anywhere; faster backends
have the same signatures and are tested against it. Operations that are not part of Backend exist in the reference
only, and are imported from here.

Shape letters: N tokens (or keys), B slots, T tokens per slot, R rows, H hidden size, C conv channels, V value heads, D
value dim, K key dim, Q query heads, G key/value heads, A half of the rotary dims, P pages, S tokens per page, X
experts, I expert width, J chosen experts; in attention D is the head dim.

Layouts of the pools, one layer each: `ssm_RVDK` float32 (value dim before key dim), `conv_R3C` (the last three rows
BEFORE the convolution, oldest first), `hidden_RH`, `kv_P2SGD` (keys at [:, 0], values at [:, 1]).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

import torch
from torch import distributed

from agentspec.kernels import reference
from agentspec.kernels.backend import (
    AttentionWeights,
    Backend,
    DeltaRing,
    DeltaWeights,
    MixtureWeights,
    Norm,
    OpenProduct,
    OpenSum,
    ProductInput,
    RopeTable,
)
from agentspec.kernels.four_bit import GROUPS, SYMMETRIC_ZERO, FourBit, FourBitForm, pack, quantize_int4, unpack
from agentspec.kernels.four_bit_tiles import FourBitTiles, has_tiles
from agentspec.kernels.group import GatheredGroup, Group, RankGroup, within
from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference.hidden import read_hidden
from agentspec.kernels.reference.moe import mix_experts, route_top_k
from agentspec.kernels.reference.rope import rope_cos_sin
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.variants import KernelCompiler, Machine, Variant
from agentspec.kernels.weights import (
    FP8,
    FP8_MAX,
    SCALE_BLOCK,
    BlockScaled,
    Plain,
    Region,
    RowScaled,
    Weight,
    quantize_blocks,
    quantize_rows,
    scales_shape,
)

__all__ = [
    "FP8",
    "FP8_MAX",
    "GROUPS",
    "SCALE_BLOCK",
    "SYMMETRIC_ZERO",
    "AttentionWeights",
    "Backend",
    "BlockScaled",
    "DeltaRing",
    "DeltaWeights",
    "FourBit",
    "FourBitForm",
    "FourBitTiles",
    "GatheredGroup",
    "Group",
    "KernelCompiler",
    "LiveColumns",
    "Machine",
    "MixtureWeights",
    "Norm",
    "OpenProduct",
    "OpenSum",
    "Plain",
    "PrefillBatch",
    "ProductInput",
    "RankGroup",
    "Region",
    "RingWindow",
    "RopeTable",
    "RowScaled",
    "Variant",
    "Weight",
    "backend",
    "compiler",
    "group_of",
    "group_of_launches",
    "has_tiles",
    "mix_experts",
    "pack",
    "quantize_blocks",
    "quantize_int4",
    "quantize_rows",
    "read_hidden",
    "rope_cos_sin",
    "route_top_k",
    "scales_shape",
    "unpack",
    "within",
]


@functools.cache
def backend(device: torch.device) -> Backend:
    """Return the backend for tensors on `device`.

    Triton is imported for CUDA only: elsewhere it may not be installed. "meta" stands for a GPU on which nothing is
    launched (variants.KernelCompiler.variants_of)."""
    if device.type in ("cuda", "meta"):
        return cast(Backend, importlib.import_module("agentspec.kernels.triton"))
    return reference


def compiler() -> KernelCompiler:
    """Return the compiler of the CUDA backend's kernels. Raises ImportError if Triton is not installed."""
    return cast(KernelCompiler, importlib.import_module("agentspec.kernels.triton.compiler"))


def group_of(
    process_group: distributed.ProcessGroup, device: torch.device, *, shares_device: bool = False
) -> RankGroup:
    """The group of a rank that computes on `device`; all ranks must call this. process_group: of gloo.

    shares_device: several ranks are on one GPU. Raises ConfigError if the ranks' GPUs can't reach each other."""
    if device.type == "cpu":
        return GatheredGroup(process_group)
    return cast(RankGroup, _exchange_group().of_processes(process_group, device, overlapped=not shares_device))


def group_of_launches(rank: int, count: int) -> Group:
    """A group for an outline of a rank's model, of which only the launches count (variants_of)."""
    return cast(Group, _exchange_group().of_launches(rank, count))


def _exchange_group() -> Any:
    return importlib.import_module("agentspec.kernels.triton.exchange").ExchangeGroup
