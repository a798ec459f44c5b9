"""Normalise JSON schemas (draft 2020-12) into plain alternatives that a grammar can enforce exactly.

`alternatives` resolves references, merges the parts of a schema, and splits it by type. Every keyword is enforced,
ignored because it doesn't affect validity (annotations), or rejected by name: a grammar that skipped one would admit
invalid values. Knows nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from agentspec.errors import RequestError
from agentspec.text.tool_calls.schemas import KEYWORDS_OF_TYPE, implied_types, type_of

Schema = Mapping[str, Any]

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 20_000
_MAX_ALTERNATIVES = 128
_MAX_JOINS = 64
_MAX_READINGS = 50_000

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
    }
)
"""Keywords that don't affect validity. `discriminator` is OpenAPI's hint for the readers of a oneOf."""
_JOINED = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_CHOSEN = frozenset(("enum", "const"))
_BESIDE_CHOSEN = _CHOSEN | {"type", "minLength", "maxLength", "minItems", "maxItems"} | KEYWORDS_OF_TYPE["number"]
_KNOWN = frozenset({"type"} | ANNOTATIONS | _JOINED | _CHOSEN).union(*KEYWORDS_OF_TYPE.values())


def check_size(schema: object, field: str) -> None:
    """Raise RequestError when a schema (or a list of choices) is too large or nested too deep. Its own running time is
    bounded for any input."""
    level: list[object] = [schema]
    num_nodes = depth = 0
    while level:
        num_nodes += len(level)
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(field, "...", f"nests deeper than {MAX_SCHEMA_DEPTH} levels")
        if num_nodes > MAX_SCHEMA_NODES:
            raise RequestError(field, "...", f"has more than {MAX_SCHEMA_NODES} values")
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise RequestError(field, "...", "is not valid Unicode") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise RequestError(field, "...", f"is {num_bytes} bytes long; {MAX_SCHEMA_BYTES} are the limit")


class SchemaReader:
    """Reads the schemas of one document. References are resolved against its root."""

    def __init__(self, root: object, field: str) -> None:
        """Raises RequestError naming `field` when the root is not a valid schema, or too large."""
        check_size(root, field)
        if not isinstance(root, bool | dict):
            raise RequestError(field, root, "must be a JSON schema: an object, true or false")
        # Imported late: an engine's process and the command line have no schema to read while they start.
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError

        try:
            Draft202012Validator.check_schema(root)
        except SchemaError as error:
            place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            raise RequestError(
                field + place, error.instance, f"is not valid in a JSON schema: {error.message[:200]}"
            ) from None
        self._root = root
        self._field = field
        self._num_readings = 0
        self._validator = Draft202012Validator(root)

    def alternatives(self, schema: object, field: str, depth: int = 0) -> list[Schema]:
        """Return the alternatives of a schema: `{}` for any value, `{"enum": [...]}`, or one type with its own
        keywords.

        Empty when no value validates. Raises RequestError naming the keyword that can't be enforced."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        assert isinstance(schema, dict)
        if depth > _MAX_JOINS:
            raise RequestError(field, schema, "refers to itself without end, or joins too much")
        self._num_readings += 1
        if self._num_readings > _MAX_READINGS:
            raise RequestError(self._field, "...", "takes too much work to read")
        plain = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        for key in plain:
            if key not in _KNOWN and not key.startswith("x-"):
                raise RequestError(
                    f"{field}.{key}",
                    plain[key],
                    "can't be enforced: this keyword is not supported in a schema that binds the output",
                )
        for key in _JOINED:
            if key in plain:
                return self._expanded(plain, key, field, depth)
        if not plain:
            return [{}]
        if plain.keys() & _CHOSEN:
            return self._chosen(plain, field)
        return list(_by_type(plain, field))

    def _expanded(self, plain: dict[str, Any], key: str, field: str, depth: int) -> list[Schema]:
        """Resolve one of the keywords that contain or refer to other schemas."""
        rest = {name: value for name, value in plain.items() if name != key}
        if key == "$ref":
            return self.alternatives(join(self._target(plain[key], field), rest, field), field, depth + 1)
        if key == "allOf":
            for part in plain[key]:
                rest = join(rest, part, f"{field}.allOf")
            return self.alternatives(rest, field, depth + 1)
        options = [
            self.alternatives(join(rest, option, f"{field}.{key}[{index}]"), f"{field}.{key}[{index}]", depth + 1)
            for index, option in enumerate(plain[key])
        ]
        if key == "oneOf":
            self._check_disjoint(options, field)
        found = [alternative for option in options for alternative in option]
        if len(found) > _MAX_ALTERNATIVES:
            raise RequestError(f"{field}.{key}", "...", f"comes to more than {_MAX_ALTERNATIVES} alternatives")
        return found

    def _target(self, reference: str, field: str) -> object:
        target: Any = self._root
        if reference != "#" and not reference.startswith("#/"):
            raise RequestError(
                f"{field}.$ref", reference, "can't be followed: only references into the same schema (#/...) can"
            )
        for name in reference[2:].split("/") if reference != "#" else ():
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise RequestError(f"{field}.$ref", reference, "points to nothing")
        if not isinstance(target, bool | dict):
            raise RequestError(f"{field}.$ref", reference, "points to something that is no schema")
        return target

    def _chosen(self, plain: dict[str, Any], field: str) -> list[Schema]:
        """Return the values of `enum` and `const` that all other keywords allow."""
        for key in plain:
            if key not in _BESIDE_CHOSEN:
                raise RequestError(f"{field}.{key}", plain[key], "can't be enforced beside enum or const")
        values = list(plain.get("enum", [plain.get("const")]))
        if "const" in plain:
            values = [value for value in values if is_same(value, plain["const"])]
        validator = self._validator.evolve(schema={key: value for key, value in plain.items() if key not in _CHOSEN})
        values = [value for value in values if validator.is_valid(value)]
        return [{"enum": values}] if values else []

    def _check_disjoint(self, options: list[list[Schema]], field: str) -> None:
        for index, option in enumerate(options):
            for other in options[:index]:
                if not all(_are_disjoint(one, two) for one in option for two in other):
                    raise RequestError(
                        f"{field}.oneOf",
                        "...",
                        f"option {index} may overlap with one before it, which can't be enforced: use anyOf",
                    )


