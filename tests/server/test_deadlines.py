"""Keep-alives of waiting requests, and time limits, in every API, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from agentspec.engine.sdk_clients import anthropic_client, openai_client
from agentspec.errors import ContextLengthError, EngineClosedError, RequestError
from agentspec.server.app import create_app
from agentspec.server.deadlines import TimeLimits
from agentspec.server.errors import ApiError
from agentspec.server.large_json import LARGE_BYTES, LargeJson
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responding import KEEP_ALIVE_SECONDS, STATUS_SECONDS
from agentspec.server.transport import InProcessTransport
from agentspec.wire import EngineClient, Submit
from tests.fakes.engine_client import ScriptedEngine, Step, ended, said
from tests.replay.fakes import run

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "scripted", "prompt": "hi"}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"model": "scripted", "input": "hi"}),
]
PATHS = [path for path, _ in BODIES]
IN_EVERY_API = pytest.mark.parametrize(("path", "body"), BODIES, ids=PATHS)


def waiting(seconds: float, text: str) -> list[Step]:
    return [seconds, *said(text)]


async def parts_of(response: httpx.Response) -> list[tuple[float, str]]:
    """The parts of a stream, with their times."""
    clock = asyncio.get_running_loop().time
    return [(clock(), part) async for part in response.aiter_text()]


async def ask(
    text: TextPipeline, engine: ScriptedEngine, path: str, body: dict[str, Any], **app: Any
) -> tuple[httpx.Response, float, list[tuple[float, str]]]:
    """The answer, the time of its headers, and the parts of its body with their times."""
    transport = InProcessTransport(create_app(engine, text, **app))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=None) as client,
        client.stream("POST", path, json=body) as response,
    ):
        began = asyncio.get_running_loop().time()
        return response, began, await parts_of(response)


def text_of(parts: list[tuple[float, str]]) -> str:
    return "".join(part for _, part in parts)


def num_terminal(path: str, parts: list[tuple[float, str]]) -> int:
    frames = text_of(parts).split("\n\n")
    if path == "/v1/responses":
        return sum(frame.startswith(("event: response.completed", "event: response.failed")) for frame in frames)
    if path == "/v1/messages":
        return sum(frame.startswith(("event: message_stop", "event: error")) for frame in frames)
    return sum(frame == "data: [DONE]" or frame.startswith('data: {"error"') for frame in frames)


@IN_EVERY_API
def test_silent_stream_sends_keep_alives(path: str, body: dict[str, Any], pipeline: TextPipeline) -> None:
    """Regression: without keep-alives, proxies and clients gave up before the first token, or between distant
    tokens."""
    engine = ScriptedEngine([35.0, *said("well"), 15.0, *said(" then"), 3.0, ended()])
    response, began, parts = run(ask(pipeline, engine, path, body | {"stream": True}))
    assert (response.status_code, began) == (200, STATUS_SECONDS)
    sign = "event: ping\n" if path == "/v1/messages" else ": keep-alive\n"
    beats = [time for time, part in parts if part.startswith(sign)]
    assert beats == [began + KEEP_ALIVE_SECONDS * turn for turn in (1, 2, 3)] + [35 + KEEP_ALIVE_SECONDS]
    assert all(part.endswith("\n\n") for _, part in parts)
    assert num_terminal(path, parts) == 1
    assert "well" in text_of(parts)


@pytest.mark.parametrize("limit", ["queue_seconds", "request_seconds"])
def test_time_limits_count_from_the_complete_body_and_include_its_decoding(
    limit: str, pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LargeJson.decode

    async def late(self: LargeJson, *arguments: Any) -> Any:
        await asyncio.sleep(8.0)  # behind other large bodies
        return await decode(self, *arguments)

    monkeypatch.setattr(LargeJson, "decode", late)
    body = {"model": "scripted", "prompt": "x", "unknown": "x" * 2 * LARGE_BYTES}
    for seconds, status in ((1.0, 200), (5.0, {"queue_seconds": 429, "request_seconds": 504}[limit])):
        engine = ScriptedEngine([*waiting(seconds, "x"), ended()])
        limits = TimeLimits(**{limit: 10.0})
        response, _, _ = run(ask(pipeline, engine, "/v1/completions", body, limits=limits))
        assert response.status_code == status


@IN_EVERY_API
def test_active_stream_sends_no_keep_alives(path: str, body: dict[str, Any], pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*itertools.chain(*[waiting(9.0, "x")] * 5), ended()])
    _, began, parts = run(ask(pipeline, ScriptedEngine([0.5, *said("x"), ended()]), path, body | {"stream": True}))
    assert began == 0.5, "the headers come with the first event"
    _, _, parts = run(ask(pipeline, engine, path, body | {"stream": True}))
    assert "keep-alive" not in text_of(parts)
    assert "ping" not in text_of(parts)


@IN_EVERY_API
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextLengthError("prompt_ids", "9 tokens", "is too long"), 400),
        (RequestError("top_k", -1, "is negative"), 400),
        (EngineClosedError("gone"), 503),
    ],
    ids=["context", "value", "closed"],
)
def test_early_engine_refusal_determines_the_status(
    path: str, body: dict[str, Any], error: Exception, status: int, pipeline: TextPipeline
) -> None:
    response, _, parts = run(ask(pipeline, ScriptedEngine([STATUS_SECONDS / 2, error]), path, body | {"stream": True}))
    assert response.status_code == status
    assert "event:" not in text_of(parts)


@IN_EVERY_API
def test_late_engine_refusal_is_one_event_with_the_clients_field(
    path: str, body: dict[str, Any], pipeline: TextPipeline
) -> None:
    error = ContextLengthError("prompt_ids", "9 tokens", "is too long")
    response, _, parts = run(ask(pipeline, ScriptedEngine([12.0, error]), path, body | {"stream": True}))
    assert response.status_code == 200
    assert num_terminal(path, parts) == 1
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    assert f"{field}='9 tokens': is too long" in text_of(parts)
    if path == "/v1/responses":
        events = [
            json.loads(line.removeprefix("data: ")) for line in text_of(parts).splitlines() if line.startswith("data: ")
        ]
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
        assert [event["sequence_number"] for event in events] == [0, 1, 2]


@IN_EVERY_API
@pytest.mark.parametrize("seconds", [0.5, STATUS_SECONDS + 0.5, 25.0])
def test_disconnect_before_the_first_token_aborts_the_request(
    path: str, body: dict[str, Any], seconds: float, pipeline: TextPipeline
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([1000.0, ended()])
        transport = InProcessTransport(create_app(engine, pipeline))
        async with httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=None) as client:
            call = asyncio.create_task(client.post(path, json=body | {"stream": True}))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.wait((call,))
        assert engine.aborted == [engine.submits[0].request_id]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@IN_EVERY_API
@pytest.mark.parametrize("stream", [False, True])
def test_request_over_the_queue_limit_is_429(
    path: str, body: dict[str, Any], stream: bool, pipeline: TextPipeline
) -> None:
    engine = ScriptedEngine([1000.0, ended()])
    limits = TimeLimits(queue_seconds=30.0 if stream else 0.5)
    response, _, parts = run(ask(pipeline, engine, path, body | {"stream": stream}, limits=limits))
    if not stream:
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        assert json.loads(text_of(parts))["error"]["type"] == "rate_limit_error"
    else:
        assert (response.status_code, parts[-1][0], num_terminal(path, parts)) == (200, 30.0, 1)
    assert "that a request may wait here" in text_of(parts)
    assert engine.aborted == [engine.submits[0].request_id]


@IN_EVERY_API
def test_queue_limit_before_the_headers_determines_the_status(
    path: str, body: dict[str, Any], pipeline: TextPipeline
) -> None:
    limits = TimeLimits(queue_seconds=STATUS_SECONDS / 2)
    response, _, _ = run(ask(pipeline, ScriptedEngine([1000.0, ended()]), path, body | {"stream": True}, limits=limits))
    assert response.status_code == 429


@IN_EVERY_API
@pytest.mark.parametrize("stream", [False, True])
def test_request_over_the_run_limit_is_504(
    path: str, body: dict[str, Any], stream: bool, pipeline: TextPipeline
) -> None:
    engine = ScriptedEngine([*itertools.chain(*[waiting(1.5, "x")] * 100), ended()])
    limits = TimeLimits(queue_seconds=5.0, request_seconds=50.0)
    response, _, parts = run(ask(pipeline, engine, path, body | {"stream": stream}, limits=limits))
    assert parts[-1][0] == 50.0
    assert "within the 50 seconds that it may take here" in text_of(parts)
    if stream:
        assert (response.status_code, num_terminal(path, parts)) == (200, 1)
    else:
        assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert engine.aborted == [engine.submits[0].request_id]


def test_queue_limit_ends_with_the_first_token_of_any_choice(pipeline: TextPipeline) -> None:
    """The queue limit ends with the first token of any prompt; the request limit applies to the whole request."""
    body = {"model": "scripted", "prompt": ["a", "b", "c"], "return_token_ids": True}
    scripts = [[seconds, *said("x"), ended()] for seconds in (1.0, 20.0, 40.0)]
    limits = TimeLimits(queue_seconds=10.0, request_seconds=60.0)
    response, _, _ = run(ask(pipeline, ScriptedEngine(*scripts), "/v1/completions", body, limits=limits))
    assert response.status_code == 200
    engine = ScriptedEngine(*scripts)
    response, began, _ = run(
        ask(pipeline, engine, "/v1/completions", body, limits=TimeLimits(queue_seconds=10.0, request_seconds=30.0))
    )
    assert (response.status_code, began, len(engine.aborted)) == (504, 30.0, 1)


def test_slow_reader_has_the_same_time_limit(pipeline: TextPipeline) -> None:
    """Events that are buffered already don't extend the time limit."""

    async def main() -> None:
        engine = ScriptedEngine([*said(*"x" * 1000), ended()])
        timed = TimeLimits(request_seconds=10.0).of_request(engine)
        with pytest.raises(ApiError, match="within the 10 seconds"):
            await read(timed)
        assert 100 <= engine.produced <= 102

    async def read(timed: EngineClient) -> None:
        async for _ in timed.stream(Submit(request_id="a", prompt_ids=[1])):
            await asyncio.sleep(0.1)

    run(main())


def test_official_clients_ignore_keep_alives(pipeline: TextPipeline) -> None:
    """OpenAI's and Anthropic's own clients read streams with a late first token."""

    async def main() -> None:
        app = create_app(ScriptedEngine([35.0, *said("well"), 15.0, *said(" then"), ended()]), pipeline)
        openai, anthropic = openai_client(app), anthropic_client(app)
        user: Any = [{"role": "user", "content": "hi"}]
        chunks = await openai.chat.completions.create(model="scripted", messages=user, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]) == "well then"
        events = await openai.responses.create(model="scripted", input="hi", stream=True)
        assert [event async for event in events][-1].response.output_text == "well then"  # type: ignore[union-attr]
        async with anthropic.messages.stream(model="scripted", messages=user, max_tokens=9) as stream:
            assert await stream.get_final_text() == "well then"
        assert asyncio.get_running_loop().time() == 3 * 50

    run(main())
