"""The parameter types that a request's tools declare, and the conversion of untyped text to these types.

Knows nothing of the dialects.
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
"""JSON Schema's keywords that constrain values of one type."""


_TYPES_OF = (
    (type(None), frozenset({"null"})),
    (bool, frozenset({"boolean"})),
    (int | float, frozenset({"integer", "number"})),
    (str, frozenset({"string"})),
    (dict, frozenset({"object"})),
    (object, frozenset({"array"})),
)
"""(type of a decoded JSON value, JSON Schema types): the first that matches. Bool comes before int, its base class."""


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
        """Return the JSON Schema types of a parameter; empty when the tool, the parameter or its type isn't
        declared."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root))


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema. Only the schemas of strict tools are validated, so invalid parts are ignored. Each
    reference is followed once."""
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
    """Return the types that a schema without `type` implies."""
    if "const" in schema:
        return set(type_of(schema["const"]))
    if isinstance(schema.get("enum"), list):
        return {name for value in schema["enum"] for name in type_of(value)}
    return {name for name, keywords in KEYWORDS_OF_TYPE.items() if name != "integer" and keywords & schema.keys()}


def is_plain_string(types: frozenset[str]) -> bool:
    """Whether the value is always its text: the schema says string, or nothing."""
    return not types or ("string" in types and "null" not in types)


def coerce(text: str, types: frozenset[str]) -> Any:
    """Convert `text` to a value of one of the types; the text itself when it is none of them.

    Python's spelling of booleans and null is accepted, since some templates show it to the model."""
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
    """Parse JSON text that a model wrote. A lone surrogate, which JSON can spell but no response can carry, becomes
    U+FFFD.

    Raises ValueError, also for numbers that JSON lacks (NaN, infinities) and for values nested too deep to be sent
    back, and RecursionError."""
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
    """Return the JSON Schema types of a decoded value."""
    if isinstance(value, float) and not value.is_integer():
        return frozenset({"number"})
    return next(names for kind, names in _TYPES_OF if isinstance(value, kind))
