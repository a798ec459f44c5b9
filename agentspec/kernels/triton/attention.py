"""Attention of a decode window in Triton: head norms, RoPE, page stores, split-KV attention and the output gate. See
backend.Backend.

There are three launches. The first norms and rotates queries and the window's own keys, and stores the keys and values.
The second attends with a fixed number of programs, as many as the device holds at once. They share all keys of all
slots equally, so that the longest sequence of a batch never depends on a single program. A *unit* is BLOCK_S keys of
one page. A *task* is one slot, key/value head and block of query rows, and has as many units as its slot. A block
without a live column is no task, so it reads no keys. Tasks are concatenated to one list of units, and program c takes
the c-th equal share of it, often the end of one task and the start of the next. Its result for one task is a *partial*:
for every query row the largest score, the sum of the exponentials relative to it, and the values weighted by them. The
third launch adds up the partials of every row, in order, and applies the gate. For pages in FP8 the second launch is
attention_fp8.py's.

The query rows of a task are all of the window's queries that read its key/value head: row t * SHARES + s is query head
g * SHARES + s of column t. Programs of the second launch find out what to do, and ask for their first keys and values,
while the first one runs; those of the third find out theirs while the second one runs.

An inert slot (its first page is the scratch page) has no units: nothing of it is stored, and its output is zeros.
Scores are in powers of two. A slot's sums are split at places that depend on the whole batch's lengths, so its
rounding may differ from batch to batch, but never from run to run.

Knows nothing of layers. Shape letters: as in backend.py; M query rows of a task, C partials, S keys of a unit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec import types
from agentspec.kernels.backend import AttentionWeights, RopeTable
from agentspec.kernels.slots import LiveColumns
from agentspec.kernels.traffic import touches_pools
from agentspec.kernels.triton import attention_fp8
from agentspec.kernels.triton.fp8_pages import as_bytes, decoded, multipliers, store_heads
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, overlapped, release_next
from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES, machine_of, shared_bytes
from agentspec.kernels.triton.prefetch import CAN_PREFETCH, LINE_BYTES, prefetch
from agentspec.kernels.triton.shares import owner_of, share_of

_SCRATCH_PAGE = tl.constexpr(types.SCRATCH_PAGE)

_MIN_DOT = 16
"""Smallest side of a tile that the matrix units support."""
_QUERY_ROWS = 16
"""Query rows of a program of the first launch (`_sixteen_queries`)."""
_MAX_ROWS = 64
"""Most query rows of a task: more would leave no registers for the output. A window with more rows has several tasks
per head, each of which reads the keys."""
_COMBINE_TILE = 4096
"""Elements of partials that a program of the third launch loads at once."""
_PREFETCHED_UNITS = tl.constexpr(2)
"""Units that a program asks for while the first launch runs. With one or four, steps of 16 slots take longer."""
_INTERPRETED_PROGRAMS = 5
"""Under the interpreter: few enough that a program has several tasks, and a task several programs."""


class AttendPlan(NamedTuple):
    """Tiling and occupancy of the second launch."""

    block_keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


_FP8_PLAN = AttendPlan(attention_fp8.UNIT, attention_fp8.NUM_WARPS, 1, attention_fp8.PROGRAMS_PER_SM)


@touches_pools
def attention_step(
    projected_NP: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    page_table_BP: Tensor,
    start_B: Tensor,
    *,
    first_position: int,
    exponent_P2GS: Tensor | None = None,
    live: LiveColumns | None = None,
) -> Tensor:
    """A page must have a multiple of 16 tokens. An inert slot, whose first page is the scratch page, stores nothing
    and gets zeros."""
    assert projected_NP.stride(1) == 1
    assert page_table_BP.is_contiguous()
    assert start_B.is_contiguous()
    num_slots, num_pages = page_table_BP.shape
    page_tokens, num_kv_heads, head_dim = kv_P2SGD.shape[2:]
    num_columns = projected_NP.shape[0] // num_slots if live is None else live.row_BT.shape[1]
    shares = weights.num_heads // num_kv_heads
    device, dtype, fp8 = projected_NP.device, projected_NP.dtype, exponent_P2GS is not None
    in_gluon = fp8 and takes_fp8(dtype, head_dim, page_tokens)
    block_rows = task_rows(num_columns * shares, attention_fp8.MOST_ROWS if in_gluon else _MAX_ROWS)
    plan = _FP8_PLAN if in_gluon else attend_plan(block_rows, dtype, head_dim, shared_bytes(device), fp8=fp8)
    shapes = {
        "T": num_columns,
        "G": num_kv_heads,
        "SHARES": shares,
        "BLOCK_B": block_slots(num_slots),
        "BLOCK_M": block_rows,
        "ROW_BLOCKS": triton.cdiv(num_columns * shares, block_rows),
    }
    sizes = {
        "D": head_dim,
        "BLOCK_D": max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        "BLOCK_S": math.gcd(plan.block_keys, page_tokens),
    }
    assert sizes["BLOCK_S"] >= _MIN_DOT, page_tokens
    num_tasks = num_slots * num_kv_heads * shapes["ROW_BLOCKS"]
    most_units = num_tasks * num_pages * (page_tokens // sizes["BLOCK_S"])
    num_programs = min(even_programs(_resident_programs(device, plan.programs_per_sm), num_tasks), most_units)
    # The partial of program c for task i has index c + i. Along the list of units at least one of the two grows, so
    # indices are unique.
    num_partials = num_programs + num_tasks
    sums_CMD = torch.empty(num_partials, block_rows, head_dim, dtype=torch.float32, device=device)
    scores_2CM = torch.empty(2, num_partials, block_rows, dtype=torch.float32, device=device)
    pools = (exponent_P2GS, page_table_BP, num_slots, num_pages, start_B)
    inputs = (*pools, None if live is None else live.count_B, weights.scale * math.log2(math.e), sums_CMD, scores_2CM)
    queries_BGMD = _queries(projected_NP, weights, rope, kv_P2SGD, pools, live, shapes | sizes)
    if in_gluon:
        attention_fp8.attend_fp8[(num_programs,)](
            queries_BGMD,
            kv_P2SGD.view(torch.int32),
            *inputs,
            FIRST=first_position,
            num_warps=plan.num_warps,
            **shapes,
            **overlapped(),
        )
    else:
        _attend[(num_programs,)](
            queries_BGMD,
            as_bytes(kv_P2SGD, exponent_P2GS),
            *inputs,
            PAGE=page_tokens,
            FIRST=first_position,
            PRECISION=dot_precision(dtype),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **shapes,
            **sizes,
            **overlapped(),
        )
    return _combined(sums_CMD, scores_2CM, projected_NP, page_table_BP, start_B, live, num_programs, shapes | sizes)


def _queries(
    projected_NP: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    pools: tuple[Tensor | None, Tensor, int, int, Tensor],
    live: LiveColumns | None,
    shapes: dict[str, int],
) -> Tensor:
    """Run the first launch: [B, G, rows of all row blocks, D]."""
    exponent_P2GS, page_table_BP, num_slots, num_pages, start_B = pools
    num_rows = shapes["ROW_BLOCKS"] * shapes["BLOCK_M"]
    queries_BGMD = projected_NP.new_empty(num_slots, shapes["G"], num_rows, shapes["D"])
    _prepare[(1 + num_rows // _QUERY_ROWS, shapes["G"], num_slots)](
        projected_NP,
        projected_NP.stride(0),
        weights.q_norm.weight,
        weights.q_norm.eps,
        weights.k_norm.weight,
        weights.k_norm.eps,
        rope.cos_LA,
        rope.sin_LA,
        as_bytes(kv_P2SGD, exponent_P2GS),
        exponent_P2GS,
        page_table_BP,
        num_pages,
        start_B,
        *((None, None) if live is None else (live.first_B, live.count_B)),
        queries_BGMD,
        PAGE=kv_P2SGD.shape[2],
        A=rope.cos_LA.shape[1],
        BLOCK_T=triton.next_power_of_2(shapes["T"]),
        **{name: shapes[name] for name in ("T", "G", "SHARES", "D", "BLOCK_D", "BLOCK_M", "ROW_BLOCKS")},
        num_warps=4,
        **overlapped(),
    )
    return queries_BGMD


def takes_fp8(dtype: torch.dtype, head_dim: int, page_tokens: int) -> bool:
    """Whether attention_fp8.py attends over such pages. dtype: of activations."""
    shape = (head_dim, page_tokens)
    return (INTERPRETED or dtype == torch.bfloat16) and shape == (attention_fp8.HEAD_DIM, attention_fp8.UNIT)


def _combined(
    sums_CMD: Tensor,
    scores_2CM: Tensor,
    projected_NP: Tensor,
    page_table_BP: Tensor,
    start_B: Tensor,
    live: LiveColumns | None,
    num_programs: int,
    shapes: dict[str, int],
) -> Tensor:
    """Run the third launch: [N, Q * D]."""
    num_tokens, num_slots = projected_NP.shape[0], start_B.shape[0]
    num_heads, head_dim = shapes["G"] * shapes["SHARES"], shapes["D"]
    out_NX = torch.empty(num_tokens, num_heads * head_dim, dtype=projected_NP.dtype, device=projected_NP.device)
    block_partials, block_dims = combine_blocks(num_programs, num_slots * shapes["G"], head_dim)
    _combine[(num_tokens * num_heads, triton.cdiv(head_dim, block_dims))](
        sums_CMD,
        scores_2CM,
        projected_NP,
        projected_NP.stride(0),
        page_table_BP,
        num_slots,
        page_table_BP.shape[1],
        start_B,
        *((None, None, None) if live is None else (live.first_B, live.count_B, live.cell_N)),
        out_NX,
        num_programs,
        BLOCK_C=block_partials,
        **(shapes | {"BLOCK_D": block_dims}),
        num_warps=4,
        **overlapped(),
    )
    return out_NX


def task_rows(num_rows: int, most: int = _MAX_ROWS) -> int:
    """Return the query rows of a task, for a window with num_rows query rows per key/value head."""
    rows: int = triton.next_power_of_2(num_rows)
    return min(most, max(_MIN_DOT, rows))


def block_slots(num_slots: int) -> int:
    """Return the width of vectors over slots. One compiled kernel serves batches of up to 32 slots; a single slot,
    where latency matters most, has its own."""
    block: int = triton.next_power_of_2(num_slots)
    return 1 if num_slots == 1 else max(32, block)


def attend_plan(
    block_rows: int,
    dtype: torch.dtype,
    head_dim: int,
    shared_bytes: int = HOPPER_SHARED_BYTES,
    *,
    fp8: bool = False,
) -> AttendPlan:
    """Choose the second launch's plan. dtype: of activations. fp8: keys and values are in FP8.

    At least 64 KB of loads must be in flight in every multiprocessor; the number of programs is what fits its registers
    and shared memory.

    The compiler pipelines the page ids and the tiles that depend on them as two levels, so (num_stages - 1) // 2 tiles
    are loaded ahead. Where the shared memory of a program is less than Hopper's, fewer are, so that programs_per_sm
    fit."""
    plan = _attend_plan(block_rows, dtype)
    if fp8 and dtype != torch.float32:
        plan = plan._replace(num_stages=2 * plan.num_stages - 1)  # as many bytes
    if shared_bytes >= HOPPER_SHARED_BYTES or dtype == torch.float32:
        return plan
    tile_bytes = 2 * plan.block_keys * head_dim * (1 if fp8 else dtype.itemsize)
    room = shared_bytes - 2 * block_rows * head_dim * dtype.itemsize
    programs = min(plan.programs_per_sm, max(1, room // (2 * tile_bytes)))
    ahead = min((plan.num_stages - 1) // 2, max(1, room // programs // tile_bytes))
    return plan._replace(num_stages=2 * ahead + 1, programs_per_sm=programs)


def _attend_plan(block_rows: int, dtype: torch.dtype) -> AttendPlan:
    if dtype == torch.float32:
        return AttendPlan(block_keys=16, num_warps=8, num_stages=5, programs_per_sm=1)
    if block_rows == 16:
        return AttendPlan(block_keys=32, num_warps=4, num_stages=7, programs_per_sm=2)
    if block_rows == 32:
        return AttendPlan(block_keys=32, num_warps=4, num_stages=5, programs_per_sm=2)
    return AttendPlan(block_keys=32, num_warps=8, num_stages=5, programs_per_sm=1)


def even_programs(most: int, num_tasks: int) -> int:
    """Return the number of programs of the second launch: a multiple of the tasks' unless that would leave more than a
    16th of `most` idle. Then tasks of equal lengths begin where shares do, and no program has two."""
    idle = most % num_tasks
    return most - idle if 0 < idle < most and 16 * idle <= most else most


def combine_blocks(num_programs: int, num_tasks: int, head_dim: int) -> tuple[int, int]:
    """Return (partials, dimensions) of the third launch's tiles: all partials of a row at once if the tasks have
    equal lengths."""
    partials = min(128, max(8, triton.next_power_of_2(triton.cdiv(num_programs, num_tasks) + 1)))
    return partials, min(triton.next_power_of_2(head_dim), _COMBINE_TILE // partials)


def dot_precision(dtype: torch.dtype) -> str | None:
    """Return tl.dot's input_precision. Products of float32 stay float32: by default the matrix units would round them
    to tf32."""
    return "ieee" if dtype == torch.float32 else None


@functools.cache
def _resident_programs(device: torch.device, programs_per_sm: int) -> int:
    if INTERPRETED:
        return _INTERPRETED_PROGRAMS
    return machine_of(device).num_multiprocessors * programs_per_sm


@triton.jit
def _units(  # type: ignore[no-untyped-def]
    start_B, count_B, page_table_BP, num_slots, num_pages, BLOCK_B: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
    SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, ROW_BLOCKS: tl.constexpr
):  # fmt: skip
    """Return (units of each task of every slot, units of all its tasks), int32 [BLOCK_B]."""
    b = tl.arange(0, BLOCK_B)
    first_page = tl.load(page_table_BP + b.to(tl.int64) * num_pages, mask=b < num_slots, other=_SCRATCH_PAGE)
    length = tl.load(start_B + b, mask=b < num_slots, other=0).to(tl.int32)
    if count_B is None:
        units = tl.where(first_page != _SCRATCH_PAGE, tl.cdiv(length + T, BLOCK_S), 0)
        all_units = units * (G * ROW_BLOCKS)
    else:
        count = tl.load(count_B + b, mask=b < num_slots, other=0).to(tl.int32)
        units = tl.where(first_page != _SCRATCH_PAGE, tl.cdiv(length + count, BLOCK_S), 0)
        all_units = units * G * tl.cdiv(count * SHARES, BLOCK_M)
    return units, all_units


@triton.jit
def _live_columns(b, first_B, count_B, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of slot b's column 0, and its live columns."""
    first, count = b.to(tl.int64) * T, T
    if first_B is not None:
        first, count = tl.load(first_B + b), tl.load(count_B + b).to(tl.int32)
    return first, count


