"""Grammars for JSON that validates against a schema. They are sound but not complete: they admit a subset of the valid
values.

Properties come in the schema's order, objects are closed unless the schema opens them, numbers and whitespace are
bounded. Knows nothing of tool calls, except that strings may have to exclude some words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from agentspec.errors import RequestError
from agentspec.text.automata import TooLargeError, add_automaton
from agentspec.text.grammar_rules import Rules, any_of, literal, regex, text_without
from agentspec.text.json_schema import Schema, SchemaReader
from agentspec.text.number_patterns import (
    ANY_INTEGER,
    ANY_NUMBER,
    MAX_BOUNDED_NUMBER,
    MAX_INTEGER,
    integers_between,
    numbers_between,
)
from agentspec.text.schema_patterns import (
    ANY_TEXT,
    FORMATS,
    JSON_STRING,
    JSON_STRING_IN_TAGS,
    PatternError,
    Writing,
    all_but,
    none_of,
    read_pattern,
)

MAX_MIN_LENGTH = 100
"""Greatest minLength: counting characters one by one makes masks slow."""
_MAX_LENGTH_WRITTEN_OUT = 8
"""Up to this length, characters are written as a sequence instead of being counted."""
MAX_ITEMS_COUNTED = 1000
MAX_MULTIPLES = 1000
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

_CONTROLS = "".join(map(chr, range(0x20)))
_ESCAPE = r'\\(["\\/bfnrt]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'
"""Escapes in a JSON string, except lone surrogates, which are not characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Layout of JSON, and words that its strings must exclude."""

    space: str = '" "?'
    """Expression for the whitespace between tokens."""
    barred: tuple[str, ...] = ()
    """Words beginning with `<` that no string may contain, because they would be parsed as tags."""


PRETTY = Style(space='(" " | "\\n" " "{0,40})?')
"""The style of an answer's content: on one line, or indented."""


