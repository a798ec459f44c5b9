"""One column of each slot's window, of two tensors in one launch. See backend.Backend, `take_columns`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.launch import await_previous, overlapped, release_next

_BLOCK = 1024
"""Features of a program."""


def take_columns(x_NH: Tensor, y_NX: Tensor, column_B: Tensor) -> tuple[Tensor, Tensor]:
    (num_rows, width), num_slots = x_NH.shape, len(column_B)
    assert len(y_NX) == num_rows
    assert num_rows % num_slots == 0, f"{num_rows} rows of {num_slots} windows"
    assert x_NH.stride(1) == y_NX.stride(1) == 1
    x_BH, y_BX = (torch.empty(num_slots, of.shape[1], dtype=of.dtype, device=of.device) for of in (x_NH, y_NX))
    blocks = triton.cdiv(width, _BLOCK)
    _take_columns[(blocks + triton.cdiv(y_NX.shape[1], _BLOCK), num_slots)](
        x_BH,
        x_NH,
        x_NH.stride(0),
        y_BX,
        y_NX,
        y_NX.stride(0),
        column_B,
        T=num_rows // num_slots,
        H=width,
        X=y_NX.shape[1],
        BLOCKS=blocks,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlapped(),
    )
    return x_BH, y_BX


@triton.jit
def _take_columns(  # type: ignore[no-untyped-def]
    x_BH, x_NH, x_stride, y_BX, y_NX, y_stride, column_B, T: tl.constexpr, H: tl.constexpr, X: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (i, b) copies block i of slot b's row of x, behind the BLOCKS of x of its row of y."""
    release_next(PDL)
    await_previous(PDL)
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = b * T + tl.load(column_B + b)
    if block < BLOCKS:
        h = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_BH + b * H + h, tl.load(x_NH + row * x_stride + h, mask=h < H), mask=h < H)
    else:
        x = (block - BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_BX + b * X + x, tl.load(y_NX + row * y_stride + x, mask=x < X), mask=x < X)
