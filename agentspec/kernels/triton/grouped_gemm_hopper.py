"""The products of grouped_gemm.py with 8-bit operands for Hopper's matrix units, in Gluon.

One persistent program per multiprocessor takes pieces of work from a shared counter. A piece is the up to 128 tokens
of a tile by two blocks of 128 outputs. One group of four warps only fetches, up to four steps of K ahead and on into
the next piece. Two other groups have 64 tokens each, multiply and accumulate: the matrix units work for one while the
other scales its sums. Triton's own compiler has no such warp specialization: there all warps wait for every product,
and every piece starts with an empty pipeline.

Sums equal those of grouped_gemm.py, bit for bit: see there for the mathematics, operands and shape letters.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST, NUM_ROWS, ExpertGroups, empty_parts
from agentspec.kernels.triton.fp8_activations import LARGEST, ScaledTokens, scales_by_token
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters, await_previous, overlapped, release_next
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.weights import FP8, SCALE_BLOCK, BlockScaled, Weight

BLOCK_M = 128
"""Tokens of a tile in the table."""
_HALF_M = gl.constexpr(64)
"""Tokens per warp group."""
_BLOCK_O = gl.constexpr(128)
"""Outputs with one scale; a piece has two such blocks."""
_BLOCK_K = gl.constexpr(SCALE_BLOCK)
_STAGES = gl.constexpr(4)
_GATE_UP_REGISTERS = {"REGISTERS": 216, "FETCH_REGISTERS": 64}
_DOWN_REGISTERS = {"REGISTERS": 232, "FETCH_REGISTERS": 40}
"""Registers of a thread that multiplies and of one that fetches; the first multiplying group gets the rest of 504.
With these nothing is spilled."""

_EXPERT, _FIRST, _COUNT, _NUM_ROWS, _FIELDS = (
    gl.constexpr(field.value) for field in (EXPERT, FIRST, COUNT, NUM_ROWS, FIELDS)
)
_LARGEST = gl.constexpr(LARGEST.value)
_copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Their names in Triton 3.9, and in earlier versions."""
_barrier = tl.debug_barrier
"""A barrier of the warps of one group."""
_release_next = gluon.jit(release_next.fn)
_await_previous = gluon.jit(await_previous.fn)


def is_supported(gate_up_X2IH: Weight, device: torch.device) -> bool:
    """Whether this kernel supports experts of these shapes, whose products are W8A8, on this device."""
    _, two_widths, hidden_size = gate_up_X2IH.shape
    return two_widths % (2 * SCALE_BLOCK) == 0 and hidden_size % (2 * SCALE_BLOCK) == 0 and _num_programs(device) > 0


