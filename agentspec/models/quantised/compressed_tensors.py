"""compressed-tensors checkpoints, as llm-compressor writes them: 4-bit integers, NVFP4 and 8-bit floats, in groups of
modules that may differ.

For a matrix of N rows and K columns in groups of g, with nibble j of a word in bits 4 j to 4 j + 3. `pack-quantized`:
`weight_packed` int32 [N, K / 8], word (n, w) has the codes of columns 8 w + j; `weight_scale` [N, K / g];
`weight_zero_point` int32 [N / 8, K / g], word (r, .) has those of rows 8 r + j, where the weights are asymmetric;
`weight_shape` is (N, K). w = weight_scale * (code - zero), zero 8 where symmetric. `nvfp4-pack-quantized`:
`weight_packed` uint8 [N, K / 2]; `weight_global_scale` divides. `float-quantized`: schemes.ScaledFp8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError, cut_repr
from agentspec.models.quantised.names import (
    alternatives,
    canonical_module,
    mapping,
    matches,
    name_list,
    refuse,
    refuse_unknown,
    require,
    spellings,
)
from agentspec.models.quantised.schemes import (
    FLOATS,
    NVFP4_GROUP,
    WORD,
    FourBitScheme,
    Nvfp4,
    ScaledFp8,
    beside,
    in_units,
    inside,
    int4_form,
    matrix,
    nibbles,
    rows_and_columns,
)
from agentspec.models.quantization import ReadTensor, Scheme, StoredTensor

METHOD = "compressed-tensors"
INT4, NVFP4, FP8, MIXED = "pack-quantized", "nvfp4-pack-quantized", "float-quantized", "mixed-precision"
_CLASS = "Linear"
_EXPRESSION = "re:"
_KNOWN = (
    "quant_method",
    "format",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "quantization_status",
    "global_compression_ratio",
    "version",
)
_KNOWN_OF_GROUP = ("targets", "weights", "input_activations", "format")
_KNOWN_OF_WEIGHTS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "actorder",
    # How the scales were found, and dtypes that the tensors tell:
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInt4(FourBitScheme):
    """A weight in `pack-quantized`, a Scheme."""

    dtype: ClassVar[str] = "I32"

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        num_rows, depth = matrix(name, shape)
        groups = depth // self.form.group
        found = {
            beside(name, "weight_packed"): StoredTensor(
                shapes=((num_rows, -(-depth // WORD)),), dtypes=("I32",), what="packed values"
            ),
            beside(name, "weight_scale"): StoredTensor(shapes=((num_rows, groups),), dtypes=tuple(FLOATS)),
            beside(name, "weight_shape"): StoredTensor(
                shapes=((2,),),
                dtypes=("I64", "I32"),
                what="shapes",
                complaint=lambda shape: (
                    None
                    if shape.tolist() == [num_rows, depth]
                    else f"is {shape.tolist()}, expected {[num_rows, depth]}"
                ),
            ),
        }
        if self.form.has_zeros:
            found[beside(name, "weight_zero_point")] = StoredTensor(
                shapes=((-(-num_rows // WORD), groups),), dtypes=("I32",), what="packed zero points"
            )
        return found

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return replace(self, form=self.with_scales_of(dtype(beside(name, "weight_scale"))))

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        rows, columns = rows_and_columns(region)
        groups = in_units(columns, self.form.group)
        words_NW = tensor(beside(name, "weight_packed"), (rows, in_units(columns, WORD)))
        scales_NG = tensor(beside(name, "weight_scale"), (rows, groups))
        zeros_NG: Tensor | None = None
        if self.form.has_zeros:
            words_RG = tensor(beside(name, "weight_zero_point"), (in_units(rows, WORD), groups))
            zeros_NG = nibbles(words_RG.t())[:, inside(rows, WORD)][:, : len(scales_NG)].t().contiguous()
        return kernels.FourBit(
            form=replace(self.form, scale_dtype=scales_NG.dtype),
            values=kernels.pack(nibbles(words_NW)),
            scales=scales_NG,
            zeros=zeros_NG,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One of the config's groups: modules with the same scheme."""

    scheme: Scheme
    names: frozenset[str]
    """Modules by canonical name."""
    expressions: tuple[re.Pattern[str], ...]
    has_class: bool
    """Whether it is of all linear modules."""

    def tier(self, module: str, spelled: Sequence[str]) -> int | None:
        """How exactly the group names a module: by its name (0), an expression (1) or its class (2)."""
        if module in self.names:
            return 0
        if matches(self.expressions, spelled):
            return 1
        return 2 if self.has_class else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensors:
    """A config in this format, a Quantization."""

    is_official: ClassVar[bool] = False

    where: str
    groups: tuple[Group, ...]
    ignored: frozenset[str]
    ignored_expressions: tuple[re.Pattern[str], ...]
    notes: tuple[str, ...] = ()

    @property
    def column_block(self) -> int:
        return max(group.scheme.column_block for group in self.groups)

    def scheme(self, module: str) -> Scheme | None:
        spelled = spellings(module)
        if module in self.ignored or matches(self.ignored_expressions, spelled):
            return None
        tiers = [(tier, group.scheme) for group in self.groups if (tier := group.tier(module, spelled)) is not None]
        if not tiers:
            return None
        best = min(tier for tier, _ in tiers)
        found = {scheme for tier, scheme in tiers if tier == best}
        if len(found) > 1:
            raise UnsupportedModelError(f"{self.where}: config_groups has several groups with {module} as a target")
        return found.pop()


