"""Weights of linear layers as they lie in memory: a tensor of the activation dtype, or 8-bit floats with one multiplier a block.

Owns the form, its definition (`dequantize`) and how weights are cut and joined. Knows nothing of checkpoints, layers or products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest magnitude of float8_e4m3fn."""

SCALE_BLOCK = 128
"""Rows and columns that share one multiplier in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaled:
    """A matrix [O, K], or a stack of them [X, O, K]: w[o, k] = values[o, k] * scales[o // block_rows, k // SCALE_BLOCK]."""

    values: Tensor
    """float8_e4m3fn [..., O, K], contiguous."""
    scales: Tensor
    """float32 [..., ceil(O / block_rows), ceil(K / SCALE_BLOCK)], contiguous."""
    block_rows: int = SCALE_BLOCK
    """Divides SCALE_BLOCK. Smaller where matrices were joined whose rows are no multiple of SCALE_BLOCK: each keeps its own blocks."""

    def __post_init__(self) -> None:
        *stack, num_rows, depth = self.values.shape
        assert SCALE_BLOCK % self.block_rows == 0, f"{self.block_rows}"
        expected = (*stack, -(-num_rows // self.block_rows), -(-depth // SCALE_BLOCK))
        assert self.scales.shape == expected, f"scales {tuple(self.scales.shape)} of values {tuple(self.values.shape)}"
        assert (self.values.dtype, self.scales.dtype) == (FP8, torch.float32), f"{self.values.dtype} {self.scales.dtype}"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def is_finite(self) -> bool:
        """Whether every value and multiplier is a finite number. Of 8-bit floats only two codes are none: all ones, but for the sign."""
        codes = self.values.view(torch.uint8)
        has_nan = codes.view(torch.int8).max() == 0x7F or codes.max() == 0xFF
        return not has_nan and bool(self.scales.isfinite().all())


Weight = Tensor | BlockScaled


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as a plain tensor. Exact in float32 where scales have at most 20 bits of mantissa, as those of checkpoints (bfloat16) do."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    num_rows, depth = weight.shape[-2:]
    scales = weight.scales.repeat_interleave(weight.block_rows, -2)[..., :num_rows, :]
    return (weight.values.float() * scales.repeat_interleave(SCALE_BLOCK, -1)[..., :depth]).to(dtype)


def quantize_blocks(weight: Tensor) -> BlockScaled:
    """The nearest 8-bit floats of [..., O, K] under one multiplier for each block of 128 x 128: its largest magnitude / 448.

    Multipliers are bfloat16 values, as in published checkpoints, rounded up so that nothing exceeds 448; a block of zeros has 1."""
    *stack, num_rows, depth = weight.shape
    row_blocks, column_blocks = -(-num_rows // SCALE_BLOCK), -(-depth // SCALE_BLOCK)
    padded = weight.new_zeros(*stack, row_blocks * SCALE_BLOCK, column_blocks * SCALE_BLOCK, dtype=torch.float32)
    padded[..., :num_rows, :depth] = weight
    blocks = padded.view(*stack, row_blocks, SCALE_BLOCK, column_blocks, SCALE_BLOCK)
    scales = blocks.abs().amax((-3, -1)) / FP8_MAX
    nearest = scales.bfloat16()
    above = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    scales = torch.where(nearest.float() < scales, above, nearest).float()
    scales = torch.where(scales == 0, 1.0, scales)
    values = (blocks / scales[..., :, None, :, None]).view(padded.shape)[..., :num_rows, :depth]
    return BlockScaled(values=values.to(FP8).contiguous(), scales=scales)


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """One weight [sum of O, K] of several over the same input; all plain, or all block-scaled."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain)
    scaled = [weight for weight in weights if isinstance(weight, BlockScaled)]
    assert len(scaled) == len(weights), "plain and block-scaled rows don't stack"
    # Every part but the last must fill whole blocks, so that the next one begins a new one.
    block_rows = math.gcd(*(weight.block_rows for weight in scaled), *(weight.shape[-2] for weight in scaled[:-1]))
    scales = [with_block_rows(weight, block_rows).scales for weight in scaled]
    return BlockScaled(values=torch.cat([weight.values for weight in scaled], -2), scales=torch.cat(scales, -2), block_rows=block_rows)


def rows_from(weight: Weight, first: int) -> Weight:
    """The rows [first:] of a matrix, in the same memory. first: begins a block."""
    if isinstance(weight, Tensor):
        return weight[first:]
    assert first % weight.block_rows == 0, f"row {first} is inside a block of {weight.block_rows}"
    return BlockScaled(values=weight.values[first:], scales=weight.scales[first // weight.block_rows :], block_rows=weight.block_rows)


def matrix(weight: Weight, index: int) -> Weight:
    """One matrix of a stack, in the same memory."""
    if isinstance(weight, Tensor):
        return weight[index]
    return BlockScaled(values=weight.values[index], scales=weight.scales[index], block_rows=weight.block_rows)


def with_block_rows(weight: BlockScaled, block_rows: int) -> BlockScaled:
    """The same values under multipliers of lower blocks. block_rows: divides the weight's own."""
    num_blocks = -(-weight.shape[-2] // block_rows)
    scales = weight.scales.repeat_interleave(weight.block_rows // block_rows, -2)[..., :num_blocks, :].contiguous()
    return BlockScaled(values=weight.values, scales=scales, block_rows=block_rows)
