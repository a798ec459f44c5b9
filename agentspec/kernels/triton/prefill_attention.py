"""Attention of prompts in Triton: head norms, RoPE, page stores, causal attention over paged keys and the output gate.
See backend.Backend.

There are three launches. The first applies norm and RoPE: keys and values go to their pages, queries to a tensor; one
more program builds the work list of the second launch. The second attends. (Over pages in FP8, page_expansion.py has
another between them.) A *tile* is BLOCK_M query rows of one span that read the same key/value head: row r is query head
g * SHARES + r % SHARES of token r // SHARES, so that keys and values are loaded once for all heads that share them. A
*unit* of work is one tile and one page of keys. The units of all tiles form one list, the *line*, and a fixed number of
programs, one per multiprocessor, take shares of equal cost: long prompts, short prompts and appends to long contexts
all fill the machine. A tile within one share is written out at once; a tile that is split over shares leaves a
*partial* for each of its programs: for each row the largest score, the sum of the exponentials relative to it, and the
values weighted by them. The third launch adds up the partials of every split tile, in order, and applies the gate.

The keys of a long context are many times the size of L2, and every tile needs them all. They are read from memory
once, instead of once per tile, only if programs read the same page at about the same time. So the order of the line
(prefill_line.py) and the order in which a program processes its units (`_attend`) make programs pass through a context
in step.

All lengths are read on the device; grids and tensors depend on the table sizes only. Scores are in powers of two.
Tiles are split at places that depend on all spans' lengths, so a span's rounding may differ from batch to batch, but
never from run to run.

Knows nothing of layers. Shape letters: as in prefill_batch.py and backend.py; M query rows of a tile, I places of the
line, C programs, K twice the width of all key/value heads.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import AttentionWeights, RopeTable
from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.traffic import touches_pools
from agentspec.kernels.triton import page_expansion
from agentspec.kernels.triton import prefill_attention_groups_hopper as groups
from agentspec.kernels.triton import prefill_attention_hopper as hopper
from agentspec.kernels.triton.attention import dot_precision, norm_rope
from agentspec.kernels.triton.fp8_pages import as_bytes, decoded, multipliers, store_heads
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, overlapped, release_next
from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES, machine_of, shared_bytes
from agentspec.kernels.triton.prefill_columns import COUNT, NUM_SPAN_FIELDS, OFFSET, START
from agentspec.kernels.triton.prefill_line import (
    NOT_SPECIALIZED,
    SEARCH,
    TILE_COST,
    lay_out,
    shares_of,
    tile_at,
    unit_at,
)
from agentspec.kernels.triton.shares import share_of

_MIN_DOT = 16
"""Smallest side of a tile that the matrix units support."""
_BLOCK_N = 8
"""Tokens per program of the first launch."""
_LINE_TILE = 4096
"""Most elements of a matrix of tiles and spans while the line is built. More would take registers from the rest of
that launch."""
_WIDE_SHARED_BYTES = 144 * 1024
"""What 128 rows of heads of 256 take off Hopper."""
_COMBINE_ROWS = 8
_INTERPRETED_PROGRAMS = 5
"""Under the interpreter: few enough that a program has several tiles, and a tile several programs."""


class AttendPlan(NamedTuple):
    """Tiling of the second launch."""

    block_rows: int
    num_warps: int
    num_stages: int
    is_hopper: bool
    """Use the kernel of prefill_attention_groups_hopper.py, or for pages in FP8 that of prefill_attention_hopper.py."""


def attend_plan(
    dtype: torch.dtype,
    head_dim: int,
    page_tokens: int,
    *,
    is_hopper: bool,
    shared_bytes: int = HOPPER_SHARED_BYTES,
    fp8: bool = False,
) -> AttendPlan:
    """Choose the second launch's plan. On Hopper, large heads of 16 bits, which published models have, use the Hopper
    kernel. dtype: of activations. shared_bytes: of a program, at most. fp8: keys and values are in FP8."""
    if INTERPRETED:
        return AttendPlan(block_rows=_MIN_DOT, num_warps=4, num_stages=2, is_hopper=False)
    if dtype == torch.float32:
        return AttendPlan(block_rows=16, num_warps=8, num_stages=1, is_hopper=False)
    if is_hopper and head_dim in (128, 256) and page_tokens == 64:
        num_warps = hopper.NUM_WARPS if fp8 else groups.NUM_WARPS
        return AttendPlan(block_rows=hopper.BLOCK_M, num_warps=num_warps, num_stages=1, is_hopper=True)
    if head_dim > 128 and (fp8 or shared_bytes < _WIDE_SHARED_BYTES):
        return AttendPlan(block_rows=64, num_warps=8, num_stages=1, is_hopper=False)
    if head_dim > 128:
        return AttendPlan(block_rows=128, num_warps=8, num_stages=2, is_hopper=False)
    return AttendPlan(block_rows=64, num_warps=4, num_stages=2, is_hopper=False)


@touches_pools
def attention_prefill(
    projected_NP: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    batch: PrefillBatch,
    *,
    exponent_P2GS: Tensor | None = None,
) -> Tensor:
    """A page must have a power of two of tokens, at least 16."""
    num_tokens, device = projected_NP.shape[0], projected_NP.device
    num_heads, num_kv_heads, head_dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    num_programs, is_hopper = _machine(device)
    most = shared_bytes(device)
    plan = attend_plan(
        projected_NP.dtype,
        head_dim,
        kv_P2SGD.shape[2],
        is_hopper=is_hopper,
        shared_bytes=most,
        fp8=exponent_P2GS is not None,
    )
    shapes = {
        "G": num_kv_heads,
        "SHARES": num_heads // num_kv_heads,
        "D": head_dim,
        "BLOCK_M": plan.block_rows,
        "PAGE": kv_P2SGD.shape[2],
    }
    most_tiles = num_kv_heads * (triton.cdiv(num_tokens * shapes["SHARES"], plan.block_rows) + batch.spans_UF.shape[0])
    queries_NQD = torch.empty(num_tokens, num_heads, head_dim, dtype=projected_NP.dtype, device=device)
    line_4I = torch.empty(4, most_tiles + 1, dtype=torch.int32, device=device)
    expansion = None
    if plan.is_hopper and exponent_P2GS is not None:
        expansion = page_expansion.expansion_for(kv_P2SGD, batch, projected_NP.dtype, shapes["SHARES"], plan.block_rows)
    _prepare(
        projected_NP,
        projected_NP[:, 2 * num_heads * head_dim :],
        weights,
        rope,
        kv_P2SGD,
        exponent_P2GS,
        batch,
        queries_NQD,
        line_4I,
        expansion,
        shapes,
        num_programs,
    )
    out_NX = torch.empty(num_tokens, num_heads * head_dim, dtype=projected_NP.dtype, device=device)
    cuts_2C = torch.empty(2, num_programs, dtype=torch.int32, device=device)
    sums_CMD = torch.empty(2 * num_programs, plan.block_rows, head_dim, dtype=torch.float32, device=device)
    scores_2CM = torch.empty(2, 2 * num_programs, plan.block_rows, dtype=torch.float32, device=device)
    layout = (batch.spans_UF, line_4I, most_tiles, cuts_2C)
    block_dims = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    arguments = (projected_NP, projected_NP.stride(0))
    sizes: dict[str, Any] = shapes | {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    if plan.is_hopper:
        attend, pools, own = _hopper_kernel(kv_P2SGD, exponent_P2GS, expansion, batch, num_programs)
    else:
        attend, pools = _attend, (as_bytes(kv_P2SGD, exponent_P2GS), exponent_P2GS)
        own = {"BLOCK_D": block_dims, "PRECISION": dot_precision(projected_NP.dtype)}
    attend[(num_programs,)](
        queries_NQD,
        *arguments,
        *pools,
        batch.page_table_UP,
        batch.page_table_UP.shape[1],
        *layout,
        weights.scale * math.log2(math.e),
        sums_CMD,
        scores_2CM,
        out_NX,
        **sizes,
        **own,
        **overlapped(),
    )
    partials = sums_CMD, scores_2CM, *arguments, *layout, out_NX
    _combine_partials(partials, num_programs, plan.block_rows, block_dims, shapes)
    return out_NX


def _hopper_kernel(
    kv_P2SGD: Tensor,
    exponent_P2GS: Tensor | None,
    expansion: page_expansion.Expansion | None,
    batch: PrefillBatch,
    num_programs: int,
) -> tuple[Any, tuple[object, ...], dict[str, Any]]:
    """(the second launch's kernel, the pools as it takes them, its own sizes); the scratch pool is filled."""
    if exponent_P2GS is None:
        return groups.attend, (hopper.descriptor(kv_P2SGD),), groups.REGISTERS
    pool = as_bytes(kv_P2SGD, exponent_P2GS)
    scratch: tuple[object, ...] = None, None, None
    if expansion is not None:
        page_expansion.expand(expansion, pool, exponent_P2GS, batch, num_programs)
        scratch = hopper.descriptor(expansion.pool_E2SGD), *expansion[1:]
    return hopper.attend, (hopper.descriptor(pool), exponent_P2GS, *scratch), {}


def _combine_partials(
    partials: tuple[object, ...], num_programs: int, tile_rows: int, block_dims: int, shapes: dict[str, int]
) -> None:
    """Run the third launch. partials: its tensors and sizes."""
    block_rows = min(_COMBINE_ROWS, tile_rows)
    combine_shapes: dict[str, Any] = {name: shapes[name] for name in ("G", "SHARES", "D", "BLOCK_M")}
    _combine[(num_programs, tile_rows // block_rows)](
        *partials,
        BLOCK_R=block_rows,
        BLOCK_C=triton.next_power_of_2(num_programs),
        BLOCK_D=block_dims,
        num_warps=4,
        **combine_shapes,
        **overlapped(),
    )


@touches_pools
def store_keys_values(
    projected_NK: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    batch: PrefillBatch,
    *,
    exponent_P2GS: Tensor | None = None,
) -> None:
    shapes = {
        "G": weights.num_kv_heads,
        "SHARES": 0,
        "D": weights.head_dim,
        "BLOCK_M": _MIN_DOT,
        "PAGE": kv_P2SGD.shape[2],
    }
    pool = kv_P2SGD, exponent_P2GS
    _prepare(
        projected_NK, projected_NK, weights, rope, *pool, batch, projected_NK, batch.page_table_UP, None, shapes, 0
    )


def _prepare(
    projected_NP: Tensor,
    keys_values_NK: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    exponent_P2GS: Tensor | None,
    batch: PrefillBatch,
    queries_NQD: Tensor,
    line_4I: Tensor,
    expansion: page_expansion.Expansion | None,
    shapes: dict[str, int],
    num_programs: int,
) -> None:
    """Run the first launch. Without queries (SHARES 0) it only stores keys and values, and `queries_NQD` and `line_4I`
    are unused."""
    assert projected_NP.stride(1) == 1
    num_tokens, head_dim = projected_NP.shape[0], weights.head_dim
    heads = shapes["G"] * (shapes["SHARES"] + 1)
    _norm_and_store[(1 + triton.cdiv(num_tokens, _BLOCK_N) * heads,)](
        projected_NP,
        keys_values_NK,
        num_tokens,
        projected_NP.stride(0),
        weights.q_norm.weight,
        weights.q_norm.eps,
        weights.k_norm.weight,
        weights.k_norm.eps,
        rope.cos_LA,
        rope.sin_LA,
        as_bytes(kv_P2SGD, exponent_P2GS),
        exponent_P2GS,
        batch.position_N,
        batch.spans_UF,
        batch.spans_UF.shape[0],
        batch.page_table_UP,
        batch.page_table_UP.shape[1],
        queries_NQD,
        line_4I,
        line_4I.shape[1] - 1,
        num_programs,
        *((None, 0) if expansion is None else (expansion.first_U, len(expansion.pool_E2SGD))),
        A=rope.cos_LA.shape[1],
        BLOCK_N=_BLOCK_N,
        **line_blocks(batch.spans_UF.shape[0]),
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        num_warps=4,
        **shapes,
        **overlapped(),
    )


def line_blocks(num_spans: int) -> dict[str, int]:
    """Block sizes while the line is built: spans, and tiles at a time. Few distinct values, since each compiles
    another kernel."""
    block_spans = 4 ** max(1, math.ceil(math.log(num_spans, 4)))
    return {"BLOCK_U": block_spans, "BLOCK_I": max(1, min(256, _LINE_TILE // block_spans))}


@functools.cache
def _machine(device: torch.device) -> tuple[int, bool]:
    """Return (number of multiprocessors, whether the device is a Hopper)."""
    if INTERPRETED:
        return _INTERPRETED_PROGRAMS, False
    machine = machine_of(device)
    return machine.num_multiprocessors, machine.capability[0] == 9


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _norm_and_store(  # type: ignore[no-untyped-def]
    projected_NP, keys_values_NK, num_tokens, row_stride, q_norm_D, q_eps, k_norm_D, k_eps, cos_LA, sin_LA, kv_P2SGD,
    exponent_P2GS, position_N, spans_UF, num_spans, page_table_UP, num_pages, queries_NQD, line_4I, most_tiles,
    num_programs, first_U, capacity, G: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr, A: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program 0 builds the line, and finds spans their place in the scratch pool (first_U None: there is none); program
    1 + i * heads + h processes head h of the i-th BLOCK_N tokens: query heads, then key heads and their values."""
    release_next(PDL)
    await_previous(PDL)
    heads: tl.constexpr = G * (SHARES + 1)
    if tl.program_id(0) == 0:
        if SHARES > 0:
            lay_out(spans_UF, num_spans, line_4I, most_tiles, num_programs, G, SHARES, PAGE, BLOCK_M, BLOCK_U, BLOCK_I)
        if first_U is not None:
            page_expansion.place_spans(spans_UF, num_spans, first_U, capacity, SHARES, PAGE, BLOCK_M, BLOCK_U)
    else:
        first = ((tl.program_id(0) - 1) // heads).to(tl.int64) * BLOCK_N
        h = (tl.program_id(0) - 1) % heads
        n = first + tl.arange(0, BLOCK_N)
        d = tl.arange(0, BLOCK_D)
        is_token = n < num_tokens
        position = tl.load(position_N + n, mask=is_token, other=0)
        row = tl.arange(0, BLOCK_N) * row_stride
        if h < G * SHARES:
            q = norm_rope(
                projected_NP + first * row_stride + h * (2 * D),
                row,
                is_token,
                position,
                q_norm_D,
                q_eps,
                cos_LA,
                sin_LA,
                D,
                BLOCK_D,
                A,
            )
            place = queries_NQD + n[:, None] * (G * SHARES * D) + h * D + d[None, :]
            tl.store(place, q.to(queries_NQD.dtype.element_ty), mask=is_token[:, None] & (d < D)[None, :])
        else:
            g = h - G * SHARES
            keys = keys_values_NK + first * row_stride + g * D
            u, is_real = _span_of(n, spans_UF, num_spans, BLOCK_U)
            page = tl.load(page_table_UP + u.to(tl.int64) * num_pages + position // PAGE, mask=is_real, other=0).to(
                tl.int64
            )
            k = norm_rope(keys, row, is_real, position, k_norm_D, k_eps, cos_LA, sin_LA, D, BLOCK_D, A)
            mask = is_real[:, None] & (d < D)[None, :]
            v = tl.load(keys + G * D + (row[:, None] + d[None, :]), mask=mask, other=0.0)
            pool = kv_P2SGD + g * D + (page * (2 * PAGE) + position % PAGE)[:, None] * (G * D) + d[None, :]
            exponent = (page * (2 * G) + g) * PAGE + position % PAGE
            store_heads(pool, k.to(keys.dtype.element_ty), mask, exponent_P2GS, exponent, is_real)
            store_heads(pool + PAGE * G * D, v, mask, exponent_P2GS, exponent + PAGE * G, is_real)


@triton.jit
def _span_of(n_N, spans_UF, num_spans, BLOCK_U: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (the span of each token, whether it has one)."""
    u = tl.arange(0, BLOCK_U)
    offset = tl.load(spans_UF + u * NUM_SPAN_FIELDS + OFFSET, mask=u < num_spans, other=0)
    count = tl.load(spans_UF + u * NUM_SPAN_FIELDS + COUNT, mask=u < num_spans, other=0)
    is_in = (n_N[:, None] >= offset[None, :]) & (n_N[:, None] < (offset + count)[None, :])
    return tl.sum(tl.where(is_in, u[None, :], 0), axis=1), tl.sum(is_in.to(tl.int32), axis=1) > 0


@triton.jit
def _softmax(scores, largest, exponentials, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the scores of one more page. Return (weights [M, S], largest [M], exponentials [M], factor [M] for previous
    sums)."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = new_largest
    if MASKED:
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = tl.exp2(largest - base)
    weight = tl.exp2(scores * scale - base[:, None])
    return weight, new_largest, exponentials * shrink + tl.sum(weight, axis=1), shrink


@triton.jit
def _half_page(  # type: ignore[no-untyped-def]
    kv_head, page, HALF: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load keys (HALF 0) or values (1) of one head in a page, [S, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    place = (
        kv_head + (page.to(tl.int64) * 2 + HALF) * (PAGE * G * D) + tl.arange(0, PAGE)[:, None] * (G * D) + d[None, :]
    )
    if BLOCK_D == D:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=(d < D)[None, :], other=0)
    return x


@triton.jit
def _multipliers(exponent_P2GS, g, page, HALF: tl.constexpr, is_key, G: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The powers of two of a page's keys (HALF 0) or values (1), as a row."""
    place = ((page.to(tl.int64) * 2 + HALF) * G + g) * PAGE + tl.arange(0, PAGE)
    return multipliers(exponent_P2GS + place, is_key)[None, :]


@triton.jit
def _attend_run(  # type: ignore[no-untyped-def]
    q,
    query_position_M,
    kv_head,
    exponent_P2GS,
    g,
    pages,
    first_page,
    num_pages,
    num_full,
    turned,
    length,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (largest score [M], sum of exponentials [M], weighted values [M, D]) of queries over a run of pages.

    The first `num_full` pages are visible to all rows. They are processed in rotated order, starting at page `turned`.
    Of the other pages only positions below `length` are loaded: unwritten ones may be NaN, and 0 * NaN is NaN."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    exponentials = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for j in range(num_full):
        turn = j + turned
        page = tl.load(pages + tl.where(turn < num_full, turn, turn - num_full))
        k = decoded(_half_page(kv_head, page, 0, G, D, PAGE, BLOCK_D), q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if exponent_P2GS is not None:
            scores *= _multipliers(exponent_P2GS, g, page, 0, True, G, PAGE)
        weight, largest, exponentials, shrink = _softmax(scores, largest, exponentials, scale, False)
        v = decoded(_half_page(kv_head, page, 1, G, D, PAGE, BLOCK_D), q.dtype)
        if exponent_P2GS is not None:
            weight *= _multipliers(exponent_P2GS, g, page, 1, True, G, PAGE)
        values = tl.dot(weight.to(v.dtype), v, values * shrink[:, None], input_precision=PRECISION)
    s = tl.arange(0, PAGE)
    d = tl.arange(0, BLOCK_D)
    for j in tl.range(num_full, num_pages, num_stages=1):
        position = (first_page + j) * PAGE + s
        page = tl.load(pages + j)
        place = kv_head + page.to(tl.int64) * (2 * PAGE * G * D) + s[:, None] * (G * D) + d[None, :]
        is_key = (position < length)[:, None] & (d < D)[None, :]
        k = decoded(tl.load(place, mask=is_key, other=0), q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if exponent_P2GS is not None:
            scores *= _multipliers(exponent_P2GS, g, page, 0, position < length, G, PAGE)
        scores = tl.where(position[None, :] <= query_position_M[:, None], scores, float("-inf"))
        weight, largest, exponentials, shrink = _softmax(scores, largest, exponentials, scale, True)
        v = decoded(tl.load(place + PAGE * G * D, mask=is_key, other=0), q.dtype)
        if exponent_P2GS is not None:
            weight *= _multipliers(exponent_P2GS, g, page, 1, position < length, G, PAGE)
        values = tl.dot(weight.to(v.dtype), v, values * shrink[:, None], input_precision=PRECISION)
    return largest, exponentials, values


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _attend(  # type: ignore[no-untyped-def]
    queries_NQD,
    projected_NP,
    row_stride,
    kv_P2SGD,
    exponent_P2GS,
    page_table_UP,
    num_pages,
    spans_UF,
    line_4I,
    most_tiles,
    cuts_2C,
    scale,
    sums_CMD,
    scores_2CM,
    out_NX,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program processes the whole tiles of its share first, then the part of its last tile, then the part of its
    first. So all programs process pages whose place in the context is about the place of these units in the share. A
    share within one tile starts at the page whose place in the context is a multiple of the share, and ends with the
    pages before it."""
    release_next(PDL)
    await_previous(PDL)
    program = tl.program_id(0)
    begin, end = _share(line_4I, most_tiles, program, tl.num_programs(0))
    first_tile, num_tiles = _tiles_of_share(line_4I, most_tiles, begin, end)
    tl.store(cuts_2C + program, first_tile)
    tl.store(cuts_2C + tl.num_programs(0) + program, begin)
    if begin < end:
        for turn in tl.range(0, num_tiles, num_stages=1):
            i = first_tile + (turn + 1) % num_tiles
            tile_begin = tl.load(line_4I + i)
            tile_end = tl.load(line_4I + i + 1)
            first_page = tl.maximum(begin - tile_begin, 0)
            run = tl.minimum(end, tile_end) - tile_begin - first_page
            u, g, tile = tile_at(line_4I, most_tiles, i)
            span = spans_UF + u * NUM_SPAN_FIELDS
            offset = tl.load(span + OFFSET)
            start = tl.load(span + START).to(tl.int32)
            count = tl.load(span + COUNT).to(tl.int32)
            first_token, row_M, token_M = _tokens_of(tile, tl.arange(0, BLOCK_M), SHARES, BLOCK_M)
            d = tl.arange(0, BLOCK_D)
            is_real = (first_token + token_M < count)[:, None] & (d < D)[None, :]
            head = ((offset + first_token) * (G * SHARES) + g * SHARES) * D
            place = token_M * (G * SHARES * D) + (row_M % SHARES) * D
            q = tl.load(queries_NQD + head + place[:, None] + d[None, :], mask=is_real, other=0.0)
            # A page is full if the tile's first token sees its last key.
            num_full = tl.minimum(tl.maximum((start + first_token + 1) // PAGE - first_page, 0), run)
            shift = tl.where(run == end - begin, (run - first_page % run) % run, 0)
            turned = tl.where(shift < num_full, shift, 0)
            pages = page_table_UP + u.to(tl.int64) * num_pages + first_page
            keys = (kv_P2SGD + g * D, exponent_P2GS, g, pages, first_page, run, num_full, turned, start + count, scale)
            largest, exponentials, values = _attend_run(
                q, start + first_token + token_M, *keys, G, D, PAGE, BLOCK_M, BLOCK_D, PRECISION
            )
            if run == tile_end - tile_begin:
                values = values * (1.0 / exponentials)[:, None]
                gates = projected_NP + (offset + first_token) * row_stride + g * (SHARES * 2 * D) + D
                _store_gated(
                    values, gates, row_stride, out_NX + head, token_M, row_M % SHARES, d, is_real, G, SHARES, D
                )
            else:
                partial = (2 * program + (begin < tile_begin).to(tl.int32)).to(tl.int64) * BLOCK_M + tl.arange(
                    0, BLOCK_M
                )
                tl.store(scores_2CM + partial, largest)
                tl.store(scores_2CM + 2 * tl.num_programs(0) * BLOCK_M + partial, exponentials)
                tl.store(sums_CMD + partial[:, None] * D + d[None, :], values, mask=(d < D)[None, :])


@triton.jit
def _share(line_4I, most_tiles, program, num_programs):  # type: ignore[no-untyped-def]
    """Return (a program's first unit, one past its last unit); the share may be empty."""
    total = tl.load(line_4I + most_tiles)
    num_tiles = tl.zeros((), tl.int32)
    for first in tl.range(0, most_tiles, SEARCH, num_stages=1):
        i = first + tl.arange(0, SEARCH)
        num_tiles += tl.sum((tl.load(line_4I + i, mask=i < most_tiles, other=2147483647) < total).to(tl.int32), axis=0)
    begin, end = share_of(program, shares_of(total, num_programs), total + TILE_COST * num_tiles)
    begin_tile = tl.full((), -1, tl.int32)
    end_tile = tl.full((), -1, tl.int32)
    for first in tl.range(0, most_tiles, SEARCH, num_stages=1):
        i = first + tl.arange(0, SEARCH)
        cost = tl.where(i < most_tiles, tl.load(line_4I + i, mask=i < most_tiles, other=0) + TILE_COST * i, 2147483647)
        begin_tile += tl.sum((cost <= begin).to(tl.int32), axis=0)
        end_tile += tl.sum((cost <= end).to(tl.int32), axis=0)
    return unit_at(line_4I, begin_tile, begin), unit_at(line_4I, end_tile, end)


@triton.jit
def _tiles_of_share(line_4I, most_tiles, begin, end):  # type: ignore[no-untyped-def]
    """Return (place of the first tile of units begin..end-1, number of tiles)."""
    first_tile = tl.full((), -1, tl.int32)
    last_tile = tl.full((), -1, tl.int32)
    for first in tl.range(0, most_tiles, SEARCH, num_stages=1):
        i = first + tl.arange(0, SEARCH)
        units = tl.load(line_4I + i, mask=i < most_tiles, other=2147483647)
        first_tile += tl.sum((units <= begin).to(tl.int32), axis=0)
        last_tile += tl.sum((units < end).to(tl.int32), axis=0)
    return first_tile, last_tile - first_tile + 1


@triton.jit
def _tokens_of(tile, r, SHARES: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (the tile's first token in its span; for rows r, the row in the span and the token counted from the
    first)."""
    first_token = tile * BLOCK_M // SHARES
    row = tile * BLOCK_M + r
    return first_token, row, row // SHARES - first_token


@triton.jit
def _store_gated(  # type: ignore[no-untyped-def]
    values_RD,
    gates,
    row_stride,
    out,
    token_R,
    head_R,
    d,
    is_real_RD,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
):
    """Store gated outputs. `gates`, `out`: at token 0 and the first of the heads that share a key/value head."""
    place = token_R * row_stride + head_R * (2 * D)
    gate = tl.load(gates + place[:, None] + d[None, :], mask=is_real_RD, other=0.0).to(tl.float32)
    values_RD = values_RD * tl.sigmoid(gate)
    place = token_R * (G * SHARES * D) + head_R * D
    tl.store(out + place[:, None] + d[None, :], values_RD.to(out.dtype.element_ty), mask=is_real_RD)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _combine(  # type: ignore[no-untyped-def]
    sums_CMD,
    scores_2CM,
    projected_NP,
    row_stride,
    spans_UF,
    line_4I,
    most_tiles,
    cuts_2C,
    out_NX,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, r) combines the r-th BLOCK_R rows of the tile in which share c begins, if c is the first share that
    begins inside it."""
    release_next(PDL)
    await_previous(PDL)
    num_programs = tl.num_programs(0)
    share = tl.program_id(0)
    total = tl.load(line_4I + most_tiles)
    num_shares = shares_of(total, num_programs)
    if (share > 0) & (share < num_shares):
        i = tl.load(cuts_2C + share)
        begins = cuts_2C + num_programs
        tile_begin = tl.load(line_4I + i)
        if (tl.load(begins + share) > tile_begin) & (tl.load(begins + share - 1) <= tile_begin):
            p = tl.arange(0, BLOCK_C)
            is_before_end = tl.load(begins + p, mask=p < num_shares, other=2147483647) < tl.load(line_4I + i + 1)
            last = tl.sum(is_before_end.to(tl.int32), axis=0) - 1
            r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
            d = tl.arange(0, BLOCK_D)
            largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            exponentials = tl.zeros((BLOCK_R,), tl.float32)
            values = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            for part_turn in range(last + 2 - share):
                c = share - 1 + part_turn
                partial = (2 * c + (tl.load(begins + c) < tile_begin).to(tl.int32)).to(tl.int64) * BLOCK_M + r
                score = tl.load(scores_2CM + partial)
                sum_ = tl.load(scores_2CM + 2 * num_programs * BLOCK_M + partial)
                part = tl.load(sums_CMD + partial[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
                new_largest = tl.maximum(largest, score)
                base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
                shrink = tl.exp2(largest - base)
                weight = tl.exp2(score - base)
                exponentials = exponentials * shrink + sum_ * weight
                values = values * shrink[:, None] + part * weight[:, None]
                largest = new_largest
            u, g, tile = tile_at(line_4I, most_tiles, i)
            span = spans_UF + u * NUM_SPAN_FIELDS
            offset = tl.load(span + OFFSET)
            first_token, row_R, token_R = _tokens_of(tile, r, SHARES, BLOCK_M)
            is_real = (first_token + token_R < tl.load(span + COUNT))[:, None] & (d < D)[None, :]
            values = values * (1.0 / exponentials)[:, None]
            gates = projected_NP + (offset + first_token) * row_stride + g * (SHARES * 2 * D) + D
            head = ((offset + first_token) * (G * SHARES) + g * SHARES) * D
            _store_gated(values, gates, row_stride, out_NX + head, token_R, row_R % SHARES, d, is_real, G, SHARES, D)
