"""Responses that stop working when nobody listens any more.

Owns the watch for the client's disconnect, and the statuses of errors that come before the first byte. Knows ASGI and
nothing of requests or engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.errors import AgentspecError
from agentspec.server import sse
from agentspec.server.errors import ApiError, api_error, printable

_log = logging.getLogger(__name__)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str = "") -> Response:
    """`path`: the request's, which decides the shape of the body."""
    return _ErrorResponse(error, path)


def shown_path(path: str) -> str:
    """A path as a log shows it: on one line, and without a blank."""
    return quote(path, safe="/:@")


class _ErrorResponse(Response):
    """Every answer that is an error. Sending it leaves a line in the log."""

    media_type = "application/json"

    def __init__(self, error: ApiError, path: str) -> None:
        super().__init__(msgspec.json.encode(error.body(path)), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = "failed" if self._error.status == 500 else "refused"
        _log.info("%s %s %s: %s", scope["method"], shown_path(scope["path"]), verb, printable(self._error.for_log))
        await super().__call__(scope, receive, send)


class WatchedResponse(Response):
    """Awaits `produce` for the real response and sends it; cancels both when the client goes away."""

    def __init__(self, produce: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            try:
                response = await self._produce()
            except ApiError as error:
                response = error_response(error, scope["path"])
            except AgentspecError as error:
                response = error_response(api_error(error), scope["path"])
            except Exception:
                _log.exception("a request failed")
                response = error_response(ApiError(500, "internal error"), scope["path"])
            await response(scope, receive, send)

        await _run_until_disconnect(receive, work())


class FrameResponse(Response):
    """Sends frames as they are made. Unlike starlette's StreamingResponse it leaves `receive` to WatchedResponse."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    @classmethod
    async def begin(cls, frames: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> FrameResponse:
        """Wait for the first frame, so that an error before it can still choose the status. headers: beside those of every stream."""
        return cls(await anext(frames), frames, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for frame in self._rest:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_cancel_on_disconnect(receive, worker))
    try:
        await asyncio.wait((worker,))
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait((worker, watcher))
    for task in (worker, watcher):
        if not task.cancelled():
            task.result()


async def _cancel_on_disconnect(receive: Receive, worker: asyncio.Task[None]) -> None:
    """The request's body has been read before, so the next message of interest is the client's leaving."""
    while (await receive())["type"] != "http.disconnect":
        pass
    worker.cancel()