def gate_up(x: ScaledTokens, weight_X2IK: BlockScaled, groups: ExpertGroups, top_k: int) -> ScaledTokens:
    """grouped_gemm.gate_up over tiles of BLOCK_M. One launch, if x has scales_RG."""
    depth, width, num_pairs = x.values_RK.shape[1], weight_X2IK.shape[1] // 2, groups.pairs_P.shape[0]
    assert groups.block_m == BLOCK_M
    values = torch.empty(num_pairs, width, dtype=FP8, device=x.values_RK.device)
    scales = torch.empty(width // SCALE_BLOCK, num_pairs, dtype=torch.float32, device=values.device)
    gate_up_kernel[(_num_programs(values.device),)](
        values,
        scales,
        x.values_RK,
        x.values_RK.stride(0),
        scales_by_token(x),
        _descriptor(weight_X2IK.values.flatten(0, 1), SCALE_BLOCK),
        weight_X2IK.scales,
        groups.pairs_P,
        groups.tiles_T4,
        arrival_counters(values.device),
        num_pairs,
        top_k,
        width,
        depth,
        num_warps=4,
        **_GATE_UP_REGISTERS,
        **overlapped(),
    )
    return ScaledTokens(values_RK=values, scales_GR=scales)


def down(
    h: ScaledTokens, weight_XOI: BlockScaled, groups: ExpertGroups, weights_NJ: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_gemm.down over tiles of BLOCK_M. One launch."""
    (num_pairs, depth), num_outputs = h.values_RK.shape, weight_XOI.shape[1]
    assert (weights_NJ.dtype, weights_NJ.is_contiguous()) == (torch.float32, True)
    assert groups.block_m == BLOCK_M
    parts = empty_parts(groups, (*weights_NJ.shape, num_outputs), dtype, weights_NJ.device)
    down_kernel[(_num_programs(parts.device),)](
        parts,
        _descriptor(h.values_RK, BLOCK_M // 2),
        h.scales_GR,
        _descriptor(weight_XOI.values.flatten(0, 1), SCALE_BLOCK),
        weight_XOI.scales,
        weights_NJ,
        groups.pairs_P,
        groups.tiles_T4,
        arrival_counters(parts.device),
        num_pairs,
        num_outputs,
        depth,
        num_warps=4,
        **_DOWN_REGISTERS,
        **overlapped(),
    )
    return parts


def _descriptor(values: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of [*, K] in blocks of `rows` rows of 128 bytes."""
    block = [rows, SCALE_BLOCK]
    return TensorDescriptor.from_tensor(values, block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv))


@functools.cache
def _num_programs(device: torch.device) -> int:
    """One program per multiprocessor; 0 if the device is not a Hopper."""
    if INTERPRETED:
        return 0
    machine = machine_of(device)
    return machine.num_multiprocessors if machine.capability[0] == 9 else 0


@gluon.jit
def _fetch(operands, shared, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The fetching warp group: takes pieces, publishes their description, and loads every step of them into the next
    free buffers. A piece without tokens marks the end. Of gate and up, whose pieces have many steps, it finds out the
    next piece between two steps, while the buffers are full."""
    x, x_stride, weights, pairs_ptr, tiles_ptr, counters_ptr, num_tiles, top_k, num_outputs, depth = operands
    _x_buffers, _weight_buffers, facts, places, full, empty = shared
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    num_blocks = num_outputs // (_BLOCK_O if GATED else 2 * _BLOCK_O)
    num_steps = depth // _BLOCK_K
    first_steps = num_steps // 2 if GATED else num_steps
    fact = gl.arange(0, 4, layout=four)
    turn = num_tiles * 0
    piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    expert, first, count = _tile_of(tiles_ptr, piece // num_blocks, num_tiles)
    low, high = _pairs_of(pairs_ptr, first, count, rows)
    while piece < num_tiles * num_blocks:
        block = piece % num_blocks
        if GATED:
            weight_row = expert * (2 * num_outputs) + block * _BLOCK_O
            second_row = weight_row + num_outputs
            low, high = low // top_k, high // top_k
        else:
            weight_row = expert * num_outputs + block * (2 * _BLOCK_O)
            second_row = weight_row + _BLOCK_O
        if count > 0:
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
            facts.index(stage).store(
                gl.where(fact == 0, expert, gl.where(fact == 1, first, gl.where(fact == 2, count, block)))
            )
            places.index(2 * stage).store(low)
            places.index(2 * stage + 1).store(high)
            _barrier()
        source = (x, x_stride, low, high, first, count, weights, weight_row, second_row)
        turn = _fetch_steps(source, 0, first_steps, turn, shared, rows, GATED)
        piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
        next_expert, next_first, next_count = _tile_of(tiles_ptr, piece // num_blocks, num_tiles)
        if GATED:
            turn = _fetch_steps(source, first_steps, num_steps, turn, shared, rows, GATED)
        expert, first, count = next_expert, next_first, next_count
        low, high = _pairs_of(pairs_ptr, first, count, rows)
    stage = turn % _STAGES
    mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
    facts.index(stage).store(fact * 0)
    _barrier()
    mbarrier.arrive(full.index(stage), count=1)
    if GATED:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    if gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        # All programs have stopped taking pieces: reset the counters for the next kernel.
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def _tile_of(tiles_ptr, tile, num_tiles):  # type: ignore[no-untyped-def]
    """Return (expert, first place, number of places) of a tile; behind the last one there are no places."""
    row = tiles_ptr + tile * _FIELDS
    is_tile = tile < num_tiles
    expert, first = gl.load(row + _EXPERT, mask=is_tile, other=0), gl.load(row + _FIRST, mask=is_tile, other=0)
    return expert, first, gl.load(row + _COUNT, mask=is_tile, other=0)


@gluon.jit
def _pairs_of(pairs_ptr, first, count, rows: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pairs of the places of both halves of a tile, [64] each. Places past the end repeat the last pair;
    their results are not stored."""
    m = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, rows))
    has_any = m < gl.where(count > 0, _HALF_M, 0)
    low = gl.load(pairs_ptr + first + gl.minimum(m, count - 1), mask=has_any, other=0)
    return low, gl.load(pairs_ptr + first + gl.minimum(m + _HALF_M, count - 1), mask=has_any, other=0)


