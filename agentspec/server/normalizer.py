"""Normalizes HEAD and trailing slashes for every route: an ASGI layer.

The app behind it sees `GET` for `HEAD`, and paths without trailing slashes, so keys, limits and routes apply to every
spelling of a request. It sends no redirects, since many clients don't repeat a POST after one. Knows no route.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Normalizer:
    """The layer in front of `app`. It is idempotent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        known = {**scope, "method": "GET" if is_head else scope["method"], "path": scope["path"].rstrip("/") or "/"}

        async def send_without_body(message: Message) -> None:
            """Drop the body; the headers, content-length included, are those of the GET."""
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(known, receive, send_without_body if is_head else send)
