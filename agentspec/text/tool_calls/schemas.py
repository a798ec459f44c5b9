"""The types that a request's tools declare for their parameters, and untyped text turned into values of them.

Knows nothing of how calls are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_REF_DEPTH = 8


class ToolSchemas:
    """Parameter types of a request's tools, given in OpenAI's form (`{"type": "function", "function": {...}}`)."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            parameters = function.get("parameters")
            self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON Schema types that the parameter may have; empty when the tool, the parameter or its type isn't declared."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root, 0))


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_REF_DEPTH:
        return set()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            found |= _types(option, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth + 1)
    return found


def is_plain_string(types: frozenset[str]) -> bool:
    """The value is its text, whatever it reads: the schema says string, or says nothing."""
    return not types or ("string" in types and "null" not in types)


def coerce(text: str, types: frozenset[str]) -> Any:
    """The value that `text` writes, of one of the types; the text itself when it writes none of them.

    Booleans and null are also known by their Python names: some templates show them so to the model."""
    if is_plain_string(types):
        return text
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "string" in types:
        return text
    if "boolean" in types and word in ("true", "false", "True", "False"):
        return word in ("true", "True")
    try:
        value = json.loads(word)
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    return value if _type_of(value) & types else text


def _type_of(value: object) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, dict):
        return frozenset({"object"})
    if isinstance(value, list):
        return frozenset({"array"})
    return frozenset()
