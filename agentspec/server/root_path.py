"""A server under a path of a proxy's, such as /models: what stands behind it never sees that path. Knows ASGI."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """In front of an app: takes the prefix off, where the proxy has left it. A proxy that strips it needs nothing here,
    and both may ask."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._prefix and scope["method"] in ("GET", "HEAD"):
            # The page names its files relative to where it stands.
            await RedirectResponse(f"{path}/", 308)(scope, receive, send)
            return
        if path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        await self._app(scope, receive, send)
