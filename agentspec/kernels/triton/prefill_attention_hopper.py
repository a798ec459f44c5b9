"""The second launch of prefill_attention.py over pages in FP8 for Hopper's matrix units, in Gluon: the same function as
prefill_attention._attend. For pages in 16 bits see prefill_attention_groups_hopper.py.

Triton's own compiler fetches a page only after the work on the previous one has ended, since there is no room for
three. Here every wait and copy is explicit. While a program processes page j, TMA copies the keys of page j + 1 and
the values of page j. The matrix units add the values of page j - 1 while the threads compute the weights of page j,
and compute the scores of page j while the output is rescaled.

Pages in FP8 that page_expansion.py has written out are read from its scratch pool. Others are copied to a staging
buffer for keys and one for values, and all threads decode them from there to the buffers that the matrix units read,
while these work: the keys of page j + 1 and the values of page j. Every number is exact, so how a page was decoded
changes no bit.

Knows nothing of where tiles come from: see prefill_attention.py, also for terms and shape letters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.triton import prefill_line
from agentspec.kernels.triton.fp8_pages import power
from agentspec.kernels.triton.gluon_names import await_previous, copy_block, release_next, warp_barrier
from agentspec.kernels.triton.linear_tiles import decode_e4m3
from agentspec.kernels.triton.prefill_attention_pages import (
    masked_scores,
    page_at,
    place_at,
    rescaled,
    share_on_line,
    softmax,
    tiles_of_share,
)
from agentspec.kernels.triton.prefill_columns import COUNT, NUM_SPAN_FIELDS, OFFSET, START

BLOCK_M = 128
"""Two warp groups of four warps, 64 rows each."""
NUM_WARPS = 8

_decode_e4m3 = gluon.jit(decode_e4m3.fn)
_power = gluon.jit(power.fn)
_tile_at = gluon.jit(prefill_line.tile_at.fn)


_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.uint8: gl.uint8}


def descriptor(kv_P2SGD: Tensor) -> TensorDescriptor:
    """TMA descriptor of the pool, which is bytes where it is in FP8: a block is one head's keys, or values, of a
    page."""
    page_tokens, num_kv_heads, head_dim = kv_P2SGD.shape[2:]
    layout = gl.NVMMASharedLayout.get_default_for([page_tokens, head_dim], _ELEMENTS[kv_P2SGD.dtype])
    return TensorDescriptor.from_tensor(kv_P2SGD.view(-1, num_kv_heads * head_dim), [page_tokens, head_dim], layout)


@gluon.jit
def _fetch(pool, page, column, HALF: gl.constexpr, buffers, barriers, turn, is_wanted, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copy of a page's keys (HALF 0) or values (1) into the buffer of turn `turn`, which must have no more
    readers."""
    barrier = barriers.index(turn % 2)
    mbarrier.expect(barrier, pool.block_type.nbytes, pred=is_wanted)
    copy_block(pool, [page * (2 * PAGE) + HALF * PAGE, column], barrier, buffers.index(turn % 2), pred=is_wanted)


