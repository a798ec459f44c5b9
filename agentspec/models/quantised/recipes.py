"""What `agentspec quantize` can write: the form of each module for each of its targets, the tensors of that form, and
the `quantization_config` that says so.

Knows no file: `commands/quantize.py` decides about the tensors that it reads, `models/outline.py` about those of a
config alone. How values are rounded is in the kernels; the readers of these layouts are `compressed_tensors.py` and
`models/quantization.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.quantised import compressed_tensors
from agentspec.models.quantised.schemes import beside
from agentspec.models.quantization import (
    QUANTIZATION_FIELDS,
    SCALE_SUFFIX,
    Quantization,
    canonical_name,
    is_convertible,
)
from agentspec.models.tensors import HEAD

INT4_GROUPS = (128, 32)
"""Columns that share a scale of int4: the first of these that divides a matrix. Other engines have kernels for both."""

_FFN = re.compile(r"model\.layers\.\d+\.mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj\.weight")
_MIXER = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight"
)
_MTP = r"re:mtp\..*"
_PARAMETER_SUFFIX = re.compile(r"\.(weight|bias)$")

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections of each expert in a stack, by the stack's last name."""


class Form(Protocol):
    """How a matrix is stored."""

    @property
    def label(self) -> str:
        """In words, for people."""

    def quantize(self, values: Tensor) -> kernels.Weight:
        """The nearest weight to [O, K], which may be some rows of a matrix: whole blocks of 128 before the last."""

    def tensors(self, name: str, weight: kernels.Weight) -> dict[str, Tensor]:
        """The tensors of the matrix `name`, by name, from what `quantize` returned."""

    def holds(self, weight: kernels.Weight) -> bool:
        """Whether a weight of the source has this form already, so that rounding it again would be a loss."""

    def config(self) -> dict[str, Any]:
        """A group in the config of compressed-tensors, without its targets; of the official format, its fields."""


@dataclass(frozen=True, slots=True)
class OfficialFp8:
    """The family's own format (`quantization.Fp8Blocks`)."""

    label = "FP8 in blocks of 128 x 128"

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_blocks(values)

    def tensors(self, name: str, weight: kernels.Weight) -> dict[str, Tensor]:
        assert isinstance(weight, kernels.BlockScaled), f"{name}"
        return {name: weight.values, name + SCALE_SUFFIX: weight.scales.bfloat16()}

    def holds(self, weight: kernels.Weight) -> bool:
        return False

    def config(self) -> dict[str, Any]:
        return dict(QUANTIZATION_FIELDS)


@dataclass(frozen=True, slots=True)
class Int4:
    """`pack-quantized` of compressed-tensors: symmetric, scales in bfloat16."""

    group: int

    @property
    def label(self) -> str:
        return f"int4 in groups of {self.group}"

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_int4(values, self.group)

    def tensors(self, name: str, weight: kernels.Weight) -> dict[str, Tensor]:
        assert isinstance(weight, kernels.FourBit), f"{name}"
        return {
            beside(name, "weight_packed"): weight.values.view(torch.int32),
            beside(name, "weight_scale"): weight.scales,
            beside(name, "weight_shape"): torch.tensor(weight.shape),
        }

    def holds(self, weight: kernels.Weight) -> bool:
        return False

    def config(self) -> dict[str, Any]:
        weights = _weights(4, "int", "group") | {"group_size": self.group}
        return {"weights": weights, "input_activations": None, "format": compressed_tensors.INT4}


@dataclass(frozen=True, slots=True)
class Fp8:
    """`float-quantized` of compressed-tensors, with a scale for a block of 128 x 128 or for a row.

    Inputs may be rounded to 8 bits as well, with a scale a token (and 128 columns, of blocks): engines have kernels for
    it. Agentspec doesn't look at what is said of inputs."""

    strategy: Literal["block", "channel"]

    @property
    def label(self) -> str:
        return "FP8 by row" if self.strategy == "channel" else OfficialFp8.label

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_rows(values) if self.strategy == "channel" else kernels.quantize_blocks(values)

    def tensors(self, name: str, weight: kernels.Weight) -> dict[str, Tensor]:
        assert isinstance(weight, kernels.BlockScaled | kernels.RowScaled), f"{name}"
        scales = weight.scales if isinstance(weight, kernels.BlockScaled) else weight.scales[:, None]
        short = scales.bfloat16()
        return {name: weight.values, name + "_scale": short if torch.equal(short.float(), scales) else scales}

    def holds(self, weight: kernels.Weight) -> bool:
        is_block = isinstance(weight, kernels.BlockScaled) and weight.block_rows == kernels.SCALE_BLOCK
        return self.strategy == "block" and is_block

    def config(self) -> dict[str, Any]:
        weights, inputs = _weights(8, "float", self.strategy), _weights(8, "float", "token") | {"dynamic": True}
        if self.strategy == "block":
            weights["block_structure"] = [kernels.SCALE_BLOCK, kernels.SCALE_BLOCK]
            inputs |= {"strategy": "group", "group_size": kernels.SCALE_BLOCK}
        return {"weights": weights, "input_activations": inputs, "format": compressed_tensors.FP8}


def _weights(bits: int, kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}


def _int4(num_columns: int) -> Form | None:
    return next((Int4(group) for group in INT4_GROUPS if num_columns % group == 0), None)


