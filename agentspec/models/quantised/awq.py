"""AWQ checkpoints: `quant_method: awq`, layout `gemm`, as AutoAWQ writes them.

For a matrix of N rows and K columns in groups of g, with nibble j of a word in bits 4 j to 4 j + 3: `qweight` int32
[K, N / 8], nibble j of word (k, c) has the code of row 8 c + ORDER[j]; `qzeros` int32 [K / g, N / 8] alike; `scales`
[K / g, N]. w = scale * (code - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import UnsupportedModelError
from agentspec.models.quantised.names import name_list, refuse_unknown, require, spellings
from agentspec.models.quantised.schemes import (
    FLOATS,
    WORD,
    FourBitScheme,
    beside,
    in_units,
    inside,
    int4_form,
    matrix,
    nibbles,
    rows_and_columns,
)
from agentspec.models.quantization import ReadTensor, Scheme, StoredTensor

METHOD = "awq"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_KNOWN = (
    "quant_method",
    "bits",
    "group_size",
    "zero_point",
    "version",
    "modules_to_not_convert",
    # How the weights were found or are run elsewhere, not what they are:
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqInt4(FourBitScheme):
    """A weight in this format, a Scheme."""

    dtype: ClassVar[str] = "I32"

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        num_rows, depth = matrix(name, shape)
        if num_rows % WORD:
            raise UnsupportedModelError(f"{name}: codes of {num_rows} rows don't fill words of {WORD}")
        groups, num_words = depth // self.form.group, num_rows // WORD
        return {
            beside(name, "qweight"): StoredTensor(shapes=((depth, num_words),), dtypes=("I32",), what="packed values"),
            beside(name, "qzeros"): StoredTensor(
                shapes=((groups, num_words),), dtypes=("I32",), what="packed zero points"
            ),
            beside(name, "scales"): StoredTensor(shapes=((groups, num_rows),), dtypes=tuple(FLOATS)),
        }

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return replace(self, form=self.with_scales_of(dtype(beside(name, "scales"))))

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        rows, columns = rows_and_columns(region)
        words, groups = in_units(rows, WORD), in_units(columns, self.form.group)
        codes_KN = _in_order(tensor(beside(name, "qweight"), (columns, words)))[:, inside(rows, WORD)]
        zeros_GN = _in_order(tensor(beside(name, "qzeros"), (groups, words)))[:, inside(rows, WORD)]
        scales_NG = tensor(beside(name, "scales"), (groups, rows)).t().contiguous()
        return kernels.FourBit(
            form=replace(self.form, scale_dtype=scales_NG.dtype),
            values=kernels.pack(codes_KN.t()).contiguous(),
            scales=scales_NG,
            zeros=zeros_GN.t().contiguous(),
        )


def _in_order(words: Tensor) -> Tensor:
    """uint8 [..., N] from words [..., N / 8]: what each nibble has, by row."""
    stored = torch.unflatten(nibbles(words), -1, (-1, WORD))
    return stored[..., torch.tensor(ORDER).argsort()].flatten(-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Awq:
    """A config in this format, a Quantization."""

    is_official: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    default: AwqInt4
    excluded: tuple[str, ...]
    """A module is in full precision if its name contains one of these, as in AutoAWQ."""

    @property
    def column_block(self) -> int:
        return self.default.column_block

    def scheme(self, module: str) -> Scheme | None:
        return None if any(part in name for name in spellings(module) for part in self.excluded) else self.default


def parse(quantization: Mapping[str, Any], where: str) -> Awq:
    """Raises CheckpointError, or UnsupportedModelError that names field and value."""
    where = f"{where}: quant_method={METHOD!r}"
    refuse_unknown(quantization, where, _KNOWN)
    require(quantization, where, "bits", (4,))
    group = require(quantization, where, "group_size", kernels.GROUPS)
    require(quantization, where, "zero_point", (True,), True)
    require(quantization, where, "version", ("gemm", "GEMM"), "gemm")
    excluded = name_list(quantization, where, "modules_to_not_convert")
    return Awq(default=AwqInt4(form=int4_form(group, has_zeros=True)), excluded=tuple(sorted(excluded)))
