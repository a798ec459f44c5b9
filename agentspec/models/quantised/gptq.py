"""GPTQ checkpoints: `quant_method: gptq`, as AutoGPTQ and GPTQModel write them, and the family's own -GPTQ-Int4.

For a matrix of N rows and K columns in groups of g, with nibble j of a word in bits 4 j to 4 j + 3: `qweight` int32
[K / 8, N], word (r, n) has the codes of columns 8 r + j; `qzeros` int32 [K / g, N / 8], word (., c) has the zero points
of rows 8 c + j, less 1 in the first version of the format; `scales` [K / g, N]. w = scale * (code - zero).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.quantised.names import expression, mapping, matches, refuse, refuse_unknown, require, spellings
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

METHOD = "gptq"
_PER_MODULE = ("bits", "group_size", "sym", "desc_act")
_KNOWN = (
    *_PER_MODULE,
    "quant_method",
    "checkpoint_format",
    "lm_head",
    "dynamic",
    "pack_dtype",
    # How the weights were found, not what they are:
    "act_group_aware",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "exllama_config",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "mse",
    "pad_token_id",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqInt4(FourBitScheme):
    """A weight in this format, a Scheme."""

    dtype: ClassVar[str] = "I32"

    zero_offset: int
    """What is added to a stored zero point, modulo 16."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        num_rows, depth = matrix(name, shape)
        if num_rows % WORD or depth % WORD:
            raise UnsupportedModelError(f"{name}: {num_rows} x {depth} codes don't fill words of {WORD}")
        group = self.form.group
        groups = depth // group
        packed = "packed values"
        return {
            beside(name, "qweight"): StoredTensor(shapes=((depth // WORD, num_rows),), dtypes=("I32",), what=packed),
            beside(name, "qzeros"): StoredTensor(
                shapes=((groups, num_rows // WORD),),
                dtypes=("I32",),
                what="packed zero points",
                complaint=None if self.form.has_zeros else self._asymmetry,
            ),
            beside(name, "scales"): StoredTensor(shapes=((groups, num_rows),), dtypes=tuple(FLOATS)),
            beside(name, "g_idx"): StoredTensor(
                shapes=((depth,),),
                dtypes=("I32", "I64"),
                what="groups of columns",
                is_optional=True,
                complaint=lambda groups_K: (
                    None
                    if torch.equal(groups_K.long(), torch.arange(depth) // group)
                    else "isn't the plain order of groups: act order is not supported"
                ),
            ),
            beside(name, "bias"): StoredTensor(
                shapes=((num_rows,),),
                dtypes=tuple(FLOATS),
                what="biases",
                is_optional=True,
                complaint=lambda bias_N: "is not zero: this model has no biases" if bias_N.any() else None,
            ),
        }

    def _asymmetry(self, words: Tensor) -> str | None:
        zeros = nibbles(words) + self.zero_offset & 15
        return None if bool((zeros == kernels.SYMMETRIC_ZERO).all()) else "has zero points although sym=True"

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return replace(self, form=self.with_scales_of(dtype(beside(name, "scales"))))

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        rows, columns = rows_and_columns(region)
        groups = in_units(columns, self.form.group)
        words_NW = tensor(beside(name, "qweight"), (in_units(columns, WORD), rows)).t().contiguous()
        scales_NG = tensor(beside(name, "scales"), (groups, rows)).t().contiguous()
        zeros_NG = None
        if self.form.has_zeros:
            zeros_GN = nibbles(tensor(beside(name, "qzeros"), (groups, in_units(rows, WORD))))[:, inside(rows, WORD)]
            zeros_NG = (zeros_GN + self.zero_offset & 15).t().contiguous()
        form = replace(self.form, scale_dtype=scales_NG.dtype)
        return kernels.FourBit(form=form, values=words_NW.view(torch.uint8), scales=scales_NG, zeros=zeros_NG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptq:
    """A config in this format, a Quantization."""

    is_official: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    default: GptqInt4
    dynamic: tuple[tuple[re.Pattern[str], GptqInt4 | None], ...]
    """(expression, scheme) in the config's order; the first expression that matches a module's name decides."""
    has_head: bool

    @property
    def column_block(self) -> int:
        schemes = (self.default, *(scheme for _, scheme in self.dynamic))
        return max(scheme.column_block for scheme in schemes if scheme is not None)

    def scheme(self, module: str) -> Scheme | None:
        if module == "lm_head" and not self.has_head:
            return None
        spelled = spellings(module)
        for pattern, scheme in self.dynamic:
            if matches((pattern,), spelled):
                return scheme
        return self.default


def parse(quantization: Mapping[str, Any], where: str) -> Gptq:
    """Raises CheckpointError, or UnsupportedModelError that names field and value."""
    where = f"{where}: quant_method={METHOD!r}"
    refuse_unknown(quantization, where, _KNOWN)
    require(quantization, where, "pack_dtype", ("int32",), "int32")
    version = require(quantization, where, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields = {name: quantization.get(name) for name in _PER_MODULE}
    default = _scheme(fields, where, version)
    dynamic: list[tuple[re.Pattern[str], GptqInt4 | None]] = []
    for key, changes in mapping(quantization, where, "dynamic").items():
        here = f"{where}: dynamic[{key!r}]"
        if key.startswith("-:"):
            dynamic.append((expression(key.removeprefix("-:"), where), None))
            continue
        if changes is not None and not isinstance(changes, Mapping):
            raise CheckpointError(f"{here} must be an object")
        refuse_unknown(changes or {}, here, _KNOWN)
        dynamic.append(
            (expression(key.removeprefix("+:"), where), _scheme(fields | dict(changes or {}), here, version))
        )
    return Gptq(
        default=default,
        dynamic=tuple(dynamic),
        has_head=require(quantization, where, "lm_head", (False, True), False),
    )


def _scheme(fields: Mapping[str, Any], where: str, version: str) -> GptqInt4:
    require(fields, where, "bits", (4,))
    if fields.get("desc_act"):
        raise refuse(where, "desc_act", fields["desc_act"], (False,))
    is_symmetric = require(fields, where, "sym", (True, False), True)
    group = require(fields, where, "group_size", kernels.GROUPS)
    return GptqInt4(form=int4_form(group, has_zeros=not is_symmetric), zero_offset=int(version == "gptq"))
