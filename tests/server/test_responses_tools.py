"""Tools of /v1/responses other than plain functions: custom tools, namespaces, and hosted tools."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.server.custom_input import CustomInput
from agentspec.server.fields import Notes
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responses_tools import HostedKind, Toolset
from agentspec.server.unknown_fields import HEADER
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from agentspec.types import FinishReason
from agentspec.wire import TokensEvent
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.fakes.text import END_OF_TURN, TEMPLATE_FILE, byte_backend
from tests.server.test_chat import split

Connect = Callable[..., httpx.AsyncClient]

BODY: dict[str, Any] = {"model": "scripted", "input": "hi"}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
FETCH: dict[str, Any] = {
    "type": "function",
    "name": "fetch",
    "description": "Gets one.",
    "parameters": {"type": "object", "properties": {}},
}
CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [FETCH, {**PATCH, "name": "note"}],
}
PATCH_TEXT = '*** Begin "Patch"\n+\tü \\n </p>\n*** End'
TOKENIZER = Tokenizer(byte_backend(), eos_token=END_OF_TURN)
BYTES = TOKENIZER.token_bytes
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def call_text(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def post(connect: Connect, engine: ScriptedEngine, body: dict[str, Any], **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine, **options) as client:
            return await client.post("/v1/responses", json=BODY | body)

    return asyncio.run(run())


def streamed(connect: Connect, engine: ScriptedEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, validated by the openai package's types."""
    text = post(connect, engine, body | {"stream": True}).text
    events = [json.loads(frame.partition("data: ")[2]) for frame in text.split("\n\n")[:-1]]
    for event in events:
        STREAM_EVENT.validate_python(event)
    return events


def prompt(engine: ScriptedEngine, number: int = -1) -> str:
    return b"".join(BYTES[token] for token in engine.submits[number].prompt_ids).decode(errors="replace")


def generated(text: str) -> TokensEvent:
    return TokensEvent(request_id="", token_ids=list(TOKENIZER.encode(text)), text=text)


@pytest.fixture
def with_calls() -> TextPipeline:
    """A template that renders calls, so that a returned turn is recognized."""
    return TextPipeline(TOKENIZER, PromptBuilder(TOKENIZER, ChatTemplate(TEMPLATE_FILE.read_text()), TurnMemory()))


def goes_on(engine: ScriptedEngine, text: str) -> bool:
    """The second prompt starts with the first one and its generated tokens."""
    first, second = engine.submits[:2]
    before = [*first.prompt_ids, *generated(text).token_ids]
    return list(second.prompt_ids[: len(before)]) == before


@pytest.mark.parametrize("seed", range(10))
def test_custom_tool_call_has_a_text_input(connect: Connect, seed: int) -> None:
    script = [*said(*split(call_text("apply_patch", input=PATCH_TEXT), random.Random(seed))), ended()]
    engine = ScriptedEngine(script)
    events = streamed(connect, engine, {"tools": [PATCH]})
    assert "apply_patch" in prompt(engine)
    assert engine.submits[0].grammar is None
    (item,) = events[-1]["response"]["output"]
    assert {key: value for key, value in item.items() if key not in ("id", "call_id")} == {
        "type": "custom_tool_call",
        "status": "completed",
        "name": "apply_patch",
        "input": PATCH_TEXT,
    }
    assert item["id"].startswith("ctc_")
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["custom_tool_call_input.delta"] * len(deltas),
        *("custom_tool_call_input.done", "output_item.done", "completed"),
    ]
    assert all(deltas)
    assert "".join(deltas) == PATCH_TEXT == events[-3]["input"]
    assert events[2]["item"]["input"] == ""
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    whole = post(connect, ScriptedEngine(script), {"tools": [PATCH]}).json()
    Response.model_validate(whole)
    assert whole["output"][0]["input"] == PATCH_TEXT
    assert whole["tools"] == [PATCH]


