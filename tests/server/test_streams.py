"""Streams over HTTP: exactly one terminal frame, the first byte before the last event, and aborts on disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import AgentspecError, ContextLengthError, EngineClosedError, RequestError
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, TokensEvent
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": "hi", "stream": True}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
ENDS: list[Any] = [
    ended(),
    ended(FinishReason.LENGTH, stop_match=None),
    ended(FinishReason.ABORT, stop_match=None),
    ended(FinishReason.ERROR, error="the step failed"),
    AgentspecError("out of luck"),
    EngineClosedError("closed"),
    ValueError("a bug"),
    None,
]


def script_of(rng: random.Random) -> list[Any]:
    """Some tokens, one kind of ending, and events after it that must never be sent."""
    words = ["a", "<tool", "_call>", "</think>", "\n", "", "é", "{"]
    end = rng.choice(ENDS)
    tokens = said(*rng.choices(words, k=rng.randint(0, 6)))
    if end is None:
        return tokens
    return [*tokens, end, *said("late"), ended()]


@pytest.mark.parametrize("seed", range(60))
def test_exactly_one_terminal_frame_for_any_engine_script(
    connect: Connect, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    script = script_of(rng)
    path, body = rng.choice(PATHS)
    options = {"stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
    num_choices = rng.choice([1, 1, 3])

    async def run() -> httpx.Response:
        async with connect(ScriptedEngine(script)) as client:
            return await client.post(
                path, json=body | options | {"return_token_ids": rng.random() < 0.5, "n": num_choices}
            )

    response = asyncio.run(run())
    num_tokens = next((index for index, step in enumerate(script) if not isinstance(step, TokensEvent)), len(script))
    end = script[num_tokens] if num_tokens < len(script) else None
    is_finish = isinstance(end, FinishEvent) and end.reason is not FinishReason.ERROR
    if num_tokens == 0 and not is_finish:
        assert response.status_code in (500, 503), seed
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, seed
        return
    assert response.status_code == 200, seed
    *frames, rest = [frame.removeprefix("data: ") for frame in response.text.split("\n\n")]
    assert rest == "", seed
    bodies = [json.loads(frame) for frame in frames if frame != "[DONE]"]
    reasons = [
        choice["finish_reason"] for body in bodies for choice in body.get("choices", []) if choice["finish_reason"]
    ]
    errors = [body for body in bodies if "error" in body]
    assert "late" not in response.text, seed
    if is_finish:
        assert (len(reasons), len(errors), frames.count("[DONE]"), frames[-1]) == (num_choices, 0, 1, "[DONE]"), seed
        assert ["metrics" in body for body in bodies] == [False] * (len(bodies) - 1) + [True], seed
        assert sum(bool(body.get("usage")) for body in bodies) == bool(options), seed
    else:
        assert (len(reasons), len(errors), frames.count("[DONE]")) == (0, 1, 0), seed
        assert "error" in bodies[-1], seed
        assert "a bug" not in response.text, seed


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (RequestError("top_k", -1, "is negative"), 400, "top_k", "invalid_value"),
        (ContextLengthError("prompt_ids", "9 tokens", "is too long"), 400, "prompt", "context_length_exceeded"),
        (EngineClosedError("the engine was closed"), 503, None, "engine_closed"),
        (AgentspecError("broken"), 500, None, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_first_event_determine_the_status(
    connect: Connect,
    path: str,
    body: dict[str, Any],
    stream: bool,
    error: Exception,
    status: int,
    param: str | None,
    code: str,
) -> None:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine([error])) as client:
            return await client.post(path, json=body | {"stream": stream})

    response = asyncio.run(run())
    shown = response.json()["error"]
    if param == "prompt" and "messages" in body:
        param = "messages"
    assert (response.status_code, shown["param"], shown["code"]) == (status, param, code)
    assert "prompt_ids" not in shown["message"]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_first_text_arrives_before_the_last_engine_event(connect: Connect, path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        engine = ScriptedEngine([*said("first"), go_on, *said("second"), ended()])
        async with connect(engine) as client, client.stream("POST", path, json=body) as response:
            parts = response.aiter_text()
            assert "first" in await read_until(parts, "first")
            assert engine.produced == 1
            go_on.set()
            assert "[DONE]" in await read_until(parts, "[DONE]")

    asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_closing_a_stream_aborts_the_request(connect: Connect, path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        engine = ScriptedEngine([*said("first"), asyncio.Event(), ended()])
        async with connect(engine) as client:
            async with client.stream("POST", path, json=body) as response:
                await read_until(response.aiter_text(), "first")
            assert engine.aborted == [engine.submits[0].request_id]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_disconnect_before_the_answer_aborts_the_request(
    connect: Connect, path: str, body: dict[str, Any], stream: bool
) -> None:
    async def run() -> None:
        engine = ScriptedEngine([asyncio.Event(), ended()])
        async with connect(engine) as client:
            call = asyncio.create_task(client.post(path, json=body | {"stream": stream}))
            while not engine.submits:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert engine.aborted == [engine.submits[0].request_id]

    asyncio.run(run())


def test_disconnect_aborts_an_engine_that_never_yields_control(connect: Connect) -> None:
    """At most one more event after the disconnect."""

    async def run() -> None:
        events: list[Event] = [*said(*["x"] * 1000), ended()]
        engine = ScriptedEngine(events)
        async with connect(engine) as client, client.stream("POST", "/v1/completions", json=COMPLETION) as response:
            await anext(response.aiter_raw())
            produced = engine.produced
            await response.aclose()
            assert engine.produced <= produced + 1
        assert len(engine.aborted) == 1

    asyncio.run(run())


def test_models_stats_and_health_routes(connect: Connect) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        async with connect(engine) as client:
            models = (await client.get("/v1/models")).json()
            assert models["data"] == [
                {"id": "scripted", "object": "model", "created": 0, "owned_by": "agentspec", "max_model_len": 4096}
            ]
            assert (await client.get("/stats")).json() == {"requests": 0}
            assert (await client.get("/health")).status_code == 200
            engine.alive = False
            assert (await client.get("/health")).status_code == 503
            for method, path, status in (
                ("GET", "/v1/nothing", 404),
                ("GET", "/v1/completions", 405),
                ("GET", "/docs", 404),
            ):
                response = await client.request(method, path)
                assert response.status_code == status
                assert path in response.json()["error"]["message"]

    asyncio.run(run())


def test_invalid_json_and_too_large_bodies_are_refused(connect: Connect) -> None:
    async def run() -> None:
        async with connect(ScriptedEngine(), max_body_bytes=100) as client:
            for content, status, code in (
                (b"{", 400, "invalid_json"),
                (b"\xff", 400, "invalid_json"),
                (b" " * 101, 413, "body_too_large"),
            ):
                response = await client.post("/v1/completions", content=content)
                assert (response.status_code, response.json()["error"]["code"]) == (status, code)

    asyncio.run(run())


async def read_until(parts: AsyncIterator[str], wanted: str) -> str:
    seen = ""
    while wanted not in seen:
        seen += await anext(parts)
    return seen
