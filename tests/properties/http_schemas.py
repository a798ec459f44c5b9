"""Random JSON schemas, unusual ones included, and model outputs that call a tool with such a schema. Knows nothing
about HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

CALLS = {
    "qwen3_coder": "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n"
    "</function>\n</tool_call>",
    "hermes": '<tool_call>\n{{"name": {name_json}, "arguments": {{{key_json}: {value}}}}}\n</tool_call>',
}


def call_text(rng: random.Random, dialect: str, tools: list[dict[str, Any]]) -> str:
    """A model's output that calls one of the tools, correctly or not."""
    function = rng.choice(tools)["function"]
    properties = (
        function.get("parameters", {}).get("properties") if isinstance(function.get("parameters"), dict) else None
    )
    key = rng.choice([*(properties if isinstance(properties, dict) else ()), "a", "b"])
    value = rng.choice(
        [
            "1",
            "true",
            "null",
            "NaN",
            "-Infinity",
            "1e999",
            '"x"',
            "x",
            '{"a": [1, 2]}',
            "[" * 99 + "]" * 99,
            '["\\ud83d"]',
            "9" * 99,
            "</parameter>",
        ]
    )
    name = function["name"]
    return CALLS[dialect].format(name=name, key=key, value=value, name_json=json.dumps(name), key_json=json.dumps(key))


def random_schema(rng: random.Random, depth: int) -> Any:
    """A JSON schema, valid or not."""
    if rng.random() < 0.12:
        return rng.choice(ODD_SCHEMAS)
    kind = rng.choice(
        ["object", "object", "array", "string", "integer", "number", "boolean", "null", "enum", "anyOf"]
        if depth
        else ["string", "integer"]
    )
    if kind == "object":
        names = rng.sample(["a", "b", "c d", "é", "x" * 100, "</parameter>"], k=rng.randrange(4))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": names[: rng.randrange(4)],
            "additionalProperties": rng.random() < 0.5,
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.choice([1, 3])}
    if kind == "enum":
        return {"enum": rng.choice([["x", "y"], [1, None, True], [{}]])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_WIDE = {"$ref": "#/properties/a"}
ODD_SCHEMAS: tuple[Any, ...] = (
    {},
    {"type": "object", "properties": {"a": {"anyOf": [_WIDE] * 300}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "http://example.com/x"}}},
    {"type": "object", "properties": {"a": {"anyOf": 3}}},
    {"type": "object", "properties": {"a": {"type": [{}]}}},
    {"type": "object", "properties": {"a": {"type": {}, "enum": 5}}},
    {"type": "object", "properties": {"a": {"allOf": {"x": 1}}}},
    {"type": "object", "properties": {"a": 5, "b": None, "c": []}},
    {"type": "object", "properties": ["a"]},
    {"type": "object", "properties": {"a": {"const": 10**30}, "b": {"enum": [10**400]}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "((((a*)*)*)*)*$"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "[", "maxLength": -1, "minLength": 10**9}}},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 10**6}}},
    {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**7}}},
    {"type": "object", "properties": {"a": {"enum": [str(number) for number in range(3000)]}}},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": "x", "multipleOf": 0}}},
    {"type": "object", "properties": {str(number): {"type": "string"} for number in range(300)}},
    _nested(30),
    _nested(45),
    _nested(120),
)


def _object(schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def _wide(depth: int) -> Any:
    return _object({"anyOf": [_wide(depth - 1)] * 6}) if depth else {"type": "string"}


_DOUBLED = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
    for i in range(60)
}

EXPLODING: tuple[tuple[str, Any], ...] = (
    ("json", _nested(45)),
    ("json", _wide(5)),
    (
        "json",
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": _DOUBLED | {"d60": {"type": "null"}}},
    ),
    ("json", _object({"type": "string", "minLength": 10**6})),
    ("json", _object({"type": "array", "items": {"type": "null"}, "minItems": 10**7})),
    ("json", _object({"$ref": "#/properties/a"})),
    ("json", _object({"enum": [str(number) for number in range(100_000)]})),
    ("json", _object({"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"})),
    ("regex", "(((a{1,999}){1,999}){1,999})"),
    ("regex", "\\d{5000}"),
    ("regex", "(" * 500 + ")" * 500),
    ("choice", [str(number) for number in range(2000)]),
)
"""(field of structured_outputs, value): compiling any of these would take too much time or memory."""
