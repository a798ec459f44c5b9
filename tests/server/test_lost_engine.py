"""Requests that end with their engine, in each API: 503 before the first token, one terminal event after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

MESSAGES = [{"role": "user", "content": "hi"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "scripted", "messages": MESSAGES},
    "/v1/completions": {"model": "scripted", "prompt": "hi"},
    "/v1/responses": {"model": "scripted", "input": "hi"},
    "/v1/messages": {"model": "scripted", "messages": MESSAGES, "max_tokens": 50},
}
WHY = "the engine is not running: its process died"
LOST = msgspec.structs.replace(ended(FinishReason.ERROR, error=WHY), is_lost=True)


def post(connect: Connect, engine: ScriptedEngine, path: str, **fields: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine) as client:
            return await client.post(path, json=APIS[path] | fields)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_engine_loss_before_the_first_token_is_503(connect: Connect, path: str, stream: bool) -> None:
    answer = post(connect, ScriptedEngine([LOST]), path, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (503, WHY)
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "api_error")
    else:
        assert (error["type"], error["code"]) == ("server_error", "engine_closed")


@pytest.mark.parametrize("path", APIS)
def test_engine_loss_ends_a_running_stream_with_an_error(connect: Connect, path: str) -> None:
    answer = post(connect, ScriptedEngine([*said("a", "b"), LOST]), path, stream=True)
    assert answer.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert WHY in json.dumps(events[-1])
    assert not any(WHY in json.dumps(event) for event in events[:-1])


@pytest.mark.parametrize("path", APIS)
def test_failure_of_a_single_request_is_500(connect: Connect, path: str) -> None:
    assert (
        post(connect, ScriptedEngine([ended(FinishReason.ERROR, error="the grammar failed")]), path).status_code == 500
    )
