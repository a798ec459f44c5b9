"""RMS norms in Triton: plain, with the row stores of the final norm, and the pair before the MTP head. See
backend.Backend.

A tile of rows is read once and kept in registers; a row's sum does not depend on the number of rows. Knows nothing of
layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.traffic import touches_pools
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next

_TILE = 1024
"""Least elements per program: several rows if rows are short."""
_ELEMENTS_A_WARP = 512
"""16 per lane: two loads of 16 bytes in bf16."""


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), norm, out)
    return out


@touches_pools
def norm_to_rows(x_NH: Tensor, norm: Norm, hidden_RH: Tensor, write_rows_N: Tensor) -> Tensor:
    out_NH = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    _launch(x_NH, norm, out_NH, hidden_RH, write_rows_N)
    return out_NH


def pair_norms(
    tokens_N: Tensor, embedding_VH: Tensor, hidden_NH: Tensor, embedding_norm: Norm, hidden_norm: Norm
) -> Tensor:
    num_tokens, width = hidden_NH.shape
    assert embedding_VH.stride(1) == hidden_NH.stride(1) == 1
    assert tokens_N.is_contiguous()
    out = torch.empty(num_tokens, 2 * width, dtype=hidden_NH.dtype, device=hidden_NH.device)
    block = triton.next_power_of_2(width)
    _pair_norms[(num_tokens, 2)](
        tokens_N,
        embedding_VH,
        embedding_VH.stride(0),
        hidden_NH,
        hidden_NH.stride(0),
        embedding_norm.weight,
        embedding_norm.eps,
        hidden_norm.weight,
        hidden_norm.eps,
        out,
        H=width,
        BLOCK_H=block,
        num_warps=_num_warps(block),
        **overlapped(),
    )
    return out


def _launch(
    x_NH: Tensor, norm: Norm, out: Tensor, hidden_RH: Tensor | None = None, write_rows_N: Tensor | None = None
) -> None:
    """Norm the rows of x_NH into `out`, which is contiguous, and into the pool if one is given."""
    num_rows, width = x_NH.shape
    assert x_NH.stride(1) == 1
    if hidden_RH is not None and write_rows_N is not None:
        assert hidden_RH.stride(1) == write_rows_N.stride(0) == 1
        assert write_rows_N.shape == (num_rows,), f"{num_rows} rows, write_rows {write_rows_N.shape}"
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x_NH,
        x_NH.stride(0),
        norm.weight,
        norm.eps,
        out,
        hidden_RH,
        0 if hidden_RH is None else hidden_RH.stride(0),
        write_rows_N,
        num_rows,
        H=width,
        BLOCK_N=rows,
        BLOCK_H=block,
        num_warps=_num_warps(rows * block),
        **overlapped(),
    )


def _num_warps(num_elements: int) -> int:
    return min(16, max(1, num_elements // _ELEMENTS_A_WARP))


@triton.jit
def _gain(weight, BLOCK_H: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 + weight, float32 [BLOCK_H]. It may be read before `await_previous`, since it is a weight."""
    h = tl.arange(0, BLOCK_H)
    return 1.0 + tl.load(weight + h, mask=h < H, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, gain, eps, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x / rms(x) * gain over the rows of a tile, float32; x is 0 from column H on."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / H + eps) * gain[None, :]


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_NH,
    x_stride,
    weight_H,
    eps,
    out_NH,
    hidden_RH,
    hidden_stride,
    write_rows_N,
    num_rows,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    gain = _gain(weight_H, BLOCK_H, H)
    await_previous(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    is_real = (n < num_rows)[:, None] & (h < H)[None, :]
    x = tl.load(x_NH + n[:, None] * x_stride + h[None, :], mask=is_real, other=0.0)
    y = _normed(x, gain, eps, H).to(out_NH.dtype.element_ty)
    tl.store(out_NH + n[:, None] * H + h[None, :], y, mask=is_real)
    if hidden_RH is not None:
        row = tl.load(write_rows_N + n, mask=n < num_rows, other=0)
        tl.store(hidden_RH + row[:, None] * hidden_stride + h[None, :], y, mask=is_real)


@triton.jit
def _pair_norms(  # type: ignore[no-untyped-def]
    tokens_N,
    embedding_VH,
    embedding_stride,
    hidden_NH,
    hidden_stride,
    embedding_weight_H,
    embedding_eps,
    hidden_weight_H,
    hidden_eps,
    out,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, 0) writes the left half of row n, program (n, 1) the right half."""
    release_next(PDL)
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    place = out + n * 2 * H + h
    if tl.program_id(1) == 0:
        gain = _gain(embedding_weight_H, BLOCK_H, H)
        await_previous(PDL)
        source = embedding_VH + tl.load(tokens_N + n) * embedding_stride + h
        left = tl.load(source[None, :], mask=(h < H)[None, :], other=0.0)
        tl.store(place[None, :], _normed(left, gain, embedding_eps, H).to(out.dtype.element_ty), mask=(h < H)[None, :])
    else:
        gain = _gain(hidden_weight_H, BLOCK_H, H)
        await_previous(PDL)
        right = tl.load((hidden_NH + n * hidden_stride + h)[None, :], mask=(h < H)[None, :], other=0.0)
        tl.store(
            (place + H)[None, :], _normed(right, gain, hidden_eps, H).to(out.dtype.element_ty), mask=(h < H)[None, :]
        )
