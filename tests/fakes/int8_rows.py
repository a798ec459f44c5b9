"""A weight form that the package doesn't have: 8-bit integers with one scale per row. Implements exactly what a new
form must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentspec.kernels import Region, Weight
from agentspec.models.quantization import ReadTensor, Scheme, StoredTensor


@dataclass(frozen=True, slots=True)
class Int8Rows(Weight):
    """w[..., o, k] = values[..., o, k] * scales[..., o]."""

    plan_key: ClassVar[str] = "int8 rows"

    values: Tensor
    """int8 [..., O, K]."""
    scales: Tensor
    """float32 [..., O]."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.values.float() * self.scales[..., None]).to(dtype)

    def cut(self, region: Region) -> Int8Rows:
        return Int8Rows(self.values[region], self.scales[region[: self.scales.dim()]])

    def select_rows(self, ids_O: Tensor) -> Int8Rows:
        return Int8Rows(self.values[ids_O], self.scales[ids_O])

    def stack(self, others: Sequence[Weight]) -> Int8Rows:
        parts = [self, *map(int8_rows, others)]
        return Int8Rows(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))

    def fill(self, region: Region, source: Weight, source_region: Region = ()) -> None:
        here, there = self.cut(region), int8_rows(source).cut(source_region)
        here.values.copy_(there.values)
        here.scales.copy_(there.scales)


def int8_rows(weight: Weight) -> Int8Rows:
    assert isinstance(weight, Int8Rows)
    return weight


def quantize_rows(values: Tensor) -> Int8Rows:
    scales = values.float().abs().amax(-1) / 127
    return Int8Rows((values / scales[..., None]).round().to(torch.int8), scales)


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Checkpoint:
    """A Quantization and its Scheme: each row's scale in a tensor beside the values."""

    SUFFIX: ClassVar[str] = "_row_scale"
    dtype: ClassVar[str] = "I8"
    bits: ClassVar[int] = 8
    column_block: ClassVar[int] = 1
    has_part_blocks: ClassVar[bool] = False
    is_official: ClassVar[bool] = True
    notes: ClassVar[tuple[str, ...]] = ()

    def scheme(self, module: str) -> Scheme | None:
        return self

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(shapes=(shape,), dtypes=("I8",), what="values"),
            name + self.SUFFIX: StoredTensor(shapes=(shape[:-1],), dtypes=("F32",)),
        }

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return self

    def read(self, name: str, tensor: ReadTensor, region: Region = ()) -> Weight:
        values = tensor(name, region)
        return Int8Rows(values, tensor(name + self.SUFFIX, region[: values.ndim - 1]))

    def empty(self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int) -> Weight:
        scales = torch.empty(shape[:-1], device=device)
        return Int8Rows(torch.empty(shape, dtype=torch.int8, device=device), scales)

    def quantize(self, values: Tensor) -> Weight:
        return quantize_rows(values)

    def for_head(self) -> Scheme | None:
        return None

    def cpu_only(self, name: str, shape: tuple[int, ...]) -> str | None:
        return None
