"""The second launch of prefill_attention.py over pages in 16 bits for Hopper's matrix units, in Gluon: the same
function as prefill_attention._attend.

One warp fetches pages by TMA, two ahead. Two groups of four warps have half of a tile's rows each. Neither waits for
the other, but where a sequence ends inside a page. So one's products run while the other computes weights or rescales
its output, between its own products of two pages. Within a group, the matrix units add the values of page j - 1 while
the threads compute the weights of page j, and compute the scores of page j while the output is rescaled.

Knows nothing of where tiles come from: see prefill_attention.py, also for terms and shape letters.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from agentspec.kernels.triton import prefill_line
from agentspec.kernels.triton.gluon_names import await_previous, copy_block, release_next, warp_barrier
from agentspec.kernels.triton.prefill_attention_pages import (
    masked_scores,
    page_at,
    rescaled,
    share_on_line,
    softmax,
    tiles_of_share,
)
from agentspec.kernels.triton.prefill_columns import COUNT, NUM_SPAN_FIELDS, OFFSET, START

NUM_WARPS = 4
"""Of a group."""
_ROWS = gl.constexpr(64)
"""Of a group: half of a tile."""
REGISTERS: dict[str, Any] = {"REGISTERS": 240, "FETCH_REGISTERS": 24}
"""Registers of a thread of the second group and of the fetching one; the first group gets the rest of 504."""

_tile_at = gluon.jit(prefill_line.tile_at.fn)


@gluon.jit
def _work_at(share, tile_turn, SHARES: gl.constexpr, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return what a program does at a turn: (span, key/value head, tile, its first token); (the span's offset, start,
    count); its run of pages: (the first, how many, of these seen by all rows, place of the one to begin with); (units
    before the tile, units up to its end)."""
    line_4I, most_tiles, spans_UF, begin, end, first_tile, num_tiles = share
    i = first_tile + (tile_turn + 1) % num_tiles
    tile_begin, tile_end = gl.load(line_4I + i), gl.load(line_4I + i + 1)
    first_page = gl.maximum(begin - tile_begin, 0)
    run = gl.minimum(end, tile_end) - tile_begin - first_page
    u, g, tile = _tile_at(line_4I, most_tiles, i)
    span = spans_UF + u * NUM_SPAN_FIELDS
    offset, start = gl.load(span + OFFSET), gl.load(span + START).to(gl.int32)
    count = gl.load(span + COUNT).to(gl.int32)
    first_token = tile * (2 * _ROWS) // SHARES
    num_full = gl.minimum(gl.maximum((start + first_token + 1) // PAGE - first_page, 0), run)
    shift = gl.where(run == end - begin, (run - first_page % run) % run, 0)
    turned = gl.where(shift < num_full, shift, 0)
    return (
        (u, g, tile, first_token),
        (offset, start, count),
        (first_page, run, num_full, turned),
        (tile_begin, tile_end),
    )


@gluon.jit
def _copy_page(pool, page, column, HALF: gl.constexpr, buffers, full, turn, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copy of a page's keys (HALF 0) or values (1) into the buffer of a turn, which is empty."""
    ready = full.index(turn % 2)
    mbarrier.expect(ready, pool.block_type.nbytes)
    copy_block(pool, [page * (2 * PAGE) + HALF * PAGE, column], ready, buffers.index(turn % 2))


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    share, pool, page_table_UP, num_pages, shared, SHARES: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr
):
    """The fetching warp: copies every page's keys and values into the next free buffers."""
    keys, values, keys_full, keys_empty, values_full, values_empty, _cleared = shared
    num_tiles = share[6]
    turn = num_tiles * 0
    for tile_turn in range(num_tiles):
        tile_, _span, run_, _units = _work_at(share, tile_turn, SHARES, PAGE)
        u, g = tile_[0], tile_[1]
        first_page, run, num_full, turned = run_
        pages = page_table_UP + u.to(gl.int64) * num_pages + first_page
        page = page_at(pages, 0, run, num_full, turned)
        mbarrier.wait(keys_empty.index(turn % 2), (turn // 2 & 1) ^ 1)
        _copy_page(pool, page, g * D, 0, keys, keys_full, turn, PAGE)
        for j in range(run):
            next_page = page_at(pages, j + 1, run, num_full, turned)
            at = turn + j
            if j + 1 < run:
                mbarrier.wait(keys_empty.index((at + 1) % 2), ((at + 1) // 2 & 1) ^ 1)
                _copy_page(pool, next_page, g * D, 0, keys, keys_full, at + 1, PAGE)
            mbarrier.wait(values_empty.index(at % 2), (at // 2 & 1) ^ 1)
            _copy_page(pool, page, g * D, 1, values, values_full, at, PAGE)
            page = next_page
        turn += run


@gluon.jit
def _turns(  # type: ignore[no-untyped-def]
    state, begin, end, queries, query_position_M, shared, first_page, turn, scale, MASKED: gl.constexpr,
    scores_layout: gl.constexpr, values_layout: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Process pages begin..end-1 of a run. `state`: (page j - 1's weights, factor, largest, exponentials, values before
    it)."""
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    keys, values_, keys_full, keys_empty, values_full, values_empty, _cleared = shared
    weight, shrink, largest, exponentials, values = state
    for j in range(begin, end):
        at = turn + j
        last = at - 1
        mbarrier.wait(keys_full.index(at % 2), at // 2 & 1)
        mbarrier.wait(values_full.index(last % 2), last // 2 & 1)
        nothing = gl.zeros([_ROWS, PAGE], gl.float32, scores_layout)
        scores = warpgroup_mma(queries, keys.index(at % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
        values = warpgroup_mma(weight, values_.index(last % 2), rescaled(values, shrink, values_layout), is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_empty.index(at % 2), count=1)
        if MASKED:
            scores = masked_scores(scores, (first_page + j) * PAGE, query_position_M, scores_layout, PAGE)
        new_weight, largest, exponentials, shrink = softmax(scores, largest, exponentials, scale)
        new_weight = gl.convert_layout(new_weight.to(weight.dtype), weight_layout)
        # The weights depend on it so that the compiler does not wait before they are computed.
        values, weight = warpgroup_mma_wait(0, deps=[values, new_weight])
        mbarrier.arrive(values_empty.index(last % 2), count=1)
    return weight, shrink, largest, exponentials, values


@gluon.jit
def _attend_run(  # type: ignore[no-untyped-def]
    queries, query_position_M, shared, run_, turn, num_cleared, length, scale, GROUP: gl.constexpr,
    scores_layout: gl.constexpr, values_layout: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Return (largest score [M], sum of exponentials [M], weighted values [M, D]) of a group's queries over a run of
    pages, and how many pages have been cleared after it."""
    keys, values_, keys_full, keys_empty, values_full, values_empty, cleared = shared
    first_page, num_pages, num_full, turned = run_
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    mbarrier.wait(keys_full.index(turn % 2), turn // 2 & 1)
    nothing = gl.zeros([_ROWS, PAGE], gl.float32, scores_layout)
    scores = warpgroup_mma(queries, keys.index(turn % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys_empty.index(turn % 2), count=1)
    first_position = (first_page + gl.where(num_full > 0, turned, 0)) * PAGE
    scores = masked_scores(scores, first_position, query_position_M, scores_layout, PAGE)
    largest = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    exponentials = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
    weight, largest, exponentials, shrink = softmax(scores, largest, exponentials, scale)
    weight = gl.convert_layout(weight.to(queries.dtype), weight_layout)
    values = gl.zeros([_ROWS, D], gl.float32, values_layout)
    state = (weight, shrink, largest, exponentials, values)
    place = (queries, query_position_M, shared, first_page, turn, scale)
    first_masked = gl.maximum(num_full, 1)
    state = _turns(state, 1, num_full, *place, False, scores_layout, values_layout, PAGE)
    state = _turns(state, first_masked, num_pages, *place, True, scores_layout, values_layout, PAGE)
    weight, shrink, largest, exponentials, values = state
    last = turn + num_pages - 1
    mbarrier.wait(values_full.index(last % 2), last // 2 & 1)
    buffer = values_.index(last % 2)
    rest = length - (first_page + num_pages - 1) * PAGE
    if rest < PAGE:
        # The sequence ends in this page. Unwritten places may be NaN, and 0 * NaN is NaN.
        if GROUP == 0:
            _clear_rows(buffer, rest, PAGE)
            mbarrier.arrive(cleared, count=1)
        else:
            mbarrier.wait(cleared, num_cleared & 1)
        num_cleared += 1
    values = warpgroup_mma(weight, buffer, rescaled(values, shrink, values_layout), is_async=True)
    values = warpgroup_mma_wait(0, deps=[values])
    mbarrier.arrive(values_empty.index(last % 2), count=1)
    return largest, exponentials, values, num_cleared


@gluon.jit
def _clear_rows(buffer, first_row, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zero the rows of a page's values from first_row on."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for first in gl.static_range(0, PAGE, 16):
        part = buffer.slice(first, 16)
        is_kept = first + gl.arange(0, 16, layout=gl.SliceLayout(1, rows)) < first_row
        part.store(gl.where(gl.expand_dims(is_kept, 1), part.load(rows), 0.0))
    fence_async_shared()
    warp_barrier()


@gluon.jit
def _load_queries(  # type: ignore[no-untyped-def]
    queries, heads, row, first_token, count, G: gl.constexpr, SHARES: gl.constexpr, D: gl.constexpr
):
    """Load a group's queries to shared memory. heads: at the tile's first token, the first that reads the key/value
    head. row: of the tile's first token on, of the span. Rows after the span are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for first in gl.static_range(0, _ROWS, 16):
        at = row + first + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        place = (at // SHARES - first_token) * (G * SHARES * D) + (at % SHARES) * D
        to = gl.expand_dims(heads + place.to(gl.int64), 1) + gl.expand_dims(d, 0).to(gl.int64)
        q = gl.load(to, mask=gl.expand_dims(at // SHARES < count, 1), other=0.0)
        queries.slice(first, 16).store(q)
    # The group's matrix units read what all of its threads stored.
    fence_async_shared()
    warp_barrier()


@gluon.jit
def _store_partial(  # type: ignore[no-untyped-def]
    largest, exponentials, values, row, scores_2CM, sums_CMD, scores_layout: gl.constexpr,
    values_layout: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Store a group's part of a tile's result. row: its first one of all partials."""
    m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, scores_layout))
    gl.store(scores_2CM + row + m, largest)
    gl.store(scores_2CM + 2 * gl.num_programs(0) * (2 * _ROWS) + row + m, exponentials)
    m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, values_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, values_layout))
    # In 64 bits, so that a lane's addresses differ by constants.
    to = gl.expand_dims(sums_CMD + (row + m.to(gl.int64)) * D, 1) + gl.expand_dims(d, 0).to(gl.int64)
    gl.store(to, values)


@gluon.jit
def _store_gated(  # type: ignore[no-untyped-def]
    values, gates, row_stride, out, row, first_token, count, layout: gl.constexpr, G: gl.constexpr,
    SHARES: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """prefill_attention._store_gated of a group's rows. Every thread loads the gates of its own values."""
    at = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    token = at // SHARES - first_token
    is_real = gl.expand_dims(at // SHARES < count, 1)
    # In 64 bits, so that a lane's addresses differ by constants.
    place, column = token.to(gl.int64) * row_stride + (at % SHARES) * (2 * D), gl.expand_dims(d, 0).to(gl.int64)
    gate = gl.load(gl.expand_dims(gates + place, 1) + column, mask=is_real, other=0.0).to(gl.float32)
    values = values / (1.0 + gl.exp2(gate * -1.4426950408889634))
    place = token.to(gl.int64) * (G * SHARES * D) + (at % SHARES) * D
    gl.store(gl.expand_dims(out + place, 1) + column, values.to(out.dtype.element_ty), mask=is_real)


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    share, tensors, queries, shared, GROUP: gl.constexpr, G: gl.constexpr, SHARES: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr
):  # fmt: skip
    """One of the two groups that attend."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PAGE, 16]
    )
    values_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    queries_NQD, projected_NP, row_stride, scale, sums_CMD, scores_2CM, out_NX = tensors
    begin, num_tiles = share[3], share[6]
    turn = num_tiles * 0
    num_cleared = num_tiles * 0
    for tile_turn in range(num_tiles):
        tile_, span, run_, units = _work_at(share, tile_turn, SHARES, PAGE)
        _u, g, tile, first_token = tile_
        offset, start, count = span
        head = ((offset + first_token) * (G * SHARES) + g * SHARES) * D
        row = tile * (2 * _ROWS) + GROUP * _ROWS
        _load_queries(queries.index(GROUP), queries_NQD + head, row, first_token, count, G, SHARES, D)
        at = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, scores_layout))
        largest, exponentials, values, num_cleared = _attend_run(
            queries.index(GROUP), start + at // SHARES, shared, run_, turn, num_cleared, start + count, scale, GROUP,
            scores_layout, values_layout, PAGE, D,
        )  # fmt: skip
        turn += run_[1]
        if run_[1] == units[1] - units[0]:
            values = rescaled(values, 1.0 / exponentials, values_layout)
            gates = projected_NP + (offset + first_token) * row_stride + g * (SHARES * 2 * D) + D
            _store_gated(values, gates, row_stride, out_NX + head, row, first_token, count, values_layout, G, SHARES, D)
        else:
            partial = 2 * gl.program_id(0) + (begin < units[0]).to(gl.int32)
            first = partial.to(gl.int64) * (2 * _ROWS) + GROUP * _ROWS
            _store_partial(largest, exponentials, values, first, scores_2CM, sums_CMD, scores_layout, values_layout, D)


@gluon.jit
def _pages(dtype: gl.constexpr, layout: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]
    """Allocate two buffers of keys and two of values, and their barriers: a page is there, and both groups have read
    it. The last barrier: the first group has cleared what is behind a sequence's end."""
    keys = gl.allocate_shared_memory(dtype, [2, PAGE, D], layout)
    values = gl.allocate_shared_memory(dtype, [2, PAGE, D], layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(keys_full.index(buffer), count=1)
        mbarrier.init(values_full.index(buffer), count=1)
        mbarrier.init(keys_empty.index(buffer), count=2)
        mbarrier.init(values_empty.index(buffer), count=2)
    cleared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(cleared, count=1)
    return keys, values, keys_full, keys_empty, values_full, values_empty, cleared


@gluon.jit(do_not_specialize=prefill_line.NOT_SPECIALIZED)
def attend(  # type: ignore[no-untyped-def]
    queries_NQD, projected_NP, row_stride, pool, page_table_UP, num_pages, spans_UF, line_4I, most_tiles, cuts_2C,
    scale, sums_CMD, scores_2CM, out_NX, G: gl.constexpr, SHARES: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr, REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """prefill_attention._attend; BLOCK_M is 128, D a power of two."""
    gl.static_assert(BLOCK_M == 2 * _ROWS)
    dtype: gl.constexpr = queries_NQD.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [2, _ROWS, D], gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype))
    shared = _pages(dtype, gl.NVMMASharedLayout.get_default_for([PAGE, D], dtype), PAGE, D)
    release_next(PDL)
    await_previous(PDL)
    program = gl.program_id(0)
    begin, end = share_on_line(line_4I, most_tiles, program, gl.num_programs(0), 4)
    first_tile, num_tiles = tiles_of_share(line_4I, most_tiles, begin, end, 4)
    gl.store(cuts_2C + program, first_tile)
    gl.store(cuts_2C + gl.num_programs(0) + program, begin)
    num_tiles = gl.where(begin < end, num_tiles, 0)
    share = (line_4I, most_tiles, spans_UF, begin, end, first_tile, num_tiles)
    tensors = (queries_NQD, projected_NP, row_stride, scale, sums_CMD, scores_2CM, out_NX)
    gl.warp_specialize(
        [
            (_attend, (share, tensors, queries, shared, 0, G, SHARES, D, PAGE)),
            (_attend, (share, tensors, queries, shared, 1, G, SHARES, D, PAGE)),
            (_fetch, (share, pool, page_table_UP, num_pages, shared, SHARES, D, PAGE)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )
