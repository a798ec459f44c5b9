"""Bodies on their way in, and answers that don't wait for one.

Owns how long a body may take, how many bytes of unfinished bodies are held, and how a connection ends whose client may
still be sending. Knows ASGI; nothing of JSON, keys or the engine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentspec.server.errors import ApiError

WINDOW_SECONDS = 20.0
"""A body may always pause this long, if it kept to the rate before."""
LEAST_RATE = 8 * 2**10
"""Bytes a second that a body must come with, over WINDOW_SECONDS."""
SMALL_BYTES = 64 * 2**10
"""Of each body: these bytes always find room. What is more counts as large."""
LARGE_BODIES = 4
"""The largest bodies that unfinished ones may hold the bytes of, all together."""
LINGER_BYTES = 2**20
LINGER_SECONDS = 1.0
"""How much is read, and for how long, behind an answer that came before its request's body: a connection that closes on
a client that still sends takes the answer with it."""
RETRY_SECONDS = 1


class _Arriving:
    """One body, as far as it has come."""

    is_crowded_out = False
    """The memory is needed for others."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.data = bytearray()
        self.limit = limit

    def crowd_out(self) -> None:
        self.is_crowded_out = True
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Reads the bodies of one server."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one body."""
        self._max_bytes = max_bytes
        self._large: dict[_Arriving, int] = {}
        """Large unfinished bodies, the one that has been large for longest first, and their bytes."""
        self._large_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> Message:
        """The whole body as one ASGI message.

        Raises ApiError: 413 for one that is too large, 408 for one that comes too slowly, 429 for a large one that came
        more slowly than others for which there would be no memory; ClientDisconnect when the client leaves."""
        if _declared_bytes(scope) > self._max_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        body = _Arriving(asyncio.timeout(WINDOW_SECONDS))
        try:
            async with body.limit:
                while not body.is_crowded_out:
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
                    if not body.is_crowded_out:
                        due = body.limit.when()
                        assert due is not None
                        body.limit.reschedule(min(due + len(part) / LEAST_RATE, loop.time() + WINDOW_SECONDS))
        except TimeoutError:
            pass
        finally:
            self._large_bytes -= self._large.pop(body, 0)
        if body.is_crowded_out:
            reason = f"more than {LARGE_BODIES * self._max_bytes} bytes of large bodies are on their way, and this one came more slowly than others"
            raise ApiError(429, reason, code="overloaded", headers={"retry-after": str(RETRY_SECONDS)})
        raise ApiError(
            408,
            f"the body came more slowly than {LEAST_RATE} bytes a second over {WINDOW_SECONDS:g} seconds",
            code="body_timeout",
        )

    def _count(self, body: _Arriving) -> None:
        """Beyond the limit the oldest goes: whoever sends slowly on purpose is older than those who don't."""
        if len(body.data) <= SMALL_BYTES:
            return
        self._large_bytes += len(body.data) - self._large.get(body, 0)
        self._large[body] = len(body.data)
        while self._large_bytes > LARGE_BODIES * self._max_bytes:
            oldest = next(iter(self._large))
            self._large_bytes -= self._large.pop(oldest)
            oldest.crowd_out()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def replayed(message: Message, receive: Receive) -> Receive:
    """A `receive` that begins with `message`, a whole body, and keeps nothing of it once it was taken."""
    waiting = [message]

    async def receive_rest() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_rest


async def answer_unread(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer whose request's body, if there is one, nobody has read to its end; the connection is closed behind
    it."""
    if not _has_body(scope):
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
                if not message.get("more_body", False):  # the end, or the client left
                    return
                left -= len(message.get("body", b""))


def _has_body(scope: Scope) -> bool:
    return _declared_bytes(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


def _declared_bytes(scope: Scope) -> int:
    """0: nothing is declared."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()), 0)
