"""An ASGI app that answers while the engine is loaded, and then passes requests on to the real app.

A load balancer's probes get a 503 instead of a refused connection, so it knows that the server exists. Knows neither
engine nor model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.server.bodies import answer_unread
from agentspec.server.door import LIVENESS, PROBES
from agentspec.server.errors import ApiError
from agentspec.server.responding import error_response, json_response

RETRY_SECONDS = 2
"""Value of Retry-After."""


class WaitingRoom:
    """Answers 503 with Retry-After until `enter` sets the app."""

    def __init__(self, describe: Callable[[], str], seconds: Callable[[], float]) -> None:
        """describe: the current stage of the start. seconds: time since its beginning."""
        self._describe, self._seconds = describe, seconds
        self._app: ASGIApp | None = None

    def enter(self, app: ASGIApp) -> None:
        """Pass requests to this app from now on."""
        self._app = app

    @contextmanager
    def waiting(self, describe: Callable[[], str], seconds: Callable[[], float]) -> Iterator[None]:
        """A context in which new requests get 503 again. Afterwards they go to the app again, unless the body has
        raised. Requests already in the app stay there."""
        app, self._app = self._app, None
        self._describe, self._seconds = describe, seconds
        yield
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        headers = {"retry-after": str(RETRY_SECONDS)}
        stage = self._describe()
        if scope["path"] in PROBES:
            body: dict[str, Any] = {"status": "loading", "stage": stage, "seconds": round(self._seconds(), 1)}
            response = json_response(body) if scope["path"] == LIVENESS else json_response(body, 503, headers)
        else:
            error = ApiError(503, f"the model is being loaded: {stage}", code="loading", headers=headers)
            response = error_response(error, scope["path"])
        await answer_unread(response, scope, receive, send)