def parse(quantization: Mapping[str, Any], where: str) -> CompressedTensors:
    """Raises CheckpointError, or UnsupportedModelError that names field and value."""
    where = f"{where}: quant_method={METHOD!r}"
    refuse_unknown(quantization, where, _KNOWN)
    refuse_kv_scheme(quantization, where)
    sparsity = mapping(quantization, where, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise refuse(where, "sparsity_config", dict(sparsity))
    top = quantization.get("format")
    groups, notes = [], []
    for key, raw in mapping(quantization, where, "config_groups").items():
        here = f"{where}: config_groups[{key!r}]"
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{here} must be an object")
        refuse_unknown(raw, here, _KNOWN_OF_GROUP)
        scheme, note = _scheme(raw, here, raw.get("format") or (None if top == MIXED else top))
        groups.append(_group(name_list(raw, here, "targets"), scheme, here))
        notes += [note] if note else []
    if not groups:
        raise CheckpointError(f"{where}: config_groups is missing or empty")
    ignored = name_list(quantization, where, "ignore")
    return CompressedTensors(
        where=where,
        groups=tuple(groups),
        ignored=frozenset(canonical_module(name) for name in ignored if not name.startswith(_EXPRESSION)),
        ignored_expressions=_expressions(ignored, where),
        notes=tuple(dict.fromkeys(notes)),
    )


def refuse_kv_scheme(quantization: Mapping[str, Any], where: str) -> None:
    """Refuse keys and values in anything but 8-bit floats, whose multipliers are known by name."""
    scheme = mapping(quantization, where, "kv_cache_scheme")
    if scheme and (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        raise refuse(where, "kv_cache_scheme", dict(scheme))


def _group(targets: list[str], scheme: Scheme, where: str) -> Group:
    names = {target for target in targets if not target.startswith(_EXPRESSION)} - {_CLASS}
    for name in names:
        if "." not in name and name != "lm_head":
            raise refuse(where, "targets", name, (_CLASS, "names of modules", "re:..."))
    return Group(
        scheme=scheme,
        names=frozenset(map(canonical_module, names)),
        expressions=_expressions(targets, where),
        has_class=_CLASS in targets,
    )


def _expressions(names: list[str], where: str) -> tuple[re.Pattern[str], ...]:
    return alternatives((name.removeprefix(_EXPRESSION) for name in names if name.startswith(_EXPRESSION)), where)


def _scheme(raw: Mapping[str, Any], where: str, form: object) -> tuple[Scheme, str | None]:
    """The scheme of a group, and a note on its inputs."""
    weights, inputs = mapping(raw, where, "weights"), mapping(raw, where, "input_activations")
    here = f"{where}: weights"
    refuse_unknown(weights, here, _KNOWN_OF_WEIGHTS)
    kind = require(weights, here, "type", ("int", "float"), "int")
    bits = require(weights, here, "num_bits", (4,) if kind == "int" else (4, 8))
    require({"actorder": weights.get("actorder") or "static"}, here, "actorder", ("static", "weight"))
    is_symmetric = require(weights, here, "symmetric", (True, False) if kind == "int" else (True,), True)
    expected = INT4 if kind == "int" else NVFP4 if bits == 4 else FP8
    if form not in (None, expected):
        raise refuse(where, "format", form, (expected,))
    of_inputs = (inputs.get("num_bits"), inputs.get("type"))
    if inputs and of_inputs != ((bits, "float") if kind == "float" else None):
        raise UnsupportedModelError(
            f"{where}: input_activations={cut_repr(dict(inputs))} is not supported "
            f"with weights in {bits} bits of {kind}"
        )
    if kind == "int":
        require(weights, here, "strategy", ("group",))
        return PackedInt4(
            form=int4_form(require(weights, here, "group_size", kernels.GROUPS), has_zeros=not is_symmetric)
        ), None
    if bits == 4:
        require(weights, here, "strategy", ("tensor_group",))
        require(weights, here, "group_size", (NVFP4_GROUP,))
        note = "made for 4-bit inputs (W4A4) and served with its weights alone: inputs are not rounded"
        scheme = Nvfp4(codes="weight_packed", scale="weight_global_scale", input_scale="input_global_scale")
        return scheme, note if inputs else None
    strategy = require(weights, here, "strategy", ("tensor", "channel", "block"))
    if strategy == "block" and weights.get("block_structure") != [128, 128]:
        raise refuse(here, "block_structure", weights.get("block_structure"), ([128, 128],))
    return ScaledFp8(strategy=strategy), None
