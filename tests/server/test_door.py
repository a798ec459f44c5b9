"""Admission: keys, the limit on requests, and draining. Based on counts, not on times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.server.app import ROUTES, create_app
from agentspec.server.door import GENERATING, Door
from agentspec.server.transport import InProcessTransport
from tests.fakes.engine_client import ScriptedEngine, ended, said

COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": [1, 2], "max_tokens": 5}
KEYS = ServerConfig(api_keys=("first-key", "second-key"))


def door_of(engine: ScriptedEngine, config: ServerConfig, max_running: int = 1) -> Door:
    return Door(create_app(engine, None, max_body_bytes=config.max_body_bytes), config, max_running=max_running)


def client_of(door: Door) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=InProcessTransport(door), base_url="http://in-process", timeout=None)


def test_generating_paths_are_exactly_the_counted_ones() -> None:
    assert (
        {route.path for route in ROUTES if "events" in route.answers}
        <= GENERATING
        <= {route.path for route in ROUTES if route.method == "POST"}
    )


def test_without_configured_keys_requests_need_none() -> None:
    async def run() -> None:
        async with client_of(door_of(ScriptedEngine(), ServerConfig())) as client:
            assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-keys"},
        {"authorization": "Bearer first-key second-key"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST-KEY"},
        {"api-key": "first-key"},
    ],
)
def test_wrong_or_missing_key_is_401(headers: dict[str, str]) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        async with client_of(door_of(engine, KEYS)) as client:
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("GET", "/stats"),
                ("GET", "/nothing"),
                ("GET", "/healthy"),
            ):
                response = await client.request(method, path, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["type"]) == (
                    401,
                    "invalid_api_key",
                    "invalid_request_error",
                )
                assert response.headers["www-authenticate"] == "Bearer"
                assert "first-key" not in response.text
            response = await client.post("/v1/messages", headers=headers, json={})
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == "authentication_error"
            for path in ("/", "/health", "/static/nothing"):
                assert (await client.get(path, headers=headers)).status_code in (200, 404)
        assert engine.submits == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
        {"x-api-key": "wrong", "authorization": "Bearer first-key"},
    ],
)
def test_valid_key_is_admitted(headers: dict[str, str]) -> None:
    async def run() -> None:
        async with client_of(door_of(ScriptedEngine(), KEYS)) as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            assert (await client.post("/v1/completions", headers=headers, json=COMPLETION)).status_code == 200

    asyncio.run(run())


async def opened(client: httpx.AsyncClient) -> tuple[httpx.Response, AsyncIterator[str]]:
    """A stream whose first frame has arrived."""
    request = client.build_request("POST", "/v1/completions", json=COMPLETION | {"stream": True})
    response = await client.send(request, stream=True)
    assert response.status_code == 200
    frames = response.aiter_text()
    await anext(frames)
    return response, frames


def test_requests_over_the_limit_are_429() -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        engine = ScriptedEngine([*said("first"), go_on, ended()])
        async with client_of(door_of(engine, ServerConfig(max_queue=1), max_running=2)) as client:
            streams = [await opened(client) for _ in range(3)]
            for _ in range(2):
                refused = await client.post("/v1/completions", json=COMPLETION)
                error = refused.json()["error"]
                assert (refused.status_code, error["type"], error["code"], refused.headers["retry-after"]) == (
                    429,
                    "rate_limit_error",
                    "overloaded",
                    "1",
                )
            refused = await client.post("/v1/messages", json={})
            assert (refused.status_code, refused.json()["error"]["type"], refused.headers["retry-after"]) == (
                429,
                "rate_limit_error",
                "1",
            )
            assert (await client.get("/health")).status_code == 200, "requests without generation are never refused"
            assert (await client.post("/tokenize", json={})).status_code == 400
            assert len(engine.submits) == 3
            await streams[0][0].aclose()
            assert (await client.post("/v1/completions", json={})).status_code == 400, (
                "a client that leaves makes room, and so does a refusal"
            )
            streams.append(await opened(client))
            go_on.set()
            for _, frames in streams[1:]:
                assert "[DONE]" in "".join([text async for text in frames])
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    asyncio.run(run())


def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        door = door_of(ScriptedEngine([*said("first"), go_on, ended()]), ServerConfig())
        async with client_of(door) as client:
            _, frames = await opened(client)
            draining = asyncio.create_task(door.drain())
            await asyncio.sleep(0)
            for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/health")):
                response = await client.request(method, path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert (await client.post("/v1/messages")).json()["error"]["type"] == "api_error"
            assert (await client.get("/v1/models")).status_code == 200
            assert not draining.done()
            go_on.set()
            assert "[DONE]" in "".join([text async for text in frames])
            await draining

    asyncio.run(run())


def test_idle_server_drains_at_once() -> None:
    asyncio.run(door_of(ScriptedEngine(), ServerConfig()).drain())


@pytest.mark.parametrize(("size", "status"), [(1000, 400), (1024, 400), (1025, 413), (5000, 413)])
def test_body_over_the_size_limit_is_413(size: int, status: int) -> None:
    async def run() -> None:
        config = ServerConfig(max_body_mib=1 / 1024)
        async with client_of(door_of(ScriptedEngine(), config)) as client:
            for path in ("/v1/completions", "/v1/messages", "/tokenize"):
                assert (await client.post(path, content=b"{}".ljust(size))).status_code == status

    asyncio.run(run())
