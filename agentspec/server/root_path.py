"""Serves under a path prefix of a reverse proxy, such as /models: the app behind it never sees the prefix. Knows
ASGI."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """An ASGI layer that removes the prefix if the proxy has kept it. It accepts paths without the prefix, too, for
    proxies that strip it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._prefix and scope["method"] in ("GET", "HEAD"):
            # The page's links are relative to its own URL, so it needs the trailing slash.
            await RedirectResponse(f"{path}/", 308)(scope, receive, send)
            return
        if path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        await self._app(scope, receive, send)