@gluon.jit
def _turns(  # type: ignore[no-untyped-def]
    state,
    begin,
    end,
    queries,
    query_position_M,
    keys,
    keys_ready,
    values_,
    values_ready,
    pool,
    column,
    run,
    turn,
    scale,
    MASKED: gl.constexpr,
    scores_layout: gl.constexpr,
    values_layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Process pages begin..end-1 of a run. `state`: (page j - 1's weights, factor, largest, exponentials, values
    before it, ids of pages j and j + 1)."""
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    pages, first_page, num_pages, num_full, turned = run
    weight, shrink, largest, exponentials, values, page, next_page = state
    for j in range(begin, end):
        mbarrier.wait(keys_ready.index((turn + j) % 2), ((turn + j) // 2) & 1)
        values = warpgroup_mma_wait(0, deps=[values])
        nothing = gl.zeros([BLOCK_M, PAGE], gl.float32, scores_layout)
        scores = warpgroup_mma(
            queries, keys.index((turn + j) % 2).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        # All threads have read the keys of page j - 1 and the values of page j - 2.
        warp_barrier()
        _fetch(pool, next_page, column, 0, keys, keys_ready, turn + j + 1, j + 1 < num_pages, PAGE)
        _fetch(pool, page, column, 1, values_, values_ready, turn + j, True, PAGE)
        page = next_page
        next_page = page_at(pages, j + 2, num_pages, num_full, turned)
        values = rescaled(values, shrink, values_layout)
        mbarrier.wait(values_ready.index((turn + j - 1) % 2), ((turn + j - 1) // 2) & 1)
        values = warpgroup_mma(weight, values_.index((turn + j - 1) % 2), values, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if MASKED:
            scores = masked_scores(scores, (first_page + j) * PAGE, query_position_M, scores_layout, PAGE)
        new_weight, largest, exponentials, shrink = softmax(scores, largest, exponentials, scale)
        weight = gl.convert_layout(new_weight.to(weight.dtype), weight_layout)
    return weight, shrink, largest, exponentials, values, page, next_page


@gluon.jit
def _attend_run(  # type: ignore[no-untyped-def]
    queries,
    query_position_M,
    keys,
    keys_ready,
    values_,
    values_ready,
    pool,
    column,
    run,
    turn,
    length,
    scale,
    scores_layout: gl.constexpr,
    values_layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
):
    """Return (largest score [M], sum of exponentials [M], weighted values [M, D]) of queries over a run of pages."""
    pages, first_page, num_pages, num_full, turned = run
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    page = page_at(pages, 0, num_pages, num_full, turned)
    next_page = page_at(pages, 1, num_pages, num_full, turned)
    # The fence makes the threads' shared-memory stores visible to the matrix units and TMA; after the barrier all
    # threads have read the last tile's buffers.
    fence_async_shared()
    warp_barrier()
    _fetch(pool, page, column, 0, keys, keys_ready, turn, True, PAGE)
    _fetch(pool, next_page, column, 0, keys, keys_ready, turn + 1, num_pages > 1, PAGE)
    _fetch(pool, page, column, 1, values_, values_ready, turn, True, PAGE)
    page = next_page
    next_page = page_at(pages, 2, num_pages, num_full, turned)
    mbarrier.wait(keys_ready.index(turn % 2), (turn // 2) & 1)
    nothing = gl.zeros([BLOCK_M, PAGE], gl.float32, scores_layout)
    scores = warpgroup_mma(queries, keys.index(turn % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    first_position = (first_page + gl.where(num_full > 0, turned, 0)) * PAGE
    scores = masked_scores(scores, first_position, query_position_M, scores_layout, PAGE)
    largest = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    exponentials = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores_layout))
    weight, largest, exponentials, shrink = softmax(scores, largest, exponentials, scale)
    weight = gl.convert_layout(weight.to(queries.dtype), weight_layout)
    values = warpgroup_mma_init(gl.zeros([BLOCK_M, D], gl.float32, values_layout))
    state = (weight, shrink, largest, exponentials, values, page, next_page)
    place = (queries, query_position_M, keys, keys_ready, values_, values_ready, pool, column, run, turn, scale)
    first_masked = gl.maximum(num_full, 1)
    state = _turns(state, 1, num_full, *place, False, scores_layout, values_layout, BLOCK_M, PAGE)
    state = _turns(state, first_masked, num_pages, *place, True, scores_layout, values_layout, BLOCK_M, PAGE)
    weight, shrink, largest, exponentials, values, page, next_page = state
    values = warpgroup_mma_wait(0, deps=[values])
    last = turn + num_pages - 1
    mbarrier.wait(values_ready.index(last % 2), (last // 2) & 1)
    buffer = values_.index(last % 2)
    rest = length - (first_page + num_pages - 1) * PAGE
    if rest < PAGE:
        # The sequence ends in this page. Unwritten places may be NaN, and 0 * NaN is NaN.
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
        v = buffer.load(rows)
        is_key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, rows)) < rest
        buffer.store(gl.where(gl.expand_dims(is_key, 1), v, 0.0))
        fence_async_shared()
        warp_barrier()
    values = warpgroup_mma(weight, buffer, rescaled(values, shrink, values_layout), is_async=True)
    values = warpgroup_mma_wait(0, deps=[values])
    return largest, exponentials, values


@gluon.jit
def _stage(pool, page, column, HALF: gl.constexpr, staged, ready, is_wanted, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copy of a page's codes of keys (HALF 0) or values (1) to a staging buffer that no thread reads."""
    mbarrier.expect(ready, pool.block_type.nbytes, pred=is_wanted)
    copy_block(pool, [page * (2 * PAGE) + HALF * PAGE, column], ready, staged, pred=is_wanted)


@gluon.jit
def _decode(staged, buffer, PAGE: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write a page's numbers, without their powers of two, to a buffer that has no more readers."""
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [8, 1], [1, 0])
    step: gl.constexpr = 4096 // D if 4096 // D < PAGE else PAGE
    for first in gl.static_range(0, PAGE, step):
        codes = staged.slice(first, step).load(rows)
        buffer.slice(first, step).store(_decode_e4m3(codes, buffer.dtype))


@gluon.jit
def _multipliers(  # type: ignore[no-untyped-def]
    exponents, page, HALF: gl.constexpr, rest, layout: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr
):
    """The powers of two of a page's keys or values, as a row. exponents: of the head, in page 0. rest: how many places
    of the page are written; 1 for the others."""
    place = gl.arange(0, PAGE, layout=gl.SliceLayout(0, layout))
    head = exponents + (page.to(gl.int64) * 2 + HALF) * (G * PAGE)
    return gl.expand_dims(_power(gl.load(head + place, mask=place < rest, other=0).to(gl.int32)), 0)


@gluon.jit
def _attend_run_fp8(  # type: ignore[no-untyped-def]
    queries,
    query_position_M,
    keys,
    values_,
    pool,
    column,
    run,
    turn,
    length,
    scale,
    staged,
    staged_ready,
    exponents,
    scores_layout: gl.constexpr,
    values_layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
):
    """`_attend_run` over pages in FP8. staged: buffers of one page's codes of keys, and of values. staged_ready: their
    barriers. turn: pages that have passed through them. exponents: of the head, in page 0."""
    pages, first_page, num_pages, num_full, turned = run
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    staged_keys, staged_values = staged.index(0), staged.index(1)
    keys_here, values_here = staged_ready.index(0), staged_ready.index(1)
    page = page_at(pages, 0, num_pages, num_full, turned)
    next_page = page_at(pages, 1, num_pages, num_full, turned)
    # As in `_attend_run`: queries are visible to the matrix units, and the last tile's buffers have no readers.
    fence_async_shared()
    warp_barrier()
    _stage(pool, page, column, 0, staged_keys, keys_here, True, PAGE)
    _stage(pool, page, column, 1, staged_values, values_here, True, PAGE)
    mbarrier.wait(keys_here, turn & 1)
    _decode(staged_keys, keys.index(turn % 2), PAGE, D)
    mbarrier.wait(values_here, turn & 1)
    _decode(staged_values, values_.index(turn % 2), PAGE, D)
    fence_async_shared()
    warp_barrier()
    _stage(pool, next_page, column, 0, staged_keys, keys_here, num_pages > 1, PAGE)
    _stage(pool, next_page, column, 1, staged_values, values_here, num_pages > 1, PAGE)
    largest = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    exponentials = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores_layout))
    values = gl.zeros([BLOCK_M, D], gl.float32, values_layout)
    for j in range(num_pages):
        place = first_page + place_at(j, num_full, turned)
        rest = length - place * PAGE
        key_multipliers = _multipliers(exponents, page, 0, rest, scores_layout, G, PAGE)
        value_multipliers = _multipliers(exponents, page, 1, rest, scores_layout, G, PAGE)
        nothing = gl.zeros([BLOCK_M, PAGE], gl.float32, scores_layout)
        scores = warpgroup_mma(
            queries, keys.index((turn + j) % 2).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        if j + 1 < num_pages:
            # Its last readers were the scores of page j - 1, which all threads have waited for.
            mbarrier.wait(keys_here, (turn + j + 1) & 1)
            _decode(staged_keys, keys.index((turn + j + 1) % 2), PAGE, D)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = scores * key_multipliers
        scores = masked_scores(scores, place * PAGE, query_position_M, scores_layout, PAGE)
        new_weight, largest, exponentials, shrink = softmax(scores, largest, exponentials, scale)
        weight = gl.convert_layout((new_weight * value_multipliers).to(queries.dtype), weight_layout)
        values = rescaled(values, shrink, values_layout)
        values = warpgroup_mma(weight, values_.index((turn + j) % 2), values, is_async=True)
        if j + 1 < num_pages:
            mbarrier.wait(values_here, (turn + j + 1) & 1)
            _decode(staged_values, values_.index((turn + j + 1) % 2), PAGE, D)
        page = next_page
        next_page = page_at(pages, j + 2, num_pages, num_full, turned)
        values = warpgroup_mma_wait(0, deps=[values])
        fence_async_shared()
        warp_barrier()
        _stage(pool, next_page, column, 0, staged_keys, keys_here, j + 2 < num_pages, PAGE)
        _stage(pool, next_page, column, 1, staged_values, values_here, j + 2 < num_pages, PAGE)
    return largest, exponentials, values


@gluon.jit
def _attend_either(  # type: ignore[no-untyped-def]
    queries, query_position_M, keys, keys_ready, values_, values_ready, pool, scratch, column, page_E, first_U, u, run,
    turn, staged_turn, length, scale, staged, staged_ready, exponents, scores_layout: gl.constexpr,
    values_layout: gl.constexpr, BLOCK_M: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """`_attend_run` over span u's pages in FP8, which may have been written out. Also return the turns after it."""
    coded = (queries, query_position_M, keys, values_, pool, column, run, staged_turn, length, scale)
    codes = (staged, staged_ready, exponents)
    _pages, first_page, num_pages, num_full, turned = run
    if first_U is None:
        largest, exponentials, values = _attend_run_fp8(
            *coded, *codes, scores_layout, values_layout, BLOCK_M, PAGE, D, G
        )
        staged_turn += num_pages
    else:
        first = gl.load(first_U + u)
        if first >= 0:
            buffers = (queries, query_position_M, keys, keys_ready, values_, values_ready)
            written = (page_E + first + first_page, first_page, num_pages, num_full, turned)
            place = (scratch, column, written, turn, length, scale)
            largest, exponentials, values = _attend_run(
                *buffers, *place, scores_layout, values_layout, BLOCK_M, PAGE, D
            )
            turn += num_pages
        else:
            largest, exponentials, values = _attend_run_fp8(
                *coded, *codes, scores_layout, values_layout, BLOCK_M, PAGE, D, G
            )
            staged_turn += num_pages
    return largest, exponentials, values, turn, staged_turn


@gluon.jit
def _init_barriers(barriers):  # type: ignore[no-untyped-def]
    for buffer in gl.static_range(2):
        mbarrier.init(barriers.index(buffer), count=1)


@gluon.jit(do_not_specialize=prefill_line.NOT_SPECIALIZED)
def attend(  # type: ignore[no-untyped-def]
    queries_NQD, projected_NP, row_stride, pool, exponent_P2GS, scratch, page_E, first_U, page_table_UP, num_pages,
    spans_UF, line_4I, most_tiles, cuts_2C, scale, sums_CMD, scores_2CM, out_NX, G: gl.constexpr, SHARES: gl.constexpr,
    D: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """prefill_attention._attend; BLOCK_M is 128, D a power of two. scratch, page_E, first_U: of
    `page_expansion.Expansion`; None: there is none."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, PAGE, 16]
    )
    values_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, D, 16]
    )
    dtype: gl.constexpr = queries_NQD.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype))
    page_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAGE, D], dtype)
    keys = gl.allocate_shared_memory(dtype, [2, PAGE, D], page_layout)
    values_ = gl.allocate_shared_memory(dtype, [2, PAGE, D], page_layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    _init_barriers(keys_ready)
    _init_barriers(values_ready)
    staged = gl.allocate_shared_memory(gl.uint8, [2, PAGE, D], pool.layout)
    staged_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    _init_barriers(staged_ready)
    release_next(PDL)
    await_previous(PDL)
    program = gl.program_id(0)
    begin, end = share_on_line(line_4I, most_tiles, program, gl.num_programs(0), 8)
    first_tile, num_tiles = tiles_of_share(line_4I, most_tiles, begin, end, 8)
    gl.store(cuts_2C + program, first_tile)
    gl.store(cuts_2C + gl.num_programs(0) + program, begin)
    if begin < end:
        # Numbers of pages that have passed through the buffers, and through the staging buffers.
        turn = program * 0
        staged_turn = program * 0
        for tile_turn in range(num_tiles):
            i = first_tile + (tile_turn + 1) % num_tiles
            tile_begin = gl.load(line_4I + i)
            tile_end = gl.load(line_4I + i + 1)
            first_page = gl.maximum(begin - tile_begin, 0)
            run = gl.minimum(end, tile_end) - tile_begin - first_page
            u, g, tile = _tile_at(line_4I, most_tiles, i)
            span = spans_UF + u * NUM_SPAN_FIELDS
            offset = gl.load(span + OFFSET)
            start = gl.load(span + START).to(gl.int32)
            count = gl.load(span + COUNT).to(gl.int32)
            first_token = tile * BLOCK_M // SHARES
            head = ((offset + first_token) * (G * SHARES) + g * SHARES) * D
            _load_queries(queries, queries_NQD + head, tile, first_token, count, G, SHARES, D, BLOCK_M)
            num_full = gl.minimum(gl.maximum((start + first_token + 1) // PAGE - first_page, 0), run)
            shift = gl.where(run == end - begin, (run - first_page % run) % run, 0)
            turned = gl.where(shift < num_full, shift, 0)
            pages = (page_table_UP + u.to(gl.int64) * num_pages + first_page, first_page, run, num_full, turned)
            row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores_layout))
            coded = (queries, start + row // SHARES, keys, keys_ready, values_, values_ready, pool, scratch, g * D)
            place = (page_E, first_U, u, pages, turn, staged_turn)
            codes = (start + count, scale, staged, staged_ready, exponent_P2GS + g * PAGE)
            largest, exponentials, values, turn, staged_turn = _attend_either(
                *coded, *place, *codes, scores_layout, values_layout, BLOCK_M, PAGE, D, G
            )
            if run == tile_end - tile_begin:
                values = rescaled(values, 1.0 / exponentials, values_layout)
                gates = projected_NP + (offset + first_token) * row_stride + g * (SHARES * 2 * D) + D
                tokens = (tile, first_token, count)
                _store_gated(values, gates, row_stride, out_NX + head, *tokens, values_layout, G, SHARES, D, BLOCK_M)
            else:
                partial = (2 * program + (begin < tile_begin).to(gl.int32)).to(gl.int64) * BLOCK_M
                stores = (partial, scores_2CM, sums_CMD)
                _store_partial(largest, exponentials, values, *stores, scores_layout, values_layout, D, BLOCK_M)


@gluon.jit
def _load_queries(  # type: ignore[no-untyped-def]
    queries,
    heads,
    tile,
    first_token,
    count,
    G: gl.constexpr,
    SHARES: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Load a tile's queries to shared memory. `heads`: at its first token, the first that reads the key/value head.
    Rows after the span are 0."""
    # All threads have read the last tile's queries.
    warp_barrier()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    place = (row // SHARES - first_token) * (G * SHARES * D) + (row % SHARES) * D
    q = gl.load(
        heads + (gl.expand_dims(place, 1) + gl.expand_dims(d, 0)),
        mask=gl.expand_dims(row // SHARES < count, 1),
        other=0.0,
    )
    queries.store(q)


@gluon.jit
def _store_partial(  # type: ignore[no-untyped-def]
    largest,
    exponentials,
    values,
    partial,
    scores_2CM,
    sums_CMD,
    scores_layout: gl.constexpr,
    values_layout: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Store a program's part of a tile's result. partial: its first row."""
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores_layout))
    gl.store(scores_2CM + partial + m, largest)
    gl.store(scores_2CM + 2 * gl.num_programs(0) * BLOCK_M + partial + m, exponentials)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, values_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, values_layout))
    gl.store(sums_CMD + partial * D + (gl.expand_dims(m, 1) * D + gl.expand_dims(d, 0)), values)


@gluon.jit
def _store_gated(  # type: ignore[no-untyped-def]
    values,
    gates,
    row_stride,
    out,
    tile,
    first_token,
    count,
    layout: gl.constexpr,
    G: gl.constexpr,
    SHARES: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """prefill_attention._store_gated; every thread loads the gates of its own values, since there is no shared memory
    to exchange them."""
    row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    token = row // SHARES - first_token
    is_real = gl.expand_dims(row // SHARES < count, 1)
    place = token * row_stride + (row % SHARES) * (2 * D)
    gate = gl.load(gates + (gl.expand_dims(place, 1) + gl.expand_dims(d, 0)), mask=is_real, other=0.0).to(gl.float32)
    values = values / (1.0 + gl.exp2(gate * -1.4426950408889634))
    place = token * (G * SHARES * D) + (row % SHARES) * D
    gl.store(out + (gl.expand_dims(place, 1) + gl.expand_dims(d, 0)), values.to(out.dtype.element_ty), mask=is_real)
