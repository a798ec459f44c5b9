"""Pairs of (token, choice) in the order of their experts, and the tiles that cut each expert's share: what grouped products walk over.

One launch, whatever the ids are: nothing is read on the host. A program reads all ids for its few experts, so none needs another's result and there
are no atomics: the order is that of the pairs within an expert. Knows nothing of weights or products.

Shape letters: N tokens, J choices a token, P = N J pairs, X experts, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.launch import OVERLAPPED, await_previous, release_next

EXPERT, FIRST, COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Columns of a table of tiles."""
FIELDS = tl.constexpr(4)
_MOST_PAIRS_AT_ONCE = 4096
_PAIRS_FOR_ONE = 16384
"""With more pairs a program has two experts: all that programs read has to come out of L2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    pairs_P: Tensor
    """int32: pair n * J + j at each place of the order."""
    tiles_T4: Tensor
    """int32: expert, first place, number of places (1..block_m; 0 where there is no tile, which may be anywhere), nothing."""
    block_m: int


def group_pairs(expert_ids_NJ: Tensor, num_experts: int, block_m: int) -> ExpertGroups:
    """expert_ids_NJ: int32, contiguous, each 0..num_experts - 1. At least one pair."""
    num_pairs, device = expert_ids_NJ.numel(), expert_ids_NJ.device
    assert (expert_ids_NJ.dtype, expert_ids_NJ.is_contiguous()) == (torch.int32, True)
    pairs_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles_T4 = torch.empty(num_pairs // block_m + num_experts, FIELDS.value, dtype=torch.int32, device=device)
    block_p = min(max(triton.next_power_of_2(num_pairs), 128), _MOST_PAIRS_AT_ONCE)
    block_e = 1 if num_pairs <= _PAIRS_FOR_ONE else 2
    _group_kernel[(triton.cdiv(num_experts, block_e),)](
        pairs_P,
        tiles_T4,
        expert_ids_NJ,
        num_pairs,
        num_experts,
        block_m,
        BLOCK_E=block_e,
        BLOCK_P=block_p,
        num_warps=min(max(block_p // 128, 1), 16),
        **OVERLAPPED,
    )
    return ExpertGroups(pairs_P=pairs_P, tiles_T4=tiles_T4, block_m=block_m)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_m"])
def _group_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr,
    tiles_ptr,
    ids_ptr,
    num_pairs,
    num_experts,
    block_m,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    release_next(PDL)
    first_expert = tl.program_id(0) * BLOCK_E
    expert = first_expert + tl.arange(0, BLOCK_E)
    lower, equal = tl.zeros((BLOCK_E, BLOCK_P), tl.int32), tl.zeros((BLOCK_E, BLOCK_P), tl.int32)
    following = _ids(ids_ptr, 0, num_pairs, BLOCK_P)
    for first in range(0, num_pairs, BLOCK_P):
        ids, following = following, _ids(ids_ptr, first + BLOCK_P, num_pairs, BLOCK_P)
        lower += (ids[None, :] < expert[:, None]).to(tl.int32)
        equal += (ids[None, :] == expert[:, None]).to(tl.int32)
    place, count = tl.sum(lower, axis=1), tl.sum(equal, axis=1)
    for e in tl.static_range(BLOCK_E):
        is_this = expert == first_expert + e
        first, size = tl.sum(tl.where(is_this, place, 0), axis=0), tl.sum(tl.where(is_this, count, 0), axis=0)
        _write_tiles(tiles_ptr, first_expert + e, num_experts, first, size, block_m)
    following = _ids(ids_ptr, 0, num_pairs, BLOCK_P)
    for first in range(0, num_pairs, BLOCK_P):
        ids, following = following, _ids(ids_ptr, first + BLOCK_P, num_pairs, BLOCK_P)
        is_mine = ids[None, :] == expert[:, None]
        rank = tl.cumsum(is_mine.to(tl.int32), axis=1)
        pair = first + tl.arange(0, BLOCK_P)[None, :] + tl.zeros((BLOCK_E, 1), tl.int32)
        tl.store(pairs_ptr + place[:, None] + rank - 1, pair, mask=is_mine)
        place += tl.max(rank, axis=1)


@triton.jit
def _ids(ids_ptr, first, num_pairs, BLOCK_P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Past the end: of no expert, and above all."""
    pair = first + tl.arange(0, BLOCK_P)
    return tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0x7FFFFFFF)


@triton.jit
def _write_tiles(tiles_ptr, expert, num_experts, first, size, block_m):  # type: ignore[no-untyped-def]
    """The rows from first // block_m + expert up to those of the next expert, which begin no earlier than this one's tiles end:
    floor((a + b) / m) + 1 >= floor(a / m) + ceil(b / m). So where an expert's tiles stand does not depend on how many tiles others have."""
    row = first // block_m + expert
    end = tl.where(expert < num_experts, (first + size) // block_m + expert + 1, row)
    for start in range(row, end, 32):
        t = start + tl.arange(0, 32)
        done = (t - row) * block_m
        to = tiles_ptr + t * FIELDS
        tl.store(to + EXPERT, tl.zeros((32,), tl.int32) + expert, mask=t < end)
        tl.store(to + FIRST, first + done, mask=t < end)
        tl.store(to + COUNT, tl.minimum(tl.maximum(size - done, 0), block_m), mask=t < end)
