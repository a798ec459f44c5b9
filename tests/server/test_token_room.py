"""Token limits beyond the context: clamped to the room after the prompt, and reported by header and usage, in every
API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

MESSAGES = [{"role": "user", "content": "hi"}]
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/messages": ({"messages": MESSAGES}, "max_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
}


def post(connect: Connect, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine) as client:
            return await client.post(path, json={"model": "scripted", **body})

    return asyncio.run(run())


def usages(value: Any) -> list[dict[str, Any]]:
    """Every usage in an answer, or in a list of events."""
    if isinstance(value, list):
        return [found for entry in value for found in usages(entry)]
    if not isinstance(value, dict):
        return []
    own = [value["usage"]] if value.get("usage") else []
    return own + [found for entry in value.values() for found in usages(entry)]


def told(response: httpx.Response, *, stream: bool) -> tuple[str | None, int | None]:
    """The limit as header and usage report it."""
    assert response.status_code == 200, response.text
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        bodies: Any = [json.loads(line) for line in lines]
    else:
        bodies = response.json()
    return response.headers.get("x-agentspec-max-tokens"), usages(bodies)[-1].get("max_tokens_clamped_to")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LIMITS)
def test_every_api_clamps_and_reports_it(path: str, stream: bool, connect: Connect) -> None:
    body, field = LIMITS[path]
    streamed = {"stream": stream} | (
        {"stream_options": {"include_usage": True}} if stream and path.endswith("completions") else {}
    )
    engine = ScriptedEngine([*said("a"), ended()])
    response = post(connect, engine, path, {**body, **streamed, field: 10**9})
    room = INFO.max_context - len(engine.submits[0].prompt_ids)
    assert engine.submits[0].sampling.max_tokens == room
    assert told(response, stream=stream) == (str(room), room)

    engine = ScriptedEngine([*said("a"), ended()])
    response = post(connect, engine, path, {**body, **streamed, field: room})
    assert engine.submits[0].sampling.max_tokens == room
    assert told(response, stream=stream) == (None, None), "the limit is the requested one"


def test_max_completion_tokens_is_clamped_too(connect: Connect) -> None:
    engine = ScriptedEngine([*said("a"), ended()])
    response = post(
        connect, engine, "/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5000, "n": 2}
    )
    room = INFO.max_context - len(engine.submits[0].prompt_ids)
    assert [submit.sampling.max_tokens for submit in engine.submits] == [room, room]
    assert told(response, stream=False) == (str(room), room)


def test_without_a_limit_nothing_is_clamped(connect: Connect) -> None:
    for path, (body, _) in LIMITS.items():
        if path == "/v1/messages":  # its limit is required
            continue
        engine = ScriptedEngine([*said("a"), ended()])
        assert told(post(connect, engine, path, body), stream=False) == (None, None)
        assert engine.submits[0].sampling.max_tokens == (16 if path == "/v1/completions" else None)


def test_clamping_reports_the_smallest_room_of_several_prompts(connect: Connect) -> None:
    engine = ScriptedEngine([*said("a"), ended()])
    response = post(
        connect, engine, "/v1/completions", {"prompt": [[5] * 10, [5] * 90, [5] * 4096], "max_tokens": 4050}
    )
    assert [submit.sampling.max_tokens for submit in engine.submits] == [4050, 4006, 4050], (
        "the last is the engine's to refuse"
    )
    assert told(response, stream=False) == ("4006", 4006)


def test_limit_stays_unclamped_without_room_for_the_minimum(connect: Connect) -> None:
    for body in (
        {"prompt": [5] * 4096},
        {"prompt": [5] * 5000},
        {"prompt": [5] * 4000, "forced_output": [7] * 97},
        {"prompt": [5] * 4000, "min_tokens": 97},
    ):
        engine = ScriptedEngine([*said("a"), ended()])
        post(connect, engine, "/v1/completions", {**body, "max_tokens": 99})
        assert engine.submits[0].sampling.max_tokens == 99


def test_prompt_without_output_may_fill_the_context(connect: Connect) -> None:
    engine = ScriptedEngine([ended()])
    assert told(post(connect, engine, "/v1/completions", {"prompt": [5] * 4096, "max_tokens": 0}), stream=False) == (
        None,
        None,
    )
    assert engine.submits[0].sampling.max_tokens == 0
