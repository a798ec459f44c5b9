"""HEAD and trailing slashes, for every route at once: an ASGI app that passes each request on as the routes know it.

What stands behind it sees `GET` for `HEAD`, and paths without slashes at their end; so keys, limits and routes mean the
same however a client spells its request. There is no redirect: many clients don't repeat a POST behind one. Knows no
route.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Normalizer:
    """In front of `app`. One in front of another changes nothing more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        known = {**scope, "method": "GET" if is_head else scope["method"], "path": scope["path"].rstrip("/") or "/"}

        async def send_without_body(message: Message) -> None:
            """The headers are those of the GET, its content-length with them."""
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(known, receive, send_without_body if is_head else send)
