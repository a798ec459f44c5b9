"""The products of grouped_gemm.py with 8-bit operands for Hopper's matrix units, in Gluon.

One persistent program per multiprocessor takes pieces of work from a shared counter. A piece is the up to 128 tokens
of a tile by two blocks of 128 outputs. One group of four warps only fetches, up to four steps of K ahead and on into
the next piece. Two other groups have 64 tokens each, multiply and accumulate: the matrix units work for one while the
other scales its sums. Triton's own compiler has no such warp specialization: there all warps wait for every product,
and every piece starts with an empty pipeline.

Down-projections are bound by what comes from L2. Where the weights of all steps have room at once, a piece is a run of
tiles (expert_groups), whose weights are fetched with the first tile and stay for the others.

Sums equal those of grouped_gemm.py, bit for bit: see there for the mathematics, operands and shape letters.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST, NUM_ROWS, ExpertGroups, empty_parts
from agentspec.kernels.triton.fp8_activations import LARGEST, ScaledTokens, scales_by_token
from agentspec.kernels.triton.gluon_names import await_previous, copy_block, copy_values, release_next, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters, overlapped
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.weights import FP8, SCALE_BLOCK, BlockScaled, Weight

BLOCK_M = 128
"""Tokens of a tile in the table."""
_HALF_M = gl.constexpr(64)
"""Tokens per warp group."""
_BLOCK_O = gl.constexpr(128)
"""Outputs with one scale; a piece has two such blocks."""
_BLOCK_K = gl.constexpr(SCALE_BLOCK)
_STEPS = 4
"""Steps of K whose operands have room at once."""
_STAGES = gl.constexpr(_STEPS)
_TILES = gl.constexpr(8)
"""Tiles of down whose description and pairs there is room for: more than steps are fetched ahead, as a tile's pairs are
read after its last step is released."""
_WEIGHT_BYTES = gl.constexpr(2 * SCALE_BLOCK * SCALE_BLOCK)
_HALF_BYTES = gl.constexpr(BLOCK_M // 2 * SCALE_BLOCK)
"""Of a step: weights, and tokens of a multiplying group."""
_GATE_UP_REGISTERS = {"REGISTERS": 216, "FETCH_REGISTERS": 64}
_DOWN_REGISTERS = {"REGISTERS": 232, "FETCH_REGISTERS": 40}
"""Registers of a thread that multiplies and of one that fetches; the first multiplying group gets the rest of 504.
With these nothing is spilled."""

_EXPERT, _FIRST, _COUNT, _NUM_ROWS, _FIELDS = (
    gl.constexpr(field.value) for field in (EXPERT, FIRST, COUNT, NUM_ROWS, FIELDS)
)
_LARGEST = gl.constexpr(LARGEST.value)


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
    stay = depth <= _STEPS * SCALE_BLOCK
    down_kernel[(_num_programs(parts.device),)](
        parts,
        _descriptor(h.values_RK, BLOCK_M // 2),
        h.scales_GR,
        _descriptor(weight_XOI.values.flatten(0, 1), SCALE_BLOCK),
        weight_XOI.scales,
        weights_NJ,
        groups.pairs_P,
        groups.runs_U4 if stay else groups.tiles_T4,
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
def _fetch_gate_up(operands, shared):  # type: ignore[no-untyped-def]
    """The fetching warp group of gate and up: takes pieces, publishes their description, and loads every step of them
    into the next free buffers. A piece without tokens marks the end. It finds out the next piece between two steps,
    while the buffers are full."""
    x, x_stride, weights, pairs_ptr, tiles_ptr, counters_ptr, num_tiles, top_k, width, depth = operands
    _x_buffers, _weight_buffers, facts, places, full, empty = shared
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    num_blocks = width // _BLOCK_O
    num_steps = depth // _BLOCK_K
    first_steps = num_steps // 2
    turn = num_tiles * 0
    piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    expert, first, count = _tile_of(tiles_ptr, piece // num_blocks, num_tiles)
    low, high = _pairs_of(pairs_ptr, first, count, rows)
    while piece < num_tiles * num_blocks:
        block = piece % num_blocks
        weight_row = expert * (2 * width) + block * _BLOCK_O
        low, high = low // top_k, high // top_k
        if count > 0:
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
            _describe(facts.index(stage), expert, first, count, block)
            places.index(2 * stage).store(low)
            places.index(2 * stage + 1).store(high)
            warp_barrier()
        source = (x, x_stride, low, high, count, weights, weight_row, weight_row + width)
        turn = _fetch_steps(source, 0, first_steps, turn, shared, rows)
        piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
        next_expert, next_first, next_count = _tile_of(tiles_ptr, piece // num_blocks, num_tiles)
        turn = _fetch_steps(source, first_steps, num_steps, turn, shared, rows)
        expert, first, count = next_expert, next_first, next_count
        low, high = _pairs_of(pairs_ptr, first, count, rows)
    mbarrier.wait(empty.index(turn % _STAGES), (turn // _STAGES & 1) ^ 1)
    _end(facts.index(turn % _STAGES), full.index(turn % _STAGES), counters_ptr)


@gluon.jit
def _describe(facts, first, second, third, fourth):  # type: ignore[no-untyped-def]
    """Store what `_next_piece` returns. A barrier must follow."""
    fact = gl.arange(0, 4, layout=gl.BlockedLayout([4], [32], [4], [0]))
    facts.store(gl.where(fact == 0, first, gl.where(fact == 1, second, gl.where(fact == 2, third, fourth))))


@gluon.jit
def _end(facts, ready, counters_ptr):  # type: ignore[no-untyped-def]
    """Publish the end in the next free buffers, where its description belongs. ready: their barrier."""
    _describe(facts, 0, 0, 0, 0)
    warp_barrier()
    mbarrier.arrive(ready, count=1)
    async_copy.mbarrier_arrive(ready, increment_count=False)
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
def _fetch_steps(source, begin, end, turn, shared, rows: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load some steps of a piece of gate and up. Return the turn behind them."""
    x, x_stride, low, high, count, weights, weight_row, second_row = source
    x_buffers, weight_buffers, _facts, _places, full, empty = shared
    k = gl.arange(0, _BLOCK_K, layout=gl.SliceLayout(0, rows))
    if count > 0:
        for step in range(begin, end):
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, _WEIGHT_BYTES)
            copy_block(weights, [weight_row, step * _BLOCK_K], ready, weight_buffers.index(2 * stage))
            copy_block(weights, [second_row, step * _BLOCK_K], ready, weight_buffers.index(2 * stage + 1))
            low_rows = gl.expand_dims(x + low.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
            copy_values(x_buffers.index(2 * stage), low_rows + step * _BLOCK_K)
            if count > _HALF_M:
                high_rows = gl.expand_dims(x + high.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
                copy_values(x_buffers.index(2 * stage + 1), high_rows + step * _BLOCK_K)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            turn += 1
    return turn


@gluon.jit
def _fetch_down(operands, num_runs, num_pairs, num_outputs, depth, shared):  # type: ignore[no-untyped-def]
    """The fetching warp group of down: as that of gate and up, but a piece has a description for each of its tiles, and
    it finds out the next piece while it fetches the last tile.

    turn counts steps of tokens, weight_turn those of weights, which only first tiles have. Buffers of weights need no
    barriers of their own: whoever has released the tokens of four turns ago has released the weights of four
    weight_turns ago, as the three weight_turns since have had a turn each, and a run has no more than four steps if it
    has several tiles."""
    h, h_scales_ptr, weights, weight_scales_ptr, pairs_ptr, runs_ptr, counters_ptr = operands
    x_buffers, weight_buffers, scales, facts, places, full, empty = shared
    m = gl.arange(0, 2 * _HALF_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    num_blocks = num_outputs // (2 * _BLOCK_O)
    num_steps = depth // _BLOCK_K
    turn = num_runs * 0
    weight_turn = num_runs * 0
    tile = num_runs * 0
    piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    expert, first, count = _tile_of(runs_ptr, piece // num_blocks, num_runs)
    while piece < num_runs * num_blocks:
        block = piece % num_blocks
        weight_row = expert * num_outputs + block * (2 * _BLOCK_O)
        # Of the first block of outputs 64 times, and of the second.
        weight_scales = weight_scales_ptr + weight_row // _BLOCK_O * num_steps + m // _HALF_M * num_steps
        next_expert, next_first, next_count = expert, first, count
        for begin in range(0, count, 2 * _HALF_M):
            left = count - begin
            place = first + begin
            at = place + gl.minimum(m, left - 1)
            for step in range(num_steps):
                if (left <= 2 * _HALF_M) & (step == 0):
                    piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
                stage = turn % _STAGES
                mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
                ready = full.index(stage)
                if step == 0:
                    _describe(facts.index(tile % _TILES), weight_turn, 0, gl.minimum(left, 2 * _HALF_M), block)
                    copy_values(places.index(tile % _TILES), pairs_ptr + at)
                    warp_barrier()
                _expect(ready, begin == 0, left > _HALF_M)
                if begin == 0:
                    buffer = (weight_turn + step) % _STAGES * 2
                    copy_block(weights, [weight_row, step * _BLOCK_K], ready, weight_buffers.index(buffer))
                    copy_block(
                        weights, [weight_row + _BLOCK_O, step * _BLOCK_K], ready, weight_buffers.index(buffer + 1)
                    )
                copy_block(h, [place, step * _BLOCK_K], ready, x_buffers.index(2 * stage))
                if left > _HALF_M:
                    copy_block(h, [place + _HALF_M, step * _BLOCK_K], ready, x_buffers.index(2 * stage + 1))
                copy_values(scales.index(2 * stage), h_scales_ptr + num_pairs.to(gl.int64) * step + at)
                copy_values(scales.index(2 * stage + 1), weight_scales + step)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                if (left <= 2 * _HALF_M) & (step == num_steps // 2):
                    next_expert, next_first, next_count = _tile_of(runs_ptr, piece // num_blocks, num_runs)
                turn += 1
            tile += 1
        if count > 0:
            weight_turn += num_steps
        else:
            piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
            next_expert, next_first, next_count = _tile_of(runs_ptr, piece // num_blocks, num_runs)
        expert, first, count = next_expert, next_first, next_count
    mbarrier.wait(empty.index(turn % _STAGES), (turn // _STAGES & 1) ^ 1)
    _end(facts.index(tile % _TILES), full.index(turn % _STAGES), counters_ptr)


@gluon.jit
def _expect(ready, has_weights, has_both):  # type: ignore[no-untyped-def]
    """Expect the bytes of a step of down. has_both: tokens of both multiplying groups."""
    if has_weights:
        if has_both:
            mbarrier.expect(ready, _WEIGHT_BYTES + 2 * _HALF_BYTES)
        else:
            mbarrier.expect(ready, _WEIGHT_BYTES + _HALF_BYTES)
    else:
        if has_both:
            mbarrier.expect(ready, 2 * _HALF_BYTES)
        else:
            mbarrier.expect(ready, _HALF_BYTES)


@gluon.jit
def _next_piece(facts, full, turn):  # type: ignore[no-untyped-def]
    """Return the description of the piece whose first step is `turn`. Of gate and up: expert, first place, number of
    places, block of outputs; of down, where it is one of a tile: weight_turn, nothing, and the same."""
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    mbarrier.wait(full.index(turn % _STAGES), turn // _STAGES & 1)
    values = facts.load(four)
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
def _multiply_kept(turn, weight_turn, num_steps, shared, GROUP: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """As `_multiply`, with weights that may stay for other tiles, and all scales in shared memory."""
    x_buffers, weight_buffers, scales, _facts, _places, full, empty = shared
    scale_M: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([_HALF_M, _BLOCK_O], gl.float32, layout)
    sums = zeros
    second_sums = zeros
    for step in range(num_steps):
        stage = turn % _STAGES
        buffer = (weight_turn + step) % _STAGES * 2
        mbarrier.wait(full.index(stage), turn // _STAGES & 1)
        x = x_buffers.index(2 * stage + GROUP)
        product = warpgroup_mma(x, weight_buffers.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
        x_scale = scales.index(2 * stage).slice(GROUP * _HALF_M, _HALF_M).load(scale_M)
        scale = scales.index(2 * stage + 1).slice(0, _HALF_M).load(scale_M)
        second_scale = scales.index(2 * stage + 1).slice(_HALF_M, _HALF_M).load(scale_M)
        product = warpgroup_mma_wait(0, deps=[product])
        sums += product * gl.expand_dims(scale * x_scale, 1)
        product = warpgroup_mma(
            x, weight_buffers.index(buffer + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
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
    expert, first, all_count, block = _next_piece(facts.index(turn % _STAGES), full, turn)
    while all_count > 0:
        count = all_count - GROUP * _HALF_M
        if count > 0:
            token = places.index(2 * (turn % _STAGES) + GROUP).load(gl.SliceLayout(1, layout))
            warp_barrier()  # all warps have read the piece's description
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
            warp_barrier()
            turn = _skip(turn, depth, full, empty)
        expert, first, all_count, block = _next_piece(facts.index(turn % _STAGES), full, turn)


@gluon.jit
def _down(operands, shared, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two multiplying warp groups of down."""
    parts_ptr, weights_ptr, num_outputs, depth = operands
    _x_buffers, _weight_buffers, _scales, facts, places, full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    place = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, rows))
    o = gl.arange(0, _BLOCK_O, layout=gl.SliceLayout(0, rows))
    turn = num_outputs * 0
    tile = num_outputs * 0
    weight_turn, _nothing, all_count, block = _next_piece(facts.index(tile % _TILES), full, turn)
    while all_count > 0:
        count = all_count - GROUP * _HALF_M
        if count > 0:
            pairs = places.index(tile % _TILES).slice(GROUP * _HALF_M, _HALF_M)
            weight_M = gl.expand_dims(gl.load(weights_ptr + pairs.load(gl.SliceLayout(1, layout))), 1)
            sums, second_sums, turn = _multiply_kept(turn, weight_turn, depth // _BLOCK_K, shared, GROUP, layout)
            pair = pairs.load(gl.SliceLayout(1, rows)).to(gl.int64)
            at = gl.expand_dims(pair * num_outputs, 1) + gl.expand_dims(block * (2 * _BLOCK_O) + o, 0)
            is_real = gl.expand_dims(place < count, 1)
            dtype: gl.constexpr = parts_ptr.dtype.element_ty
            gl.store(parts_ptr + at, gl.convert_layout((sums * weight_M).to(dtype), rows), mask=is_real)
            gl.store(
                parts_ptr + at + _BLOCK_O, gl.convert_layout((second_sums * weight_M).to(dtype), rows), mask=is_real
            )
        else:
            turn = _skip(turn, depth, full, empty)
        tile += 1
        weight_turn, _nothing, all_count, block = _next_piece(facts.index(tile % _TILES), full, turn)


@gluon.jit
def _buffers(weights):  # type: ignore[no-untyped-def]
    """Allocate the shared memory of the operands of both kernels: tokens by step and multiplying group; weights by step
    and block; barriers: a step is loaded, by TMA and the 128 threads that copy tokens or scales, and it is released."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF_M, _BLOCK_K], gl.float8e4nv)
    x_buffers = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _HALF_M, _BLOCK_K], layout)
    weight_buffers = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _BLOCK_O, _BLOCK_K], weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
    return x_buffers, weight_buffers, full, empty


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
    x_buffers, weight_buffers, full, empty = _buffers(weights)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A piece's description, and its tokens, by its first step.
    facts = gl.allocate_shared_memory(gl.int32, [_STAGES, 4], plain)
    places = gl.allocate_shared_memory(gl.int32, [2 * _STAGES, _HALF_M], plain)
    shared = (x_buffers, weight_buffers, facts, places, full, empty)
    await_previous(PDL)
    release_next(PDL)
    num_tiles = gl.load(tiles_ptr + _NUM_ROWS)
    operands = (h_ptr, h_scales_ptr, x_scales_ptr, weight_scales_ptr, num_pairs, width, depth)
    gl.warp_specialize(
        [
            (_gate_up, (operands, shared, 0)),
            (_gate_up, (operands, shared, 1)),
            (
                _fetch_gate_up,
                (
                    (x_ptr, x_stride, weights, pairs_ptr, tiles_ptr, counters_ptr, num_tiles, top_k, width, depth),
                    shared,
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
    runs_ptr,
    counters_ptr,
    num_pairs,
    num_outputs,
    depth,
    REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    x_buffers, weight_buffers, full, empty = _buffers(weights)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # By step: scales of tokens, and of weights. By tile: its description, and its pairs.
    scales = gl.allocate_shared_memory(gl.float32, [2 * _STAGES, 2 * _HALF_M], plain)
    facts = gl.allocate_shared_memory(gl.int32, [_TILES, 4], plain)
    places = gl.allocate_shared_memory(gl.int32, [_TILES, 2 * _HALF_M], plain)
    shared = (x_buffers, weight_buffers, scales, facts, places, full, empty)
    await_previous(PDL)
    release_next(PDL)
    num_runs = gl.load(runs_ptr + _NUM_ROWS)
    operands = (parts_ptr, weights_ptr, num_outputs, depth)
    sources = (h, h_scales_ptr, weights, weight_scales_ptr, pairs_ptr, runs_ptr, counters_ptr)
    gl.warp_specialize(
        [
            (_down, (operands, shared, 0)),
            (_down, (operands, shared, 1)),
            (_fetch_down, (sources, num_runs, num_pairs, num_outputs, depth, shared)),
        ],
        [4, 4],
        [REGISTERS, FETCH_REGISTERS],
    )
