"""Responses that are cancelled when the client disconnects.

Owns the watch for disconnects, and the statuses of errors before the first byte. Knows ASGI and nothing of requests or
engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.errors import AgentspecError, printable
from agentspec.server import sse
from agentspec.server.errors import ApiError, api_error
from agentspec.server.request_ids import log_mark

STATUS_SECONDS = 1.0
"""How long a stream's status waits for the engine's first event. The engine refuses requests at once, if at all."""
KEEP_ALIVE_SECONDS = 10.0
"""Longest silence of a stream."""

_log = logging.getLogger(__name__)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str = "") -> Response:
    """path: the request's, which determines the shape of the body."""
    return _ErrorResponse(error, path)


def shown_path(path: str) -> str:
    """A path for the log: on one line, and without spaces."""
    return quote(path, safe="/:@")


class _ErrorResponse(Response):
    """A response for an error. Sending it writes a log line."""

    media_type = "application/json"

    def __init__(self, error: ApiError, path: str) -> None:
        super().__init__(msgspec.json.encode(error.body(path)), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = "failed" if self._error.status == 500 else "refused"
        _log.info(
            "%s %s %s: %s%s",
            scope["method"],
            shown_path(scope["path"]),
            verb,
            printable(self._error.for_log),
            log_mark(),
        )
        await super().__call__(scope, receive, send)


class WatchedResponse(Response):
    """Awaits `produce` for the actual response and sends it; cancels both when the client disconnects."""

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
                _log.exception("a request failed%s", log_mark())
                response = error_response(ApiError(500, "internal error"), scope["path"])
            await response(scope, receive, send)

        await _run_until_disconnect(receive, work())


class FrameResponse(Response):
    """Sends frames as they arrive, and keep-alives in between. Unlike starlette's StreamingResponse it leaves `receive`
    to WatchedResponse."""

    media_type = sse.MEDIA_TYPE

    def __init__(
        self,
        first: asyncio.Future[bytes],
        rest: AsyncGenerator[bytes, None],
        head: sse.StreamHead,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._rest, self._head = first, rest, head
        self._sent_at = 0.0

    @classmethod
    async def begin(
        cls, frames: AsyncGenerator[bytes, None], head: sse.StreamHead, headers: Mapping[str, str]
    ) -> FrameResponse:
        """Wait up to STATUS_SECONDS for the first frame: an error before it can still determine the status. headers: in
        addition to those of every stream."""
        first = asyncio.ensure_future(anext(frames))
        try:
            await asyncio.wait((first,), timeout=STATUS_SECONDS)
            head.is_sent = not first.done()
            if first.done():
                first.result()
        except BaseException:
            await _closed(first, frames)
            raise
        return cls(first, frames, head, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time

        async def send_frame(frame: bytes) -> None:
            self._sent_at = clock()
            await send({"type": "http.response.body", "body": frame, "more_body": True})

        async def beat() -> None:
            while True:
                await asyncio.sleep(self._sent_at + KEEP_ALIVE_SECONDS - clock())
                if clock() >= self._sent_at + KEEP_ALIVE_SECONDS:
                    await send_frame(self._head.keep_alive)

        self._sent_at = clock()
        pulse = asyncio.create_task(beat())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_frame(await self._first)
            async for frame in self._rest:
                await send_frame(frame)
        finally:
            pulse.cancel()
            await asyncio.wait((pulse,))
            await _closed(self._first, self._rest)
        await send({"type": "http.response.body", "body": b""})


async def _closed(first: asyncio.Future[bytes], frames: AsyncGenerator[bytes, None]) -> None:
    """Close `frames`, whose first frame may still be pending."""
    first.cancel()
    await asyncio.wait((first,))
    first.cancelled() or first.exception()  # retrieve the error: its reader has gone, or has already seen it
    await frames.aclose()


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
    """Cancel the worker on disconnect. The body has been read before, so no other message matters."""
    while (await receive())["type"] != "http.disconnect":
        pass
    worker.cancel()
