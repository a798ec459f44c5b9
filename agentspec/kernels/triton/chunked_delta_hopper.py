"""The third launch of chunked_delta.py for Hopper's matrix units, in Gluon: the function of
chunked_delta._fold_blocks, for heads of 128 by 128.

All matrices are transposed compared with _fold_blocks, as a state lies in memory: value dims are rows. Then the state,
and each block's update of it, are left operands and never leave the registers; Triton's own compiler passes both
through shared memory in every block.

A state depends on the one before by two products, and there are too few programs to hide how long these take. So four
warps (_advance) compute states only. They leave copies of the state before each block and of the block's delta, both
rounded, in shared memory, from which four others (_read) compute the outputs meanwhile. Three more warps fetch the
operands of the first, fetch those of the second, and store the outputs.

Bits are those of _fold_blocks. Knows nothing of how operands are computed: see chunked_delta_blocks.py, also for terms
and shape letters.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

import torch
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

from agentspec.kernels.triton import chunked_delta_blocks as blocks
from agentspec.kernels.triton.bfloat16_pairs import in_float32
from agentspec.kernels.triton.gluon_names import (
    await_previous,
    copy_block,
    copy_out,
    copy_values,
    release_next,
    warp_barrier,
)
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.triton.prefill_columns import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    FIRST_BLOCK,
    NUM_BLOCK_FIELDS,
    NUM_BLOCKS,
    NUM_SPAN_FIELDS,
    OFFSET,
    READ_ROW,
    SAVE_ROW,
    SECOND_SAVE_ROW,
)
from agentspec.types import BLOCK_TOKENS

HEAD_DIM = 128
"""Dims of a key and of a value."""
BLOCK_D = 64
"""Value dims per program: the least rows of a product."""
NUM_WARPS = 4
"""Warps that advance."""

_T = gl.constexpr(BLOCK_TOKENS)
_K = gl.constexpr(HEAD_DIM)
_D = gl.constexpr(BLOCK_D)
_TILES = gl.constexpr(HEAD_DIM // BLOCK_D)
_UPDATE_STAGES, _READ_STAGES = gl.constexpr(3), gl.constexpr(2)
"""Pipeline stages: blocks of which the operands of _advance, and those of _read, fit at once."""
_OUT_STAGES = gl.constexpr(1)
"""Blocks of which outputs fit at once. There is no room for more."""
assert _UPDATE_STAGES.value <= _READ_STAGES.value + 1, "_fetch_updates would miss a phase of the states' barriers"
_READ_REGISTERS, _FETCH_REGISTERS, _STORE_REGISTERS = gl.constexpr(152), gl.constexpr(40), gl.constexpr(72)
"""Registers of a thread that reads, of one that fetches and of one that stores; the advancing threads get the rest."""

_FROM_START = gl.constexpr(blocks.FROM_START.value)
_NUM_GATES = gl.constexpr(blocks.NUM_GATES.value)
assert blocks.TO_END.value == blocks.FROM_START.value + 1, "both are copied at once"


def is_supported(dtype: torch.dtype, value_dim: int, key_dim: int, device: torch.device) -> bool:
    """Whether this kernel supports such heads on this device."""
    if INTERPRETED or dtype != torch.bfloat16 or (value_dim, key_dim) != (HEAD_DIM, HEAD_DIM):
        return False
    return machine_of(device).capability[0] == 9


def operands(
    keys_METK: Tensor, values_MVTD: Tensor, w_MVTK: Tensor, reads_MVTT: Tensor, out_NX: Tensor
) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of fold_blocks' operands and output."""
    return (
        as_rows(keys_METK, HEAD_DIM),
        as_rows(values_MVTD, BLOCK_D),
        as_rows(w_MVTK, HEAD_DIM),
        as_rows(reads_MVTT, BLOCK_TOKENS),
        as_rows(out_NX, BLOCK_D),
    )