@dataclass(slots=True)
class SchemaGrammar:
    """Adds rules for the values of one schema document."""

    rules: Rules
    reader: SchemaReader
    style: Style = field(default_factory=Style)
    _names: dict[str, str] = field(default_factory=dict)

    def value(self, schema: object, path: str) -> str:
        """Return an expression for the JSON text of a value. Raises RequestError naming the keyword that can't be
        enforced."""
        key = json.dumps(schema)
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self.rules.reserve()
            alternatives = self.reader.alternatives(schema, path)
            if not alternatives:
                raise RequestError(path, schema, "admits no value at all")
            self.rules.fill(name, any_of([self.alternative(alternative, path) for alternative in alternatives]))
        return name

    def alternative(self, schema: Schema, path: str) -> str:
        """Return an expression for one of a schema's plain alternatives."""
        if "enum" in schema:
            return any_of([literal(self.constant(value, path)) for value in schema["enum"]])
        match schema.get("type"):
            case None:
                return self.anything()
            case "null":
                return '"null"'
            case "boolean":
                return '("true" | "false")'
            case "integer":
                return number_rule(self.rules, _integers(schema, path))
            case "number":
                return number_rule(self.rules, _numbers(schema, path))
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path)
            case _:
                return self._object(schema, path)

    def constant(self, value: object, path: str) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise RequestError(path, value, "is no number that JSON can hold") from None
        return text.replace("</", "<\\/") if self.style.barred else text

    def anything(self) -> str:
        key = "anything"
        if key not in self._names:
            name = self._names[key] = self.rules.reserve()
            space = self.style.space
            items = f'"[" {space} ({name} {space} ("," {space} {name} {space})*)? "]"'
            text, number = self._any_string(), number_rule(self.rules, ANY_NUMBER)
            self.rules.fill(
                name, " | ".join([text, number, '"true"', '"false"', '"null"', items, self._map(text, name, 0, None)])
            )
        return self._names[key]

    # Strings

    def _any_string(self) -> str:
        return self._quoted(f'{self._characters()}"')

    def _characters(self) -> str:
        """Return an expression for any number of characters between quotes."""
        return text_without(self.style.barred, json_character) if self.style.barred else json_character("") + "*"

    def _quoted(self, expression: str, options: str = "") -> str:
        """Return a string with an expression after the opening quote. The lookahead lets xgrammar decide most tokens
        without a trial."""
        body = self.rules.add(f'{regex(expression)} (=" "? [,}}\\]:\\n])', options=options)
        return f'"\\"" {body}'

    def _string(self, schema: Schema, path: str) -> str:
        if (
            pattern := string_pattern(
                self.rules, schema, JSON_STRING_IN_TAGS if self.style.barred else JSON_STRING, path
            )
        ) is not None:
            return f'"\\"" {pattern} "\\""'
        low, high = string_lengths(schema, path)
        if low == 0 and high is None:
            return self._any_string()
        one = json_character("<" if self.style.barred else "")
        return f'"\\"" {counted(self.rules, one, self._characters(), low, high)} "\\""'

    # Arrays

    def _array(self, schema: Schema, path: str) -> str:
        if schema.get("uniqueItems"):
            raise RequestError(f"{path}.uniqueItems", True, "can't be enforced")
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        for name, bound in (("minItems", low), ("maxItems", high)):
            if bound is not None and bound > MAX_ITEMS_COUNTED:
                raise RequestError(
                    f"{path}.{name}", bound, f"is more than the {MAX_ITEMS_COUNTED} items that can be counted"
                )
        first = [
            self.value(item, f"{path}.prefixItems[{index}]") for index, item in enumerate(schema.get("prefixItems", ()))
        ]
        rest = schema.get("items", True)
        if rest is False:
            high = len(first) if high is None else min(int(high), len(first))
        if high is not None and high < low:
            raise RequestError(f"{path}.minItems", low, f"is more than the {high} items that there may be")
        space = self.style.space
        if high == 0:
            return f'"[" {space} "]"'
        comma = f'{space} "," {space}'
        other = "" if rest is False or (high is not None and high <= len(first)) else self.value(rest, f"{path}.items")
        if not first:
            more = _times(f"({comma} {other})", max(low - 1, 0), None if high is None else int(high) - 1)
            items = f"{other} {more}"
        else:
            items = self._listed(first[: None if high is None else int(high)], other, comma, low, high)
        return f'"[" {space} {items if low else f"({items})?"} {space} "]"'

    def _listed(self, first: Sequence[str], other: str, comma: str, low: int, high: int | None) -> str:
        """Return an expression for a list of at least one item, whose first items have their own schemas."""
        tail = ""
        if other:
            tail = _times(
                f"({comma} {other})", max(low - len(first), 0), None if high is None else int(high) - len(first)
            )
        for index in range(len(first) - 1, 0, -1):
            tail = f"{comma} {first[index]} {tail}"
            tail = tail if index < low else f"({tail})?"
        return f"{first[0]} {tail}"

    # Objects

    def _object(self, schema: Schema, path: str) -> str:
        members, extra = object_members(schema, path, self.reader)
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if extra is not False and not members:
            if low > 1:
                raise RequestError(
                    f"{path}.minProperties", low, "can't be enforced where names are free: they may repeat"
                )
            return self._map(self._free_name(()), self.value(extra, f"{path}.additionalProperties"), low, high)
        num_required = sum(member.is_required for member in members)
        if low > num_required:
            raise RequestError(f"{path}.minProperties", low, "can't be enforced beyond the required properties")
        if high is not None and (extra is not False or high < len(members)):
            raise RequestError(f"{path}.maxProperties", high, "can't be enforced below the number of properties")
        space = self.style.space
        names = [literal(self.constant(member.name, path)) for member in members]
        values = [self.value(member.schema, f"{path}.properties.{member.name}") for member in members]
        pairs = [f'{name} {space} ":" {space} {value}' for name, value in zip(names, values, strict=True)]
        more = ""
        if extra is not False:
            name = self._free_name([member.name for member in members])
            more = f'{name} {space} ":" {space} {self.value(extra, f"{path}.additionalProperties")}'
        return f'"{{" {space} {self._members(members, pairs, more)} {space} "}}"'

    def _members(self, members: Sequence[Member], pairs: Sequence[str], more: str) -> str:
        """Return the pairs in order, with commas between those that are present. `more`: a pair that may be repeated at
        the end."""
        comma = f'{self.style.space} "," {self.style.space}'
        behind = f"({comma} {more})*" if more else '""'
        begins = f"({more} {behind})?" if more else '""'
        # From last to first. `behind`: the rest after a pair; `begins`: the rest when no pair came before.
        for member, pair in zip(reversed(members), reversed(pairs), strict=True):
            after = self.rules.add(f"{comma} {pair} {behind}")
            if member.is_required:
                begins, behind = self.rules.add(f"{pair} {behind}"), after
            else:
                begins, behind = self.rules.add(f"({pair} {behind}) | {begins}"), self.rules.add(f"{after} | {behind}")
        return begins

    def _map(self, name: str, value: str, low: int, high: int | None) -> str:
        space = self.style.space
        if high == 0:
            return f'"{{" {space} "}}"'
        pair = f'{name} {space} ":" {space} {value}'
        more = _times(f'({space} "," {space} {pair})', max(low - 1, 0), None if high is None else int(high) - 1)
        return f'"{{" {space} ({pair} {more}){"" if low else "?"} {space} "}}"'

    def _free_name(self, taken: Sequence[str]) -> str:
        """Return a property name that is not in `taken`. Escapes are excluded, so that it can't spell one of them."""
        if not taken:
            return self._any_string()
        name = add_automaton(self.rules, none_of(taken, JSON_STRING_IN_TAGS if self.style.barred else JSON_STRING))
        return f'"\\"" {name} "\\""'


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    schema: object
    is_required: bool


