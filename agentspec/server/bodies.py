"""Reading request bodies, and answering before a body is complete.

Owns how long a body may take, how many bytes of unfinished bodies are held, and how to close a connection whose client
may still be sending. Knows ASGI; nothing of JSON, keys or the engine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentspec.server.errors import ApiError

WINDOW_SECONDS = 20.0
"""The longest pause within a body that kept to LEAST_RATE before."""
LEAST_RATE = 8 * 2**10
"""Minimum bytes per second of a body, over WINDOW_SECONDS."""
SMALL_BYTES = 64 * 2**10
"""Per body: up to this size, it never counts against LARGE_BODIES."""
LARGE_BODIES = 4
"""Unfinished large bodies may hold as many bytes as this many bodies of the maximum size, in total."""
LINGER_BYTES = 2**20
LINGER_SECONDS = 1.0
"""How much is still read, and for how long, after an answer that was sent before its request's body was complete. If a
connection is closed while its client still sends, the client loses the answer."""
RETRY_SECONDS = 1


class _Arriving:
    """One unfinished body."""

    is_dropped = False
    """It was dropped, because its memory was needed for other bodies."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.data = bytearray()
        self.limit = limit

    def drop(self) -> None:
        self.is_dropped = True
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Reads the request bodies of one server."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: limit for one body."""
        self._max_bytes = max_bytes
        self._large: dict[_Arriving, int] = {}
        """Large unfinished bodies and their sizes; the body that became large first comes first."""
        self._large_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> Message:
        """Read the whole body; return it as one ASGI message.

        Raises ApiError: 413 for a body that is too large, 408 for one that is too slow, 429 for a large one that was
        dropped to make room for faster ones. Raises ClientDisconnect when the client leaves."""
        if _declared_bytes(scope) > self._max_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        body = _Arriving(asyncio.timeout(WINDOW_SECONDS))
        try:
            async with body.limit:
                while not body.is_dropped:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, is_last = message.get("body", b""), not message.get("more_body", False)
                    if len(body.data) + len(part) > self._max_bytes:
                        raise self._too_large()
                    if is_last and not body.data:
                        return message
                    body.data += part
                    self._count(body)
                    if is_last:
                        return {"type": "http.request", "body": body.data, "more_body": False}
                    if not body.is_dropped:
                        due = body.limit.when()
                        assert due is not None
                        body.limit.reschedule(min(due + len(part) / LEAST_RATE, loop.time() + WINDOW_SECONDS))
        except TimeoutError:
            pass
        finally:
            self._large_bytes -= self._large.pop(body, 0)
        if body.is_dropped:
            reason = (
                f"more than {LARGE_BODIES * self._max_bytes} bytes of large bodies are on their way, and this one came "
                "more slowly than others"
            )
            raise ApiError(429, reason, code="overloaded", headers={"retry-after": str(RETRY_SECONDS)})
        raise ApiError(
            408,
            f"the body came more slowly than {LEAST_RATE} bytes a second over {WINDOW_SECONDS:g} seconds",
            code="body_timeout",
        )

    def _count(self, body: _Arriving) -> None:
        """Account for a body's size. Over the limit the oldest body is dropped: deliberately slow bodies are older than
        honest ones."""
        if len(body.data) <= SMALL_BYTES:
            return
        self._large_bytes += len(body.data) - self._large.get(body, 0)
        self._large[body] = len(body.data)
        while self._large_bytes > LARGE_BODIES * self._max_bytes:
            oldest = next(iter(self._large))
            self._large_bytes -= self._large.pop(oldest)
            oldest.drop()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def replayed(message: Message, receive: Receive) -> Receive:
    """A `receive` that first returns `message`, a whole body, and keeps no reference to it afterwards."""
    waiting = [message]

    async def receive_rest() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_rest


async def answer_unread(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer although the request's body may not have been read to its end. If there is a body, close the
    connection afterwards."""
    if not _declared_bytes(scope) and all(name != b"transfer-encoding" for name, _ in scope["headers"]):
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"

    async def send_and_stay(message: Message) -> None:
        await send(message if message["type"] == "http.response.start" else {**message, "more_body": True})

    await response(scope, receive, send_and_stay)
    await _discard(receive)
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body", False):  # the end of the body, or the client left
                    return
                left -= len(message.get("body", b""))


def _declared_bytes(scope: Scope) -> int:
    """The Content-Length; 0 without one."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()), 0)