@gluon.jit
def _fetch_steps(source, begin, end, turn, shared, rows: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load some steps of a piece. Return the turn behind them."""
    x, x_stride, low, high, first, count, weights, weight_row, second_row = source
    x_buffers, weight_buffers, _facts, _places, full, empty = shared
    weight_bytes: gl.constexpr = 2 * _BLOCK_O * _BLOCK_K
    k = gl.arange(0, _BLOCK_K, layout=gl.SliceLayout(0, rows))
    if count > 0:
        for step in range(begin, end):
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
            ready = full.index(stage)
            if GATED:
                mbarrier.expect(ready, weight_bytes)
            elif count > _HALF_M:
                mbarrier.expect(ready, weight_bytes + 2 * _HALF_M * _BLOCK_K)
            else:
                mbarrier.expect(ready, weight_bytes + _HALF_M * _BLOCK_K)
            _copy_block(weights, [weight_row, step * _BLOCK_K], ready, weight_buffers.index(2 * stage))
            _copy_block(weights, [second_row, step * _BLOCK_K], ready, weight_buffers.index(2 * stage + 1))
            if GATED:
                low_rows = gl.expand_dims(x + low.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
                _copy_rows(x_buffers.index(2 * stage), low_rows + step * _BLOCK_K)
                if count > _HALF_M:
                    high_rows = gl.expand_dims(x + high.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
                    _copy_rows(x_buffers.index(2 * stage + 1), high_rows + step * _BLOCK_K)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                _copy_block(x, [first, step * _BLOCK_K], ready, x_buffers.index(2 * stage))
                if count > _HALF_M:
                    _copy_block(x, [first + _HALF_M, step * _BLOCK_K], ready, x_buffers.index(2 * stage + 1))
            turn += 1
    return turn


@gluon.jit
def _next_piece(facts, full, turn):  # type: ignore[no-untyped-def]
    """Return (expert, first place, number of places, block of outputs) of the piece whose first step is `turn`."""
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    mbarrier.wait(full.index(turn % _STAGES), turn // _STAGES & 1)
    values = facts.index(turn % _STAGES).load(four)
    fact = gl.arange(0, 4, layout=four)
    expert = gl.sum(gl.where(fact == 0, values, 0), axis=0)
    first = gl.sum(gl.where(fact == 1, values, 0), axis=0)
    count = gl.sum(gl.where(fact == 2, values, 0), axis=0)
    return expert, first, count, gl.sum(gl.where(fact == 3, values, 0), axis=0)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    x_scales,
    scales_stride,
    place_M,
    first_scales,
    second_scales,
    depth,
    turn,
    shared,
    GROUP: gl.constexpr,
    layout: gl.constexpr,
):
    """Compute two blocks of 128 outputs of 64 tokens: float32 [64, 128] each."""
    x_buffers, weight_buffers, _facts, _places, full, empty = shared
    zeros = gl.zeros([_HALF_M, _BLOCK_O], gl.float32, layout)
    sums = zeros
    second_sums = zeros
    last = depth // _BLOCK_K - 1
    next_x_scale = gl.load(x_scales + place_M)
    next_scale = gl.load(first_scales)
    next_second_scale = gl.load(second_scales)
    for step in range(last + 1):
        stage = turn % _STAGES
        x_scale = next_x_scale
        scale = next_scale
        second_scale = next_second_scale
        mbarrier.wait(full.index(stage), turn // _STAGES & 1)
        # Makes the tokens that threads have gathered visible to the matrix units.
        fence_async_shared()
        x = x_buffers.index(2 * stage + GROUP)
        product = warpgroup_mma(x, weight_buffers.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Loaded one step ahead: too small for an asynchronous copy, and too slow to wait for.
        further = gl.minimum(step + 1, last)
        next_x_scale = gl.load(x_scales + further.to(gl.int64) * scales_stride + place_M)
        next_scale = gl.load(first_scales + further)
        next_second_scale = gl.load(second_scales + further)
        product = warpgroup_mma_wait(0, deps=[product])
        sums += product * gl.expand_dims(scale * x_scale, 1)
        product = warpgroup_mma(
            x, weight_buffers.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        second_sums += product * gl.expand_dims(second_scale * x_scale, 1)
        turn += 1
    return sums, second_sums, turn


@gluon.jit
def _skip(turn, depth, full, empty):  # type: ignore[no-untyped-def]
    """Pass over a piece in which this warp group has no tokens."""
    for _ in range(depth // _BLOCK_K):
        mbarrier.wait(full.index(turn % _STAGES), turn // _STAGES & 1)
        mbarrier.arrive(empty.index(turn % _STAGES), count=1)
        turn += 1
    return turn


@gluon.jit
def _gate_up(operands, shared, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two multiplying warp groups of gate and up."""
    h_ptr, h_scales_ptr, x_scales_ptr, weight_scales_ptr, num_pairs, width, depth = operands
    _x_buffers, _weight_buffers, facts, places, full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    num_blocks = width // _BLOCK_O
    num_groups = depth // _BLOCK_K
    m = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, layout))
    place = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, rows))
    o = gl.arange(0, _BLOCK_O, layout=gl.SliceLayout(0, rows))
    turn = width * 0
    expert, first, all_count, block = _next_piece(facts, full, turn)
    while all_count > 0:
        count = all_count - GROUP * _HALF_M
        if count > 0:
            token = places.index(2 * (turn % _STAGES) + GROUP).load(gl.SliceLayout(1, layout))
            _barrier()  # all warps have read the piece's description
            gate_scales = weight_scales_ptr + (expert * 2 * num_blocks + block) * num_groups
            up_scales = gate_scales + num_blocks * num_groups
            gate, up, turn = _multiply(
                x_scales_ptr, 1, token * num_groups, gate_scales, up_scales, depth, turn, shared, GROUP, layout
            )
            h = gate / (1.0 + gl.exp(-gate)) * up
            largest = gl.max(gl.abs(h), axis=1)
            scale = gl.where(largest < 2.0**-100, 1.0, gl.div_rn(largest, gl.full_like(largest, _LARGEST)))
            inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
            begin = first + GROUP * _HALF_M
            gl.store(h_scales_ptr + block.to(gl.int64) * num_pairs + begin + m, scale, mask=m < count)
            rounded = gl.convert_layout((h * gl.expand_dims(inverse, 1)).to(gl.float8e4nv), rows)
            at = gl.expand_dims((begin + place).to(gl.int64) * width, 1) + gl.expand_dims(block * _BLOCK_O + o, 0)
            gl.store(h_ptr + at, rounded, mask=gl.expand_dims(place < count, 1))
        else:
            _barrier()
            turn = _skip(turn, depth, full, empty)
        expert, first, all_count, block = _next_piece(facts, full, turn)