def object_members(schema: Schema, path: str, reader: SchemaReader) -> tuple[list[Member], object]:
    """Return an object's possible properties in order, and the schema of additional ones (False unless the schema opens
    the object).

    Raises RequestError when a required property admits no value."""
    extra = schema.get("additionalProperties", False)
    required = dict.fromkeys(schema.get("required", ()))
    properties: dict[str, object] = dict(schema.get("properties", {}))
    for name in required:
        if name not in properties:
            if schema.get("additionalProperties", True) is False:
                raise RequestError(f"{path}.required", name, "is not among the properties of a closed object")
            properties[name] = schema.get("additionalProperties", True)
    members = []
    for name, value in properties.items():
        if reader.alternatives(value, f"{path}.properties.{name}"):
            members.append(Member(name, value, name in required))
        elif name in required:
            raise RequestError(f"{path}.properties.{name}", value, "admits no value at all, but is required")
    return members, extra


def counted(rules: Rules, one: str, many: str, low: int, high: int | None) -> str:
    """Return a rule for low to high characters. `one`, `many`: regular expressions for one character and for any
    number.

    The upper bound counts written characters, so an escape counts more than the character that it stands for."""
    if high == 0:
        return '""'
    if low <= _MAX_LENGTH_WRITTEN_OUT:
        return rules.add(regex(one * low + many), options="" if high is None else f"[max_chars={high}]")
    first = f"{rules.add(regex(one))}{{{low}}}"
    return (
        first
        if high == low
        else f"{first} {rules.add(regex(many), options='' if high is None else f'[max_chars={high - low}]')}"
    )


def string_pattern(rules: Rules, schema: Schema, writing: Writing, path: str) -> str | None:
    """Return a rule for a string's `pattern` or `format`; None when it has neither."""
    bound = [key for key in ("pattern", "format") if key in schema]
    if not bound:
        return None
    key, value = bound[0], schema[bound[0]]
    for other in ("format", "minLength", "maxLength"):
        if other in schema and other != key:
            raise RequestError(f"{path}.{other}", schema[other], f"can't be enforced together with {key}")
    if key == "format" and value not in FORMATS:
        raise RequestError(f"{path}.format", value, f"can't be enforced (known are {', '.join(sorted(FORMATS))})")
    try:
        return add_automaton(rules, read_pattern(value if key == "pattern" else FORMATS[value], writing))
    except (PatternError, TooLargeError) as error:
        raise RequestError(f"{path}.{key}", value, str(error)) from None


