"""/v1/responses over HTTP with the openai package: shapes, the order of events, endings, errors with field names, the
same output for any chunking."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, cast

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agentspec.errors import AgentspecError, ContextLengthError, EngineClosedError, RequestError
from agentspec.server.fields import Notes
from agentspec.server.responses_request import parse
from agentspec.server.responses_tools import Toolset
from agentspec.text.constraints import OutputForm, ToolDemand
from agentspec.types import FinishReason, SamplingParams, TokenScore
from agentspec.wire import Event, TokensEvent
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.server.test_chat import split

Connect = Callable[..., httpx.AsyncClient]

BODY: dict[str, Any] = {"model": "scripted", "input": "hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
}
CALL_TEXT = (
    "<tool_call>\n<function=look>\n<parameter=where>\nunder it\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>"
)
ARGUMENTS = '{"where": "under it", "deep": true}'
FULL: dict[str, Any] = BODY | {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
FULL_TEXT = f"I think so.\n</think>\n\nLooking.\n\n{CALL_TEXT}\n{CALL_TEXT}"
"""Its prompt ends inside a think block."""
CUT = ended(FinishReason.LENGTH, stop_match=None)

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(connect: Connect, engine: ScriptedEngine, body: dict[str, Any], path: str = "/v1/responses") -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def streamed(connect: Connect, engine: ScriptedEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, validated by the openai package's types and numbered from 0."""
    response = post(connect, engine, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        STREAM_EVENT.validate_python(event)
        events.append(event)
    return events


def sdk(client: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://in-process/v1", api_key="none", http_client=cast(Any, client), max_retries=0)


def told(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The items' content, without ids."""
    return [
        (item["type"], item["status"], item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], item["status"], "".join(part["text"] for part in item["content"]))
        for item in items
    ]


def test_whole_response_has_the_documented_shape(connect: Connect) -> None:
    engine = ScriptedEngine([*said("Hel", "lo"), ended(text="!")])
    body = post(
        connect,
        engine,
        BODY | {"instructions": "Be short.", "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u"},
    ).json()
    Response.model_validate(body)
    key = engine.submits[0].request_id
    metrics = body.pop("metrics")
    assert metrics["speculative_decoding"]["num_spec_steps"] == 4
    assert body.pop("created_at") <= body.pop("completed_at")
    part = {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    assert body == {
        "id": f"resp_{key}",
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": "Be short.",
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "scripted",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "u",
        "output": [
            {"id": f"msg_{key}_0", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        ],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 16,
        },
    }
    assert engine.submits[0].sampling.max_tokens == 9


def test_stream_events_come_in_the_documented_order(connect: Connect) -> None:
    script = [*said("Hm", ".</think>\n\nLook", "ing.\n\n", CALL_TEXT), ended()]
    events = streamed(connect, ScriptedEngine(script), FULL)
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_deltas = [
        kind for number, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[number - 1] != kind
    ]
    assert without_deltas == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert (
        events[0]["response"] | {"status": "in_progress", "output": [], "usage": None}
        == events[0]["response"]
        == events[1]["response"]
    )
    final = events[-1]["response"]
    assert told(final["output"]) == [
        ("reasoning", "completed", "Hm."),
        ("message", "completed", "Looking."),
        ("function_call", "completed", "look", ARGUMENTS),
    ]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    for event in events:
        place = event.get("output_index")
        if place is not None:
            assert event.get("item_id", final["output"][place]["id"]) == final["output"][place]["id"]
    opened = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in opened] == ["in_progress"] * 3
    assert ([item.get("content") for item in opened], opened[2]["arguments"]) == ([[], [], None], "")
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm.") + 1, (
        "a token a character here, and one a tag"
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_chunking_gives_the_same_output_streamed_or_whole(connect: Connect, seed: int) -> None:
    expected = [
        ("reasoning", "completed", "I think so."),
        ("message", "completed", "Looking."),
        ("function_call", "completed", "look", ARGUMENTS),
        ("function_call", "completed", "look", ARGUMENTS),
    ]
    script = [*said(*split(FULL_TEXT, random.Random(seed))), ended()]
    events = streamed(connect, ScriptedEngine(script), FULL)
    final = events[-1]["response"]
    assert told(final["output"]) == expected, seed
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        elif event["type"].endswith(("_text.done", "_arguments.done")):
            assert deltas[event["item_id"]] == event.get("text", event.get("arguments")), seed
    assert list(deltas) == [item["id"] for item in final["output"]], seed

    whole = post(connect, ScriptedEngine(script), FULL).json()
    assert told(whole["output"]) == expected, seed
    assert whole["status"] == final["status"] == "completed", seed


@pytest.mark.parametrize(
    ("text", "end", "status", "output"),
    [
        ("Hello", CUT, "incomplete", [("message", "incomplete", "Hello")]),
        (CALL_TEXT, CUT, "incomplete", [("function_call", "completed", "look", ARGUMENTS)]),
        (CALL_TEXT[:60], CUT, "incomplete", [("function_call", "incomplete", "look", '{"where": "under it')]),
        ("Hello", ended(FinishReason.ABORT, stop_match=None), "failed", [("message", "incomplete", "Hello")]),
        ("", ended(), "completed", [("message", "completed", "")]),
        ("", CUT, "incomplete", []),
    ],
    ids=[
        "text at the limit",
        "whole call at the limit",
        "cut call",
        "abort",
        "nothing said",
        "nothing said at the limit",
    ],
)
def test_status_of_a_response_follows_its_ending(
    connect: Connect, text: str, end: Event, status: str, output: list[tuple[str, ...]]
) -> None:
    body, script = BODY | {"tools": [TOOL]}, [*said(text), end]
    events = streamed(connect, ScriptedEngine(script), body)
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{status}"
    assert (final["status"], told(final["output"])) == (status, output)
    assert final["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert (final["error"] is None) == (status != "failed")
    assert (final["completed_at"] is None) == (status != "completed")
    finished = [event["type"] for event in events if event["type"].endswith("arguments.done")]
    assert len(finished) == sum(item[:2] == ("function_call", "completed") for item in output), (
        "arguments that were cut are not done"
    )
    whole = post(connect, ScriptedEngine(script), body).json()
    assert (whole["status"], told(whole["output"])) == (status, output)


def test_broken_stream_ends_with_response_failed(connect: Connect) -> None:
    for error, message in ((AgentspecError("broken"), "broken"), (ValueError("a bug"), "internal error")):
        events = streamed(connect, ScriptedEngine([*said("Hel"), error]), BODY)
        assert [event["type"] for event in events].count("response.failed") == 1
        assert events[-1]["response"]["error"] == {"code": "server_error", "message": message}
        assert told(events[-1]["response"]["output"]) == [("message", "incomplete", "Hel")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("max_tokens", -1, "is negative"), 400, "max_output_tokens"),
        (ContextLengthError("prompt_ids", "9 tokens", "is too long"), 400, "input"),
        (EngineClosedError("the engine was closed"), 503, None),
        (AgentspecError("broken"), 500, None),
    ],
)
def test_errors_before_the_first_event_determine_the_status(
    connect: Connect, stream: bool, error: Exception, status: int, param: str | None
) -> None:
    response = post(connect, ScriptedEngine([error]), BODY | {"stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "compaction"}]}, "input[1].type"),
        ({"input": [{"type": "item_reference", "id": 7}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{**CALL_ITEM, "arguments": []}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": 7}]}, "input[0].encrypted_content"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"include": [7]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": "x"}}, "stream_options.include_obfuscation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"metadata": {str(name): "" for name in range(17)}}, "metadata"),
        ({"metadata": {"name": "x" * 513}}, "metadata.name"),
        ({"tools": [{"type": "psychic"}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "leap"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "leap"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unsupported_fields_are_refused_by_name(connect: Connect, change: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    response = post(connect, engine, BODY | change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.submits


def test_fields_without_effect_are_accepted(connect: Connect) -> None:
    idle = {
        "background": False,
        "include": [],
        "truncation": "disabled",
        "service_tier": "auto",
        "conversation": None,
        "max_tool_calls": None,
        "prompt_cache_retention": "in_memory",
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [{**TOOL, "strict": False, "description": None, "async": False, "defer_loading": False}],
    }
    response = post(connect, ScriptedEngine([*said("x"), ended()]), BODY | idle)
    assert response.status_code == 200, response.text


def test_unknown_model_is_404(connect: Connect) -> None:
    assert post(connect, ScriptedEngine(), BODY | {"model": "other"}).status_code == 404


def test_include_adds_log_probabilities_of_the_text(connect: Connect) -> None:
    token = TokensEvent(
        request_id="",
        token_ids=[ord("a")],
        text="a",
        scores=[TokenScore(ord("a"), -0.5, [(ord("a"), -0.5), (300, -2.0)])],
    )
    body = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    engine = ScriptedEngine([token, token, ended()])
    events = streamed(connect, engine, body)
    assert engine.submits[0].logprobs == 2
    (entry,) = next(event for event in events if event["type"] == "response.output_text.delta")["logprobs"]
    assert (entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]]) == (-0.5, [-0.5, -2.0])
    assert entry["top_logprobs"][1]["bytes"] == []
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry, entry]
    assert next(event for event in events if event["type"] == "response.output_text.done")["logprobs"] == [entry, entry]


def test_input_tokens_are_counted_without_generation(connect: Connect) -> None:
    engine = ScriptedEngine()
    body = BODY | {"instructions": "Be short.", "tools": [TOOL]}
    post(connect, engine, body)
    counted = post(connect, engine, body, "/v1/responses/input_tokens").json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.submits[0].prompt_ids)}
    assert len(engine.submits) == 1


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tool_choice": "required"}, {"demand": ToolDemand(choice="required")}),
        ({"tool_choice": {"type": "function", "name": "look"}}, {"demand": ToolDemand(choice="required", name="look")}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "leap"}],
                }
            },
            {"demand": ToolDemand(choice="required"), "callable_names": frozenset({"leap"})},
        ),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"demand": ToolDemand(choice="none", parallel=False)}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"output": OutputForm(kind="json_schema", source=SCHEMA, field="text.format.schema")},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"output": OutputForm(kind="json_object", source=None, field="text.format")},
        ),
        ({"reasoning": {"effort": "none"}}, {"effort": "none"}),
        ({"temperature": 0, "top_k": 3, "seed": 7}, {"sampling": SamplingParams(temperature=0, top_k=3, seed=7)}),
        ({"top_k": -1}, {"sampling": SamplingParams()}),
        ({"min_tokens": 5, "ignore_eos": True}, {"sampling": SamplingParams(min_tokens=5, ignore_eos=True)}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_request_fields_reach_the_turn_request(change: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = {
        "demand": ToolDemand(),
        "callable_names": None,
        "output": None,
        "effort": None,
        "sampling": SamplingParams(),
    }
    request = parse(BODY | {"tools": [TOOL, {**TOOL, "name": "leap", "strict": True}]} | change, Notes())
    turn = request.turn_request([], Toolset.of(request.tools, Notes()), None)
    assert {name: getattr(turn, name) for name in plain} == plain | expected
    functions = [tool["function"] for tool in turn.tools]
    assert [list(function) for function in functions] == [["name", "parameters"], ["name", "parameters", "strict"]]


class Place(BaseModel):
    name: str
    depth: int


def test_the_sdk_parses_and_streams(connect: Connect) -> None:
    script = [*said('{"name": "under', ' it", "depth": 3}'), ended()]

    async def run() -> None:
        async with connect(ScriptedEngine(script)) as http:
            client = sdk(http)
            parsed = await client.responses.parse(model="scripted", input="where", text_format=Place)
            assert parsed.output_parsed == Place(name="under it", depth=3)
            async with client.responses.stream(model="scripted", input="where", text_format=Place) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert deltas == ['{"name": "under', ' it", "depth": 3}']
            assert final.output_parsed == parsed.output_parsed
            answer: Any = [
                *parsed.output,
                *(item.to_dict() for item in final.output),
                {"role": "user", "content": "and now?"},
            ]
            again = await client.responses.create(model="scripted", input=answer)
            assert again.status == "completed", "fields that the package adds when it parses are accepted"

    asyncio.run(run())


def test_closing_a_stream_aborts_the_request_and_stores_nothing(connect: Connect) -> None:
    async def run() -> None:
        engine = ScriptedEngine([*said("first"), asyncio.Event(), ended()])
        async with connect(engine) as http:
            client = sdk(http)
            stream = await client.responses.create(model="scripted", input="hi", stream=True)
            first = await anext(aiter(stream))
            assert first.type == "response.created"
            await stream.close()
            assert engine.aborted == [engine.submits[0].request_id]
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.response.id)

    asyncio.run(run())