def _are_disjoint(one: Schema, two: Schema) -> bool:
    """Whether no value that a grammar writes for one alternative validates against the other. Grammars close objects
    unless the schema opens them."""
    if "enum" in one and "enum" in two:
        return not any(is_same(first, second) for first in one["enum"] for second in two["enum"])
    types, others = _types(one), _types(two)
    if not types or not others:
        return False
    if not types & others:
        return True
    if types != {"object"} or others != {"object"} or "enum" in one or "enum" in two:
        return False
    return (_excludes_a_required(one, two) and _excludes_a_required(two, one)) or _has_disjoint_property(one, two)


def _types(alternative: Schema) -> set[str]:
    """Return the types of an alternative. Integer and number count as both, since 1 equals 1.0."""
    found = (
        {name for value in alternative["enum"] for name in type_of(value)}
        if "enum" in alternative
        else {alternative.get("type", "")} - {""}
    )
    return found | {"integer", "number"} if found & {"integer", "number"} else found


def _excludes_a_required(one: Schema, two: Schema) -> bool:
    """Whether objects of the first can't have a property that the second requires."""
    is_closed = one.get("additionalProperties", False) is False
    return is_closed and not set(two.get("required", ())) <= {*one.get("properties", {}), *one.get("required", ())}


def _has_disjoint_property(one: Schema, two: Schema) -> bool:
    """Whether some property that both require has disjoint values."""
    for name in {*one.get("required", ())} & {*two.get("required", ())}:
        first, second = (each.get("properties", {}).get(name) for each in (one, two))
        if all(isinstance(each, dict) and each.keys() & _CHOSEN for each in (first, second)):
            values = [_chosen_values(each) for each in (first, second)]
            if not any(is_same(value, other) for value in values[0] for other in values[1]):
                return True
    return False


def _chosen_values(schema: Schema) -> list[Any]:
    return list(schema["enum"]) if "enum" in schema else [schema["const"]]


def is_same(one: Any, two: Any) -> bool:
    """Whether two values are equal as JSON: 1 equals 1.0 but not true."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(is_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(is_same(one[key], two[key]) for key in one)
    return bool(one == two) and isinstance(one, bool) == isinstance(two, bool)


def join(one: object, two: object, field: str) -> Any:
    """Return a schema for the values that validate against both. Raises RequestError when the keywords can't be
    combined."""
    if isinstance(one, bool) or isinstance(two, bool):
        return False if one is False or two is False else two if one is True else one
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    joined = {key: value for key, value in one.items() if key not in ANNOTATIONS}
    for first, second in ((one, two), (two, one)):
        for closer, affected in (
            ("additionalProperties", "properties"),
            ("unevaluatedProperties", "properties"),
            ("items", "prefixItems"),
        ):
            if closer in first and affected in second and second[affected] != first.get(affected):
                raise RequestError(
                    f"{field}.{closer}",
                    first[closer],
                    f"can't be enforced beside {affected} from another part of the schema",
                )
    for key, value in two.items():
        if key in ANNOTATIONS:
            continue
        if key not in joined or (joined[key] == value and type(joined[key]) is type(value)):
            joined[key] = value
        elif key == "required":
            joined[key] = [*joined[key], *(name for name in value if name not in joined[key])]
        elif key == "properties":
            joined[key] = {
                **joined[key],
                **{
                    name: join(joined[key].get(name, True), schema, f"{field}.{name}") for name, schema in value.items()
                },
            }
        elif key == "allOf":
            joined[key] = [*joined[key], *value]
        else:
            raise RequestError(
                f"{field}.{key}", value, f"can't be enforced beside another {key} that goes for the same value"
            )
    return joined


def _by_type(plain: dict[str, Any], field: str) -> Iterator[Schema]:
    declared = plain.get("type")
    types = (
        [declared]
        if isinstance(declared, str)
        else list(declared)
        if declared is not None
        else sorted(implied_types(plain))
    )
    if not types:
        yield {}
    if "number" in types and "integer" in types:
        types.remove("integer")
    for name in types:
        yield {"type": name, **{key: value for key, value in plain.items() if key in KEYWORDS_OF_TYPE[name]}}