def number_rule(rules: Rules, expression: str) -> str:
    return add_automaton(rules, read_pattern(expression, ANY_TEXT, is_whole=True))


def string_lengths(schema: Schema, path: str) -> tuple[int, int | None]:
    low = int(schema.get("minLength", 0))
    high = None if "maxLength" not in schema else int(schema["maxLength"])
    if low > MAX_MIN_LENGTH:
        raise RequestError(
            f"{path}.minLength", low, f"is more than the {MAX_MIN_LENGTH} characters that can be counted"
        )
    if high is not None and high < low:
        raise RequestError(f"{path}.maxLength", high, f"is less than minLength={low}")
    return low, None if high is not None and high >= 2**31 else high


def _integers(schema: Schema, path: str) -> str:
    least, most, above_least, below_most = _bounds(schema, Decimal(MAX_INTEGER), path)
    low = int(least.to_integral_value("ROUND_CEILING")) + (above_least and _is_whole(least))
    high = int(most.to_integral_value("ROUND_FLOOR")) - (below_most and _is_whole(most))
    multiple = schema.get("multipleOf", 1)
    if low > high:
        raise RequestError(path, dict(schema), "admits no integer")
    if multiple != 1:
        if not isinstance(multiple, int) or (high - low) // multiple > MAX_MULTIPLES:
            raise RequestError(
                f"{path}.multipleOf",
                multiple,
                f"can be enforced only between bounds, for at most {MAX_MULTIPLES} whole multiples",
            )
        found = [str(number) for number in range(-(-low // multiple) * multiple, high + 1, multiple)]
        if not found:
            raise RequestError(path, dict(schema), "admits no integer")
        return "(" + "|".join(found) + ")"
    return ANY_INTEGER if (low, high) == (-MAX_INTEGER, MAX_INTEGER) else integers_between(low, high)


def _numbers(schema: Schema, path: str) -> str:
    if "multipleOf" in schema:
        raise RequestError(f"{path}.multipleOf", schema["multipleOf"], "can be enforced only for integers")
    limit = Decimal(MAX_BOUNDED_NUMBER)
    if schema.keys() == {"type"}:
        return ANY_NUMBER
    low, high, above_low, below_high = _bounds(schema, limit, path)
    is_empty = low > high or (low == high and (above_low or below_high)) or low > limit or high < -limit
    found = None if is_empty else numbers_between(low, high, above_low=above_low, below_high=below_high)
    if found is None:
        raise RequestError(path, dict(schema), "admits no number that can be written plainly")
    return found


def _bounds(schema: Schema, limit: Decimal, path: str) -> tuple[Decimal, Decimal, bool, bool]:
    """Return (low, high, whether low is excluded, whether high is excluded), within -limit..limit inclusive unless the
    schema's own bounds lie outside."""
    low, high, above_low, below_high = -limit, limit, False, False
    bounds = {key: _decimal(schema[key], f"{path}.{key}") for key in _BOUNDS if key in schema}
    for key, is_strict in (("minimum", False), ("exclusiveMinimum", True)):
        if key in bounds and (bounds[key], is_strict) >= (low, above_low):
            low, above_low = bounds[key], is_strict
    for key, is_strict in (("maximum", False), ("exclusiveMaximum", True)):
        if key in bounds and (-bounds[key], is_strict) >= (-high, below_high):
            high, below_high = bounds[key], is_strict
    return low, high, above_low, below_high


def _is_whole(number: Decimal) -> bool:
    """Whether a number is an integer. `% 1` would fail for numbers with more digits than the decimal context's
    precision."""
    return number == number.to_integral_value()


def _decimal(value: Any, path: str) -> Decimal:
    if isinstance(value, float) and abs(value) > 1e300:
        raise RequestError(path, value, "is no bound that can be enforced")
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _times(expression: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{expression}*" if low == 0 else f"{expression}{{{low},}}"
    return '""' if high == 0 else f"{expression}{{{low},{high}}}"


def json_character(other_than: str) -> str:
    """Return a regular expression for one character of a JSON string, excluding `other_than`."""
    return f"({all_but(_CONTROLS + chr(0x22) + chr(0x5C) + other_than)}|{_ESCAPE})"
