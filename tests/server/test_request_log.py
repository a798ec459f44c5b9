"""The request log: one line at the end of a request, and one for each refusal, with field and reason and without the
client's texts."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.errors import RequestError
from agentspec.server.app import create_app
from agentspec.server.door import Door
from agentspec.server.pipeline import TextPipeline
from agentspec.server.request_log import RequestLog
from agentspec.server.transport import InProcessTransport
from agentspec.server.waiting_room import WaitingRoom
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5}

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]
Logged = Callable[..., list[str]]


@pytest.fixture
def logged(pipeline: TextPipeline, caplog: pytest.LogCaptureFixture) -> Logged:
    """The log of a server while it serves requests. Its clock advances by 5 ms at each reading."""

    def lines(
        ask: Ask, engine: ScriptedEngine | None = None, *, level: int = logging.INFO, app: Any = None, **config: Any
    ) -> list[str]:
        door = app or Door(
            create_app(engine or ScriptedEngine([*said("a", "bc"), ended()]), pipeline, strict_fields=True),
            ServerConfig(**config),
            max_running=1,
        )
        ticks = itertools.count()

        async def run() -> None:
            transport = InProcessTransport(RequestLog(door, lambda: next(ticks) * 0.005))
            async with httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=None) as client:
                await ask(client)

        with caplog.at_level(level, "agentspec"):
            caplog.clear()
            asyncio.run(run())
        assert all(record.name.partition(".")[0] == "agentspec" for record in caplog.records)
        return caplog.messages

    return lines


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
        ("/v1/responses", {"model": "scripted", "input": "x"}),
    ],
)
def test_answer_line_has_tokens_and_times(path: str, body: dict[str, Any], stream: bool, logged: Logged) -> None:
    engine = ScriptedEngine([*said("a", "bc"), ended()])
    (line,) = logged(
        lambda client: client.post(path, json=body | {"stream": stream}, headers={"x-session-id": "s 1"}), engine
    )
    prompt = len(engine.submits[0].prompt_ids)
    assert line == f"POST {path} 200 session='s 1' prompt={prompt} cached=4 output=6 finish=stop first=5ms all=10ms"


def test_choices_count_their_prompt_once_in_the_log(logged: Logged) -> None:
    body = COMPLETION | {"prompt": [[1, 2, 3], [4, 5]], "n": 2}
    (line,) = logged(lambda client: client.post("/v1/completions", json=body))
    assert line == "POST /v1/completions 200 prompt=5 cached=8 output=24 finish=stop first=5ms all=10ms"


def test_line_without_engine_use_has_no_tokens(logged: Logged) -> None:
    (line,) = logged(lambda client: client.get("/v1/models", headers={"x-session-id": "s"}))
    assert line == "GET /v1/models 200 session='s' all=5ms"


def test_session_from_the_body_is_escaped_to_one_line(logged: Logged) -> None:
    (line,) = logged(
        lambda client: client.post("/v1/completions", json=COMPLETION | {"prompt_cache_key": "a\nGET / 200"})
    )
    assert " session='a\\nGET / 200' " in line


def test_disconnect_is_logged_as_an_abort(logged: Logged) -> None:
    async def leave(client: httpx.AsyncClient) -> None:
        request = client.build_request("POST", "/v1/completions", json=COMPLETION | {"stream": True})
        response = await client.send(request, stream=True)
        await anext(response.aiter_raw())
        await response.aclose()

    (line,) = logged(leave, ScriptedEngine([*said("abc"), asyncio.Event()]))
    assert line == "POST /v1/completions 200 prompt=3 output=3 finish=abort first=5ms all=10ms"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (CHAT | {"temperature": "secret words"}, "400 temperature: Expected `float`, got `str`"),
        (CHAT | {"modalities": ["audio"]}, "400 modalities: is not supported (only ['text'])"),
        (CHAT | {"mood": "secret words"}, "400 mood: is not a field of this endpoint"),
        (CHAT | {"moo\nd": 1}, "400 moo\\u000ad: is not a field of this endpoint"),
        (CHAT | {"model": "other"}, "404 model='other': not served here; this server has 'scripted'"),
    ],
)
def test_refusal_line_has_field_and_reason(body: dict[str, Any], why: str, logged: Logged) -> None:
    refusal, line = logged(lambda client: client.post("/v1/chat/completions", json=body))
    assert refusal == f"POST /v1/chat/completions refused: {why}"
    assert line == f"POST /v1/chat/completions {why[:3]} all=5ms"


def test_engine_refusals_are_logged(logged: Logged) -> None:
    engine = ScriptedEngine([RequestError("prompt_ids", [1, 2, 3], "is too long")])
    refusal, line = logged(lambda client: client.post("/v1/completions", json=COMPLETION), engine)
    assert refusal == "POST /v1/completions refused: 400 prompt: is too long"
    assert line == "POST /v1/completions 400 all=5ms"


def test_failing_stream_is_logged(logged: Logged) -> None:
    engine = ScriptedEngine([*said("abc"), ended(FinishReason.ERROR, error="is no grammar", refused="prompt_ids")])
    failure, line = logged(lambda client: client.post("/v1/completions", json=COMPLETION | {"stream": True}), engine)
    assert failure == "a stream ended early: 400 prompt: is no grammar"
    assert line == "POST /v1/completions 200 prompt=3 cached=4 output=6 finish=error first=5ms all=10ms"


def test_status_500_is_logged_as_failed(logged: Logged) -> None:
    engine = ScriptedEngine([ended(FinishReason.ERROR, error="out of memory")])
    failure, line = logged(lambda client: client.post("/v1/completions", json=COMPLETION), engine)
    assert failure == "POST /v1/completions failed: 500 out of memory"
    assert line.startswith("POST /v1/completions 500 ")


def test_refusals_before_the_app_are_logged(logged: Logged) -> None:
    refusal, line = logged(lambda client: client.get("/a%20b%0A"), api_keys=("secret",))
    assert refusal.startswith("GET /a%20b%0A refused: 401 an API key is needed")
    assert line == "GET /a%20b%0A 401 all=5ms"
    room = WaitingRoom(lambda: "loading weights", lambda: 1.0)
    refusal, line = logged(lambda client: client.post("/v1/completions", json=COMPLETION), app=room)
    assert refusal == "POST /v1/completions refused: 503 the model is being loaded: loading weights"
    assert line == "POST /v1/completions 503 all=5ms"


def test_successful_probes_are_logged_at_debug_only(logged: Logged) -> None:
    async def probe(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/ping/", "/ready", "/metrics"):
            await client.get(path)

    assert logged(probe) == []
    assert [line.split()[1] for line in logged(probe, level=logging.DEBUG)] == [
        "/health",
        "/ping/",
        "/ready",
        "/metrics",
    ]
    engine = ScriptedEngine()
    engine.alive = False
    assert logged(lambda client: client.get("/health"), engine)[-1] == "GET /health 503 all=5ms"


def test_nothing_is_logged_by_default(logged: Logged) -> None:
    assert logged(lambda client: client.post("/v1/completions", json=COMPLETION), level=logging.WARNING) == []
    assert logged(lambda client: client.post("/v1/completions", json={}), level=logging.WARNING) == []
