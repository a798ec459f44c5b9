"""NVIDIA ModelOpt checkpoints: NVFP4, 8-bit floats, and a mixture of both by module.

The config is in `hf_quant_config.json`, in config.json's `quantization_config`, or in both, which must then agree where
both speak. NVFP4: `weight` uint8 [N, K / 2] with the even column in the low nibble, `weight_scale` float8_e4m3fn
[N, K / 16], `weight_scale_2` float32; all multiply. FP8: schemes.ScaledFp8.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentspec.errors import CheckpointError, UnsupportedModelError, cut_repr
from agentspec.models.quantised.compressed_tensors import refuse_kv_scheme
from agentspec.models.quantised.names import (
    canonical_module,
    expert_stack,
    mapping,
    name_list,
    refuse,
    refuse_unknown,
    require,
)
from agentspec.models.quantised.schemes import NVFP4_GROUP, Nvfp4, ScaledFp8
from agentspec.models.quantization import Scheme

METHOD = "modelopt"
FILE = "hf_quant_config.json"
_NVFP4 = Nvfp4(codes="weight", scale="weight_scale_2", input_scale="input_scale")
_SCHEMES: dict[str, Scheme] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": ScaledFp8(strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledFp8(strategy="channel"),
}
_MIXED = "MIXED_PRECISION"
_KNOWN = (
    "quant_method",
    "quant_algo",
    "group_size",
    "ignore",
    "exclude_modules",
    "quantized_layers",
    "config_groups",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "producer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOpt:
    """A config in this format, a Quantization."""

    is_official: ClassVar[bool] = False

    algorithm: str | None
    """Of every module that isn't excluded; None: `layers` says."""
    layers: Mapping[str, str] = field(hash=False)
    """Algorithms by canonical module."""
    excluded: frozenset[str]
    """Modules that are excluded together with those in them."""
    excluded_wildcards: tuple[str, ...]
    """The same, where `*` stands for any letters."""

    @property
    def _algorithms(self) -> set[str]:
        return {*self.layers.values()} if self.algorithm is None else {self.algorithm}

    @property
    def column_block(self) -> int:
        return max(_SCHEMES[algorithm].column_block for algorithm in self._algorithms)

    @property
    def notes(self) -> tuple[str, ...]:
        note = "made for 4-bit inputs (W4A4) and served with its weights alone: inputs are not rounded"
        return (note,) if "NVFP4" in self._algorithms else ()

    def scheme(self, module: str) -> Scheme | None:
        parts = module.split(".")
        if not self.excluded.isdisjoint(".".join(parts[: depth + 1]) for depth in range(len(parts))):
            return None
        if any(_wildcard(name).fullmatch(module) for name in self.excluded_wildcards):
            return None
        algorithm = self.algorithm
        if algorithm is None:
            algorithm = self.layers.get(module) or self.layers.get(expert_stack(module) or "")
        return None if algorithm is None else _SCHEMES[algorithm]


def _stem(name: str) -> str:
    """A listed module without the wildcard at its end: exporters write `mlp.gate*` for the router and what is in it,
    not for `mlp.gate_proj`."""
    return canonical_module(name).removesuffix("*").removesuffix(".")


