"""Products of many tokens with block-scaled weights: both operands as 8-bit floats (W8A8), by the matrix library.

Hopper's matrix units sum the 128 products of one block of K with about 14 bits of precision (the loss is within 2^-10
of the largest result); each sum times its two scales is added in float32. Where W8A8 does not apply (float32
activations, shapes or devices that the library does not support) the weights are dequantised and multiplied with
unrounded activations.

Shape letters: N tokens, R rows (the tokens and the padding after them), K features, O outputs, G groups of 128
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.backend import ProductInput
from agentspec.kernels.triton.fp8_activations import ScaledTokens, quantize_tokens
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.machine import multiplies_scaled_blocks
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled

_DEPTH_MULTIPLE = 4 * SCALE_BLOCK
"""The library reads the scales of a row of blocks in groups of four."""
_ROW_ALIGNMENT = 8
"""Outputs are 16-bit: each row of a result must begin at a multiple of 16 bytes."""
_BLOCKWISE_1X128, _BLOCKWISE_128X128 = 4, 5
"""torch.nn.functional.ScalingType."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedTokens(ProductInput):
    """What `prefill_linear` makes of its input before the product."""

    scaled: ScaledTokens
    num_tokens: int
    dtype: torch.dtype
    """The input's, and the product's."""


def prefill_linear(x_NK: Tensor, weight_OK: BlockScaled, out_NO: Tensor) -> None:
    """x W^T into `out`, whose rows may be slices of wider ones. x: the activation dtype; rows may have any stride."""
    if takes_fp8(x_NK.dtype, weight_OK):
        multiply_scaled(quantize_tokens(x_NK), weight_OK, out_NO)
    else:
        out_NO.copy_(x_NK @ weight_OK.dequantize(x_NK.dtype).t())


def takes_fp8(dtype: torch.dtype, weight_OK: BlockScaled) -> bool:
    """Whether products of this activation dtype with this weight are W8A8."""
    num_outputs, depth = weight_OK.shape
    has_product = INTERPRETED or multiplies_scaled_blocks(weight_OK.values.device)
    is_whole = num_outputs % SCALE_BLOCK == 0 and depth % _DEPTH_MULTIPLE == 0
    return has_product and dtype.itemsize == 2 and weight_OK.block_rows == SCALE_BLOCK and is_whole


def multiply_scaled(x: ScaledTokens, weight_OK: BlockScaled, out_NO: Tensor) -> None:
    """x W^T of tokens that are already 8-bit floats, as from `quantize_tokens`."""
    num_tokens, num_rows = len(out_NO), len(x.values_RK)
    assert num_tokens <= num_rows, f"{num_tokens} tokens, {num_rows} rows"
    if num_tokens == num_rows and out_NO.stride(0) % _ROW_ALIGNMENT == 0:
        _multiply(x, weight_OK, out_NO)
    else:
        out_RO = torch.empty(num_rows, weight_OK.shape[0], dtype=out_NO.dtype, device=out_NO.device)
        _multiply(x, weight_OK, out_RO)
        out_NO.copy_(out_RO[:num_tokens])


def _multiply(x: ScaledTokens, weight_OK: BlockScaled, out_RO: Tensor) -> None:
    if out_RO.is_meta:  # torch has no meta implementation of this product, and there is nothing to compute
        return
    if INTERPRETED:  # on the CPU, where the library lacks this product
        x_RK = x.values_RK.float() * x.scales_GR.t().repeat_interleave(SCALE_BLOCK, 1)
        out_RO.copy_(x_RK @ weight_OK.dequantize().t())
        return
    torch.ops.aten._scaled_mm_v2.out(
        x.values_RK,
        weight_OK.values.t(),
        [x.scales_GR.t()],
        [_BLOCKWISE_1X128],
        [],
        [weight_OK.scales.t()],
        [_BLOCKWISE_128X128],
        [],
        None,
        out_RO.dtype,
        out=out_RO,
    )
