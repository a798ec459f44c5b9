"""Request ids, shared by client, proxies, answer and log: the client's `x-request-id`, or a new id.

Owns the header and the id of the current task's request. Knows ASGI.
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
    """The end of a log line: the id of the current request, if there is one."""
    current = _current.get()
    return "" if current is None else f" id={current}"


class RequestIds:
    """An ASGI layer that gives every request an id, and adds it to the answer's headers."""

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
