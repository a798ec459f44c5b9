"""Pairs of (token, choice) sorted by expert, and the tiles that divide each expert's pairs: the work list of grouped
products.

Nothing is read on the host, and there are no atomics in memory: within an expert, pairs keep their order. Few pairs
take one launch, in which one program per expert reads all ids. Many take two: the first counts each chunk's pairs by
expert; the second places them after those of lower experts, and after those of the same expert in earlier chunks.
Knows nothing of weights or products.

Shape letters: N tokens, J choices per token, P = N J pairs, X experts, T tiles, U runs, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.launch import await_previous, overlapped, release_next

EXPERT, FIRST, COUNT, NUM_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Columns of a table of tiles."""
FIELDS = tl.constexpr(4)
RUN_TILES = tl.constexpr(4)
"""Most tiles of a run. Trade-off: a product that keeps an expert's weights reads them once per run, but a run is one
program's work, however few others are left."""
_PAIRS_OF_ONE_LAUNCH = 2048
_SMALL_CHUNK, _LARGE_CHUNK = 256, 512
_PAIRS_OF_SMALL_CHUNKS = 32768
"""Trade-off: ranking a chunk's pairs is quadratic in the chunk, but each program reads the counts of all chunks."""
_COUNTS_OF_A_THREAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    pairs_P: Tensor
    """int32: pair n * J + j at each place of the sorted order."""
    tiles_T4: Tensor
    """int32: expert, first place, number of places (1..block_m; 0 for a row without a tile, which may be anywhere),
    and, the same in each row, the number of rows after which there are no tiles. For many pairs the tiles fill the
    first rows without gaps."""
    runs_U4: Tensor
    """The same, of runs: each is up to RUN_TILES adjacent tiles of one expert, whose places are adjacent too."""
    block_m: int
    all_held: bool = True
    """Whether every pair is in a tile."""


