"""4-bit weights in the order in which GPUs multiply them.

Owns that order, its translation from and to row-major (four_bit.py, which says what a weight stands for), and which
weights have one. Written once, at load. Knows no product.

A tile is eight rows and 128 columns: 128 words of 32 bits, [row 8, t 4, i 4]. Word (row, t, i) has the row's columns 32
i + 8 t + 0..7. That is what one of the 32 lanes (row, t) of a warp needs of the long operand of a matrix instruction
with 16 x 8 x 16 elements: the lane's words are 16 adjacent bytes, the warp's 512. Two words of tiles one above the
other are an instruction's two halves of rows.

In a word, bits 0..15 have the even columns and bits 16..31 the odd ones, so that masks and shifts give pairs of
columns. An integer's code of pair p is at bit 4 p. A float's are spread, so that few shifts bring sign and magnitude to
where bfloat16 has its sign and the last exponent and first mantissa bits: E2M1_BITS.

Shape letters: O output features (rows), K input features, R rows of tiles (O / 8), C columns of tiles (K / 128). "..."
is nothing for a matrix, and the number of matrices for a stack of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.four_bit import FourBit, FourBitForm, FourBitParts, pack, unpack
from agentspec.kernels.weights import FP8, Region, Weight

TILE_ROWS = 8
TILE_COLUMNS = 128

E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))
"""For each pair of columns, the places of a float code's bits 0 to 3 in its half of a word."""
_INT4_BITS = tuple(tuple(range(4 * pair, 4 * pair + 4)) for pair in range(4))

E5M3_BIAS = 9
"""Scales of floats, which are e4m3 and not negative, have five exponent bits: then none is subnormal, and their bits
are those of a bfloat16 in turn. Code e * 8 + m is 2^(e - E5M3_BIAS) * (1 + m / 8); a scale of 0 has no code."""