@triton.jit
def norm_rope(  # type: ignore[no-untyped-def]
    heads,
    offset_M,
    is_row_M,
    position_M,
    norm_D,
    eps,
    cos_LA,
    sin_LA,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    A: tl.constexpr,
):
    """Return the heads at heads + offset_M after norm and RoPE, float32 [M, BLOCK_D], rounded where the reference
    rounds. Dimension pairs are (j, j + A)."""
    dtype: tl.constexpr = heads.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    is_real = is_row_M[:, None] & (d < D)[None, :]
    is_turned = is_row_M[:, None] & (d < 2 * A)[None, :]
    partner = tl.where(d < A, d + A, d - A)
    x = tl.load(heads + (offset_M[:, None] + d[None, :]), mask=is_real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    gain = 1.0 + tl.load(norm_D + d, mask=d < D, other=0.0).to(tl.float32)
    x = (x * inverse * gain[None, :]).to(dtype).to(tl.float32)
    y = tl.load(heads + (offset_M[:, None] + partner[None, :]), mask=is_turned, other=0.0).to(tl.float32)
    partner_gain = 1.0 + tl.load(norm_D + partner, mask=d < 2 * A, other=0.0).to(tl.float32)
    y = (y * inverse * partner_gain[None, :]).to(dtype).to(tl.float32)
    angle = position_M[:, None] * A + (d % A)[None, :]
    cos = tl.load(cos_LA + angle, mask=is_turned, other=1.0)
    sin = tl.load(sin_LA + angle, mask=is_turned, other=0.0)
    return x * cos + y * tl.where(d < A, -sin, sin)


@triton.jit
def _sixteen_queries(  # type: ignore[no-untyped-def]
    heads,
    row_stride,
    start,
    first_row,
    norm_D,
    eps,
    cos_LA,
    sin_LA,
    num_columns,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    A: tl.constexpr,
):
    """Return rows first_row.. of a slot's queries of a head, [16, BLOCK_D] in the activations' type; 0 after the last.
    `heads`: the first of its heads in column 0."""
    row = first_row + tl.arange(0, 16)
    column = row // SHARES
    offset = column * row_stride + (row % SHARES) * (2 * D)
    q = norm_rope(heads, offset, column < num_columns, start + column, norm_D, eps, cos_LA, sin_LA, D, BLOCK_D, A)
    return q.to(heads.dtype.element_ty)


@triton.jit
def _store_window(  # type: ignore[no-untyped-def]
    keys,
    row_stride,
    k_norm_D,
    k_eps,
    cos_LA,
    sin_LA,
    kv_head,
    exponent_P2GS,
    g,
    pages_P,
    start,
    num_columns,
    BLOCK_T: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    A: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Store keys and values of the first num_columns columns. `keys`: the head's key of column 0; `kv_head`: head g in
    page 0."""
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    position = start + t
    is_live = t < num_columns
    row = t * row_stride
    k = norm_rope(keys, row, is_live, position, k_norm_D, k_eps, cos_LA, sin_LA, D, BLOCK_D, A)
    is_real = is_live[:, None] & (d < D)[None, :]
    v = tl.load(keys + G * D + (row[:, None] + d[None, :]), mask=is_real, other=0.0)
    page = tl.load(pages_P + position // PAGE, mask=is_live, other=0).to(tl.int64)
    token = page * (2 * PAGE) + position % PAGE
    place = kv_head + token[:, None] * (G * D) + d[None, :]
    exponent = (page * (2 * G) + g) * PAGE + position % PAGE
    store_heads(place, k.to(keys.dtype.element_ty), is_real, exponent_P2GS, exponent, is_live)
    store_heads(place + PAGE * G * D, v, is_real, exponent_P2GS, exponent + PAGE * G, is_live)


@triton.jit
def _attend_run(  # type: ignore[no-untyped-def]
    q,
    query_position_M,
    kv_head,
    exponent_P2GS,
    g,
    pages_P,
    first_unit,
    num_units,
    length,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (largest score [M], sum of exponentials [M], weighted values [M, BLOCK_D]) of queries over a run of
    units; (-inf, 0, 0) without keys.

    Keys outside FIRST..length-1 are not loaded: they may be NaN, and 0 * NaN would be NaN."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Summed over the keys after the loop: a cross-warp sum in every iteration would only add latency.
    exponentials = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for unit in range(first_unit, first_unit + num_units):
        position = unit * BLOCK_S + s
        page = tl.load(pages_P + unit // (PAGE // BLOCK_S)).to(tl.int64)
        place = (unit % (PAGE // BLOCK_S)) * BLOCK_S + s
        tile = kv_head + page * (2 * PAGE * G * D) + place[:, None] * (G * D) + d[None, :]
        is_key_S = (position >= FIRST) & (position < length)
        is_key = is_key_S[:, None]
        if BLOCK_D != D:
            is_key = is_key & (d < D)[None, :]
        k = decoded(tl.load(tile, mask=is_key, other=0), q.dtype)
        v = decoded(tl.load(tile + PAGE * G * D, mask=is_key, other=0), q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if exponent_P2GS is not None:
            exponent_S = exponent_P2GS + (page * (2 * G) + g) * PAGE + place
            scores *= multipliers(exponent_S, is_key_S)[None, :]
        is_visible = (position[None, :] <= query_position_M[:, None]) & (position >= FIRST)[None, :]
        scores = tl.where(is_visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(scores - base[:, None])
        exponentials = exponentials * shrink[:, None] + weight
        if exponent_P2GS is not None:
            weight *= multipliers(exponent_S + PAGE * G, is_key_S)[None, :]
        values = tl.dot(weight.to(v.dtype), v, values * shrink[:, None], input_precision=PRECISION)
        largest = new_largest
    return largest, tl.sum(exponentials, axis=1), values


@triton.jit
def _prefetch_units(  # type: ignore[no-untyped-def]
    kv_head, pages_P, first_unit, num_units, G: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr
):  # fmt: skip
    """Ask for keys and values of the first units of a run to be in L2. Those of the window may still be written; they
    are only read later."""
    if CAN_PREFETCH:
        ELEMENTS: tl.constexpr = LINE_BYTES // (kv_head.dtype.element_ty.primitive_bitwidth // 8)
        unit = first_unit + tl.minimum(tl.arange(0, _PREFETCHED_UNITS), num_units - 1)
        page = tl.load(pages_P + unit // (PAGE // BLOCK_S)).to(tl.int64)
        first = page * (2 * PAGE) + unit % (PAGE // BLOCK_S) * BLOCK_S
        line = tl.arange(0, triton.next_power_of_2(triton.cdiv(D, ELEMENTS)))
        token = (first[:, None] + tl.arange(0, BLOCK_S)[None, :]) * (G * D)
        at = kv_head + token[:, :, None] + tl.minimum(line * ELEMENTS, D - 1)[None, None, :]
        prefetch(at)
        prefetch(at + PAGE * G * D)


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    projected_NP, row_stride, q_norm_D, q_eps, k_norm_D, k_eps, cos_LA, sin_LA, kv_P2SGD, exponent_P2GS, page_table_BP,
    num_pages, start_B, first_B, count_B, queries_BGMD, T: tl.constexpr, G: tl.constexpr, SHARES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, A: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, ROW_BLOCKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (0, g, b) stores the keys and values of slot b's columns, program (1 + i, g, b) writes rows 16 i to
    16 i + 15 of its queries. The next kernel is released when all that earlier ones wrote is complete."""
    await_previous(PDL)
    release_next(PDL)
    part, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pages_P = page_table_BP + b.to(tl.int64) * num_pages
    # Loaded together: one after the other they would take two latencies.
    first_page, start = tl.load(pages_P), tl.load(start_B + b).to(tl.int32)
    first, num_columns = _live_columns(b, first_B, count_B, T)
    if first_page != _SCRATCH_PAGE:
        window = projected_NP + first * row_stride
        if part == 0:
            keys = window + (2 * G * SHARES + g) * D
            _store_window(
                keys, row_stride, k_norm_D, k_eps, cos_LA, sin_LA, kv_P2SGD + g * D, exponent_P2GS, g, pages_P, start,
                num_columns, BLOCK_T, G, D, BLOCK_D, A, PAGE,
            )  # fmt: skip
        else:
            first_row = (part - 1) * 16
            q = _sixteen_queries(
                window + g * (SHARES * 2 * D), row_stride, start, first_row, q_norm_D, q_eps, cos_LA, sin_LA,
                num_columns, SHARES, D, BLOCK_D, A,
            )  # fmt: skip
            m, d = first_row + tl.arange(0, 16), tl.arange(0, BLOCK_D)
            place = (b.to(tl.int64) * G + g) * (ROW_BLOCKS * BLOCK_M * D) + m[:, None] * D + d[None, :]
            tl.store(queries_BGMD + place, q, mask=(d < D)[None, :])


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries_BGMD, kv_P2SGD, exponent_P2GS, page_table_BP, num_slots, num_pages, start_B, count_B, scale, sums_CMD,
    scores_2CM, T: tl.constexpr, G: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Queries and the window's keys are the previous kernel's results, all else that is read is of earlier ones."""
    release_next(PDL)
    units_B, all_units_B = _units(
        start_B, count_B, page_table_BP, num_slots, num_pages, BLOCK_B, T, G, SHARES, BLOCK_M, BLOCK_S, ROW_BLOCKS
    )
    total = tl.sum(all_units_B, axis=0)
    program = tl.program_id(0)
    position, end = share_of(program, tl.minimum(tl.num_programs(0), total), total)
    if position < end:
        b, g, _, first_unit, num_units = _locate(
            position, units_B, all_units_B, count_B, BLOCK_B, SHARES, BLOCK_M, ROW_BLOCKS
        )
        pages_P = page_table_BP + b.to(tl.int64) * num_pages
        run = tl.minimum(num_units - first_unit, end - position)
        _prefetch_units(kv_P2SGD + g * D, pages_P, first_unit, run, G, D, BLOCK_S, PAGE)
    await_previous(PDL)
    while position < end:
        b, g, row_block, first_unit, num_units = _locate(
            position, units_B, all_units_B, count_B, BLOCK_B, SHARES, BLOCK_M, ROW_BLOCKS
        )
        run = tl.minimum(num_units - first_unit, end - position)
        start = tl.load(start_B + b).to(tl.int32)
        num_columns = T
        if count_B is not None:
            num_columns = tl.load(count_B + b).to(tl.int32)
        pages_P = page_table_BP + b.to(tl.int64) * num_pages
        first_row = row_block * BLOCK_M
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        place = ((b.to(tl.int64) * G + g) * ROW_BLOCKS + row_block) * (BLOCK_M * D)
        q = tl.load(queries_BGMD + place + m[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        column = (first_row + m) // SHARES
        heads = (q, start + column, kv_P2SGD + g * D, exponent_P2GS, g, pages_P)
        keys = (first_unit, run, start + num_columns, scale)
        largest, exponentials, values = _attend_run(
            *heads, *keys, G, D, BLOCK_M, BLOCK_D, BLOCK_S, PAGE, FIRST, PRECISION
        )
        partial = (program + (b * G + g) * ROW_BLOCKS + row_block).to(tl.int64) * BLOCK_M + m
        num_partials = tl.num_programs(0) + num_slots * (G * ROW_BLOCKS)
        tl.store(scores_2CM + partial, largest, mask=column < num_columns)
        tl.store(scores_2CM + num_partials * BLOCK_M + partial, exponentials, mask=column < num_columns)
        is_real = (column < num_columns)[:, None] & (d < D)[None, :]
        tl.store(sums_CMD + partial[:, None] * D + d[None, :], values, mask=is_real)
        position += run


@triton.jit
def _locate(  # type: ignore[no-untyped-def]
    unit, units_B, all_units_B, count_B, BLOCK_B: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr,
    ROW_BLOCKS: tl.constexpr
):  # fmt: skip
    """Return (slot, key/value head, block of query rows, unit in the task, units of the task) of a place in the list of
    all units."""
    b = tl.arange(0, BLOCK_B)
    slot = tl.sum((tl.cumsum(all_units_B, axis=0) <= unit).to(tl.int32), axis=0)
    num_units = tl.sum(tl.where(b == slot, units_B, 0), axis=0)
    in_slot = unit - tl.sum(tl.where(b < slot, all_units_B, 0), axis=0)
    num_blocks = ROW_BLOCKS
    if count_B is not None:
        num_blocks = tl.cdiv(tl.load(count_B + slot).to(tl.int32) * SHARES, BLOCK_M)
    task = in_slot // num_units
    return slot, task // num_blocks, task % num_blocks, in_slot % num_units, num_units


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    sums_CMD,
    scores_2CM,
    projected_NP,
    row_stride,
    page_table_BP,
    num_slots,
    num_pages,
    start_B,
    first_B,
    count_B,
    cell_N,
    out_NX,
    max_programs,
    T: tl.constexpr,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n * Q + h, i) computes block i of the dimensions of head h of token n. Partials are the previous
    kernel's results; all else is older than the first launch, which releases the second one after its wait."""
    release_next(PDL)
    n = tl.program_id(0) // (G * SHARES)
    h = tl.program_id(0) % (G * SHARES)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    gate = tl.load(projected_NP + n.to(tl.int64) * row_stride + h * (2 * D) + D + d, mask=d < D, other=0.0).to(
        tl.float32
    )
    units_B, all_units_B = _units(
        start_B, count_B, page_table_BP, num_slots, num_pages, BLOCK_B, T, G, SHARES, BLOCK_M, BLOCK_S, ROW_BLOCKS
    )
    cell = n
    if cell_N is not None:
        cell = tl.load(cell_N + n).to(tl.int32)
    b, column = cell // T, cell % T
    m = column * SHARES + h % SHARES
    task = (h // SHARES) * ROW_BLOCKS + m // BLOCK_M
    total = tl.sum(all_units_B, axis=0)
    num_programs = tl.minimum(max_programs, total)
    num_units, num_blocks = tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, units_B, 0), axis=0), ROW_BLOCKS
    if cell_N is not None:
        first_row, count = _live_columns(b, first_B, count_B, T)
        num_blocks = tl.cdiv(count * SHARES, BLOCK_M)
        is_live = (column < count) & (first_row + column == n)
        num_units, gate = tl.where(is_live, num_units, 0), tl.where(is_live, gate, 0.0)
    first_unit = tl.sum(tl.where(tl.arange(0, BLOCK_B) < b, all_units_B, 0), axis=0)
    first_unit += (h // SHARES * num_blocks + m // BLOCK_M) * num_units
    first = owner_of(first_unit, num_programs, total)
    end = tl.where(num_units > 0, owner_of(first_unit + num_units - 1, num_programs, total) + 1, first)
    num_partials = max_programs + num_slots * (G * ROW_BLOCKS)
    await_previous(PDL)
    largest = tl.full((), float("-inf"), tl.float32)
    exponentials = tl.zeros((), tl.float32)
    values = tl.zeros((BLOCK_D,), tl.float32)
    for program in range(first, end, BLOCK_C):
        c = program + tl.arange(0, BLOCK_C)
        row = (c + b * (G * ROW_BLOCKS) + task).to(tl.int64) * BLOCK_M + m % BLOCK_M
        score = tl.load(scores_2CM + row, mask=c < end, other=float("-inf"))
        sum_ = tl.load(scores_2CM + num_partials * BLOCK_M + row, mask=c < end, other=0.0)
        part = tl.load(sums_CMD + row[:, None] * D + d[None, :], mask=(c < end)[:, None] & (d < D)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(score, axis=0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(score - base)
        exponentials = exponentials * shrink + tl.sum(weight * sum_, axis=0)
        values = values * shrink + tl.sum(weight[:, None] * part, axis=0)
        largest = new_largest
    out = values / tl.where(exponentials == 0.0, 1.0, exponentials) * tl.sigmoid(gate)
    tl.store(out_NX + n.to(tl.int64) * (G * SHARES * D) + h * D + d, out.to(out_NX.dtype.element_ty), mask=d < D)
