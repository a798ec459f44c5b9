"""Weights of linear layers as they lie in memory. Each form is a class: plain numbers, or 8-bit floats with one scale
per block or per row.

Owns the forms: the values that a weight stands for (`dequantize`), and how it is sliced, joined and filled. Code other
than product kernels uses these methods and never checks the form. Knows nothing of checkpoints, layers or products.

Shape letters: O output features (rows), K input features, X matrices of a stack, E rows in full precision, C numbers of
a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest magnitude of float8_e4m3fn."""

SCALE_BLOCK = 128
"""Rows and columns of a block, which has one scale in a checkpoint."""

Region = tuple[int | slice, ...]
"""A part of a weight, as an index of its first dimensions; () is all of it."""


class Weight(ABC):
    """A matrix [O, K], or a stack of them [X, O, K], in some form; a plain one may have any shape."""

    __slots__ = ()

    plan_key: ClassVar[str]
    """Selects the measured plans of products with such a weight."""
    is_quantized: ClassVar[bool] = True
    """Whether values were rounded for this form; such a weight is not quantized again."""
    can_draft: ClassVar[bool] = False
    """Whether rows of a head in this form make a draft head as they are. Of others they are expanded first."""

    values: Tensor
    """The stored elements."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the values that the weight stands for."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    def form_name(self) -> str:
        """The form, in words."""
        return self.plan_key

    @property
    def tensor(self) -> Tensor:
        """The memory of a plain weight. For parameters that are plain in every checkpoint: norms, routers, embeddings.
        AssertionError for another form."""
        raise AssertionError(f"{type(self).__name__} where only plain weights may be")

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the weight stands for, each rounded once to `dtype`. This defines the form."""

    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return bool(self.dequantize().isfinite().all())

    @abstractmethod
    def cut(self, region: Region) -> Weight:
        """Slice: the weight of a region, in the same memory. Where the form has blocks, rows and columns must begin at
        block boundaries."""

    def matrix(self, index: int) -> Weight:
        """One matrix of a stack, in the same memory."""
        return self.cut((index,))

    @abstractmethod
    def select_rows(self, ids_O: Tensor) -> Weight:
        """Copy some rows of a matrix. ids_O: int64, in the order of the result."""

    @abstractmethod
    def stack(self, others: Sequence[Weight]) -> Weight:
        """Concatenate rows into a new matrix: these rows, then those of the others, which must have the same form."""

    def append_full_precision(self, rows_EK: Tensor) -> tuple[Weight, Tensor | None]:
        """Append rows that must keep full precision. Returns (the matrix, rows that the form cannot hold and that stay
        separate, or None)."""
        return self, rows_EK

    @abstractmethod
    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        """Copy `source_region` of `source` into `region` of this weight. The regions have whole rows, or whole blocks
        of them.

        A plain weight accepts any form, other forms accept only their own."""

    def to_numbers(self) -> Tensor:
        """What each row of a matrix consists of, unrounded: float32 [O, C]. Only forms that can draft have it."""
        raise AssertionError(f"{type(self).__name__} has rows that are no numbers")

    def from_numbers(self, numbers_OC: Tensor) -> Weight:
        """The matrix that consists of these rows, in this weight's form; the inverse of `to_numbers`."""
        raise AssertionError(f"{type(self).__name__} has rows that are no numbers")