@gluon.jit
def _down(operands, shared, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two multiplying warp groups of down."""
    parts_ptr, h_scales_ptr, weight_scales_ptr, weights_ptr, num_pairs, num_outputs, depth = operands
    _x_buffers, _weight_buffers, facts, places, full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    num_blocks = num_outputs // (2 * _BLOCK_O)
    num_groups = depth // _BLOCK_K
    m = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, layout))
    place = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, rows))
    o = gl.arange(0, _BLOCK_O, layout=gl.SliceLayout(0, rows))
    turn = num_outputs * 0
    expert, first, all_count, block = _next_piece(facts, full, turn)
    while all_count > 0:
        count = all_count - GROUP * _HALF_M
        if count > 0:
            mine = places.index(2 * (turn % _STAGES) + GROUP)
            weight_M = gl.expand_dims(gl.load(weights_ptr + mine.load(gl.SliceLayout(1, layout))), 1)
            pair = mine.load(gl.SliceLayout(1, rows))
            _barrier()  # all warps have read the piece's description
            scales = weight_scales_ptr + (expert * num_blocks + block) * (2 * num_groups)
            h_places = first + GROUP * _HALF_M + gl.minimum(m, count - 1)
            sums, second_sums, turn = _multiply(
                h_scales_ptr, num_pairs, h_places, scales, scales + num_groups, depth, turn, shared, GROUP, layout
            )
            at = gl.expand_dims(pair.to(gl.int64) * num_outputs, 1) + gl.expand_dims(block * (2 * _BLOCK_O) + o, 0)
            is_real = gl.expand_dims(place < count, 1)
            dtype: gl.constexpr = parts_ptr.dtype.element_ty
            gl.store(parts_ptr + at, gl.convert_layout((sums * weight_M).to(dtype), rows), mask=is_real)
            gl.store(
                parts_ptr + at + _BLOCK_O, gl.convert_layout((second_sums * weight_M).to(dtype), rows), mask=is_real
            )
        else:
            _barrier()
            turn = _skip(turn, depth, full, empty)
        expert, first, all_count, block = _next_piece(facts, full, turn)


@gluon.jit
def _shared(num_arrivals: gl.constexpr, weights):  # type: ignore[no-untyped-def]
    """Allocate the shared memory of the warp groups: tokens by step and multiplying group; weights by step and block;
    a piece's description, and its pairs or tokens, by its first step; barriers: a step is loaded, and it is
    released."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF_M, _BLOCK_K], gl.float8e4nv)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_buffers = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _HALF_M, _BLOCK_K], layout)
    weight_buffers = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _BLOCK_O, _BLOCK_K], weights.layout)
    facts = gl.allocate_shared_memory(gl.int32, [_STAGES, 4], plain)
    places = gl.allocate_shared_memory(gl.int32, [2 * _STAGES, _HALF_M], plain)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=num_arrivals)
        mbarrier.init(empty.index(stage), count=2)
    return x_buffers, weight_buffers, facts, places, full, empty