def test_cut_custom_call_has_no_done_event(connect: Connect) -> None:
    for text, end in (
        (call_text("apply_patch", input="half")[:-30], "half"),
        ("<tool_call>\n<function=apply_patch>\n<para", ""),
    ):
        script = [*said(text), ended(FinishReason.LENGTH, stop_match=None)]
        events = streamed(connect, ScriptedEngine(script), {"tools": [PATCH]})
        (item,) = events[-1]["response"]["output"]
        assert (item["status"], item["input"][:4]) == ("incomplete", end)
        assert "response.custom_tool_call_input.done" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\n\\"\\u0007é"}', 'a\n"\x07é'),
        (' {"input" :"a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("{}", ""),
        ('{"inp', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ("[1", "[1"),
    ],
)
def test_custom_input_is_extracted_in_any_chunking(arguments: str, expected: str) -> None:
    for seed in range(8):
        reader = CustomInput()
        pieces = [reader.push(piece) for piece in split(arguments, random.Random(seed))]
        assert "".join(pieces) + reader.close() == expected == reader.text, seed


def test_custom_tool_results_are_accepted(connect: Connect, with_calls: TextPipeline) -> None:
    """The returned turn is the generated one, so the next prompt continues the last answer."""
    text = "Hm.\n</think>\n\n" + call_text("apply_patch", input=PATCH_TEXT)
    engine = ScriptedEngine([generated(text), ended()], [generated("</think>\n\nDone."), ended()])

    async def run() -> tuple[dict[str, Any], ...]:
        async with connect(engine, pipeline=with_calls) as client:
            first = (await client.post("/v1/responses", json=BODY | {"tools": [PATCH]})).json()
            call = first["output"][-1]
            result = {
                "type": "custom_tool_call_output",
                "call_id": call["call_id"],
                "output": [{"type": "input_text", "text": "Patched."}],
            }
            items = [
                {"role": "user", "content": "hi"},
                *first["output"][:-1],
                call | {"caller": {"type": "direct"}},
                result,
            ]
            second = (await client.post("/v1/responses", json=BODY | {"tools": [PATCH], "input": items})).json()
            stored = BODY | {"tools": [PATCH], "input": [result], "previous_response_id": first["id"]}
            return second, (await client.post("/v1/responses", json=stored)).json()

    answers = asyncio.run(run())
    assert [answer["output"][-1]["content"][0]["text"] for answer in answers] == ["Done."] * 2
    assert prompt(engine, 1) == prompt(engine, 2)
    assert goes_on(engine, text)
    assert "Patched." in prompt(engine, 1)


@pytest.mark.parametrize(
    ("definition", "pattern"),
    [("[a-z]+", "^(?:[a-z]+)$"), ("^[a-z]+$", "^(?:[a-z]+)$"), ("a|b", "^(?:a|b)$"), (r"\d+\$", r"^(?:\d+\$)$")],
)
def test_regex_format_constrains_the_input(connect: Connect, definition: str, pattern: str) -> None:
    tool = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": definition}}
    engine = ScriptedEngine()
    answer = post(connect, engine, {"tools": [tool]})
    assert HEADER not in answer.headers
    assert engine.submits[0].grammar is not None
    (function,) = Toolset.of([tool], Notes()).functions
    assert function["function"]["strict"] is True
    assert function["function"]["parameters"]["properties"]["input"]["pattern"] == pattern


