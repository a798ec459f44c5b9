"""Weights in 4 bits with one scale per group of columns: integers, or floats of two exponent bits and one fraction bit.

Owns the form: what it stands for, how it is sliced, joined and filled, and how nibbles are packed. Whatever a
checkpoint's layout is, it is translated into this form once, at load. Knows no checkpoint and no product.

Shape letters: O output features (rows), K input features, G groups of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from agentspec.kernels.weights import FP8, FP8_MAX, Region, Weight

GROUPS = (16, 32, 128)
"""Columns that may share a scale."""
SYMMETRIC_ZERO = 8
"""The code that stands for 0 where integers have no zero points."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the float codes; bit 3 is the sign (OCP Microscaling Formats v1.0, section 5.3.3)."""

CLIPPING = tuple(1 - step / 40 for step in range(16))
"""What a group's largest magnitude may be multiplied by before it becomes 7 steps. Finer and lower ratios lessen the
error of normal and heavy-tailed weights by less than a hundredth."""

_PIECE = 2**24
"""Values that are dequantised at once, so that what that takes beside its result doesn't grow with the weight."""
_SEARCH_PIECE = 2**18
"""Values whose clipping is searched at once: they are read for every ratio, so they should stay in a core's cache."""

FourBitKind = Literal["int4", "e2m1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitForm:
    """What a 4-bit weight consists of. Weights are joined only if they have the same."""

    kind: FourBitKind
    group: int
    """One of GROUPS."""
    scale_dtype: torch.dtype = torch.bfloat16
    """That of the file, so that no scale is rounded; float8_e4m3fn for e2m1."""
    has_zeros: bool = False
    """int4 alone: whether each group has its own zero point."""

    def __post_init__(self) -> None:
        assert self.group in GROUPS, f"{self.group}"
        is_float = self.kind == "e2m1"
        assert is_float == (self.scale_dtype == FP8), f"{self.kind} {self.scale_dtype}"
        assert not (is_float and self.has_zeros), "floats have no zero points"

    def __str__(self) -> str:
        zeros = " with zero points" if self.has_zeros else ""
        return f"{self.kind} in groups of {self.group}{zeros}"

    @property
    def format(self) -> str:
        """The form as kernels name it: int4, int4 zeros, the same "by 32", e2m1."""
        return self.kind + " zeros" * self.has_zeros + " by 32" * (self.group == 32)

    def empty(self, shape: tuple[int, ...], device: torch.device) -> FourBit:
        """Allocate a weight [..., O, K] without initializing it."""
        *rows, depth = shape
        return FourBit(
            form=self,
            values=torch.empty((*rows, depth // 2), dtype=torch.uint8, device=device),
            scales=torch.empty((*rows, depth // self.group), dtype=self.scale_dtype, device=device),
            zeros=torch.empty((*rows, depth // self.group), dtype=torch.uint8, device=device)
            if self.has_zeros
            else None,
            multipliers=torch.empty(rows, device=device) if self.kind == "e2m1" else None,
        )

    def quantize(self, values: Tensor) -> FourBit:
        """Round [..., O, K] to the nearest codes; a group's largest magnitude becomes 7 steps, or the float 6. Not made
        for quality: for random weights and zeros."""
        groups = values.float().unflatten(-1, (-1, self.group))
        largest = groups.abs().amax(-1)
        if self.kind == "int4":
            scales = torch.where(largest > 0, largest / 7, 1.0).to(self.scale_dtype)
            codes = (groups / scales.float()[..., None]).round().clamp(-8, 7) + SYMMETRIC_ZERO
            zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=values.device)
            packed = pack(codes.to(torch.uint8).flatten(-2))
            return FourBit(form=self, values=packed, scales=scales, zeros=zeros if self.has_zeros else None)
        of_rows = largest.amax(-1)
        multipliers = torch.where(of_rows > 0, of_rows / (E2M1[-1] * FP8_MAX), 1.0)
        scales = (largest / E2M1[-1] / multipliers[..., None]).clamp(2**-9, FP8_MAX).to(FP8)
        units = groups / (scales.float() * multipliers[..., None])[..., None]
        magnitudes = torch.tensor(E2M1, device=values.device)
        codes = torch.bucketize(units.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2).to(torch.uint8)
        packed = pack((codes | (units < 0).to(torch.uint8) << 3).flatten(-2))
        return FourBit(form=self, values=packed, scales=scales, multipliers=multipliers)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitParts(Weight):
    """What a 4-bit weight consists of in any order: row by row (FourBit), or in tiles (four_bit_tiles.py)."""

    plan_key: ClassVar[str] = "4 bits"

    form: FourBitForm
    values: Tensor
    """Codes."""
    scales: Tensor
    zeros: Tensor | None = None
    """Where the form has zero points."""
    multipliers: Tensor | None = None
    """e2m1 alone: float32 [..., O]. One a row, so that joined matrices keep each its own."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts if part is not None)

    @property
    def form_name(self) -> str:
        return str(self.form)

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.values, self.scales, self.zeros, self.multipliers

    def to(self, device: torch.device) -> Self:
        """The same weight in a device's memory."""
        return self._made_of([None if part is None else part.to(device) for part in self._parts])

    def stack(self, others: Sequence[Weight]) -> Self:
        parts = zip(self._parts, *(self._alike(other)._parts for other in others), strict=True)
        return self._made_of([None if mine is None else torch.cat((mine, *given)) for mine, *given in parts])

    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        there = self._alike(source.cut(source_region))
        for mine, given in zip(self.cut(region)._parts, there._parts, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)

    @abstractmethod
    def cut(self, region: Region) -> Self: ...

    @abstractmethod
    def _alike(self, other: Weight) -> Self:
        """The other weight in this one's order; it must have the same form."""

    def _made_of(self, parts: Sequence[Tensor | None]) -> Self:
        values, scales, zeros, multipliers = parts
        assert values is not None
        assert scales is not None
        return replace(self, values=values, scales=scales, zeros=zeros, multipliers=multipliers)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(FourBitParts):
    """For a matrix or each matrix of a stack, with u the code of (o, k) and g = k // group:

    int4: w[o, k] = (u - zeros[o, g]) * scales[o, g], zeros 8 where there are none (GPTQ, arXiv 2210.17323; AWQ, arXiv
    2306.00978). e2m1: w[o, k] = e2m1(u) * scales[o, g] * multipliers[o], multiplied in this order ("Pretraining Large
    Language Models with NVFP4", arXiv 2509.25149, section 3).

    values: uint8 [..., O, K / 2], column 2 j in the low nibble of byte j. scales: form.scale_dtype [..., O, G]. zeros:
    uint8 [..., O, G]."""

    def __post_init__(self) -> None:
        *rows, depth = self.shape
        assert depth % self.form.group == 0, f"{depth} columns in groups of {self.form.group}"
        groups = (*rows, depth // self.form.group)
        assert self.scales.shape == groups, f"scales {tuple(self.scales.shape)} of a weight {tuple(self.shape)}"
        assert (self.values.dtype, self.scales.dtype) == (torch.uint8, self.form.scale_dtype), f"{self.scales.dtype}"
        assert (None if self.zeros is None else tuple(self.zeros.shape)) == (groups if self.form.has_zeros else None)
        of_rows = tuple(rows) if self.form.kind == "e2m1" else None
        assert (None if self.multipliers is None else tuple(self.multipliers.shape)) == of_rows

    @property
    def shape(self) -> torch.Size:
        *rows, num_bytes = self.values.shape
        return torch.Size((*rows, 2 * num_bytes))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Computed in float32, then rounded to `dtype`. Exact in float32 for int4 whose scales have at most 19 bits of
        mantissa (bfloat16 and float16 have); e2m1 times its scale is exact, times the multiplier rounded once."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        depth = self.shape[-1]
        values, scales, zeros, multipliers = (
            None if part is None else part.reshape(-1, *part.shape[out.ndim - 1 :]) for part in self._parts
        )
        assert values is not None
        assert scales is not None
        table, rows = _pairs(self.form, self.device), max(1, _PIECE // depth)
        for first in range(0, len(values), rows):
            at = slice(first, first + rows)
            groups = embedding(values[at].int(), table).view(-1, depth // self.form.group, self.form.group)
            if zeros is not None:
                groups -= zeros[at, :, None]
            groups *= scales[at, :, None].float()
            if multipliers is not None:
                groups *= multipliers[at, None, None]
            out.view(-1, depth)[at] = groups.flatten(1)
        return out

    def is_finite(self) -> bool:
        largest = self.scales.float() * (2.0 * SYMMETRIC_ZERO if self.multipliers is None else E2M1[-1])
        if self.multipliers is not None:
            largest = largest * self.multipliers[..., None]
        return bool(largest.isfinite().all())

    def cut(self, region: Region) -> FourBit:
        num_rows = self.values.ndim - 1
        rows = region[:num_rows]
        columns = region[num_rows:]
        return FourBit(
            form=self.form,
            values=self.values[(*rows, *(_in_units(index, 2) for index in columns))],
            scales=self.scales[(*rows, *(_in_units(index, self.form.group) for index in columns))],
            zeros=None
            if self.zeros is None
            else self.zeros[(*rows, *(_in_units(index, self.form.group) for index in columns))],
            multipliers=None if self.multipliers is None else self.multipliers[rows],
        )

    def select_rows(self, ids_O: Tensor) -> FourBit:
        return self._made_of([None if part is None else part[ids_O] for part in self._parts])

    def _alike(self, other: Weight) -> FourBit:
        assert isinstance(other, FourBit), f"{type(other).__name__} cannot be joined with 4-bit rows"
        assert other.form == self.form, f"{other.form} cannot be joined with {self.form}"
        return other


def quantize_int4(weight: Tensor, group: int) -> FourBit:
    """Round [O, K] to symmetric integers, with the scales in bfloat16 that give each group the least squared error.

    For each r in CLIPPING: s = bfloat16(r * max|w| / 7), q = clamp(round(w / s), -8, 7). A group takes the r with the
    least sum of (w - s q)^2, the largest of equals; a group of zeros has scale 1. Scales of least squared error:
    Choukroun et al., "Low-bit Quantization of Neural Networks for Efficient Inference", arXiv 1902.06822; a search over
    clipping ratios: AWQ, arXiv 2306.00978. Looks at nothing but the weight, whose values must be finite."""
    groups = weight.reshape(-1, group)
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(groups), dtype=torch.bfloat16, device=weight.device)
    rows = max(1, _SEARCH_PIECE // group)
    for first in range(0, len(groups), rows):
        at = slice(first, first + rows)
        codes[at], scales[at] = _least_error(groups[at].float())
    return FourBit(
        form=FourBitForm(kind="int4", group=group),
        values=pack(codes.view(weight.shape)),
        scales=scales.view(*weight.shape[:-1], -1),
    )


def _least_error(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 groups [N, group]."""
    largest = groups.abs().amax(-1, keepdim=True)
    # Errors are relative to the largest magnitude: squares of very large or small values have no float32. Their sums
    # are in float64, so that the order of additions, which machines choose, doesn't decide between ratios.
    units = torch.where(largest > 0, largest, 1.0)
    shares, least = groups / units, torch.full_like(largest, torch.inf, dtype=torch.float64)
    best_codes, best_scales = torch.zeros_like(groups), torch.ones_like(largest)
    for ratio in CLIPPING:
        scales = (largest * (ratio / 7)).bfloat16().float()
        scales = torch.where(scales > 0, scales, 1.0)  # of zeros, and of numbers that have no scale in bfloat16
        codes = (groups / scales).round_().clamp_(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1)
        error = (codes * (scales / units)).sub_(shares).square_().sum(-1, keepdim=True, dtype=torch.float64)
        is_less = error < least
        least = torch.where(is_less, error, least)
        best_scales = torch.where(is_less, scales, best_scales)
        best_codes = torch.where(is_less, codes, best_codes)
    return (best_codes + SYMMETRIC_ZERO).to(torch.uint8), best_scales.squeeze(-1).bfloat16()


def _in_units(index: int | slice, size: int) -> slice:
    assert isinstance(index, slice), f"{index} is one column"
    first, stop = index.start or 0, index.stop
    assert first % size == 0, f"{first} is inside {size} columns"
    assert stop is None or stop % size == 0, f"{stop} is inside {size} columns"
    return slice(first // size, None if stop is None else stop // size)


def _pairs(form: FourBitForm, device: torch.device) -> Tensor:
    """float32 [256, 2]: what both nibbles of a byte stand for, the low one first, before any scale."""
    if form.kind == "e2m1":
        of_code = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
    else:
        of_code = torch.arange(16.0, device=device) - (0 if form.has_zeros else SYMMETRIC_ZERO)
    codes = torch.arange(256, device=device)
    return torch.stack([of_code[codes & 15], of_code[codes >> 4]], 1)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K / 2] from codes, uint8 [..., K] below 16: the even column in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(values: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack([values & 15, values >> 4], -1).flatten(-2)
