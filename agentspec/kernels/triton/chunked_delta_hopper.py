"""The third launch of chunked_delta.py for Hopper's matrix units, in Gluon: the function of
chunked_delta._fold_blocks, for heads of 128 by 128.

All matrices are transposed compared with _fold_blocks, as a state lies in memory: value dims are rows. Then the state,
and each block's update of it, are left operands and never leave the registers; Triton's own compiler passes both
through shared memory in every block. Four warps fold, one fetches their operands, and one stores the outputs.

Bits are those of _fold_blocks. Knows nothing of how operands are computed: see chunked_delta_blocks.py, also for terms
and shape letters.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

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

from agentspec.kernels.triton import chunked_delta_blocks as blocks
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, release_next
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
"""Warps that fold."""

_T = gl.constexpr(BLOCK_TOKENS)
_K = gl.constexpr(HEAD_DIM)
_D = gl.constexpr(BLOCK_D)
_TILES = gl.constexpr(HEAD_DIM // BLOCK_D)
_STAGES = gl.constexpr(3)
"""Pipeline stages: blocks whose operands fit at once."""
_FETCH_REGISTERS, _STORE_REGISTERS = gl.constexpr(40), gl.constexpr(72)
"""Registers of a thread that fetches and of one that stores; the folding threads get the rest."""

_FROM_START = gl.constexpr(blocks.FROM_START.value)
_NUM_GATES = gl.constexpr(blocks.NUM_GATES.value)
assert blocks.TO_END.value == blocks.FROM_START.value + 1, "both are copied at once"

_copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_copy_values = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Their names in Triton 3.9, and in earlier versions."""
_barrier = tl.debug_barrier
_release_next = gluon.jit(release_next.fn)
_await_previous = gluon.jit(await_previous.fn)


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
        _rows(keys_METK, HEAD_DIM),
        _rows(values_MVTD, BLOCK_D),
        _rows(w_MVTK, HEAD_DIM),
        _rows(reads_MVTT, BLOCK_TOKENS),
        _rows(out_NX, BLOCK_D),
    )


