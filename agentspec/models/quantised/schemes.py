"""What the 4-bit formats share: the form in memory, packed words, float codes with two scales; and 8-bit floats
with scales other than the official ones.

Shape letters: N outputs (rows), K inputs (columns), G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.quantization import (
    ReadTensor,
    Scheme,
    StoredTensor,
    block_tensors,
    empty_fp8,
    read_blocks,
)

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
WORD = 8
"""Nibbles of an int32."""
NVFP4_GROUP = 16
_NVFP4_FORM = kernels.FourBitForm(kind="e2m1", group=NVFP4_GROUP, scale_dtype=kernels.FP8)


def matrix(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(N, K). Raises UnsupportedModelError for a stack."""
    if len(shape) != 2:
        raise UnsupportedModelError(
            f"{name}: a stack of experts as one tensor is not supported in this format (only a tensor for each expert)"
        )
    return shape[0], shape[1]


def beside(name: str, tensor: str) -> str:
    """The name of a tensor in the same module as the weight `name`."""
    return name.removesuffix("weight") + tensor


def rows_and_columns(region: kernels.Region) -> tuple[slice, slice]:
    """The slices of a region of a matrix."""
    rows, columns = (*region, slice(None), slice(None))[:2]
    assert isinstance(rows, slice), f"{region}"
    assert isinstance(columns, slice), f"{region}"
    return rows, columns


