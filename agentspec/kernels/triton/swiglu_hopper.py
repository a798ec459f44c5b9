"""silu(gate x) * up x of many tokens with weights in 16 bits, on Hopper's matrix units, in Gluon: one launch, so that
gate and up are never stored. Without it they are the largest tensor of a prompt.

There is one program per multiprocessor. A piece of its work is 128 tokens by 128 outputs, so 256 rows of the weight.
One warp fetches, up to four steps of 64 columns ahead and on into the next piece. Two groups of four warps have 64
tokens each: one product is always under way while the next is begun. A piece's outputs are copied to memory while the
next one is computed.

Shape letters: N tokens, K input features, I outputs.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.triton.gluon_names import copy_block, copy_out, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.machine import machine_of

TOKENS, OUTPUTS = 128, 128
"""Of a piece."""
COLUMNS = 64
"""Of a step."""
_BLOCK_M, _BLOCK_O, _BLOCK_K = gl.constexpr(TOKENS), gl.constexpr(OUTPUTS), gl.constexpr(COLUMNS)
_HALF_M = gl.constexpr(TOKENS // 2)
"""Tokens of a group of warps."""
_STAGES = gl.constexpr(4)
_REGISTERS, _FETCH_REGISTERS = 232, 40
"""Of a thread that multiplies and of one that fetches."""
_TILES_M = 16
"""Of 128 tokens, that are multiplied with the same rows one after the other: after the first time both come from L2."""
_LEAST_SHARE = 0.9
"""Of the room of all programs' turns that outputs fill. With less, what the last turn and the last tokens leave idle
costs as much as the SwiGLU's own launch. Measured on an H100 with the FFNs of a 4B and a 27B."""


def is_faster(num_tokens: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `product` takes less time than the matrix library and a launch for the SwiGLU. width: of gate alone."""
    if INTERPRETED or dtype != torch.bfloat16 or width % OUTPUTS or depth % COLUMNS:
        return False
    machine = machine_of(device)
    if machine.capability[0] != 9:
        return False
    pieces = triton.cdiv(num_tokens, TOKENS) * (width // OUTPUTS)
    turns = triton.cdiv(pieces, machine.num_multiprocessors)
    room: int = turns * machine.num_multiprocessors * TOKENS * OUTPUTS
    return num_tokens * width > _LEAST_SHARE * room


def product(x_NK: Tensor, gate_up_2IK: Tensor, num_programs: int | None = None) -> Tensor:
    """[N, I], of 16-bit floats as the operands, which are contiguous. num_programs: None: one per multiprocessor."""
    (num_tokens, depth), width = x_NK.shape, gate_up_2IK.shape[0] // 2
    assert gate_up_2IK.shape == (2 * width, depth), f"{x_NK.shape} {gate_up_2IK.shape}"
    assert (width % OUTPUTS, depth % COLUMNS) == (0, 0), f"{gate_up_2IK.shape}"
    out_NI = torch.empty(num_tokens, width, dtype=x_NK.dtype, device=x_NK.device)
    if num_tokens:
        prompt_swiglu_kernel[(num_programs or machine_of(x_NK.device).num_multiprocessors,)](
            _blocks_of(out_NI, TOKENS // 2, OUTPUTS),
            _blocks_of(x_NK, TOKENS, COLUMNS),
            _blocks_of(gate_up_2IK, OUTPUTS, COLUMNS),
            num_tokens,
            width,
            depth,
            TILES_M=_TILES_M,
            REGISTERS=_REGISTERS,
            FETCH_REGISTERS=_FETCH_REGISTERS,
            num_warps=4,
        )
    return out_NI


def _blocks_of(values: Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [rows, columns]
    return TensorDescriptor.from_tensor(values, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@gluon.jit
def _place_of(piece, num_tokens, width, TILES_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first token, first output) of a piece."""
    tiles_o = width // _BLOCK_O
    tiles_m = (num_tokens + (_BLOCK_M - 1)) // _BLOCK_M
    first = piece // (TILES_M * tiles_o) * TILES_M
    count = gl.minimum(tiles_m - first, TILES_M)
    rest = piece - first * tiles_o
    return (first + rest % count) * _BLOCK_M, rest // count * _BLOCK_O


@gluon.jit
def _num_pieces(num_tokens, width):  # type: ignore[no-untyped-def]
    return (num_tokens + (_BLOCK_M - 1)) // _BLOCK_M * (width // _BLOCK_O)


@gluon.jit
def _fetch(x, weights, shared, num_tokens, width, depth, TILES_M: gl.constexpr):  # type: ignore[no-untyped-def]
    x_buffers, weight_buffers, _, full, empty = shared
    num_bytes: gl.constexpr = x.block_type.nbytes + 2 * weights.block_type.nbytes
    turn = depth * 0
    for piece in range(gl.program_id(0), _num_pieces(num_tokens, width), gl.num_programs(0)):
        m, o = _place_of(piece, num_tokens, width, TILES_M)
        for step in range(depth // _BLOCK_K):
            stage = turn % _STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)
            mbarrier.expect(ready, num_bytes)
            copy_block(x, [m, step * _BLOCK_K], ready, x_buffers.index(stage))
            gate_up = weight_buffers.index(stage)
            copy_block(weights, [o, step * _BLOCK_K], ready, gate_up.slice(0, _BLOCK_O))
            copy_block(weights, [width + o, step * _BLOCK_K], ready, gate_up.slice(_BLOCK_O, _BLOCK_O))
            turn += 1


@gluon.jit
def _multiply(out, shared, num_tokens, width, depth, GROUP: gl.constexpr, TILES_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two groups of warps that multiply."""
    x_buffers, weight_buffers, out_buffers, full, empty = shared
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * _BLOCK_O, 16]
    )
    turn = depth * 0
    buffer = out_buffers.index(GROUP)
    for piece in range(gl.program_id(0), _num_pieces(num_tokens, width), gl.num_programs(0)):
        m, o = _place_of(piece, num_tokens, width, TILES_M)
        sums = gl.zeros([_HALF_M, 2 * _BLOCK_O], gl.float32, SUMS)
        for step in range(depth // _BLOCK_K):
            stage = turn % _STAGES
            mbarrier.wait(full.index(stage), turn // _STAGES & 1)
            x = x_buffers.index(stage).slice(GROUP * _HALF_M, _HALF_M)
            sums = warpgroup_mma(x, weight_buffers.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((turn + (_STAGES - 1)) % _STAGES), count=1, pred=step > 0)
            turn += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((turn + (_STAGES - 1)) % _STAGES), count=1)
        gate, up = gl.split(sums.reshape((_HALF_M, 2, _BLOCK_O)).permute((0, 2, 1)))
        y = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype)
        tma.store_wait(0)
        warp_barrier()  # no thread writes before the one that copies has seen the last copy's end
        buffer.store(y)
        fence_async_shared()
        warp_barrier()
        copy_out(out, [m + GROUP * _HALF_M, o], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens"])
def prompt_swiglu_kernel(  # type: ignore[no-untyped-def]
    out, x, weights, num_tokens, width, depth, TILES_M: gl.constexpr, REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr
):  # fmt: skip
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK_M, _BLOCK_K], x.layout)
    weight_buffers = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 2 * _BLOCK_O, _BLOCK_K], weights.layout)
    out_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF_M, _BLOCK_O], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    shared = (x_buffers, weight_buffers, out_buffers, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (out, shared, num_tokens, width, depth, 0, TILES_M)),
            (_multiply, (out, shared, num_tokens, width, depth, 1, TILES_M)),
            (_fetch, (x, weights, shared, num_tokens, width, depth, TILES_M)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )
