"""Grammars for tool calls in each dialect: the text after `<tool_call>` up to the end of the call.

The arguments of a bound call validate against the tool's schema once the dialect's parser has read them. A loose call
is only well-formed. Calls are written in the form that chat templates use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentspec.errors import RequestError
from agentspec.text.grammar_rules import Rules, any_of, free_text, literal, regex, text_without
from agentspec.text.json_schema import Schema, SchemaReader, is_same
from agentspec.text.schema_grammar import SchemaGrammar, Style, counted, object_members, string_lengths, string_pattern
from agentspec.text.schema_patterns import TEXT_IN_TAGS, all_but
from agentspec.text.tool_calls import ToolSchemas
from agentspec.text.tool_calls.protocol import CALL_CLOSE
from agentspec.text.tool_calls.schemas import coerce

_CLOSERS = ("</parameter>", "</function>", CALL_CLOSE)
"""Tags that may end a parameter for the parser of the XML form."""
BARRED_IN_XML = tuple(tag[:5] for tag in _CLOSERS)
"""Prefixes of the closing tags, which are barred in expressions over single characters. The only HTML tag with such a
prefix is <param>, and short words compile fast."""
_IN_XML = Style(barred=BARRED_IN_XML)
_PYTHON_WORDS = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}
"""Some templates show constants to the model in Python's spelling; the parser accepts it."""


def call_body(dialect: str, rules: Rules, tool: Mapping[str, Any], path: str, *, is_bound: bool) -> str:
    """Return an expression for the text after `<tool_call>`. `tool` is in OpenAI's form; `path` names it in errors.

    Raises RequestError when the schema of a bound call can't be enforced, or when a name can't be written."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    where = f"{path}.function.parameters"
    if dialect == "hermes":
        arguments = (
            _json_arguments(rules, parameters, where)
            if is_bound
            else _json_arguments(rules, {"additionalProperties": True}, where)
        )
        head = f'\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        return f"{literal(head)} {arguments} {literal('}' + chr(10) + CALL_CLOSE)}"
    _check_name(function["name"], f"{path}.function.name")
    body = _Parameters(rules, tool, where).all() if is_bound else _loose_parameters(rules)
    head, tail = f"\n<function={function['name']}>\n", f"</function>\n{CALL_CLOSE}"
    return f"{literal(head)} {body} {literal(tail)}"


def _json_arguments(rules: Rules, parameters: Mapping[str, Any], path: str) -> str:
    reader = SchemaReader(parameters, path)
    grammar = SchemaGrammar(rules, reader)
    kinds = _objects(reader.alternatives(parameters, path), parameters, path)
    return any_of([grammar.alternative(kind, path) for kind in kinds])


def _objects(alternatives: list[Schema], parameters: Mapping[str, Any], path: str) -> list[Schema]:
    """Check that every alternative of a tool's parameters is an object. An empty schema means no parameters."""
    found = [alternative if alternative else {"type": "object"} for alternative in alternatives]
    if not found or any(alternative.get("type") != "object" for alternative in found):
        raise RequestError(path, dict(parameters), "must describe an object")
    return found


def _check_name(name: str, path: str) -> None:
    if not name.strip() or name != name.strip() or any(character in name for character in "<>\n"):
        raise RequestError(
            path, name, "can't be written into a call and read back: no '<', '>', line end or space around it"
        )


def _loose_parameters(rules: Rules) -> str:
    value = rules.add(free_text(_CLOSERS))
    name = rules.add(regex(r"[^<>\n]+"))
    return rules.add(f'("<parameter=" {name} ">\\n" {value} "\\n</parameter>\\n")*')


class _Parameters:
    """The parameters of one tool in the XML form.

    The form has no types, so only texts are admitted that `coerce` reads back as the value that the schema asks for."""

    def __init__(self, rules: Rules, tool: Mapping[str, Any], path: str) -> None:
        function = tool.get("function", tool)
        self._rules = rules
        self._path = path
        self._tool = function["name"]
        self._schema = function.get("parameters") or {}
        self._declared = ToolSchemas([tool])
        self._reader = SchemaReader(self._schema, path)
        self._json = SchemaGrammar(rules, self._reader, _IN_XML)

    def all(self) -> str:
        kinds = _objects(self._reader.alternatives(self._schema, self._path), self._schema, self._path)
        if len(kinds) > 1:
            raise RequestError(
                self._path, self._schema, "has alternatives, which can't be enforced for a tool's parameters as a whole"
            )
        members, extra = object_members(kinds[0], self._path, self._reader)
        if extra is not False:
            raise RequestError(
                f"{self._path}.additionalProperties", extra, "can't be enforced for a tool's parameters: only false can"
            )
        num_required = sum(member.is_required for member in members)
        for key, bound in (("minProperties", num_required), ("maxProperties", len(members))):
            asked = kinds[0].get(key, bound)
            if asked > bound if key == "minProperties" else asked < bound:
                raise RequestError(f"{self._path}.{key}", asked, "can't be enforced for a tool's parameters")
        pieces = []
        for member in members:
            place = f"{self._path}.properties.{member.name}"
            _check_name(member.name, place)
            head, tail = literal(f"<parameter={member.name}>\n"), literal("\n</parameter>\n")
            piece = self._rules.add(f"{head} {self._value(member.name, member.schema, place)} {tail}")
            pieces.append(piece + ("" if member.is_required else "?"))
        return " ".join(pieces) or '""'

    def _value(self, name: str, schema: object, path: str) -> str:
        types = self._declared.types(self._tool, name)
        alternatives = self._reader.alternatives(schema, path)
        may_be_null = any(kind.get("type") == "null" or None in kind.get("enum", ()) for kind in alternatives)
        texts = [text for kind in alternatives for text in self._texts(kind, types, may_be_null, path)]
        if not texts:
            raise RequestError(path, schema, "has no value that could be written as a parameter and read back")
        return self._rules.add(" | ".join(texts))

    def _texts(self, kind: Schema, types: frozenset[str], may_be_null: bool, path: str) -> list[str]:
        """Return expressions for the values of one alternative that are read back unchanged."""
        if "enum" in kind:
            return self._chosen(kind["enum"], types, path)
        name = kind.get("type")
        if name is None or (name == "string" and (not types or "string" in types)):
            # Where the schema admits null, the word `null` is read as null, not as a string.
            is_read_back = name is None or "null" not in types or may_be_null
            return [self._string(kind, path)] if is_read_back else []
        if name not in types or ("string" in types and name != "null"):
            return []  # it would be read as a string
        return [self._json.alternative(kind, path), *_PYTHON_WORDS.get(name, ())]

    def _chosen(self, values: list[Any], types: frozenset[str], path: str) -> list[str]:
        """Return literals for the enum values that are read back unchanged."""
        found = []
        for value in values:
            texts = [value] if isinstance(value, str) else [self._json.constant(value, path)]
            if value is None or isinstance(value, bool):
                texts.append(str(value))
            found += [
                literal(text)
                for text in texts
                if is_same(coerce(text, types), value) and not any(tag in text for tag in _CLOSERS)
            ]
        return found

    def _string(self, kind: Schema, path: str) -> str:
        """Return an expression for a string without quotes or escapes."""
        if (pattern := string_pattern(self._rules, kind, TEXT_IN_TAGS, path)) is not None:
            return pattern
        low, high = string_lengths(kind, path)
        if low == 0 and high is None:
            return self._rules.add(free_text(_CLOSERS))
        return counted(self._rules, all_but("<"), text_without(BARRED_IN_XML, all_but), low, high)
