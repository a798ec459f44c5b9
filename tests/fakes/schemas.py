"""Random JSON schemas for grammars: every supported keyword, in the combinations that people write."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("city", "name", "a", "ab", "abc", "unit", "note", "größe", "x-1", "with space", "id")
PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    "[0-9]+",
    r"^(red|green)$",
    r"^[^<>]*$",
    r"^\S+$",
    r"^\w[\w.-]*@example\.org$",
    r"^.{1,4}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri", "duration", "ipv6")
TEXTS = (
    "",
    "a",
    "null",
    "None",
    "true",
    "12",
    "two words",
    'say "hi"',
    "a\\b",
    "line\nend",
    " lead",
    "<b>",
    "ü",
    "None ",
)


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    """A schema that some value validates against."""
    kinds = [_string, _string, _integer, _number, _boolean, _null, _enum, _const]
    if depth > 0:
        kinds += [_array, _array, _object, _object, _any_of, _one_of, _all_of, _types]
        if rng.random() < 0.05:
            return rng.choice([True, {}, {"description": "anything"}])
    schema = rng.choice(kinds)(rng, depth)
    if isinstance(schema, dict) and rng.random() < 0.2:
        schema["description"] = "what it is"
    return schema


def random_parameters(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Parameters of a tool: a closed object, maybe with definitions that refer to each other."""
    schema = _object(rng, depth, is_open=False)
    if rng.random() < 0.3:
        schema["$defs"] = {
            "leaf": random_schema(rng, 0),
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"$ref": "#/$defs/leaf"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            },
        }
        for name in rng.sample(("leaf", "tree"), rng.randint(1, 2)):
            schema["properties"][f"of {name}"] = {"$ref": f"#/$defs/{name}", "title": name}
            if rng.random() < 0.5:
                schema.setdefault("required", []).append(f"of {name}")
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.random()
    if kind < 0.2:
        schema["pattern"] = rng.choice(PATTERNS)
    elif kind < 0.35:
        schema["format"] = rng.choice(FORMATS)
    elif kind < 0.6:
        low = rng.choice((0, 1, 3, 12))
        if low:
            schema["minLength"] = low
        if rng.random() < 0.7:
            schema["maxLength"] = low + rng.choice((0, 1, 5, 40))
    return schema


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = rng.randint(-(10 ** rng.randint(0, 6)), 10 ** rng.randint(0, 6))
    if rng.random() < 0.4:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.4:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randint(2, 500)
    if len(schema) == 3 and rng.random() < 0.3:
        schema["multipleOf"] = 1 if schema.get("minimum") is None else rng.choice((1, 2))
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    if rng.random() < 0.4:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.4:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0.5, 1, 33.25))
    return schema


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _value(rng: random.Random) -> Any:
    return rng.choice([*TEXTS, 0, 1, -5, 2.5, True, False, None, [], [1, "a"], {"k": "v"}])


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.6:
        return {"type": "string", "enum": rng.sample(["red", "green", "blue", *TEXTS], rng.randint(1, 4))}
    return {"enum": ["plain", *(_value(rng) for _ in range(rng.randint(1, 3)))]}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, True, None, "two words"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    low = rng.choice((0, 0, 1, 2))
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth - 1)
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            schema["items"] = False
            low = min(low, len(schema["prefixItems"]))
    if low:
        schema["minItems"] = low
    if rng.random() < 0.4:
        schema["maxItems"] = low + rng.randint(0, 3)
    return schema


def _object(rng: random.Random, depth: int, *, is_open: bool | None = None) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.5]
    if is_open is None and rng.random() < 0.25:
        schema["additionalProperties"] = rng.choice([True, random_schema(rng, depth - 1)])
        if not names and rng.random() < 0.5:
            schema |= {"minProperties": 1, "maxProperties": rng.randint(1, 3)}
    elif rng.random() < 0.6:
        schema["additionalProperties"] = False
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"oneOf": [{"type": "null"}, _string(rng, 0), _integer(rng, 0)][rng.randint(0, 1) :]}
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": name}, "value": random_schema(rng, depth - 1)},
            "required": ["kind"],
        }
        for name in ("a", "b")
    ]
    return {"oneOf": kinds, "discriminator": {"propertyName": "kind"}}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 9}]}
    return {
        "type": "object",
        "properties": {"a": random_schema(rng, depth - 1), "b": True},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }


def _types(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.sample(["string", "null", "integer", "boolean", "array", "number"], 2)}
    if "string" in schema["type"] and rng.random() < 0.4:
        schema["maxLength"] = 5
    return schema