@dataclass(frozen=True, slots=True)
class Plain(Weight):
    """Plain numbers. Products need them in the activations' dtype."""

    plan_key: ClassVar[str] = "plain"
    is_quantized: ClassVar[bool] = False
    can_draft: ClassVar[bool] = True

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def form_name(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    @property
    def tensor(self) -> Tensor:
        return self.values

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values.to(dtype)

    def cut(self, region: Region) -> Plain:
        return Plain(self.values[region])

    def select_rows(self, ids_O: Tensor) -> Plain:
        return Plain(self.values[ids_O])

    def stack(self, others: Sequence[Weight]) -> Plain:
        return Plain(torch.cat([self.values, *(other.tensor for other in others)]))

    def append_full_precision(self, rows_EK: Tensor) -> tuple[Weight, Tensor | None]:
        return Plain(torch.cat([self.values, rows_EK])), None

    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        self.values[region].copy_(source.dequantize(self.values.dtype)[source_region])

    def to_numbers(self) -> Tensor:
        return self.values.float()

    def from_numbers(self, numbers_OC: Tensor) -> Plain:
        return Plain(numbers_OC.to(self.values.dtype))


class _Fp8(Weight):
    """What forms of float8_e4m3fn values with float32 scales have in common."""

    __slots__ = ()

    scales: Tensor

    def _check(self, shape: Sequence[int]) -> None:
        assert self.scales.shape == tuple(shape), (
            f"scales {tuple(self.scales.shape)} of values {tuple(self.values.shape)}"
        )
        assert (self.values.dtype, self.scales.dtype) == (FP8, torch.float32), (
            f"{self.values.dtype} {self.scales.dtype}"
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def is_finite(self) -> bool:
        # An 8-bit float is NaN only for two codes: all ones, with either sign.
        codes = self.values.view(torch.uint8)
        has_nan = codes.view(torch.int8).max() == 0x7F or codes.max() == 0xFF
        return not has_nan and bool(self.scales.isfinite().all())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaled(_Fp8):
    """w[o, k] = values[o, k] * scales[o // block_rows, k // SCALE_BLOCK], for a matrix or for each matrix of a
    stack."""

    plan_key: ClassVar[str] = "fp8"

    values: Tensor
    """float8_e4m3fn [..., O, K]; contiguous, except for slices of columns."""
    scales: Tensor
    """float32 [..., ceil(O / block_rows), ceil(K / SCALE_BLOCK)]; contiguous if the values are."""
    block_rows: int = SCALE_BLOCK
    """Divides SCALE_BLOCK. Smaller if matrices were joined whose row counts are not multiples of SCALE_BLOCK: each
    keeps its own blocks."""

    def __post_init__(self) -> None:
        assert SCALE_BLOCK % self.block_rows == 0, f"{self.block_rows}"
        self._check(scales_shape(self.values.shape, self.block_rows))

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, device: torch.device, block_rows: int = SCALE_BLOCK) -> BlockScaled:
        """Allocate a weight without initializing it."""
        scales = torch.empty(scales_shape(shape, block_rows), dtype=torch.float32, device=device)
        return cls(values=torch.empty(shape, dtype=FP8, device=device), scales=scales, block_rows=block_rows)

    @property
    def form_name(self) -> str:
        return f"float8_e4m3fn in blocks of {self.block_rows} x {SCALE_BLOCK}"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Exact in float32 if scales have at most 20 bits of mantissa, as those of checkpoints (bfloat16) do."""
        num_rows, depth = self.shape[-2:]
        scales = self.scales.repeat_interleave(self.block_rows, -2)[..., :num_rows, :]
        return (self.values.float() * scales.repeat_interleave(SCALE_BLOCK, -1)[..., :depth]).to(dtype)

    def cut(self, region: Region) -> BlockScaled:
        return BlockScaled(
            values=self.values[region], scales=self.scales[self._blocks(region)], block_rows=self.block_rows
        )

    def select_rows(self, ids_O: Tensor) -> BlockScaled:
        # Adjacent result rows come from different blocks, so each row gets its own scales.
        return BlockScaled(values=self.values[ids_O], scales=self.scales[ids_O // self.block_rows], block_rows=1)

    def stack(self, others: Sequence[Weight]) -> BlockScaled:
        parts = [self, *(_block_scaled(other) for other in others)]
        # Every part but the last must fill whole blocks, so that the next one starts a new block.
        block_rows = math.gcd(*(part.block_rows for part in parts), *(part.shape[-2] for part in parts[:-1]))
        scales = torch.cat([part.with_block_rows(block_rows).scales for part in parts], -2)
        return BlockScaled(values=torch.cat([part.values for part in parts], -2), scales=scales, block_rows=block_rows)

    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        part = _block_scaled(source).with_block_rows(self.block_rows).cut(source_region)
        self.values[region].copy_(part.values)
        self.scales[self._blocks(region)].copy_(part.scales)

    def with_block_rows(self, block_rows: int) -> BlockScaled:
        """The same values with smaller blocks. block_rows: divides the weight's own."""
        num_blocks = -(-self.shape[-2] // block_rows)
        scales = self.scales.repeat_interleave(self.block_rows // block_rows, -2)[..., :num_blocks, :].contiguous()
        return BlockScaled(values=self.values, scales=scales, block_rows=block_rows)

    def _blocks(self, region: Region) -> Region:
        """The region of the scales for a region of the values."""
        num_stacked = self.values.dim() - 2
        sizes = (self.block_rows, SCALE_BLOCK)
        return region[:num_stacked] + tuple(
            _in_blocks(index, size) for index, size in zip(region[num_stacked:], sizes, strict=False)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScaled(_Fp8):
    """w[o, k] = values[o, k] * scales[o], for a matrix or for each matrix of a stack. The form of a head: of the
    kernels' products only `logits` and `draft_argmax` take it."""

    plan_key: ClassVar[str] = "fp8 rows"
    can_draft: ClassVar[bool] = True

    values: Tensor
    """float8_e4m3fn [..., O, K]; contiguous, except for slices of columns."""
    scales: Tensor
    """float32 [..., O]."""

    def __post_init__(self) -> None:
        self._check(self.values.shape[:-1])

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, device: torch.device) -> RowScaled:
        """Allocate a weight without initializing it."""
        scales = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        return cls(values=torch.empty(shape, dtype=FP8, device=device), scales=scales)

    @property
    def form_name(self) -> str:
        return "float8_e4m3fn by row"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Exact in float32 if scales have at most 20 bits of mantissa."""
        return (self.values.float() * self.scales[..., None]).to(dtype)

    def cut(self, region: Region) -> RowScaled:
        return RowScaled(values=self.values[region], scales=self.scales[region[: self.scales.dim()]])

    def select_rows(self, ids_O: Tensor) -> RowScaled:
        return RowScaled(values=self.values.view(torch.uint8)[ids_O].view(FP8), scales=self.scales[ids_O])

    def stack(self, others: Sequence[Weight]) -> RowScaled:
        parts = [self, *(_row_scaled(other) for other in others)]
        return RowScaled(
            values=torch.cat([part.values for part in parts], -2), scales=torch.cat([part.scales for part in parts], -1)
        )

    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        part, here = _row_scaled(source).cut(source_region), self.cut(region)
        here.values.copy_(part.values)
        here.scales.copy_(part.scales)

    def to_numbers(self) -> Tensor:
        return torch.cat([self.values.float(), self.scales[:, None]], 1)

    def from_numbers(self, numbers_OC: Tensor) -> RowScaled:
        return RowScaled(values=numbers_OC[:, :-1].to(FP8), scales=numbers_OC[:, -1].contiguous())


def _in_blocks(index: int | slice, size: int) -> slice:
    assert isinstance(index, slice), f"{index} is inside a block of {size}"
    first = index.start or 0
    assert first % size == 0, f"{first} is inside a block of {size}"
    return slice(first // size, None if index.stop is None else -(-index.stop // size))


def _block_scaled(weight: Weight) -> BlockScaled:
    assert isinstance(weight, BlockScaled), f"{type(weight).__name__} cannot be joined with block-scaled rows"
    return weight


def _row_scaled(weight: Weight) -> RowScaled:
    assert isinstance(weight, RowScaled), f"{type(weight).__name__} cannot be joined with rows that have scales"
    return weight


def scales_shape(shape: Sequence[int], block_rows: int = SCALE_BLOCK) -> tuple[int, ...]:
    """Shape of the scales of values [..., O, K]."""
    *stack, num_rows, depth = shape
    return (*stack, -(-num_rows // block_rows), -(-depth // SCALE_BLOCK))


def quantize_blocks(weight: Tensor) -> BlockScaled:
    """Round [..., O, K] to the nearest 8-bit floats. The scale of each block of 128 x 128 is its largest magnitude /
    448.

    Scales are bfloat16 values, as in published checkpoints, rounded up so that nothing exceeds 448; a block of zeros
    has scale 1."""
    *stack, num_rows, depth = weight.shape
    *_, row_blocks, column_blocks = scales_shape(weight.shape)
    padded = weight.new_zeros(*stack, row_blocks * SCALE_BLOCK, column_blocks * SCALE_BLOCK, dtype=torch.float32)
    padded[..., :num_rows, :depth] = weight
    blocks = padded.view(*stack, row_blocks, SCALE_BLOCK, column_blocks, SCALE_BLOCK)
    scales = _fp8_scales(blocks.abs().amax((-3, -1)))
    values = (blocks / scales[..., :, None, :, None]).view(padded.shape)[..., :num_rows, :depth]
    return BlockScaled(values=values.to(FP8).contiguous(), scales=scales)


def quantize_rows(weight: Tensor) -> RowScaled:
    """Round [..., O, K] to the nearest 8-bit floats. The scale of each row is chosen as `quantize_blocks` chooses that
    of a block."""
    values = weight.float()
    scales = _fp8_scales(values.abs().amax(-1))
    return RowScaled(values=(values / scales[..., None]).to(FP8), scales=scales)


def _fp8_scales(largest: Tensor) -> Tensor:
    """Scales, in float32, for largest magnitudes."""
    scales = largest / FP8_MAX
    nearest = scales.bfloat16()
    above = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    scales = torch.where(nearest.float() < scales, above, nearest).float()
    return torch.where(scales == 0, 1.0, scales)