@gluon.jit(do_not_specialize=["num_pairs", "top_k"])
def gate_up_kernel(  # type: ignore[no-untyped-def]
    h_ptr,
    h_scales_ptr,
    x_ptr,
    x_stride,
    x_scales_ptr,
    weights,
    weight_scales_ptr,
    pairs_ptr,
    tiles_ptr,
    counters_ptr,
    num_pairs,
    top_k,
    width,
    depth,
    REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    # TMA and the 128 threads that gather tokens.
    shared = _shared(1 + 128, weights)
    _await_previous(PDL)
    _release_next(PDL)
    num_tiles = gl.load(tiles_ptr + _NUM_ROWS)
    operands = (h_ptr, h_scales_ptr, x_scales_ptr, weight_scales_ptr, num_pairs, width, depth)
    gl.warp_specialize(
        [
            (_gate_up, (operands, shared, 0)),
            (_gate_up, (operands, shared, 1)),
            (
                _fetch,
                (
                    (x_ptr, x_stride, weights, pairs_ptr, tiles_ptr, counters_ptr, num_tiles, top_k, width, depth),
                    shared,
                    True,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_pairs"])
def down_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    h,
    h_scales_ptr,
    weights,
    weight_scales_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    counters_ptr,
    num_pairs,
    num_outputs,
    depth,
    REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    shared = _shared(1, weights)
    _await_previous(PDL)
    _release_next(PDL)
    num_tiles = gl.load(tiles_ptr + _NUM_ROWS)
    operands = (parts_ptr, h_scales_ptr, weight_scales_ptr, weights_ptr, num_pairs, num_outputs, depth)
    gl.warp_specialize(
        [
            (_down, (operands, shared, 0)),
            (_down, (operands, shared, 1)),
            (
                _fetch,
                ((h, 0, weights, pairs_ptr, tiles_ptr, counters_ptr, num_tiles, 1, num_outputs, depth), shared, False),
            ),
        ],
        [4, 4],
        [REGISTERS, FETCH_REGISTERS],
    )
