"""An httpx transport to an ASGI app in the same process: no socket, and a body that streams as the app sends it.

httpx's own ASGITransport collects the whole body first, which would hide the time to the first token. Closing a
response early reaches the app as `http.disconnect`; the close returns when the app has returned. An exception of the
app is raised in the caller that waits for the response or reads it. Knows nothing of agentspec.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import ModuleType
from typing import Any

import httpx

Message = MutableMapping[str, Any]
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class _Transport:
    """Runs `app` once per request, as a task of the caller's event loop."""

    library: ModuleType
    body_type: type[Any]

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _Exchange(await request.aread(), self.library.RemoteProtocolError)
        exchange.start(self._app, _scope(request))
        try:
            status, headers = await exchange.head()
        except BaseException:
            await exchange.hang_up()
            raise
        response: httpx.Response = self.library.Response(status, headers=headers, stream=self.body_type(exchange))
        return response


class _Exchange:
    """One request and its response: the app runs as a task, the caller reads a queue.

    The queue is unbounded, like a large socket buffer: a slow reader doesn't slow the engine."""

    def __init__(self, body: bytes, broken: type[Exception]) -> None:
        """broken: raised when the app returns before its answer is complete."""
        self._broken = broken
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._complete = False
        self._task: asyncio.Task[None] | None = None

    def start(self, app: App, scope: MutableMapping[str, Any]) -> None:
        async def run() -> None:
            try:
                await app(scope, self._receive, self._send)
            finally:
                self._closed.set()
                self._messages.put_nowait(None)

        self._task = asyncio.create_task(run())

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._next()
        if message is None:
            raise RuntimeError("the app returned without starting a response")
        return message["status"], list(message.get("headers", []))

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._next()
            if message is None:
                if not self._complete:
                    raise self._broken("the app returned before the body was complete")
                return
            if message.get("body"):
                yield message["body"]

    async def hang_up(self) -> None:
        """Send the app a disconnect, and wait until it has returned."""
        self._closed.set()
        assert self._task is not None
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # retrieve the error: the caller has left

    async def _next(self) -> Message | None:
        message = await self._messages.get()
        if message is None:
            assert self._task is not None
            self._messages.put_nowait(None)
            await self._task  # raises the app's exception
        return message

    async def _receive(self) -> Message:
        if self._request is not None:
            request, self._request = self._request, None
            return request
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._closed.is_set():
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
            self._closed.set()
        self._messages.put_nowait(message)
        await asyncio.sleep(0)  # let the reader run, as a write to a socket may


class _Body:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._exchange.body():
            yield part

    async def aclose(self) -> None:
        await self._exchange.hang_up()


class InProcessTransport(_Transport, httpx.AsyncBaseTransport):
    """The transport for an httpx client."""

    library = httpx
    body_type = type("InProcessBody", (_Body, httpx.AsyncByteStream), {})


def transport_type(library: ModuleType) -> type[Any]:
    """The same for a library with httpx's interface, such as the httpx2 of newer SDKs."""
    if library is httpx:
        return InProcessTransport
    body_type = type("InProcessBody", (_Body, library.AsyncByteStream), {})
    return type(
        "InProcessTransport", (_Transport, library.AsyncBaseTransport), {"library": library, "body_type": body_type}
    )


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("in-process", 0),
        "server": (request.url.host, request.url.port),
    }