Choose = Callable[[int], Form | None]
"""The form for a number of columns; None: full precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A target of `agentspec quantize`."""

    choices: tuple[tuple[Callable[[str], object], Choose], ...]
    """(whether a parameter is meant, by the canonical name that it has in the new checkpoint; its form)."""
    is_official: bool = False
    """Whether the result is in the family's own format."""
    warning: str | None = None
    """What the user should know of the result."""

    def covers(self, name: str) -> bool:
        """Whether a parameter is quantised if its columns are whole groups."""
        return any(is_meant(name) for is_meant, _ in self.choices)

    def reads(self, quantization: Quantization | None) -> bool:
        """Whether a source that is stored so can be quantised."""
        return quantization is None or (quantization.is_official and not self.is_official)

    def keeps_tied(self, config: TextConfig) -> bool:
        """Whether embedding and head are one matrix in the result. If the recipe quantises heads, a tied one becomes a
        matrix of its own: a step reads all of it, but of the embedding, which keeps its precision, a few rows."""
        return config.tied and self.form(HEAD, config.hidden_size) is None

    def splits(self, name: str) -> tuple[str, ...]:
        """The projections of each expert that are tensors of their own in the result, for a stack; none where it stays
        a stack, and for other tensors. name: in the file."""
        prefix, _, kind = name.rpartition(".")
        parts = EXPERT_PARTS.get(kind, ())
        return parts if parts and self.covers(canonical_name(f"{prefix}.0.{parts[0]}.weight")) else ()

    def form(self, name: str, num_columns: int) -> Form | None:
        """The form of a parameter; None: full precision."""
        return next((choose(num_columns) for is_meant, choose in self.choices if is_meant(name)), None)


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe(choices=((is_convertible, lambda _: OfficialFp8()),), is_official=True),
    "int4": Recipe(
        choices=((_FFN.fullmatch, _int4), (_MIXER.fullmatch, _int4)),
        warning="the gates in q_proj are in 4 bits too, which has harmed models of this family; mixed4 has them in 8",
    ),
    "mixed4": Recipe(
        choices=(
            (_FFN.fullmatch, _int4),
            (_MIXER.fullmatch, lambda _: Fp8("block")),
            # In 4 bits the head would change the choice between near ties. By row, as other engines read a head.
            (lambda name: name == HEAD, lambda _: Fp8("channel")),
        )
    ),
}


class Decisions:
    """What a recipe makes of each tensor of a checkpoint, and the `quantization_config` that says so."""

    def __init__(self, recipe: Recipe) -> None:
        self.notes: list[str] = [] if recipe.warning is None else [recipe.warning]
        """For people."""
        self._recipe = recipe
        self._forms: dict[str, Form] = {}
        """Of the quantised modules, by canonical name."""
        self._kept: set[str] = set()
        """Modules in full precision, by their names in the files."""
        self._kept_linears: set[str] = set()
        """Those of them that may be linear layers; or expressions for several."""

    def form(self, name: str, shape: Sequence[int]) -> Form | None:
        """Decide about a tensor by its name in the file: its form; None: full precision."""
        canonical = canonical_name(name)
        form = self._recipe.form(canonical, shape[-1]) if shape else None
        if form is None:
            self._keep(name, canonical, shape)
        else:
            self._forms[canonical.removesuffix(".weight")] = form
        return form

    def config(self) -> dict[str, object] | None:
        """The `quantization_config`; None: nothing is quantised."""
        if self._recipe.is_official:
            return OfficialFp8().config() | {"modules_to_not_convert": sorted(self._kept)}
        return compressed_config(self._forms, self._kept_linears) if self._forms else None

    def _keep(self, name: str, canonical: str, shape: Sequence[int]) -> None:
        module = _PARAMETER_SUFFIX.sub("", name)
        if module != name:
            self._kept.add(module)
        if self._recipe.covers(canonical):
            expression = alike(canonical.removesuffix(".weight"))
            if expression not in self._kept_linears:
                self.notes.append(
                    f"{module} and its like stay in full precision: their {shape[-1]} columns aren't whole "
                    f"groups of {' or '.join(map(str, INT4_GROUPS))}"
                )
            self._kept_linears.add(expression)
        elif canonical.startswith("mtp."):
            self._kept_linears.add(_MTP)
        elif name.endswith(".weight") and len(shape) == 2:
            self._kept_linears.add(module)


def compressed_config(forms: Mapping[str, Form], kept: Iterable[str]) -> dict[str, object]:
    """The `quantization_config` of compressed-tensors.

    forms: of the quantised modules, by canonical name. kept: linear layers in full precision, by their names in the
    file: other engines expect all others in a group. Expressions name what all layers have in common, so the config
    doesn't grow with the model's depth."""
    targets: dict[Form, set[str]] = {}
    for module, form in forms.items():
        targets.setdefault(form, set()).add(alike(module))
    groups = [{"targets": sorted(of_form)} | form.config() for form, of_form in targets.items()]
    formats = {str(group["format"]) for group in groups}
    return {
        "quant_method": compressed_tensors.METHOD,
        "format": formats.pop() if len(formats) == 1 else compressed_tensors.MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": sorted(kept),
        "kv_cache_scheme": None,
    }


def alike(module: str) -> str:
    """An expression, with the prefix that marks it, for the modules with the same place in every layer, and for every
    expert. It doesn't say whether they are the trunk's or the MTP head's."""
    inner = re.sub(r"^(model|mtp)\.layers\.\d+\.", "", module)
    if inner == module:
        return f"re:.*{re.escape(module)}$"
    parts = (r"\d+" if part.isdigit() else re.escape(part) for part in inner.split("."))
    return r"re:.*\.layers\.\d+\." + r"\.".join(parts) + "$"
