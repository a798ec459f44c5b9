"""Finds the format that a checkpoint's config names, and lets its module read the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.quantised import awq, compressed_tensors, gptq, modelopt
from agentspec.models.quantised.names import refuse
from agentspec.models.quantization import QUANTIZATION_FIELDS, Quantization, parse_fp8

Parse = Callable[[Mapping[str, Any], str], Quantization]

_METHODS: dict[str, Parse] = {
    str(QUANTIZATION_FIELDS["quant_method"]): parse_fp8,
    awq.METHOD: awq.parse,
    compressed_tensors.METHOD: compressed_tensors.parse,
    gptq.METHOD: gptq.parse,
}
FILE = modelopt.FILE
"""A file beside config.json that may have the quantisation too."""


def parse_quantization(
    raw: Mapping[str, Any],
    text: Mapping[str, Any],
    where: str,
    beside: Mapping[str, Any] | None = None,
    beside_path: str = FILE,
) -> Quantization | None:
    """The quantisation of a config (`raw`) or its text part; None if there is none. beside: the content of FILE. Raises
    CheckpointError, or UnsupportedModelError that names field and value."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for label, holder in (("quantization_config", raw), ("text_config.quantization_config", text)):
        quantization = holder.get("quantization_config")
        if quantization is None or (found and quantization is found[0][1]):
            continue
        if not isinstance(quantization, Mapping):
            raise CheckpointError(f"{where}: {label} must be an object")
        found.append((f"{where}: {label}", quantization))
    parsed = [_parse(quantization, label, beside, beside_path) for label, quantization in found]
    if any(one != parsed[0] for one in parsed):
        raise CheckpointError(f"{where}: quantization_config and text_config.quantization_config differ")
    if not parsed and beside is not None:
        return modelopt.parse(None, beside, where, beside_path)
    return parsed[0] if parsed else None


def _parse(
    quantization: Mapping[str, Any], where: str, beside: Mapping[str, Any] | None, beside_path: str
) -> Quantization:
    method = quantization.get("quant_method")
    if method == modelopt.METHOD:
        return modelopt.parse(quantization, beside, where, beside_path)
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise refuse(where, "quant_method", method, (*_METHODS, modelopt.METHOD))
    if beside is not None:
        raise UnsupportedModelError(
            f"{where}: quant_method={method!r} beside {beside_path}, which is of another format"
        )
    return parse(quantization, where)
