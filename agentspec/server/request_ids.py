"""The id of a request, which client, proxies, answer and log know it by: what the client sent as `x-request-id`, or a
new one.

Owns the header and the id of the request that the current task works for. Knows ASGI.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"

_SANE = re.compile(rb"[!-~]{1,128}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def log_mark() -> str:
    """What lines of a log end with: the id of the request at hand, if there is one."""
    current = _current.get()
    return "" if current is None else f" id={current}"


class RequestIds:
    """In front of an app: every request has an id, and every answer tells it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        request_id = sent if _SANE.fullmatch(sent) else uuid.uuid4().hex.encode()
        _current.set(request_id.decode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER.encode(), request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)
