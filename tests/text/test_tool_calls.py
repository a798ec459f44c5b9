"""Tables for both dialects: values, types, quoted markup, tolerated and rejected mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.text.events import ToolCallArguments
from agentspec.text.tool_calls import DIALECTS, CallStatus, ToolSchemas

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
            "properties": {
                "text": {"type": "string"},
                "maybe": {"type": ["string", "null"]},
                "whole": {"type": "integer"},
                "number": {"type": "number"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
                "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "point": {"$ref": "#/$defs/Point"},
                "loop": {"$ref": "#/$defs/Loop"},
                "either": {"type": ["integer", "string"]},
                "untyped": {"description": "anything"},
            },
        },
    },
}
SCHEMAS = ToolSchemas([TOOL])


def parse(dialect: str, text: str) -> tuple[dict[str, Any] | None, str]:
    """Return (arguments, rest), or (None, rest) when it is not a call. Pushes the trigger, then character by character,
    then final."""
    parser = DIALECTS[dialect].parser(0, SCHEMAS, lambda: "id")
    step = parser.push("<tool_call>")
    text = text.removeprefix("<tool_call>")
    written = ""
    for index, character in enumerate(text):
        step = parser.push(character)
        written += "".join(event.text for event in step.events if isinstance(event, ToolCallArguments))
        if step.status is not CallStatus.MORE:
            rest = step.rest + text[index + 1 :]
            break
    else:
        step = parser.push("", final=True)
        written += "".join(event.text for event in step.events if isinstance(event, ToolCallArguments))
        rest = step.rest
    if step.status is CallStatus.NOT_A_CALL:
        return None, rest
    assert parser.call.arguments == written
    return json.loads(written), rest


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "two words", "two words"),
        ("text", "12", "12"),
        ("text", "null", "null"),
        ("text", "", ""),
        ("text", "\n one newline at each end stays \n", "\n one newline at each end stays \n"),
        ("text", 'quotes " and \\ and é', 'quotes " and \\ and é'),
        ("text", "a </parameter> b", "a </parameter> b"),
        ("text", "a\n</parameter>\nb", "a\n</parameter>\nb"),
        (
            "text",
            "<tool_call>\n<function=g>\n</function> </tool_call",
            "<tool_call>\n<function=g>\n</function> </tool_call",
        ),
        (
            "text",
            "all of </tool_call>, </function>, <parameter=x> quoted",
            "all of </tool_call>, </function>, <parameter=x> quoted",
        ),
        ("maybe", "null", None),
        ("maybe", "nothing", "nothing"),
        ("whole", "12", 12),
        ("whole", " -3 ", -3),
        ("whole", "5.0", 5),
        ("whole", "5.5", "5.5"),
        ("whole", "five", "five"),
        ("whole", "true", "true"),
        ("number", "1.5", 1.5),
        ("number", "2", 2),
        ("number", "1e3", 1000.0),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("items", '[1, "a"]', [1, "a"]),
        ("items", "{}", "{}"),
        ("items", "[1,", "[1,"),
        ("optional", "null", None),
        ("optional", "None", None),
        ("optional", "7", 7),
        ("point", '{"x":\n 1}', {"x": 1}),
        ("loop", "1", "1"),
        ("either", "7", "7"),
        ("untyped", "true", "true"),
        ("unknown", "1", "1"),
    ],
)
def test_values_are_coerced_by_schema(key: str, value: str, expected: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert parse("qwen3_coder", text) == ({key: expected}, "")


XML: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "all on one line": (
        "<tool_call><function=f><parameter=text>a</parameter><parameter=whole>1</parameter></function></tool_call>",
        {"text": "a", "whole": 1},
        "",
    ),
    "text behind it": ("<tool_call>\n<function=f>\n</function>\n</tool_call>\nrest", {}, "\nrest"),
    "no parameter closer": (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>",
        {"text": "a"},
        "",
    ),
    "no function closer": (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</tool_call>",
        {"text": "a"},
        "",
    ),
    "no closers but the last": ("<tool_call>\n<function=f>\n<parameter=text>\na\n</tool_call>", {"text": "a"}, ""),
    "no call closer": ("<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>", {"text": "a"}, ""),
    "no closers at all": ("<tool_call>\n<function=f>\n<parameter=text>\na", {"text": "a"}, ""),
    "next call without a closer": ("<tool_call>\n<function=f>\n</function>\n<tool_call>", {}, "\n<tool_call>"),
    "next call behind an open value": (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</tool_call>\n<tool_call>",
        {"text": "a"},
        "\n<tool_call>",
    ),
    "stray text ends the call": (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\nb</function>",
        {"text": "a\n</parameter>\nb"},
        "",
    ),
    "stray text before any value": ("<tool_call>\n<function=f>\nb</function>", {}, "\nb</function>"),
    "same key twice": (
        "<tool_call><function=f><parameter=text>a</parameter><parameter=text>b</parameter></function></tool_call>",
        {"text": "b"},
        "",
    ),
    "no name": ("<tool_call>\n<function=>\n", None, "<tool_call>\n<function=>\n"),
    "name over lines": ("<tool_call>\n<function=f\n>", None, "<tool_call>\n<function=f\n>"),
    "JSON": ('<tool_call>\n{"name": "f"}', None, '<tool_call>\n{"name": "f"}'),
    "head without an end": ("<tool_call>\n<function=f", None, "<tool_call>\n<function=f"),
    "trigger alone": ("<tool_call>", None, "<tool_call>"),
}


@pytest.mark.parametrize("name", XML)
def test_xml_call_table(name: str) -> None:
    text, arguments, rest = XML[name]
    assert parse("qwen3_coder", text) == (arguments, rest)


DEEP = '{"a": ' * 120 + "1" + "}" * 120
HERMES: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "call": ('<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "é"}}\n</tool_call>x', {"b": 1, "a": "é"}, "x"),
    "closer inside a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "\\"</tool_call>"}}</tool_call>',
        {"a": '"</tool_call>'},
        "",
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', {}, ""),
    "no closer": ('<tool_call>{"name": "f", "arguments": {}}', {}, ""),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', None, '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments no object": (
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        None,
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
    ),
    "a list": ("<tool_call>[]</tool_call>", None, "<tool_call>[]</tool_call>"),
    "half a call": ('<tool_call>{"name": ', None, '<tool_call>{"name": '),
    "half a character": ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', {"a": "\ufffd"}, ""),
    "no number": (
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        None,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    ),
    "deep": (
        f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>',
        None,
        f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>',
    ),
}


@pytest.mark.parametrize("name", HERMES)
def test_hermes_call_table(name: str) -> None:
    text, arguments, rest = HERMES[name]
    assert parse("hermes", text) == (arguments, rest)


def test_string_values_are_streamed() -> None:
    parser = DIALECTS["qwen3_coder"].parser(0, SCHEMAS, lambda: "id")
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert [event.text for event in parser.push("line one\nline").events if isinstance(event, ToolCallArguments)] == [
        "line one\\nline"
    ]