def _rows(x: Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of x as rows of its last dimension, in blocks of BLOCK_TOKENS rows by `columns`."""
    block = [BLOCK_TOKENS, columns]
    return TensorDescriptor.from_tensor(
        x.flatten(0, -2), block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    )


@gluon.jit
def _fetch(operands, buffers, barriers, gates_MVGT, place, V: gl.constexpr, REPEATS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The fetching warp: loads every block's operands into the next free buffers."""
    keys, values, w, reads = operands
    w_buffers, q_buffers, k_buffers, u_buffers, read_buffers, gate_buffers, _ = buffers
    ready, free, _, _ = barriers
    first_block, num_blocks, head, first_d = place
    num_bytes: gl.constexpr = (
        w.block_type.nbytes + 2 * keys.block_type.nbytes + values.block_type.nbytes + reads.block_type.nbytes
    )
    i = gl.arange(0, 2 * _T, layout=gl.BlockedLayout([4], [32], [1], [0]))
    for j in range(num_blocks):
        stage = j % _STAGES
        barrier = ready.index(stage)
        head_block = (first_block + j) * V + head
        row = head_block * _T
        key_row = ((first_block + j) * (2 * (V // REPEATS)) + head // REPEATS) * _T
        mbarrier.wait(free.index(stage), (j // _STAGES & 1) ^ 1)
        mbarrier.expect(barrier, num_bytes)
        _copy_block(w, [row, 0], barrier, w_buffers.index(stage))
        _copy_block(keys, [key_row, 0], barrier, q_buffers.index(stage))
        _copy_block(values, [row, first_d], barrier, u_buffers.index(stage))
        _copy_block(keys, [key_row + (V // REPEATS) * _T, 0], barrier, k_buffers.index(stage))
        _copy_block(reads, [row, 0], barrier, read_buffers.index(stage))
        _copy_values(
            gate_buffers.index(stage), gates_MVGT + (head_block.to(gl.int64) * _NUM_GATES + _FROM_START) * _T + i
        )
        async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _store(out, out_NX, buffers, barriers, blocks_MF, place, V: gl.constexpr):  # type: ignore[no-untyped-def]
    """The storing warp: stores the outputs of every block to its tokens."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    _, _, _, _, _, _, out_buffers = buffers
    _, _, full, empty = barriers
    first_block, num_blocks, head, first_d = place
    t = gl.arange(0, 16, layout=gl.SliceLayout(1, rows))
    d = gl.arange(0, _D, layout=gl.SliceLayout(0, rows))
    column = head * _K + first_d
    # The first handover comes before any block was processed and is empty.
    for j in range(num_blocks + 1):
        buffer = out_buffers.index(j % 2)
        mbarrier.wait(full.index(j % 2), j // 2 & 1)
        if j > 0:
            block = blocks_MF + (first_block + j - 1).to(gl.int64) * NUM_BLOCK_FIELDS
            begin = gl.load(block + BLOCK_OFFSET)
            count = gl.load(block + BLOCK_COUNT).to(gl.int32)
            if count == _T:
                _copy_out(out, [begin.to(gl.int32), column], buffer)
                tma.store_wait(0)
            else:
                for first in gl.static_range(0, _T, 16):
                    at = gl.expand_dims((begin + first + t) * (V * _K), 1) + gl.expand_dims(column + d, 0)
                    gl.store(out_NX + at, buffer.slice(first, 16).load(rows), mask=gl.expand_dims(first + t < count, 1))
        mbarrier.arrive(empty.index(j % 2), count=1)


@gluon.jit
def _buffers():  # type: ignore[no-untyped-def]
    """Allocate the buffers of w, q, k, u, reads, gates and outputs."""
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, _K], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, _D], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _T, _K], wide)
    q = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _T, _K], wide)
    k = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _T, _K], wide)
    u = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _T, _D], narrow)
    reads = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _T, _T], narrow)
    gates = gl.allocate_shared_memory(gl.float32, [_STAGES, 2 * _T], plain)
    return w, q, k, u, reads, gates, gl.allocate_shared_memory(gl.bfloat16, [2, _T, _D], narrow)


@gluon.jit
def _barriers():  # type: ignore[no-untyped-def]
    """Allocate the barriers: a block's operands are loaded, and released; a block's outputs are written, and stored."""
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        # TMA, and the 32 threads that copy gates.
        mbarrier.init(ready.index(i), count=1 + 32)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return ready, free, full, empty


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


@gluon.jit
def _hand_over(o_DT, j, out_buffers, full):  # type: ignore[no-untyped-def]
    """Pass a block's outputs to the storing warp, in a buffer that is empty."""
    out_buffers.index(j % 2).permute((1, 0)).store(o_DT)
    fence_async_shared()
    mbarrier.arrive(full.index(j % 2), count=1)


@gluon.jit
def _fold(  # type: ignore[no-untyped-def]
    pools,
    blocks_MF,
    gates_MVGT,
    buffers,
    barriers,
    offset,
    read_row,
    place,
    V: gl.constexpr,
    REPEATS: gl.constexpr,
    BLOCK_C: gl.constexpr,
):
    """The four folding warps: process the states block after block."""
    read_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _T, 16]
    )
    state_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _K, 16]
    )
    seen_layout: gl.constexpr = gl.DotOperandLayout(0, read_layout, 2)
    delta_layout: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    C: gl.constexpr = 2 * (V // REPEATS) * _K + V * _K
    projected_NP, x_stride, ssm_RVDK, ssm_stride, conv_R3C, conv_stride = pools
    w_buffers, q_buffers, k_buffers, u_buffers, read_buffers, gate_buffers, out_buffers = buffers
    ready, free, full, empty = barriers
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
    _barrier()  # a thread may store a place that another thread loads
    seen = gl.convert_layout(state.to(gl.bfloat16), seen_layout)
    nothing = gl.zeros([_D, _T], gl.float32, read_layout)
    o = nothing.to(gl.bfloat16)
    end = offset
    for j in range(num_blocks):
        stage = j % _STAGES
        block = blocks_MF + (first_block + j).to(gl.int64) * NUM_BLOCK_FIELDS
        decay = gl.load(
            gates_MVGT + (((first_block + j) * V + head).to(gl.int64) * _NUM_GATES + _FROM_START) * _T + (_T - 1)
        )
        end += gl.load(block + BLOCK_COUNT).to(gl.int32)
        save_row = gl.load(block + SAVE_ROW)
        # All waits come before the products: during a product the compiler allows no wait in a loop.
        mbarrier.wait(empty.index(j % 2), (j // 2 & 1) ^ 1)
        mbarrier.wait(ready.index(stage), j // _STAGES & 1)
        taken = warpgroup_mma(seen, w_buffers.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        read = warpgroup_mma(seen, q_buffers.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        _hand_over(o, j, out_buffers, full)
        decayed = state * decay
        u = u_buffers.index(stage).permute((1, 0)).load(read_layout)
        gates = gate_buffers.index(stage)
        to_end = gates.slice(_T, _T).load(gl.SliceLayout(0, read_layout))
        taken = warpgroup_mma_wait(1, deps=[taken])
        delta = u.to(gl.float32) - taken
        written = gl.convert_layout((delta * gl.expand_dims(to_end, 0)).to(gl.bfloat16), delta_layout)
        new_state = warpgroup_mma(written, k_buffers.index(stage), decayed, is_async=True)
        delta_read = gl.convert_layout(delta.to(gl.bfloat16), seen_layout)
        from_start = gates.slice(0, _T).load(gl.SliceLayout(0, read_layout))
        read = warpgroup_mma_wait(1, deps=[read])
        sums = warpgroup_mma(
            delta_read, read_buffers.index(stage).permute((1, 0)), read * gl.expand_dims(from_start, 0), is_async=True
        )
        state = warpgroup_mma_wait(1, deps=[new_state])
        seen = gl.convert_layout(state.to(gl.bfloat16), seen_layout)
        o = warpgroup_mma_wait(0, deps=[sums]).to(gl.bfloat16)
        mbarrier.arrive(free.index(stage), count=1)
        if save_row >= 0:
            rows = _conv_rows(projected_NP + offset.to(gl.int64) * x_stride, x_stride, end - offset, past, channel, C)
            second_row = gl.load(block + SECOND_SAVE_ROW)
            _save(state, save_row, ssm_RVDK, ssm_stride, in_state, rows, conv_R3C, conv_stride, channel, C)
            _save(state, second_row, ssm_RVDK, ssm_stride, in_state, rows, conv_R3C, conv_stride, channel, C)
    mbarrier.wait(empty.index(num_blocks % 2), (num_blocks // 2 & 1) ^ 1)
    _hand_over(o, num_blocks, out_buffers, full)


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
    _release_next(PDL)
    _await_previous(PDL)
    span = spans_UF + gl.program_id(1).to(gl.int64) * NUM_SPAN_FIELDS
    num_blocks = gl.load(span + NUM_BLOCKS).to(gl.int32)
    if num_blocks == 0:
        return
    buffers = _buffers()
    barriers = _barriers()
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
            (_fold, (pools, blocks_MF, gates_MVGT, buffers, barriers, offset, read_row, place, V, REPEATS, BLOCK_C)),
            (_fetch, ((keys, values, w, reads), buffers, barriers, gates_MVGT, place, V, REPEATS)),
            (_store, (out, out_NX, buffers, barriers, blocks_MF, place, V)),
        ],
        [1, 1],
        [_FETCH_REGISTERS, _STORE_REGISTERS],
    )