def group_pairs(expert_ids_NJ: Tensor, num_experts: int, block_m: int, *, all_held: bool = True) -> ExpertGroups:
    """Group pairs by expert. expert_ids_NJ: int32, contiguous, each 0..num_experts - 1. At least one pair. all_held:
    False: pairs of another expert, with id num_experts, have no tile. One more launch."""
    num_pairs, device = expert_ids_NJ.numel(), expert_ids_NJ.device
    assert (expert_ids_NJ.dtype, expert_ids_NJ.is_contiguous()) == (torch.int32, True)
    num_ids = num_experts if all_held else num_experts + 1
    num_tiles, num_runs = (num_pairs // size + num_ids for size in (block_m, block_m * RUN_TILES.value))
    pairs_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table_T4 = torch.empty(num_tiles + num_runs, FIELDS.value, dtype=torch.int32, device=device)
    tiles_T4, runs_U4 = table_T4.split((num_tiles, num_runs))
    groups = ExpertGroups(pairs_P=pairs_P, tiles_T4=tiles_T4, runs_U4=runs_U4, block_m=block_m, all_held=all_held)
    if num_pairs <= _PAIRS_OF_ONE_LAUNCH:
        _group_few(groups, expert_ids_NJ, num_ids)
    else:
        _group_many(groups, expert_ids_NJ, num_ids)
    if not all_held:
        table_T4[:, COUNT.value].masked_fill_(table_T4[:, EXPERT.value] == num_experts, 0)
    return groups


def empty_parts(groups: ExpertGroups, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts of all pairs: uninitialised, with zeros where a pair may have no tile."""
    return (torch.empty if groups.all_held else torch.zeros)(shape, dtype=dtype, device=device)


def _group_few(groups: ExpertGroups, ids_NJ: Tensor, num_experts: int) -> None:
    block_p = max(triton.next_power_of_2(ids_NJ.numel()), 128)
    _few_kernel[(num_experts,)](
        groups.pairs_P,
        groups.tiles_T4,
        groups.runs_U4,
        ids_NJ,
        ids_NJ.numel(),
        num_experts,
        groups.block_m,
        BLOCK_P=block_p,
        num_warps=min(block_p // 128, 16),
        **overlapped(),
    )


def _group_many(groups: ExpertGroups, ids_NJ: Tensor, num_experts: int) -> None:
    num_pairs, block_x = ids_NJ.numel(), max(triton.next_power_of_2(num_experts), 32)
    chunk = _SMALL_CHUNK if num_pairs <= _PAIRS_OF_SMALL_CHUNKS else _LARGE_CHUNK
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts_CX = torch.empty(num_chunks, block_x, dtype=torch.int32, device=ids_NJ.device)
    _count_kernel[(num_chunks,)](
        counts_CX, ids_NJ, num_pairs, CHUNK=chunk, BLOCK_X=block_x, num_warps=4, **overlapped()
    )
    _many_kernel[(num_chunks,)](
        groups.pairs_P,
        groups.tiles_T4,
        groups.runs_U4,
        ids_NJ,
        counts_CX,
        num_pairs,
        num_experts,
        groups.block_m,
        CHUNK=chunk,
        BLOCK_X=block_x,
        BLOCK_C=max(_COUNTS_OF_A_THREAD * chunk // block_x, 1),
        num_warps=chunk // 32,  # a thread for each pair
        **overlapped(),
    )


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_m"])
def _few_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr, tiles_ptr, runs_ptr, ids_ptr, num_pairs, num_experts, block_m, BLOCK_P: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    release_next(PDL)
    expert = tl.program_id(0)
    pair = tl.arange(0, BLOCK_P)
    # Places past the end have no expert and sort last.
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0x7FFFFFFF)
    is_mine = ids == expert
    first, size = tl.sum((ids < expert).to(tl.int32), axis=0), tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(pairs_ptr + first + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1, pair, mask=is_mine)
    _store_rows_of(tiles_ptr, expert, first, size, num_pairs, num_experts, block_m)
    _store_rows_of(runs_ptr, expert, first, size, num_pairs, num_experts, RUN_TILES * block_m)


@triton.jit
def _store_rows_of(tiles_ptr, expert, first, size, num_pairs, num_experts, block_m):  # type: ignore[no-untyped-def]
    """Store an expert's rows of a table, which follow from its own first place and size. They never overlap those of
    the previous expert, as floor((a + b) / m) + 1 >= floor(a / m) + ceil(b / m)."""
    begin, end = first // block_m + expert, (first + size) // block_m + expert + 1
    for row in range(begin, end, 32):
        t = row + tl.arange(0, 32)
        _store_tiles(tiles_ptr, t, t < end, expert, first, size, begin, num_pairs // block_m + num_experts, block_m)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(counts_ptr, ids_ptr, num_pairs, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    await_previous(PDL)
    # Not earlier: the next kernel reads the ids while this one runs.
    release_next(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_real = pair < num_pairs
    counts = tl.histogram(tl.load(ids_ptr + pair, mask=is_real, other=0), BLOCK_X, mask=is_real)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_m"])
def _many_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr,
    tiles_ptr,
    runs_ptr,
    ids_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    block_m,
    CHUNK: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    # Before the wait, while the previous kernel counts: the ids were complete before it started.
    rank = _ranks(ids_ptr, chunk * CHUNK, num_pairs, CHUNK, BLOCK_X)
    await_previous(PDL)
    release_next(PDL)
    x = tl.arange(0, BLOCK_X)
    total, before = _add_counts(counts_ptr, chunk, num_chunks, BLOCK_X, BLOCK_C)
    # Pairs that come before: those of lower experts outside this chunk, and those of the same expert in earlier chunks.
    elsewhere = total - tl.load(counts_ptr + chunk * BLOCK_X + x)
    shift = tl.cumsum(elsewhere, axis=0) - elsewhere + before
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    is_real = pair < num_pairs
    ids = tl.load(ids_ptr + pair, mask=is_real, other=0)
    tl.store(pairs_ptr + tl.gather(shift, ids, axis=0) + rank, pair, mask=is_real)
    _store_share(tiles_ptr, total, chunk, num_chunks, num_pairs // block_m + num_experts, block_m, BLOCK_X)
    # By the other programs first: most tables have fewer rows than these store at once.
    run_m, place = RUN_TILES * block_m, num_chunks - 1 - chunk
    _store_share(runs_ptr, total, place, num_chunks, num_pairs // run_m + num_experts, run_m, BLOCK_X)


@triton.jit
def _store_share(tiles_ptr, total, place, num_chunks, num_tiles, block_m, BLOCK_X: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one program's share of a table's rows. total: each expert's number of pairs."""
    x = tl.arange(0, BLOCK_X)
    first = tl.cumsum(total, axis=0) - total
    tiles = (total + block_m - 1) // block_m
    first_row, num_rows = tl.cumsum(tiles, axis=0) - tiles, tl.sum(tiles, axis=0)
    for row in range(place * 16, num_tiles, num_chunks * 16):
        t = row + tl.arange(0, 16)
        expert = tl.max(tl.where(first_row[None, :] <= t[:, None], x[None, :], 0), axis=1)
        begin = tl.gather(first_row, expert, axis=0)
        _store_tiles(
            tiles_ptr,
            t,
            t < num_tiles,
            expert,
            tl.gather(first, expert, axis=0),
            tl.gather(total, expert, axis=0),
            begin,
            num_rows,
            block_m,
        )


@triton.jit
def _ranks(ids_ptr, first, num_pairs, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each pair's place in its chunk's sorted order."""
    key = _keys(ids_ptr, first, tl.arange(0, CHUNK), num_pairs, CHUNK, BLOCK_X)
    lower = tl.zeros((CHUNK, 32), tl.int32)
    for start in range(0, CHUNK, 32):
        other = _keys(ids_ptr, first, start + tl.arange(0, 32), num_pairs, CHUNK, BLOCK_X)
        lower += (other[None, :] < key[:, None]).to(tl.int32)
    return tl.sum(lower, axis=1)


@triton.jit
def _keys(ids_ptr, first, p, num_pairs, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sort keys: by expert, then by pair. Past the end: above all."""
    return tl.load(ids_ptr + first + p, mask=first + p < num_pairs, other=BLOCK_X) * CHUNK + p


@triton.jit
def _add_counts(counts_ptr, chunk, num_chunks, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each expert's number of pairs in all chunks, and in those before `chunk`."""
    total, before = tl.zeros((BLOCK_C, BLOCK_X), tl.int32), tl.zeros((BLOCK_C, BLOCK_X), tl.int32)
    following = _counts(counts_ptr, 0, num_chunks, BLOCK_X, BLOCK_C)
    for first in range(0, num_chunks, BLOCK_C):
        counts, following = following, _counts(counts_ptr, first + BLOCK_C, num_chunks, BLOCK_X, BLOCK_C)
        total += counts
        before += tl.where(first + tl.arange(0, BLOCK_C)[:, None] < chunk, counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def _counts(counts_ptr, first, num_chunks, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    c = first + tl.arange(0, BLOCK_C)
    return tl.load(
        counts_ptr + c[:, None] * BLOCK_X + tl.arange(0, BLOCK_X)[None, :], mask=(c < num_chunks)[:, None], other=0
    )


@triton.jit
def _store_tiles(tiles_ptr, t, is_real, expert, first, size, begin, num_rows, block_m):  # type: ignore[no-untyped-def]
    """Store rows `t` of the table, for an expert with `size` places from `first` on, whose rows begin at `begin`."""
    done = (t - begin) * block_m
    to = tiles_ptr + t * FIELDS
    tl.store(to + EXPERT, tl.zeros_like(t) + expert, mask=is_real)
    tl.store(to + FIRST, first + done, mask=is_real)
    tl.store(to + COUNT, tl.minimum(tl.maximum(size - done, 0), block_m), mask=is_real)
    tl.store(to + NUM_ROWS, tl.zeros_like(t) + num_rows, mask=is_real)
