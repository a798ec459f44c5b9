"""Output constraints: the texts that a turn's grammar admits, and the errors for constraints that can't be enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.text.constraints import OutputForm, ToolDemand, turn_grammar
from agentspec.text.tool_calls import DIALECTS
from agentspec.wire import Grammar
from tests.fakes.grammar_walk import Admission

QWEN, HERMES = DIALECTS["qwen3_coder"], DIALECTS["hermes"]


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def qwen_call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission()


def grammar_of(
    tools: list[dict[str, Any]] | None,
    form: OutputForm | None = None,
    *,
    dialect: Any = QWEN,
    reasoning_open: bool = False,
    **demand: Any,
) -> Grammar:
    grammar = turn_grammar(tools, ToolDemand(**demand), form, dialect=dialect, reasoning_open=reasoning_open)
    assert grammar is not None
    return grammar


def schema_form(schema: Any) -> OutputForm:
    return OutputForm(kind="json_schema", source=schema, field="form")


ORDER = tool("order", closed(item={"type": "string"}, count={"type": "integer", "minimum": 1, "maximum": 20}))
LOOSE = tool("search", {"type": "object", "properties": {"query": {"type": "string"}}}, strict=False)
GOOD = qwen_call("order", item="tea", count="2")
SEARCH = qwen_call("search", anything="at all", query="tea")


@pytest.mark.parametrize(
    ("tools", "demand"),
    [(None, {}), ([LOOSE], {}), ([ORDER], {"choice": "none"}), (None, {"choice": "none"})],
)
def test_unconstrained_turn_has_no_grammar(tools: Any, demand: dict[str, Any]) -> None:
    assert turn_grammar(tools, ToolDemand(**demand), None, dialect=QWEN, reasoning_open=True) is None


@pytest.mark.parametrize(
    ("demand", "good", "bad"),
    [
        (
            {},
            ["", "Hello < there.", GOOD, f"I look.\n\n{GOOD}\n{SEARCH}", f"{GOOD} and <b>so</b> on"],
            [
                qwen_call("order", item="tea", count="0"),
                qwen_call("order", item="tea"),
                qwen_call("other"),
                "<function=order>",
                f"{GOOD[:40]}",
            ],
        ),
        ({"parallel": False}, ["Hello", f"Hello {SEARCH}", GOOD], [f"{GOOD}\n{GOOD}", f"{GOOD} so"]),
        (
            {"choice": "required"},
            [GOOD, f"{GOOD}\n{qwen_call('search', query='x')}"],
            ["", "Hello", f"Hello {GOOD}", f"{GOOD} so"],
        ),
        ({"choice": "required", "name": "order"}, [GOOD, f"{GOOD}\n{GOOD}"], [SEARCH]),
        ({"choice": "required", "name": "order", "parallel": False}, [GOOD], [f"{GOOD}\n{GOOD}"]),
    ],
)
def test_tool_choice_admits_the_allowed_calls(
    admission: Admission, demand: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of([ORDER, LOOSE], **demand)
    assert {text: admission.admitted(grammar, text) for text in good} == dict.fromkeys(good, "whole")
    assert [text for text in bad if admission.admitted(grammar, text) == "whole"] == []


def test_reasoning_is_unconstrained_and_ended_by_a_call(admission: Admission) -> None:
    thought = 'Well: {"a": <function=order> <think> \n\n'
    auto, required = (grammar_of([ORDER], reasoning_open=True, choice=choice) for choice in ("auto", "required"))
    for text in (
        f"{thought}</think>\n\nHello {GOOD}",
        f"{thought}{GOOD}",
        f"</think>{GOOD}",
        f"{thought}</think>\n\n{GOOD}\n{GOOD}",
    ):
        assert admission.admitted(auto, text) == "whole"
    assert admission.admitted(required, f"{thought}</think>\n\n{GOOD}") == "whole"
    assert admission.admitted(required, f"{thought}{GOOD}") == "whole"
    for grammar in (auto, required):
        assert admission.admitted(grammar, thought) == thought, "a turn can't end inside its reasoning"
    assert admission.admitted(required, f"{thought}</think>\n\nHello") == f"{thought}</think>\n\n"
    assert admission.admitted(auto, thought + qwen_call("order", item="x", count="99")).endswith("<parameter=count>\n9")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string"},
            ["", "12", "null", 'say "hi"', "a\n\nb ", "<b>x</b> < y", "</param"],
            ["a</parameter>b", "</function>", "x</tool_call>"],
        ),
        ({"type": "string", "maxLength": 3}, ["", "abc", "<é>", "</p"], ["abcd"]),
        ({"type": "string", "minLength": 2, "maxLength": 30}, ["ab", "x <i>y</i>"], ["", "a", "x" * 31]),
        ({"type": "string", "minLength": 20}, ["x" * 20, "x" * 300], ["x" * 19]),
        ({"type": "string", "pattern": "^[^a]{2}$"}, ["bc", "é\n"], ["ab", "b", "<b"]),
        ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["", "ac"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "today"]),
        ({"type": "string", "enum": ["red", "dark red"]}, ["red", "dark red"], ["dark", "blue"]),
        ({"type": ["string", "null"], "maxLength": 6}, ["null", "None", "no", ""], ["nothing"]),
        ({"enum": ["a", 1, None, True, "null"]}, ["a", "null", "None"], ["1", "true"]),
        ({"enum": [1, True, None, 2.5]}, ["1", "true", "True", "None", "2.5"], ["2", "false"]),
        ({"type": "boolean"}, ["true", "True", "False"], ["yes", '"true"']),
        ({"type": "integer"}, ["0", "-12"], ["01", "-0", "1.0", "1e3", "null", "9" * 19]),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
            ["0.1", "1", "1.50", "1.4999"],
            ["0", "0.0", "1.51", "2", "-1", "1e0"],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ["x", "true"]),
        ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "pattern": "^[a-z]+$"}]}, ["abc"], ["7"]),
        (
            {"type": "array", "items": {"type": "string"}},
            ["[]", '["a", "<b>x</b>"]', '["<\\/parameter>"]'],
            ['["</parameter>"]', '"a"', "[1]"],
        ),
        (
            closed(a=closed(b={"type": "null"})),
            ['{"a": {"b": null}}'],
            ["{}", '{"a": {}}', '{"a": {"b": null, "c": 1}}'],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"x": 1, "y": 2}'], ['{"x": "1"}']),
        (True, ["anything", ""], []),
    ],
)
def test_values_in_the_xml_form(admission: Admission, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(
        [tool("f", {"type": "object", "properties": {"v": schema}, "required": ["v"]})], choice="required"
    )
    texts = {value: qwen_call("f", v=value) for value in (*good, *bad)}
    assert [value for value in good if admission.admitted(grammar, texts[value]) != "whole"] == []
    assert [value for value in bad if admission.admitted(grammar, texts[value]) == "whole"] == []


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, closed()])
def test_call_without_arguments_matches_the_template_form(admission: Admission, parameters: Any) -> None:
    grammar = grammar_of([tool("f", parameters)], choice="required")
    assert admission.admitted(grammar, "<tool_call>\n<function=f>\n</function>\n</tool_call>") == "whole"
    assert admission.admitted(grammar, "<tool_call>\n<function=f>\n\n</function>\n</tool_call>") != "whole"
    assert (
        admission.admitted(
            grammar_of([tool("f", parameters)], dialect=HERMES, choice="required"), hermes_call("f", "{}")
        )
        == "whole"
    )


def test_calls_as_json(admission: Admission) -> None:
    grammar = grammar_of([ORDER, LOOSE], dialect=HERMES)
    for text in (
        hermes_call("order", '{"item": "</tool_call> \\"", "count": 20}'),
        hermes_call("search", '{"x": [{}, null]}'),
        "Hello",
    ):
        assert admission.admitted(grammar, text) == "whole"
    for text in (
        hermes_call("order", '{"count": 20, "item": "x"}'),
        hermes_call("order", '{"item": "x", "count": 21}'),
        hermes_call("x", "{}"),
    ):
        assert admission.admitted(grammar, text) != "whole"


def test_required_call_follows_its_schema_if_enforceable(admission: Admission) -> None:
    plain = tool("f", closed(n={"type": "integer"}), strict=False)
    beyond = tool("g", {"type": "object", "properties": {"n": {"not": {}}}}, strict=False)
    grammar = grammar_of([plain, beyond], choice="required")
    assert admission.admitted(grammar, qwen_call("f", n="1")) == "whole"
    assert admission.admitted(grammar, qwen_call("f", n="x")) != "whole"
    assert admission.admitted(grammar, qwen_call("g", n="x")) == "whole"


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            OutputForm(kind="json_object", source=None, field="form"),
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1.5e3\n}'],
            ["[]", "1", '{"a"}'],
        ),
        (
            schema_form(closed(a={"type": "integer"})),
            ['{"a": 1}', '{\n  "a": 1\n}', '{"a":1}'],
            ['{"a": 1, "b": 2}', "{}", '{"a": 1}\n'],
        ),
        (schema_form({"type": "string"}), ['"</think> <tool_call>"', '"\\u00e9"'], ['"\\ud800"', "a"]),
        (OutputForm(kind="regex", source="^[a-c]+$", field="form"), ["abc"], ["", "d"]),
        (OutputForm(kind="ebnf", source='root ::= x x\nx ::= "a" | "b"', field="form"), ["ab"], ["a"]),
        (OutputForm(kind="choice", source=["yes", "yes, sir"], field="form"), ["yes", "yes, sir"], ["", "no"]),
    ],
)
@pytest.mark.parametrize("reasoning_open", [False, True])
def test_forms(admission: Admission, form: OutputForm, good: list[str], bad: list[str], reasoning_open: bool) -> None:
    grammar = grammar_of(None, form, dialect=None, reasoning_open=reasoning_open)
    lead = "so <tool_call> </thin</think>\n\n" if reasoning_open else ""
    assert [text for text in good if admission.admitted(grammar, lead + text) != "whole"] == []
    assert [text for text in bad if admission.admitted(grammar, lead + text) == "whole"] == []


def test_output_form_combined_with_tools(admission: Admission) -> None:
    form = schema_form(closed(answer={"type": "string"}))
    grammar = grammar_of([ORDER], form, reasoning_open=True)
    for text in ('hm</think>\n\n{"answer": "<tool_call>"}', f"hm</think>\n\n{GOOD}\n{GOOD}", f"hm {GOOD}"):
        assert admission.admitted(grammar, text) == "whole"
    assert admission.admitted(grammar, "hm</think>\n\nHello") == "hm</think>\n\n"
    assert admission.admitted(grammar_of([ORDER], form, choice="required"), GOOD) == "whole"
    assert admission.admitted(grammar_of([ORDER], form, choice="none"), '{"answer": "x"}') == "whole"


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"not": {}}, "not"),
    ({"if": {}, "then": {}, "else": {}}, "if"),
    ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
    ({"type": "object", "propertyNames": {}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {}}, "dependentSchemas"),
    ({"type": "object", "dependencies": {}}, "dependencies"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 0}, "maxProperties"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "minContains": 1}, "minContains"),
    ({"type": "array", "maxContains": 1}, "maxContains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "array", "maxItems": 10_000}, "maxItems"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 7}, "multipleOf"),
    ({"type": "string", "format": "regex"}, "format"),
    ({"type": "string", "pattern": "a(?!b)"}, "pattern"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "minLength"),
    ({"type": "string", "pattern": "a", "format": "date"}, "format"),
    ({"type": "string", "minLength": 1000}, "minLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
    ({"enum": ["a"], "pattern": "a"}, "pattern"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [closed(a={}), {"type": "object", "properties": {"a": {}, "b": {}}}]}, "oneOf"),
    ({"allOf": [{"type": "integer", "minimum": 1}, {"minimum": 2}]}, "minimum"),
    ({"allOf": [closed(a={}), {"properties": {"b": {}}}]}, "additionalProperties"),
    ({"$ref": "other.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"$anchor": "a"}, "$anchor"),
    ({"$recursiveRef": "#"}, "$recursiveRef"),
    ({"type": "string", "minLenght": 2}, "minLenght"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "strin"}, "type"),
    ({"type": "integer", "minimum": "1"}, "minimum"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
    (False, ""),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("schema", "keyword"), UNSUPPORTED)
def test_unenforceable_keyword_error_names_the_field(schema: Any, keyword: str) -> None:
    tail = f".{keyword}" if keyword else ""
    with pytest.raises(RequestError) as caught:
        grammar_of(None, schema_form({"type": "object", "properties": {"v": schema}, "required": ["v"]}), dialect=None)
    assert caught.value.field.startswith("form.properties.v")
    assert caught.value.field.endswith(tail)
    for dialect in (QWEN, HERMES):
        with pytest.raises(RequestError) as caught:
            grammar_of(
                [LOOSE, tool("f", {"type": "object", "properties": {"v": schema}, "required": ["v"]})], dialect=dialect
            )
        assert caught.value.field.startswith("tools[1].function.parameters.properties.v")
        assert caught.value.field.endswith(tail)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "string",
            "description": "d",
            "title": "t",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "x-order": 3,
            "$comment": "c",
        },
        {
            "type": "string",
            "readOnly": True,
            "writeOnly": False,
            "contentEncoding": "base64",
            "contentMediaType": "text/plain",
            "contentSchema": {},
        },
        {"type": "array", "uniqueItems": False, "items": {"type": "string"}},
        {"allOf": [{"$ref": "#/properties/w"}], "description": "as pydantic writes it"},
        {"type": "object", "unevaluatedProperties": False},
        {
            "oneOf": [closed(kind={"const": "a"}), closed(kind={"const": "b"})],
            "discriminator": {"propertyName": "kind"},
        },
        {"oneOf": [closed(a={}), closed(b={})]},
    ],
)
def test_annotations_and_enforceable_keywords_are_accepted(schema: Any) -> None:
    grammar_of([tool("f", {"type": "object", "properties": {"v": schema, "w": {"type": "string"}}})])


@pytest.mark.parametrize(
    ("tools", "demand", "form", "field"),
    [
        (None, {"choice": "required"}, None, "tool_choice"),
        ([ORDER], {"choice": "required", "name": "other"}, None, "tool_choice"),
        ([ORDER, ORDER], {}, None, "tools[1].function.name"),
        ([tool("a>b")], {}, None, "tools[0].function.name"),
        ([tool("f", closed(**{"a<b": {}}))], {}, None, "tools[0].function.parameters.properties.a<b"),
        ([tool("f", {"type": "array"})], {}, None, "tools[0].function.parameters"),
        ([tool("f", {"anyOf": [closed(a={}), closed(b={})]})], {}, None, "tools[0].function.parameters"),
        (
            [tool("f", {"type": "object", "additionalProperties": True})],
            {},
            None,
            "tools[0].function.parameters.additionalProperties",
        ),
        ([ORDER], {}, OutputForm(kind="ebnf", source="root ::= [a]", field="form"), "form"),
        (None, {}, OutputForm(kind="choice", source=[], field="form"), "form"),
        (None, {}, OutputForm(kind="choice", source=["a", 1], field="form"), "form"),
        (None, {}, OutputForm(kind="choice", source=[str(number) for number in range(1001)], field="form"), "form"),
        (None, {}, OutputForm(kind="choice", source=["\ud55c" * 100] * 900, field="form"), "form"),
        (None, {}, OutputForm(kind="choice", source=["\ud800"], field="form"), "form"),
        (None, {}, OutputForm(kind="regex", source=7, field="form"), "form"),
        (None, {}, OutputForm(kind="regex", source="(", field="form"), "form"),
        (None, {}, schema_form("text"), "form"),
    ],
)
def test_unsatisfiable_constraints_are_rejected(
    tools: Any, demand: dict[str, Any], form: OutputForm | None, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(tools, form, **demand)
    assert caught.value.field == field


def test_template_without_call_dialect() -> None:
    for tools, demand in (([ORDER], ToolDemand()), ([LOOSE], ToolDemand(choice="required"))):
        with pytest.raises(RequestError, match="teaches no form of calls"):
            turn_grammar(tools, demand, None, dialect=None, reasoning_open=False)


def test_grammar_is_shared_by_the_turns_of_a_conversation() -> None:
    first = grammar_of([ORDER], reasoning_open=True)
    assert grammar_of(json.loads(json.dumps([ORDER])), reasoning_open=True) is first