@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: /a+/"), ("regex", "(?i)a"), ("regex", "^a|b$")])
def test_unenforceable_format_is_described_and_noted(connect: Connect, syntax: str, definition: str) -> None:
    tool = PATCH | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    engine = ScriptedEngine()
    answer = post(connect, engine, {"tools": [tool]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, f"tools.format.{syntax}")
    assert json.dumps(definition)[1:-1] in prompt(engine)
    assert engine.submits[0].grammar is None


def test_namespace_tools_become_functions_with_joined_names(connect: Connect, with_calls: TextPipeline) -> None:
    text = "Hm.\n</think>\n\n" + "\n".join(
        [call_text("crm__fetch"), call_text("crm__note", input="x"), call_text("fetch")]
    )
    engine = ScriptedEngine([generated(text), ended()])
    answer = post(connect, engine, {"tools": [CRM, FETCH]}, pipeline=with_calls).json()
    Response.model_validate(answer)
    called = [(item["type"], item["name"], item.get("namespace")) for item in answer["output"][1:]]
    assert called == [
        ("function_call", "fetch", "crm"),
        ("custom_tool_call", "note", "crm"),
        ("function_call", "fetch", None),
    ]
    assert "Of all tools whose names begin with crm__: Customers.\\n\\nGets one." in prompt(engine)
    assert prompt(engine).count("Customers.") == 1
    results = [
        {"type": call["type"] + "_output", "call_id": call["call_id"], "output": "ok"} for call in answer["output"][1:]
    ]
    post(
        connect,
        engine,
        {"tools": [CRM, FETCH], "input": [{"role": "user", "content": "hi"}, *answer["output"], *results]},
        pipeline=with_calls,
    )
    assert goes_on(engine, text)
    ended_so = Toolset.of([CRM | {"name": "mcp__files__"}], Notes())
    assert ended_so.names == ["mcp__files__fetch", "mcp__files__note"]


@pytest.mark.parametrize("kind", HostedKind.__args__)  # type: ignore[attr-defined]
def test_hosted_tools_are_left_out_and_noted(connect: Connect, kind: str) -> None:
    engine = ScriptedEngine()
    answer = post(connect, engine, {"tools": [{"type": kind, "server_label": "x"}, FETCH]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, f"tools.{kind}")
    assert [tool["name"] for tool in answer.json()["tools"]] == ["fetch"]
    post(connect, engine, {"tools": [FETCH]})
    assert prompt(engine, 0) == prompt(engine, 1)
    forced = post(connect, engine, {"tools": [{"type": kind}, FETCH], "tool_choice": {"type": kind}})
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice.type")
    strict = post(connect, engine, {"tools": [{"type": kind}]}, strict_fields=True)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, f"tools.{kind}")


@pytest.mark.parametrize(
    "kind", ["web_search_call", "local_shell_call", "local_shell_call_output", "mcp_list_tools", "computer_call"]
)
def test_hosted_items_are_left_out_of_a_history(connect: Connect, kind: str) -> None:
    engine = ScriptedEngine()
    history = [
        {"role": "user", "content": "hi"},
        {"type": kind, "id": "x"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    answer = post(connect, engine, {"input": history})
    assert (answer.status_code, answer.headers[HEADER]) == (200, f"input.{kind}")
    post(connect, engine, {"input": [history[0], *history[2:]]})
    assert prompt(engine, 0) == prompt(engine, 1)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "custom", "name": "note"}, ["crm__note"]),
        ({"type": "function", "name": "fetch"}, ["fetch"]),
        ({"type": "function", "name": "crm__fetch"}, ["crm__fetch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
            ["crm__fetch", "crm__note"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            },
            ["apply_patch"],
        ),
    ],
)
def test_tool_choice_uses_the_clients_tool_names(connect: Connect, choice: dict[str, Any], names: list[str]) -> None:
    engine = ScriptedEngine()
    answer = post(connect, engine, {"tools": [{"type": "web_search"}, PATCH, CRM, FETCH], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    grammar = engine.submits[0].grammar
    assert grammar is not None
    assert [
        name for name in ("apply_patch", "crm__fetch", "crm__note", "fetch") if f"<function={name}>" in grammar.source
    ] == sorted(names)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{**PATCH, "name": None}]}, "tools[0].name"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "peg", "definition": "x"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{**CRM, "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [CRM, {**FETCH, "name": "crm__fetch"}]}, "tools[1].name"),
        ({"tools": [PATCH, FETCH, FETCH], "tool_choice": "required"}, "tools[2].name"),
        ({"tools": [FETCH, {**PATCH, "name": "fetch"}]}, "tools[1].name"),
        ({"tools": [PATCH], "tool_choice": {"type": "function", "name": "apply_patch"}}, "tool_choice.name"),
        (
            {"tools": [CRM, {**CRM, "name": "b"}], "tool_choice": {"type": "function", "name": "fetch"}},
            "tool_choice.name",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [PATCH],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            },
            "tool_choice.tools[0].type",
        ),
        (
            {
                "tools": [CRM],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
        ),
        (
            {"tools": [CRM], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom"}]}},
            "tool_choice.tools[0].name",
        ),
        (
            {
                "tools": [
                    {"type": "mcp"},
                    {**CRM, "tools": [{**FETCH, "strict": True, "parameters": {"type": "array"}}]},
                ]
            },
            "tools[1].tools[0].parameters",
        ),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "([a-z]{9}){900}"}}]},
            "tools[0].format.definition",
        ),
        (
            {
                "tools": [PATCH, FETCH, {**FETCH, "name": "other", "strict": True, "parameters": {"type": "array"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tools[2].parameters",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ],
)
def test_errors_name_the_clients_fields(connect: Connect, change: dict[str, Any], param: str) -> None:
    answer = post(connect, ScriptedEngine(), change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
