"""The in-process transport: bodies stream, early closes reach the app, and the app's errors reach the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentspec.server.transport import InProcessTransport

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [(b"x-kind", b"test")]}


def part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=InProcessTransport(app), base_url="http://in-process")


def test_request_reaches_the_app_and_answer_reaches_the_caller() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        headers = dict(scope["headers"])
        await send(START | {"status": 201})
        target = f"{scope['path']}?{scope['query_string'].decode()}"
        await send(part(f"{scope['method']} {target} {headers[b'x-a'].decode()} {body.decode()}".encode(), more=False))
        assert (await receive())["type"] == "http.disconnect"

    async def run() -> None:
        async with client(app) as http:
            response = await http.post("/v1/x", params={"q": "1"}, headers={"X-A": "b"}, content=b"data")
        assert response.status_code == 201
        assert response.headers["x-kind"] == "test"
        assert response.text == "POST /v1/x?q=1 b data"

    asyncio.run(run())


def test_part_arrives_before_the_next_one_is_sent() -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def app(scope: Any, receive: Receive, send: Send) -> None:
            await send(START)
            await send(part(b"first"))
            await go_on.wait()
            await send(part(b"second", more=False))

        async with client(app) as http, http.stream("GET", "/") as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"first"
            go_on.set()
            assert await anext(parts) == b"second"
            assert [more async for more in parts] == []

    asyncio.run(run())


def test_early_close_disconnects_and_waits_for_the_app() -> None:
    async def run() -> None:
        seen: list[str] = []

        async def app(scope: Any, receive: Receive, send: Send) -> None:
            await receive()
            await send(START)
            await send(part(b"x"))
            seen.append((await receive())["type"])
            await send(part(b"nobody reads this"))
            await asyncio.sleep(0)
            seen.append("cleaned up")

        async with client(app) as http:
            async with http.stream("GET", "/") as response:
                await anext(response.aiter_raw())
            assert seen == ["http.disconnect", "cleaned up"]

    asyncio.run(run())


def test_cancelled_caller_disconnects() -> None:
    async def run() -> None:
        waiting = asyncio.Event()
        seen: list[str] = []

        async def app(scope: Any, receive: Receive, send: Send) -> None:
            await receive()
            waiting.set()
            seen.append((await receive())["type"])

        async with client(app) as http:
            call = asyncio.create_task(http.get("/"))
            await waiting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert seen == ["http.disconnect"]

    asyncio.run(run())


def test_app_errors_are_raised_in_the_caller() -> None:
    async def at_once(scope: Any, receive: Receive, send: Send) -> None:
        raise ValueError("at once")

    async def half_way(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        await send(part(b"x"))
        raise ValueError("half-way")

    async def silent(scope: Any, receive: Receive, send: Send) -> None:
        return

    async def short(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        await send(part(b"x"))

    async def run() -> None:
        for app, error, text in (
            (at_once, ValueError, "at once"),
            (half_way, ValueError, "half-way"),
            (silent, RuntimeError, "without starting"),
            (short, httpx.RemoteProtocolError, "before the body was complete"),
        ):
            async with client(app) as http:
                with pytest.raises(error, match=text):
                    await http.get("/")

    asyncio.run(run())