@functools.lru_cache(maxsize=1024)
def _wildcard(stem: str) -> re.Pattern[str]:
    return re.compile(re.escape(stem).replace(r"\*", ".*") + r"(\..*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """What one of the files says; None: nothing."""

    algorithm: str | None
    layers: Mapping[str, str] | None
    excluded: frozenset[str] | None


def parse(
    quantization: Mapping[str, Any] | None, beside: Mapping[str, Any] | None, where: str, beside_path: str
) -> ModelOpt:
    """quantization: of config.json. beside: the content of FILE. Raises CheckpointError, or UnsupportedModelError that
    names field and value."""
    said = []
    if quantization is not None:
        said.append(_said(quantization, f"{where}: quant_method={METHOD!r}", excluded="ignore"))
    if beside is not None:
        here = f"{beside_path}: quantization"
        said.append(_said(mapping(beside, beside_path, "quantization"), here, excluded="exclude_modules"))
    both: dict[str, Any] = {}
    for name, words in _FIELDS.items():
        values = [value for one in said if (value := getattr(one, name)) is not None]
        if any(value != values[0] for value in values):
            raise CheckpointError(f"{where} and {beside_path} differ in the {words}")
        both[name] = values[0] if values else None
    algorithm, layers, excluded = both["algorithm"], both["layers"], both["excluded"] or ()
    if algorithm is None or (algorithm == _MIXED and not layers):
        missing = "quant_algo" if algorithm is None else "quantized_layers"
        raise CheckpointError(f"{where if beside is None else beside_path}: {missing} is missing")
    return ModelOpt(
        algorithm=None if algorithm == _MIXED else algorithm,
        layers=layers if algorithm == _MIXED else {},
        excluded=frozenset(stem for stem in excluded if "*" not in stem),
        excluded_wildcards=tuple(sorted(stem for stem in excluded if "*" in stem)),
    )


_FIELDS = {"algorithm": "quant_algo", "layers": "quantized layers", "excluded": "excluded modules"}


def _said(raw: Mapping[str, Any], where: str, *, excluded: str) -> _Said:
    refuse_unknown(raw, where, _KNOWN)
    refuse_kv_scheme(raw, where)
    require(raw, where, "kv_cache_quant_algo", ("FP8",), "FP8")
    algorithm = None
    if raw.get("quant_algo") is not None:
        algorithm = require(raw, where, "quant_algo", (*_SCHEMES, _MIXED))
    if raw.get("group_size") is not None:
        require(raw, where, "group_size", (NVFP4_GROUP,))
    names = [*name_list(raw, where, excluded), *name_list(raw, where, "exclude_modules")]
    layers = _listed(raw, where) or (_grouped(raw, where) if algorithm == _MIXED else None)
    return _Said(
        algorithm=algorithm,
        layers=layers,
        excluded=frozenset(map(_stem, names)) if names else None,
    )


def _listed(raw: Mapping[str, Any], where: str) -> dict[str, str] | None:
    found = {}
    for name, entry in mapping(raw, where, "quantized_layers").items():
        here = f"{where}: quantized_layers[{name!r}]"
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"{here} must be an object")
        refuse_unknown(entry, here, ("quant_algo", "group_size"))
        algorithm = require(entry, here, "quant_algo", tuple(_SCHEMES))
        if _SCHEMES[algorithm].bits == 4:
            require(entry, here, "group_size", (NVFP4_GROUP,), NVFP4_GROUP)
        found[canonical_module(name)] = algorithm
    return found or None


def _grouped(raw: Mapping[str, Any], where: str) -> dict[str, str] | None:
    """The layers of config.json's groups, where no list has them."""
    found: dict[str, str] = {}
    for key, group in mapping(raw, where, "config_groups").items():
        here = f"{where}: config_groups[{key!r}]"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{here} must be an object")
        weights = mapping(group, here, "weights")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (bits, kind) not in ((4, "float"), (8, "float")):
            raise refuse(here, "weights", dict(weights))
        if bits == 4:
            require(weights, here, "group_size", (NVFP4_GROUP,))
        inputs = mapping(group, here, "input_activations")
        algorithm = "FP8" if bits == 8 else "NVFP4" if inputs else "W4A16_NVFP4"
        for name in map(canonical_module, name_list(group, here, "targets")):
            if "." not in name and name != "lm_head":
                raise refuse(here, "targets", name, ("names of modules",))
            if found.setdefault(name, algorithm) != algorithm:
                raise UnsupportedModelError(
                    f"{where}: config_groups has several groups with {cut_repr(name)} as a target"
                )
    return found or None