def in_units(at: slice, size: int) -> slice:
    """The units of `size` entries that contain a slice."""
    return slice((at.start or 0) // size, None if at.stop is None else -(-at.stop // size))


def inside(at: slice, size: int) -> slice:
    """Where a slice lies in the entries of its `in_units`."""
    start = at.start or 0
    skipped = start % size
    return slice(skipped, None if at.stop is None else skipped + at.stop - start)


def nibbles(words: Tensor) -> Tensor:
    """uint8 [..., 8 W] from int32 words [..., W]: nibble j, of bits 4 j to 4 j + 3, of word w at 8 w + j."""
    return kernels.unpack(words.contiguous().view(torch.uint8))


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitScheme:
    """The part of a Scheme that all 4-bit layouts have in common."""

    bits: ClassVar[int] = 4
    has_part_blocks: ClassVar[bool] = False

    form: kernels.FourBitForm

    @property
    def column_block(self) -> int:
        return self.form.group

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        if device.type != "cpu" and kernels.has_tiles(self.form, shape):
            return kernels.FourBitTiles.empty(self.form, shape, device)
        return self.form.empty(shape, device)

    def quantize(self, values: Tensor) -> kernels.Weight:
        return self.form.quantize(values)

    def for_head(self) -> Self:
        return self

    def cpu_only(self, name: str, shape: tuple[int, ...]) -> str | None:
        return None if kernels.has_tiles(self.form, shape) else f"weights of {list(shape)} in {self.form}"

    def with_scales_of(self, dtype: str) -> kernels.FourBitForm:
        """The form with the dtype of a file's scales, by its safetensors name."""
        return replace(self.form, scale_dtype=FLOATS[dtype])


def int4_form(group: int, *, has_zeros: bool) -> kernels.FourBitForm:
    return kernels.FourBitForm(kind="int4", group=group, has_zeros=has_zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4(FourBitScheme):
    """e2m1 codes, two a byte with the even column in the low nibble; a float8_e4m3fn scale for 16 columns; a float32
    scale for the whole tensor.

    A file whose tensor-wide scale divides has its reciprocal, rounded to float32, as the multiplier in memory."""

    dtype: ClassVar[str] = "U8"

    form: kernels.FourBitForm = _NVFP4_FORM
    codes: str
    """Name of the codes' tensor in the module."""
    scale: Literal["weight_scale_2", "weight_global_scale"]
    """Name of the tensor-wide scale; the second one divides."""
    input_scale: str
    """Name of the inputs' scale, which may be there and is not used."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        num_rows, depth = matrix(name, shape)
        scalar = ((), (1,))
        return {
            beside(name, self.codes): StoredTensor(
                shapes=((num_rows, depth // 2),), dtypes=("U8",), what="packed values"
            ),
            beside(name, "weight_scale"): StoredTensor(
                shapes=((num_rows, depth // NVFP4_GROUP),), dtypes=("F8_E4M3",), what="multipliers of groups"
            ),
            beside(name, self.scale): StoredTensor(shapes=scalar, dtypes=("F32",), what="multipliers of tensors"),
            beside(name, self.input_scale): StoredTensor(
                shapes=scalar, dtypes=("F32",), what="multipliers of inputs", is_optional=True
            ),
        }

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return self

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        rows, columns = rows_and_columns(region)
        values = tensor(beside(name, self.codes), (rows, in_units(columns, 2)))
        scales = tensor(beside(name, "weight_scale"), (rows, in_units(columns, NVFP4_GROUP)))
        if scales.numel() and int(scales.view(torch.uint8).max()) >= 0x7F:
            raise CheckpointError(f"{beside(name, 'weight_scale')} holds scales that are below 0 or not finite")
        scale = tensor(beside(name, self.scale), ()).reshape(())
        if not scale > 0:
            raise CheckpointError(f"{beside(name, self.scale)} is {float(scale)}: must be above 0")
        multiplier = scale.reciprocal() if self.scale == "weight_global_scale" else scale
        return kernels.FourBit(
            form=self.form, values=values, scales=scales, multipliers=multiplier.repeat(values.shape[0])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledFp8:
    """float8_e4m3fn values in `weight`, multiplied by `weight_scale`: one for the tensor, a row, or a block of 128 x
    128."""

    dtype: ClassVar[str] = "F8_E4M3"
    bits: ClassVar[int] = 8
    has_part_blocks: ClassVar[bool] = True

    strategy: Literal["tensor", "channel", "block"]

    @property
    def column_block(self) -> int:
        return kernels.SCALE_BLOCK if self.strategy == "block" else 1

    @property
    def _block_rows(self) -> int:
        return 1 if self.strategy == "channel" else kernels.SCALE_BLOCK

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        num_rows, _ = matrix(name, shape)
        found = block_tensors(name, "_scale", shape)
        if self.strategy != "block":
            shapes = ((), (1,)) if self.strategy == "tensor" else ((num_rows, 1), (num_rows,))
            found[name + "_scale"] = StoredTensor(shapes=shapes, dtypes=("F32", "BF16"))
        unused = StoredTensor(shapes=((), (1,)), dtypes=("F32", "BF16"), what="multipliers of inputs", is_optional=True)
        return found | {beside(name, "input_scale"): unused}

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return self

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        if self.strategy == "block":
            return read_blocks(name, "_scale", tensor, region)
        values = tensor(name, region)
        scales = tensor(name + "_scale", ()).float().reshape(-1, 1)
        if self.strategy == "channel":
            scales = scales[rows_and_columns(region)[0]]
        shape = kernels.scales_shape(values.shape, self._block_rows)
        return kernels.BlockScaled(values=values, scales=scales.expand(shape).contiguous(), block_rows=self._block_rows)

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        return empty_fp8(shape, device=device, dtype=dtype, block_rows=min(block_rows, self._block_rows))

    def quantize(self, values: Tensor) -> kernels.Weight:
        blocks = kernels.quantize_blocks(values)
        return blocks if self._block_rows == kernels.SCALE_BLOCK else blocks.with_block_rows(self._block_rows)

    def for_head(self) -> Scheme | None:
        return None if self.strategy == "block" else Fp8Head(strategy=self.strategy)

    def cpu_only(self, name: str, shape: tuple[int, ...]) -> str | None:
        return "8-bit experts with scales of rows" if "expert" in name and self.strategy == "channel" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Head(ScaledFp8):
    """A head that is stored so: in memory each row has a scale, which may be that of the tensor. Columns are never
    cut."""

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        rows, columns = rows_and_columns(region)
        assert columns == slice(None), f"{region}"
        values, by_row = tensor(name, (rows,)), self.strategy == "channel"
        scales = tensor(name + "_scale", (rows,) if by_row else ()).float().flatten()
        return kernels.RowScaled(values=values, scales=scales if by_row else scales.repeat(len(values)))

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        return kernels.RowScaled.empty(shape, device=device)

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_rows(values)
