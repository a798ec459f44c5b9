"""Store hiddens to state rows, in one Triton launch: of a prefill's blocks, and of rings at the fold length. See
backend.Backend, `save_hidden` and `fold_hidden`. Knows nothing of what rows mean."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.slots import RingWindow
from agentspec.kernels.traffic import touches_pools
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.prefill_columns import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    NUM_BLOCK_FIELDS,
    SAVE_ROW,
    SECOND_SAVE_ROW,
)
from agentspec.types import SCRATCH_ROW

_MAX_BLOCK = 1024
_SCRATCH_ROW = tl.constexpr(SCRATCH_ROW)


@touches_pools
def save_hidden(hidden_NH: Tensor, hidden_RH: Tensor, batch: PrefillBatch) -> None:
    width = hidden_NH.shape[1]
    assert hidden_RH.shape[1] == width
    assert hidden_RH.dtype == hidden_NH.dtype
    assert hidden_RH.stride(1) == hidden_NH.stride(1) == 1
    assert batch.blocks_MF.is_contiguous()
    block = min(_MAX_BLOCK, triton.next_power_of_2(width))
    _save_hidden[(triton.cdiv(width, block), len(batch.blocks_MF))](
        hidden_NH,
        hidden_NH.stride(0),
        hidden_RH,
        hidden_RH.stride(0),
        batch.blocks_MF,
        H=width,
        BLOCK_H=block,
        **overlapped(),
    )


@touches_pools
def fold_hidden(hidden_RH: Tensor, hidden_SCH: Tensor, window: RingWindow) -> None:
    _, capacity, width = hidden_SCH.shape
    assert hidden_RH.shape[1] == width
    assert hidden_RH.dtype == hidden_SCH.dtype
    assert hidden_RH.stride(1) == 1
    assert hidden_SCH.is_contiguous()
    block = min(_MAX_BLOCK, triton.next_power_of_2(width))
    _fold_hidden[(triton.cdiv(width, block), len(window.slot_B))](
        hidden_RH,
        hidden_RH.stride(0),
        hidden_SCH,
        window.slot_B,
        window.fold_length_B,
        window.fold_row_B,
        CAPACITY=capacity,
        H=width,
        BLOCK_H=block,
        **overlapped(),
    )


@triton.jit
def _save_hidden(  # type: ignore[no-untyped-def]
    hidden_NH,
    hidden_stride,
    hidden_RH,
    pool_stride,
    blocks_MF,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    await_previous(PDL)
    block = blocks_MF + tl.program_id(1).to(tl.int64) * NUM_BLOCK_FIELDS
    row, second_row = tl.load(block + SAVE_ROW), tl.load(block + SECOND_SAVE_ROW)
    last = tl.load(block + BLOCK_OFFSET) + tl.load(block + BLOCK_COUNT) - 1
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    hidden = tl.load(hidden_NH + last * hidden_stride + h, mask=h < tl.where(row >= 0, H, 0), other=0.0)
    tl.store(hidden_RH + row * pool_stride + h, hidden, mask=h < tl.where(row >= 0, H, 0))
    tl.store(hidden_RH + second_row * pool_stride + h, hidden, mask=h < tl.where(second_row >= 0, H, 0))


@triton.jit
def _fold_hidden(  # type: ignore[no-untyped-def]
    hidden_RH,
    pool_stride,
    hidden_SCH,
    slot_B,
    fold_length_B,
    fold_row_B,
    CAPACITY: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Nothing is loaded or stored for a slot that folds nothing."""
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(1).to(tl.int64)
    row, length = tl.load(fold_row_B + b), tl.load(fold_length_B + b)
    entry = tl.load(slot_B + b) * CAPACITY + (tl.maximum(length, 1) - 1) % CAPACITY
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < tl.where(row == _SCRATCH_ROW, 0, H)
    tl.store(hidden_RH + row * pool_stride + h, tl.load(hidden_SCH + entry * H + h, mask=mask, other=0.0), mask=mask)