def as_rows(x: Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of x as rows of its last dimension, in blocks of BLOCK_TOKENS rows by `columns`."""
    block = [BLOCK_TOKENS, columns]
    return TensorDescriptor.from_tensor(
        x.flatten(0, -2), block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    )


@gluon.jit
def _copy_gates(buffer, gates_MVGT, head_block, barrier, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a block's gates from FROM_START on."""
    i = gl.arange(0, COUNT, layout=gl.BlockedLayout([COUNT // 32], [32], [1], [0]))
    copy_values(buffer, gates_MVGT + (head_block.to(gl.int64) * _NUM_GATES + _FROM_START) * _T + i)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _fetch_updates(operands, updates, state_full, gates_MVGT, place, V: gl.constexpr, REPEATS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A fetching warp: loads _advance's operands of every block into the next free buffers."""
    w, keys, values = operands
    w_buffers, k_buffers, u_buffers, gate_buffers, ready = updates
    first_block, num_blocks, head, first_d = place
    num_bytes: gl.constexpr = w.block_type.nbytes + keys.block_type.nbytes + values.block_type.nbytes
    for j in range(num_blocks):
        stage = j % _UPDATE_STAGES
        barrier = ready.index(stage)
        head_block = (first_block + j) * V + head
        row = head_block * _T
        key_row = ((first_block + j) * (2 * (V // REPEATS)) + V // REPEATS + head // REPEATS) * _T
        # The buffers are free when the state after their block is handed over.
        after = j - (_UPDATE_STAGES - 1)
        if after > 0:
            mbarrier.wait(state_full.index(after % _READ_STAGES), after // _READ_STAGES & 1)
        mbarrier.expect(barrier, num_bytes)
        copy_block(w, [row, 0], barrier, w_buffers.index(stage))
        copy_block(values, [row, first_d], barrier, u_buffers.index(stage))
        copy_block(keys, [key_row, 0], barrier, k_buffers.index(stage))
        _copy_gates(gate_buffers.index(stage), gates_MVGT, head_block, barrier, 2 * _T)


@gluon.jit
def _fetch_queries(operands, queries, released, gates_MVGT, place, V: gl.constexpr, REPEATS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A fetching warp: loads _read's operands of every block into the next free buffers."""
    keys, reads = operands
    q_buffers, read_buffers, gate_buffers, ready = queries
    first_block, num_blocks, head, _ = place
    num_bytes: gl.constexpr = keys.block_type.nbytes + reads.block_type.nbytes
    for j in range(num_blocks):
        stage = j % _READ_STAGES
        barrier = ready.index(stage)
        head_block = (first_block + j) * V + head
        query_row = ((first_block + j) * (2 * (V // REPEATS)) + head // REPEATS) * _T
        mbarrier.wait(released.index(stage), (j // _READ_STAGES & 1) ^ 1)
        mbarrier.expect(barrier, num_bytes)
        copy_block(keys, [query_row, 0], barrier, q_buffers.index(stage))
        copy_block(reads, [head_block * _T, 0], barrier, read_buffers.index(stage))
        _copy_gates(gate_buffers.index(stage), gates_MVGT, head_block, barrier, _T)


@gluon.jit
def _store(out, out_NX, outs, blocks_MF, place, V: gl.constexpr):  # type: ignore[no-untyped-def]
    """The storing warp: stores the outputs of every block to its tokens."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    buffers, full, empty = outs
    first_block, num_blocks, head, first_d = place
    t = gl.arange(0, 16, layout=gl.SliceLayout(1, rows))
    d = gl.arange(0, _D, layout=gl.SliceLayout(0, rows))
    column = head * _K + first_d
    for j in range(num_blocks):
        stage = j % _OUT_STAGES
        buffer = buffers.index(stage)
        block = blocks_MF + (first_block + j).to(gl.int64) * NUM_BLOCK_FIELDS
        begin = gl.load(block + BLOCK_OFFSET)
        count = gl.load(block + BLOCK_COUNT).to(gl.int32)
        mbarrier.wait(full.index(stage), j // _OUT_STAGES & 1)
        if count == _T:
            copy_out(out, [begin.to(gl.int32), column], buffer)
            tma.store_wait(0)
        else:
            for first in gl.static_range(0, _T, 16):
                at = gl.expand_dims((begin + first + t) * (V * _K), 1) + gl.expand_dims(column + d, 0)
                gl.store(out_NX + at, buffer.slice(first, 16).load(rows), mask=gl.expand_dims(first + t < count, 1))
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Allocate COUNT barriers, each of which waits for ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _buffers():  # type: ignore[no-untyped-def]
    """Allocate all buffers and barriers: (_advance's operands, _read's operands, what the first hands to the second,
    outputs)."""
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, _K], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, _D], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w = gl.allocate_shared_memory(gl.bfloat16, [_UPDATE_STAGES, _T, _K], wide)
    k = gl.allocate_shared_memory(gl.bfloat16, [_UPDATE_STAGES, _T, _K], wide)
    u = gl.allocate_shared_memory(gl.bfloat16, [_UPDATE_STAGES, _T, _D], narrow)
    gates = gl.allocate_shared_memory(gl.float32, [_UPDATE_STAGES, 2 * _T], plain)
    # Operands are loaded by TMA, and by the 32 threads that copy gates.
    updates = (w, k, u, gates, _barriers(_UPDATE_STAGES, 1 + 32))
    q = gl.allocate_shared_memory(gl.bfloat16, [_READ_STAGES, _T, _K], wide)
    reads = gl.allocate_shared_memory(gl.bfloat16, [_READ_STAGES, _T, _T], narrow)
    gates = gl.allocate_shared_memory(gl.float32, [_READ_STAGES, _T], plain)
    queries = (q, reads, gates, _barriers(_READ_STAGES, 1 + 32))
    states = gl.allocate_shared_memory(gl.bfloat16, [_READ_STAGES, _D, _K], wide)
    deltas = gl.allocate_shared_memory(gl.bfloat16, [_READ_STAGES, _D, _T], narrow)
    handed = (states, deltas, _barriers(_READ_STAGES, 1), _barriers(_READ_STAGES, 1), _barriers(_READ_STAGES, 1))
    outs = gl.allocate_shared_memory(gl.bfloat16, [_OUT_STAGES, _T, _D], narrow)
    return updates, queries, handed, (outs, _barriers(_OUT_STAGES, 1), _barriers(_OUT_STAGES, 1))


@gluon.jit
def _conv_rows(x, x_stride, count, past, channel, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """As chunked_delta._last_rows."""
    rows = ()
    for i in gl.static_range(3):
        token = count - 3 + i
        row = gl.load(x + token.to(gl.int64) * x_stride + channel, mask=channel < gl.where(token >= 0, C, 0), other=0.0)
        for j in gl.static_range(3):
            row = gl.where(token + 3 == j, past[j], row)
        rows += (row,)
    return rows


@gluon.jit
def _save(state_DK, row, ssm_RVDK, ssm_stride, in_state, conv_rows, conv_R3C, conv_stride, channel, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the program's tile of both states to `row`, unless it is NO_ROW."""
    if row >= 0:
        gl.store(ssm_RVDK + row * ssm_stride + in_state, state_DK)
        for i in gl.static_range(3):
            gl.store(conv_R3C + row * conv_stride + i * C + channel, conv_rows[i], mask=channel < C)


@gluon.constexpr_function
def _product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Of a product's results with BLOCK_D rows, in four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _advance(  # type: ignore[no-untyped-def]
    pools,
    blocks_MF,
    updates,
    handed,
    offset,
    read_row,
    place,
    V: gl.constexpr,
    REPEATS: gl.constexpr,
    BLOCK_C: gl.constexpr,
):
    """Four warps: process the states block after block, and hand over what _read takes of them.

    Whatever does not depend on a product stands between its start and the wait for it, waits for barriers too."""
    taken_layout: gl.constexpr = _product_layout(_T)
    state_layout: gl.constexpr = _product_layout(_K)
    seen_layout: gl.constexpr = gl.DotOperandLayout(0, taken_layout, 2)
    delta_layout: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    C: gl.constexpr = 2 * (V // REPEATS) * _K + V * _K
    projected_NP, x_stride, ssm_RVDK, ssm_stride, conv_R3C, conv_stride = pools
    w_buffers, k_buffers, u_buffers, gate_buffers, ready = updates
    states, deltas, state_full, delta_full, released = handed
    first_block, num_blocks, head, first_d = place
    d = gl.arange(0, _D, layout=gl.SliceLayout(1, state_layout))
    k_dim = gl.arange(0, _K, layout=gl.SliceLayout(0, state_layout))
    in_state = gl.expand_dims((head * _K + first_d + d) * _K, 1) + gl.expand_dims(k_dim, 0)
    state = gl.load(ssm_RVDK + read_row * ssm_stride + in_state)
    # Loaded at the start, because a save row may be the read row.
    channel = gl.program_id(0) * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.BlockedLayout([1], [32], [4], [0]))
    past = ()
    for i in gl.static_range(3):
        past += (gl.load(conv_R3C + read_row * conv_stride + i * C + channel, mask=channel < C, other=0.0),)
    warp_barrier()  # a thread may store a place that another thread loads
    nothing = gl.zeros([_D, _T], gl.float32, taken_layout)
    mbarrier.wait(ready.index(0), 0)
    decay = _decay(gate_buffers.index(0), state_layout)
    for j in range(num_blocks):
        stage = j % _UPDATE_STAGES
        turn = j % _READ_STAGES
        block = blocks_MF + (first_block + j).to(gl.int64) * NUM_BLOCK_FIELDS
        save_row = gl.load(block + SAVE_ROW)
        rounded = state.to(gl.bfloat16)
        seen = gl.convert_layout(rounded, seen_layout)
        taken = warpgroup_mma(seen, w_buffers.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        u = in_float32(u_buffers.index(stage).permute((1, 0)).load(taken_layout))
        decayed = state * gl.expand_dims(decay, 1)
        # Without the branch the compiler puts the work above between the parts of the product, which then ends later.
        if j >= _READ_STAGES:
            mbarrier.wait(released.index(turn), (j // _READ_STAGES & 1) ^ 1)
        states.index(turn).store(rounded)
        fence_async_shared()
        mbarrier.arrive(state_full.index(turn), count=1)
        # The first access to shared memory after an arrival waits for all warps: rather here than after the product.
        to_end = gate_buffers.index(stage).slice(_T, _T).load(gl.SliceLayout(0, taken_layout))
        taken = warpgroup_mma_wait(0, deps=[taken])
        delta = u - taken
        written = gl.convert_layout((delta * gl.expand_dims(to_end, 0)).to(gl.bfloat16), delta_layout)
        new_state = warpgroup_mma(written, k_buffers.index(stage), decayed, is_async=True)
        deltas.index(turn).store(delta.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(delta_full.index(turn), count=1)
        # The last block waits for itself: a branch here would cost a barrier of the warps before the next product.
        following = gl.minimum(j + 1, num_blocks - 1)
        mbarrier.wait(ready.index(following % _UPDATE_STAGES), following // _UPDATE_STAGES & 1)
        decay = _decay(gate_buffers.index(following % _UPDATE_STAGES), state_layout)
        state = warpgroup_mma_wait(0, deps=[new_state])
        if save_row >= 0:
            end = (gl.load(block + BLOCK_OFFSET) + gl.load(block + BLOCK_COUNT)).to(gl.int32)
            rows = _conv_rows(projected_NP + offset.to(gl.int64) * x_stride, x_stride, end - offset, past, channel, C)
            second_row = gl.load(block + SECOND_SAVE_ROW)
            _save(state, save_row, ssm_RVDK, ssm_stride, in_state, rows, conv_R3C, conv_stride, channel, C)
            _save(state, second_row, ssm_RVDK, ssm_stride, in_state, rows, conv_R3C, conv_stride, channel, C)


@gluon.jit
def _decay(gates, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """The decay over a whole block, [1]."""
    return gates.slice(_T - 1, 1).load(gl.SliceLayout(1, layout))


@gluon.jit
def _read(num_blocks, queries, handed, outs):  # type: ignore[no-untyped-def]
    """Four warps: compute every block's outputs, and pass them to the storing warp."""
    layout: gl.constexpr = _product_layout(_T)
    q_buffers, read_buffers, gate_buffers, ready = queries
    states, deltas, state_full, delta_full, released = handed
    buffers, full, empty = outs
    nothing = gl.zeros([_D, _T], gl.float32, layout)
    for j in range(num_blocks):
        stage = j % _READ_STAGES
        phase = j // _READ_STAGES & 1
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.wait(state_full.index(stage), phase)
        q = q_buffers.index(stage).permute((1, 0))
        read = warpgroup_mma(states.index(stage), q, nothing, use_acc=False, is_async=True)
        from_start = gate_buffers.index(stage).load(gl.SliceLayout(0, layout))
        read = warpgroup_mma_wait(0, deps=[read]) * gl.expand_dims(from_start, 0)
        mbarrier.wait(delta_full.index(stage), phase)
        sums = warpgroup_mma(deltas.index(stage), read_buffers.index(stage).permute((1, 0)), read, is_async=True)
        o = warpgroup_mma_wait(0, deps=[sums]).to(gl.bfloat16)
        mbarrier.arrive(released.index(stage), count=1)
        out_stage = j % _OUT_STAGES
        mbarrier.wait(empty.index(out_stage), (j // _OUT_STAGES & 1) ^ 1)
        buffers.index(out_stage).permute((1, 0)).store(o)
        fence_async_shared()
        mbarrier.arrive(full.index(out_stage), count=1)


@gluon.jit
def fold_blocks(  # type: ignore[no-untyped-def]
    projected_NP,
    x_stride,
    ssm_RVDK,
    ssm_stride,
    conv_R3C,
    conv_stride,
    spans_UF,
    blocks_MF,
    keys,
    values,
    w,
    reads,
    out,
    gates_MVGT,
    out_NX,
    V: gl.constexpr,
    REPEATS: gl.constexpr,
    BLOCK_C: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program has BLOCK_D value dims of a value head of one span. It also has BLOCK_C channels of the convolution's
    state, which it only copies."""
    release_next(PDL)
    await_previous(PDL)
    span = spans_UF + gl.program_id(1).to(gl.int64) * NUM_SPAN_FIELDS
    num_blocks = gl.load(span + NUM_BLOCKS).to(gl.int32)
    if num_blocks == 0:
        return
    updates, queries, handed, outs = _buffers()
    offset = gl.load(span + OFFSET).to(gl.int32)
    read_row = gl.load(span + READ_ROW)
    place = (
        gl.load(span + FIRST_BLOCK).to(gl.int32),
        num_blocks,
        gl.program_id(0) // _TILES,
        gl.program_id(0) % _TILES * _D,
    )
    pools = (projected_NP, x_stride, ssm_RVDK, ssm_stride, conv_R3C, conv_stride)
    gl.warp_specialize(
        [
            (_advance, (pools, blocks_MF, updates, handed, offset, read_row, place, V, REPEATS, BLOCK_C)),
            (_read, (num_blocks, queries, handed, outs)),
            (_fetch_updates, ((w, keys, values), updates, handed[2], gates_MVGT, place, V, REPEATS)),
            (_fetch_queries, ((keys, reads), queries, handed[4], gates_MVGT, place, V, REPEATS)),
            (_store, (out, out_NX, outs, blocks_MF, place, V)),
        ],
        [4, 1, 1, 1],
        [_READ_REGISTERS, _FETCH_REGISTERS, _FETCH_REGISTERS, _STORE_REGISTERS],
    )
