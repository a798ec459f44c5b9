"""/v1/messages over HTTP: the events in Anthropic's order, the same message whole and streamed, its usage and its
errors."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import AgentspecError, ContextLengthError, EngineClosedError, RequestError
from agentspec.server.errors import ApiError
from agentspec.server.messages_events import usage_body
from agentspec.server.pipeline import TextPipeline
from agentspec.types import CheckpointKind, FinishReason
from agentspec.wire import Event, Usage
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

BODY: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
}
CALL = (
    "<tool_call>\n<function=look>\n<parameter=where>\nunder it\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>"
)
THINKING = {"thinking": {"type": "adaptive"}}
ORDER = {
    None: {"message_start"},
    "message_start": {"content_block_start", "message_delta"},
    "content_block_start": {"content_block_delta", "content_block_stop"},
    "content_block_delta": {"content_block_delta", "content_block_stop"},
    "content_block_stop": {"content_block_start", "message_delta"},
    "message_delta": {"message_stop"},
}


def post(
    connect: Connect, engine: ScriptedEngine, body: dict[str, Any], path: str = "/v1/messages", **headers: str
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


def told(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each has its name in two places."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client assembles it, with checks on the order of events."""
    before: str | None = None
    texts: list[dict[str, Any]] = []
    message = dict(events[0]["message"])
    for event in events:
        assert event["type"] in ORDER[before], f"{event['type']} after {before}"
        before = event["type"]
        if before == "content_block_start":
            assert event["index"] == len(texts)
            texts.append({"block": dict(event["content_block"]), "json": ""})
        elif before == "content_block_delta":
            assert event["index"] == len(texts) - 1
            name, value = next((name, value) for name, value in event["delta"].items() if name != "type")
            place, key = (texts[-1], "json") if name == "partial_json" else (texts[-1]["block"], name)
            place[key] += value
        elif before == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
            message["metrics"] = event["metrics"]
    assert before == "message_stop"
    for text in texts:
        if text["json"]:
            text["block"]["input"] = json.loads(text["json"])
    return {**message, "content": [text["block"] for text in texts]}


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(0, 12))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that differ from request to request."""
    content = [block | ({"id": "call"} if "id" in block else {}) for block in answer["content"]]
    return {**answer, "id": "msg", "content": content}


def test_whole_message_has_the_documented_shape(connect: Connect) -> None:
    answer = post(connect, ScriptedEngine([*said("Hel", "lo"), ended(text="!")]), BODY).json()
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("metrics")["speculative_decoding"]["num_spec_steps"] == 4
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


def test_answer_continues_the_last_assistant_message(connect: Connect, pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said('"a": 1}'), ended()])
    answer = post(
        connect, engine, {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "{"}]}
    ).json()
    assert answer["content"] == [{"type": "text", "text": '"a": 1}'}]
    assert pipeline.tokenizer.spell(engine.submits[0].prompt_ids).endswith("<|im_start|>assistant\n{")


def test_think_block_opened_by_the_client_is_continued(connect: Connect) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": "<think>\nHm"}]
    answer = post(
        connect,
        ScriptedEngine([*said(", so.</think>Yes."), ended()]),
        {**BODY, "messages": messages, "thinking": {"type": "disabled"}},
    )
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in answer.json()["content"]] == [
        ("thinking", ", so."),
        ("text", "Yes."),
    ]


def test_text_stream_has_the_documented_events(connect: Connect) -> None:
    events = told(post(connect, ScriptedEngine([*said("Hel", "lo"), ended()]), {**BODY, "stream": True}))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert events[2] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 6


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "output", [f"Think.\n</think>\n\nLooking.\n{CALL}\n{CALL}", f"Hm.\n</think>\n\n{CALL}Done?", "Only thought", CALL]
)
def test_whole_and_streamed_messages_agree_for_any_chunking(connect: Connect, output: str, seed: int) -> None:
    rng = random.Random(seed)
    script = [*said(*split(output, rng)), ended()]
    body = {**BODY, **THINKING, "tools": [TOOL]}
    whole = same(post(connect, ScriptedEngine(script), body).json())
    streamed = same(assembled(told(post(connect, ScriptedEngine(script), {**body, "stream": True}))))
    assert streamed == whole, f"seed {seed}"
    again = same(post(connect, ScriptedEngine([*said(output), ended()]), body).json())
    details = "output_tokens_details"  # scripted ids don't match the text
    assert whole | {"usage": whole["usage"] | {details: None}} == again | {"usage": again["usage"] | {details: None}}, (
        f"seed {seed}"
    )


def test_thinking_text_and_calls_become_blocks(connect: Connect) -> None:
    script = [*said(f"I look.\n</think>\n\nLooking.\n{CALL}\n{CALL}"), ended()]
    answer = post(connect, ScriptedEngine(script), {**BODY, **THINKING, "tools": [TOOL]}).json()
    thinking, words, first, second = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I look.")
    assert thinking["signature"]
    assert words == {"type": "text", "text": "Looking."}
    assert (first["name"], first["input"], first["type"]) == ("look", {"where": "under it", "deep": True}, "tool_use")
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [True, False])
def test_omitted_thinking_keeps_its_signature(connect: Connect, stream: bool) -> None:
    shown, omitted = (
        post(
            connect,
            ScriptedEngine([*said("I look.\n</think>\n\nHere."), ended()]),
            {**BODY, "stream": stream, "thinking": thinking},
        )
        for thinking in ({"type": "adaptive", "display": "summarized"}, {"type": "adaptive", "display": "omitted"})
    )
    first, second = (assembled(told(answer)) if stream else answer.json() for answer in (shown, omitted))
    assert first["content"][0]["thinking"] == "I look."
    assert second["content"][0] == {"type": "thinking", "thinking": "", "signature": first["content"][0]["signature"]}
    assert second["content"][1] == {"type": "text", "text": "Here."}


@pytest.mark.parametrize(
    ("end", "tools", "reason", "sequence"),
    [
        (ended(), True, "tool_use", None),
        (ended(), False, "end_turn", None),
        (ended(stop_match="END"), False, "stop_sequence", "END"),
        (ended(stop_match="END"), True, "stop_sequence", "END"),
        (ended(FinishReason.LENGTH, stop_match=None), False, "max_tokens", None),
        (ended(FinishReason.LENGTH, stop_match=None), True, "max_tokens", None),
    ],
)
def test_stop_reason_follows_the_ending(
    connect: Connect, end: Event, tools: bool, reason: str, sequence: str | None
) -> None:
    script = [*said(CALL if tools else "Hello"), end]
    answer = post(connect, ScriptedEngine(script), {**BODY, "tools": [TOOL]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_call_cut_by_the_limit_has_no_input_when_whole(connect: Connect) -> None:
    """The stream shows the cut JSON; a whole message has no incomplete JSON."""
    script = [*said(CALL[:70]), ended(FinishReason.LENGTH, stop_match=None)]
    body = {**BODY, "tools": [TOOL]}
    answer = post(connect, ScriptedEngine(script), body).json()
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {})]
    assert answer["stop_reason"] == "max_tokens"
    events = told(post(connect, ScriptedEngine(script), {**body, "stream": True}))
    partial = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert partial.startswith('{"where": "un')
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [True, False])
def test_empty_answer_has_no_blocks(connect: Connect, stream: bool) -> None:
    response = post(
        connect,
        ScriptedEngine([ended(FinishReason.LENGTH, stop_match=None)]),
        {**BODY, "max_tokens": 0, "stream": stream},
    )
    answer = assembled(told(response)) if stream else response.json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


def test_submit_has_session_salt_and_marks(connect: Connect) -> None:
    engine = ScriptedEngine()
    content = [
        {"type": "text", "text": "a document", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": " and a question"},
    ]
    body = {**BODY, "messages": [{"role": "user", "content": content}], "cache_salt": "s", "stop_sequences": ["x"]}
    post(
        connect,
        engine,
        body,
        **{"x-claude-code-session-id": "mine", "anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01"},
    )
    (submit,) = engine.submits
    assert (submit.session_id, submit.namespace, submit.sampling.stop, submit.sampling.max_tokens) == (
        "mine",
        "s",
        ("x",),
        100,
    )
    assert [point.kind for point in submit.breakpoints][-2:] == [CheckpointKind.BRANCH, CheckpointKind.USER]


def test_count_equals_the_prompt_length(connect: Connect) -> None:
    engine = ScriptedEngine()
    body = {**BODY, "system": "Be brief.", "tools": [TOOL]}
    post(connect, engine, body)
    del body["max_tokens"]
    counted = post(connect, engine, body, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": len(engine.submits[0].prompt_ids)}
    assert len(engine.submits) == 1


@pytest.mark.parametrize(
    ("cached", "marked_end", "counts"),
    [
        (0, 0, (200, 0, 0)),
        (64, 0, (136, 0, 64)),
        (0, 130, (72, 128, 0)),
        (64, 130, (72, 64, 64)),
        (192, 130, (8, 0, 192)),
        (0, 63, (200, 0, 0)),
    ],
)
def test_input_counts_sum_to_the_prompt(cached: int, marked_end: int, counts: tuple[int, int, int]) -> None:
    body = usage_body(
        Usage(prompt_tokens=200, completion_tokens=3, cached_tokens=cached), marked_end=marked_end, thinking_tokens=1
    )
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(body[name] for name in names) == counts


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "kind", "words"),
    [
        (RequestError("top_k", -1, "is negative"), 400, "invalid_request_error", "top_k=-1"),
        (RequestError("stop", ["x"], "is too long"), 400, "invalid_request_error", "stop_sequences="),
        (
            RequestError("tools[1].function.parameters.properties.a", {}, "?"),
            400,
            "invalid_request_error",
            "tools[1].input_schema.properties.a=",
        ),
        (ContextLengthError("prompt_ids", "9 tokens", "is too long"), 400, "invalid_request_error", "messages="),
        (
            RequestError("grammar.source", "...", "takes too long to compile"),
            400,
            "invalid_request_error",
            "output_config.format.schema=",
        ),
        (EngineClosedError("closed"), 503, "api_error", "closed"),
        (AgentspecError("broken"), 500, "api_error", "broken"),
        (ValueError("a bug"), 500, "api_error", "internal error"),
    ],
)
def test_errors_before_the_first_event_determine_the_status(
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    error: Exception,
    status: int,
    kind: str,
    words: str,
) -> None:
    caplog.set_level(logging.CRITICAL)
    form = {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}
    response = post(connect, ScriptedEngine([error]), {**BODY, "output_config": {"format": form}, "stream": stream})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert words in body["error"]["message"]


@pytest.mark.parametrize(
    "rest",
    [
        [AgentspecError("broken"), *said("late")],
        [ended(FinishReason.ERROR, error="broken"), *said("late")],
        [ended(FinishReason.ABORT), *said("late")],
        [ValueError("a bug")],
        [],
    ],
)
def test_late_error_is_the_last_event(connect: Connect, caplog: pytest.LogCaptureFixture, rest: list[Any]) -> None:
    caplog.set_level(logging.CRITICAL)
    events = told(post(connect, ScriptedEngine([*said("Hel"), *rest]), {**BODY, "stream": True}))
    assert [event["type"] for event in events][-1] == "error"
    assert "message_stop" not in [event["type"] for event in events]
    assert events[-1]["error"]["type"] == "api_error"
    assert "a bug" not in json.dumps(events)
    assert "late" not in json.dumps(events)


def test_errors_of_this_path_have_anthropics_shape(connect: Connect) -> None:
    async def run() -> None:
        async with connect(ScriptedEngine()) as client:
            requests: list[tuple[str, str, bytes, int, str]] = [
                ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
                ("POST", "/v1/messages", b"[]", 400, "invalid_request_error"),
                ("POST", "/v1/messages", json.dumps({**BODY, "model": "other"}).encode(), 404, "not_found_error"),
                ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
                ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
            ]
            for method, path, content, status, kind in requests:
                response = await client.request(method, path, content=content)
                body = response.json()
                assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
            other = (await client.get("/v1/messagesx")).json()
            assert set(other["error"]) == {"message", "type", "param", "code"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_error_types_follow_the_status(status: int, kind: str) -> None:
    error = ApiError(status, "words", param="x", code="y")
    assert error.body("/v1/messages/count_tokens") == {"type": "error", "error": {"type": kind, "message": "words"}}
    assert set(error.body("/v1/responses")["error"]) == {"message", "type", "param", "code"}


def test_checkpoint_without_a_tokenizer_is_refused(connect: Connect) -> None:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine(), pipeline=None) as client:
            return await client.post("/v1/messages", json=BODY)

    assert "no tokenizer" in asyncio.run(run()).json()["error"]["message"]


def test_closing_a_stream_aborts_the_request(connect: Connect) -> None:
    async def run() -> None:
        script: list[Event | Exception | asyncio.Event] = [*said("first"), asyncio.Event(), ended()]
        engine = ScriptedEngine(script)
        async with (
            connect(engine) as client,
            client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response,
        ):
            assert b"first" in await anext(response.aiter_raw())
            assert engine.produced == 1
        assert engine.aborted == [engine.submits[0].request_id]

    asyncio.run(run())
