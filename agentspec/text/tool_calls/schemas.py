"""The types that a request's tools declare for their parameters, and untyped text turned into values of them.

Knows nothing of how calls are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.files import MAX_NESTING, is_too_deep

KEYWORDS_OF_TYPE: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "unevaluatedProperties")
    ),
}
"""JSON Schema's keywords that say something about values of one type."""


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
        """JSON Schema types that the parameter may have; empty when the tool, the parameter or its type isn't
        declared."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root))


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Nobody has checked this schema, unless its tool is strict: what makes no sense in it is passed over. Follows each
    reference once."""
    found: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type")
        if isinstance(declared, str | list):
            found |= {name for name in ([declared] if isinstance(declared, str) else declared) if isinstance(name, str)}
        else:
            found |= implied_types(part)
        for options in (part.get("anyOf"), part.get("oneOf"), part.get("allOf")):
            waiting += options if isinstance(options, list) else ()
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and reference not in followed:
            followed.add(reference)
            waiting.append(_target(reference, root))
    return found


def _target(reference: str, root: Mapping[str, Any]) -> object:
    target: Any = root
    for name in reference[2:].split("/"):
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def implied_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema without `type` speaks of."""
    if "const" in schema:
        return set(type_of(schema["const"]))
    if isinstance(schema.get("enum"), list):
        return {name for value in schema["enum"] for name in type_of(value)}
    return {name for name, keywords in KEYWORDS_OF_TYPE.items() if name != "integer" and keywords & schema.keys()}


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
        value = read_json(word)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    return value if type_of(value) & types else text


def read_json(text: str) -> Any:
    """The value of JSON text that a model wrote. A lone surrogate, which JSON can spell and no answer can hold, becomes
    U+FFFD.

    Raises ValueError, for numbers that JSON doesn't have (NaN, infinities) and for what no client could send back (too
    deep), too, and RecursionError."""
    value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    if is_too_deep(value):
        raise ValueError(f"nested deeper than {MAX_NESTING} levels")
    if "\\u" in text:
        value = json.loads(
            json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number in JSON")
    return value


def type_of(value: object) -> frozenset[str]:
    """JSON Schema's types of a decoded value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    if isinstance(value, dict):
        return frozenset({"object"})
    return frozenset({"array"})
