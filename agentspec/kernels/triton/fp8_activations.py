"""Activations as 8-bit floats with one scale per token and group of 128 features: the operands of W8A8 products.

Owns the form and the rounding. Knows nothing of the products. Shape letters: N tokens, R rows (the tokens and the
padding after them), K features, G groups of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.launch import INTERPRETED, await_previous, overlapped, release_next
from agentspec.kernels.weights import FP8, FP8_MAX, SCALE_BLOCK

GROUP: tl.constexpr = tl.constexpr(SCALE_BLOCK)
LARGEST: tl.constexpr = tl.constexpr(FP8_MAX)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
ROWS = 16
"""Rows are padded to a multiple of this, as the matrix library needs for its scales."""
_BLOCK_ROWS = 32
"""Rows per program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledTokens:
    """x[n, k] = values[n, k] * scales[k // 128, n]."""

    values_RK: Tensor
    """float8_e4m3fn, contiguous. K is a multiple of 128."""
    scales_GR: Tensor
    """float32, contiguous: the scales of one group are adjacent, as the matrix library needs. Largest magnitude / 448;
    1 for a group of zeros, or of numbers below 2^-100, which become zeros: a scale must have a reciprocal."""
    scales_RG: Tensor | None = None
    """The same, contiguous: the scales of one token are adjacent, for products that gather tokens."""


def quantize_tokens(x_NK: Tensor) -> ScaledTokens:
    """Round to the nearest 8-bit floats, in one launch. The error of a value is at most 2^-4 of itself, or 2^-10 of
    its scale if that is more.

    The number of rows is the number of tokens, padded to a multiple of ROWS; padding rows are zeros."""
    num_tokens, depth = x_NK.shape
    assert depth % SCALE_BLOCK == 0, f"{depth} features"
    assert x_NK.stride(1) == 1
    scaled = empty_scaled(num_tokens, depth, x_NK.device)
    num_rows = len(scaled.values_RK)
    if num_tokens:
        grid = (depth // SCALE_BLOCK, triton.cdiv(num_rows, _BLOCK_ROWS))
        arguments = scaled.values_RK, scaled.scales_GR, x_NK, x_NK.stride(0), num_tokens, num_rows, depth
        _quantize_kernel[grid](*arguments, BLOCK_R=_BLOCK_ROWS, num_warps=4, **overlapped())
    return scaled


def empty_scaled(num_tokens: int, depth: int, device: torch.device, *, by_token: bool = False) -> ScaledTokens:
    """Allocate ScaledTokens for num_tokens tokens and their padding, without initializing it. by_token: with
    scales_RG."""
    num_rows, num_groups = triton.cdiv(num_tokens, ROWS) * ROWS, depth // SCALE_BLOCK

    def scales(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return ScaledTokens(
        values_RK=torch.empty(num_rows, depth, dtype=FP8, device=device),
        scales_GR=scales(num_groups, num_rows),
        scales_RG=scales(num_rows, num_groups) if by_token else None,
    )


def scales_by_token(x: ScaledTokens) -> Tensor:
    """scales_RG; one more launch if whoever rounded x has not made it."""
    return x.scales_GR.t().contiguous() if x.scales_RG is None else x.scales_RG


@triton.jit
def to_fp8(x):  # type: ignore[no-untyped-def]
    """float32 to the nearest float8_e4m3fn, ties to even; magnitudes above 448 become 448."""
    if _INTERPRETED:
        # The interpreter's cast truncates: round to a representable value first.
        x = _rounded(x)
    return x.to(tl.float8e4nv)


@triton.jit
def fp8_bits(x):  # type: ignore[no-untyped-def]
    """The codes of `to_fp8` as uint8, also on devices without the type."""
    # Times 2^-120, a float32's exponent and first mantissa bits are those of the 8-bit float, subnormals included.
    bits = (_rounded(x) * 2.0**-120).to(tl.int32, bitcast=True)
    return (((bits >> 24) & 0x80) | ((bits >> 20) & 0x7F)).to(tl.uint8)


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    """float32 rounded to the nearest value of a float8_e4m3fn. Adding 1.5 * 2^(e + 20) rounds at 2^(e - 3)."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    shift = (exponent + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
    return (x + shift) - shift


@triton.jit
def group_scale(largest):  # type: ignore[no-untyped-def]
    """Return (scale, its reciprocal) of groups with these largest magnitudes."""
    scale = tl.where(largest < 2.0**-100, 1.0, tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)))
    return scale, tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_kernel(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, x_ptr, x_stride, num_tokens, num_rows, depth, BLOCK_R: tl.constexpr, PDL: tl.constexpr
):
    release_next(PDL)
    await_previous(PDL)
    group = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = group * GROUP + tl.arange(0, GROUP)
    is_row = r < num_rows
    x = tl.load(x_ptr + r[:, None] * x_stride + k[None, :], mask=(r < num_tokens)[:, None], other=0.0).to(tl.float32)
    scale, inverse = group_scale(tl.max(tl.abs(x), axis=1))
    tl.store(values_ptr + r[:, None] * depth + k[None, :], to_fp8(x * inverse[:, None]), mask=is_row[:, None])
    tl.store(scales_ptr + group.to(tl.int64) * num_rows + r, scale, mask=is_row)