def has_tiles(form: FourBitForm, shape: Sequence[int]) -> bool:
    """Whether a weight [..., O, K] can be in tiles: whole pairs of tiles, with the groups of most published formats."""
    groups = (16,) if form.kind == "e2m1" else (32, TILE_COLUMNS)
    whole = len(shape) in {2, 3} and shape[-2] % (2 * TILE_ROWS) == 0 and shape[-1] % TILE_COLUMNS == 0
    return whole and form.group in groups


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitTiles(FourBitParts):
    """The weight [..., O, K] that `rows()` defines, in tiles.

    values: int32 [..., R, C, 8, 4, 4], contiguous except for slices of columns. scales: of int4 form.scale_dtype [...,
    R, C, 8], or in groups of 32 [..., R, C, row 8, i 4]; of e2m1 uint8 [..., R, C, row 8, half 2, i 4], as E5M3_BIAS
    says, those of columns 32 i + 16 half + 0..15. zeros: uint8, of the shape of int4's scales."""

    @classmethod
    def empty(cls, form: FourBitForm, shape: Sequence[int], device: torch.device) -> FourBitTiles:
        """Allocate a weight [..., O, K] without initializing it."""
        assert has_tiles(form, shape), f"{form} {shape}"
        *stack, num_rows, depth = shape
        tiles, is_float = (*stack, num_rows // TILE_ROWS, depth // TILE_COLUMNS), form.kind == "e2m1"
        of_groups = (8,) if form.group == TILE_COLUMNS else (8, 4)
        of_scales, dtype = ((8, 2, 4), torch.uint8) if is_float else (of_groups, form.scale_dtype)
        return cls(
            form=form,
            values=torch.empty((*tiles, 8, 4, 4), dtype=torch.int32, device=device),
            scales=torch.empty((*tiles, *of_scales), dtype=dtype, device=device),
            zeros=torch.empty((*tiles, *of_groups), dtype=torch.uint8, device=device) if form.has_zeros else None,
            multipliers=torch.empty((*stack, num_rows), device=device) if is_float else None,
        )

    @classmethod
    def of(cls, weight: FourBit) -> FourBitTiles:
        """The same weight in tiles. A group of floats whose scale is 0 gets codes of 0. Rows may be any whole tiles: a
        part that fills a weight can be half of a pair."""
        *stack, num_rows, depth = weight.shape
        assert has_tiles(weight.form, (*stack, 2 * num_rows, depth)), f"{weight.form} {weight.shape}"
        codes, scales = unpack(weight.values), weight.scales
        if weight.form.kind == "e2m1":
            is_zero = (scales.float() == 0).repeat_interleave(weight.form.group, -1)
            codes = torch.where(is_zero, 0, codes)
        return cls(
            form=weight.form,
            values=_tile_codes(codes, _bits_of(weight.form)),
            scales=_tile_e4m3(scales) if weight.form.kind == "e2m1" else _tile_groups(scales, weight.form),
            zeros=None if weight.zeros is None else _tile_groups(weight.zeros, weight.form),
            multipliers=weight.multipliers,
        )

    def rows(self) -> FourBit:
        """The same weight, row by row."""
        return FourBit(
            form=self.form,
            values=pack(_untile_codes(self.values, _bits_of(self.form))),
            scales=_untile_e4m3(self.scales) if self.form.kind == "e2m1" else _untile_groups(self.scales, self.form),
            zeros=None if self.zeros is None else _untile_groups(self.zeros, self.form),
            multipliers=self.multipliers,
        )

    @property
    def shape(self) -> torch.Size:
        *stack, num_tile_rows, num_tile_columns = self.values.shape[:-3]
        return torch.Size((*stack, num_tile_rows * TILE_ROWS, num_tile_columns * TILE_COLUMNS))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.rows().dequantize(dtype)

    def is_finite(self) -> bool:
        return self.rows().is_finite()

    def cut(self, region: Region) -> FourBitTiles:
        """Rows and columns begin and end where tiles do."""
        num_stacked = len(self.shape) - 2
        stacked = (*region, slice(None))[:num_stacked]
        rows, columns = (*region[num_stacked:], slice(None), slice(None))[:2]
        at = (*stacked, _in_tiles(rows, TILE_ROWS), _in_tiles(columns, TILE_COLUMNS))
        return FourBitTiles(
            form=self.form,
            values=self.values[at],
            scales=self.scales[at],
            zeros=None if self.zeros is None else self.zeros[at],
            multipliers=None if self.multipliers is None else self.multipliers[(*stacked, rows)],
        )

    def select_rows(self, ids_O: Tensor) -> FourBit:
        tile_O, row_O = ids_O // TILE_ROWS, ids_O % TILE_ROWS
        picked = [part[tile_O, :, row_O].unsqueeze(2) if part is not None else None for part in self._parts[:3]]
        of_rows = None if self.multipliers is None else self.multipliers[ids_O]
        return self._made_of([*picked, of_rows]).rows()

    def _alike(self, other: Weight) -> FourBitTiles:
        if isinstance(other, FourBit):
            other = FourBitTiles.of(other.to(self.device))
        assert isinstance(other, FourBitTiles), f"{type(other).__name__} cannot be joined with 4-bit tiles"
        assert other.form == self.form, f"{other.form} cannot be joined with {self.form}"
        return other


def _in_tiles(at: int | slice, size: int) -> slice:
    assert isinstance(at, slice), f"{at} is inside a tile"
    first, stop = at.start or 0, at.stop
    assert first % size == 0, f"{first} is inside a tile of {size}"
    assert stop is None or stop % size == 0, f"{stop} is inside a tile of {size}"
    return slice(first // size, None if stop is None else stop // size)


def _bits_of(form: FourBitForm) -> tuple[tuple[int, ...], ...]:
    return E2M1_BITS if form.kind == "e2m1" else _INT4_BITS


def _tile_codes(codes: Tensor, bits: tuple[tuple[int, ...], ...]) -> Tensor:
    """int32 [..., R, C, 8, 4, 4] from codes, uint8 [..., O, K]."""
    *stack, num_rows, depth = codes.shape
    parts = codes.reshape(-1, 8, depth // 128, 4, 4, 4, 2)  # tiles' rows; row, column of tiles, i, t, pair, even or odd
    words = torch.zeros(len(parts), depth // 128, 8, 4, 4, dtype=torch.int32, device=codes.device)
    for pair, places in enumerate(bits):
        for odd in range(2):
            code = parts[..., pair, odd].permute(0, 2, 1, 4, 3).to(torch.int32)
            for bit, place in enumerate(places):
                words |= (code >> bit & 1) << (place + 16 * odd)
    return words.view(*stack, num_rows // 8, *words.shape[1:])


def _untile_codes(words: Tensor, bits: tuple[tuple[int, ...], ...]) -> Tensor:
    """The inverse of `_tile_codes`."""
    *stack, num_tile_rows, num_tile_columns = words.shape[:-3]
    flat = words.reshape(-1, *words.shape[-4:])
    tile_rows = words.shape[-3]
    codes = torch.zeros(len(flat), tile_rows, num_tile_columns, 4, 4, 4, 2, dtype=torch.uint8, device=words.device)
    for pair, places in enumerate(bits):
        for odd in range(2):
            code = torch.zeros_like(flat)
            for bit, place in enumerate(places):
                code |= (flat >> (place + 16 * odd) & 1) << bit
            codes[..., pair, odd] = code.permute(0, 2, 1, 4, 3)
    return codes.view(*stack, num_tile_rows * tile_rows, num_tile_columns * 128)


def _tile_groups(groups: Tensor, form: FourBitForm) -> Tensor:
    """[..., R, C, 8] or [..., R, C, 8, 4] from [..., O, G], contiguous."""
    each = TILE_COLUMNS // form.group
    tiles: Tensor = groups.unflatten(-1, (-1, each)).unflatten(-3, (-1, TILE_ROWS)).transpose(-3, -2)
    return (tiles.squeeze(-1) if each == 1 else tiles).contiguous()


def _untile_groups(tiles: Tensor, form: FourBitForm) -> Tensor:
    """The inverse of `_tile_groups`."""
    tiles = tiles if form.group < TILE_COLUMNS else tiles[..., None]
    return tiles.transpose(-3, -2).flatten(-4, -3).flatten(-2)


def _tile_e4m3(scales: Tensor) -> Tensor:
    """uint8 [..., R, C, 8, 2, 4] from e4m3 [..., O, K / 16]. A scale of 0 becomes code 0, which is not 0."""
    fraction, exponent = torch.frexp(scales.float())
    code = (exponent - 1 + E5M3_BIAS << 3) + ((2 * fraction - 1) * 8).to(torch.int32)
    code = torch.where(scales.float() == 0, 0, code).to(torch.uint8)
    tiles: Tensor = code.unflatten(-1, (-1, 4, 2)).unflatten(-4, (-1, TILE_ROWS))
    return tiles.transpose(-1, -2).transpose(-4, -3).contiguous()


def _untile_e4m3(tiles: Tensor) -> Tensor:
    """The inverse of `_tile_e4m3`, of scales above 0."""
    rows = tiles.transpose(-4, -3).transpose(-1, -2).flatten(-3)  # [..., R, 8, K / 16]
    code = rows.flatten(-3, -2).to(torch.int32)
    scales: Tensor = torch.ldexp(1 + (code & 7) / 8, (code >> 3) - E5M3_BIAS)
    return scales.to(FP8)
