"""The outermost ASGI layers, active from the server's start: request ids, the log, CORS, host names, and normalized
requests.

Knows ASGI and the server's settings.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from agentspec.config import ServerConfig
from agentspec.server.hosts import KnownHosts, known_names
from agentspec.server.normalizer import Normalizer
from agentspec.server.request_ids import RequestIds
from agentspec.server.request_log import RequestLog
from agentspec.server.root_path import RootPath

_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("retry-after", "x-agentspec-ignored-fields", "x-agentspec-max-tokens", "x-request-id")
"""Response headers that browsers hide from cross-origin pages unless they are listed."""


def in_front_of(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Wrap `app`, a WaitingRoom or a Door, for serving. CORS preflights are answered here, so they need no key."""
    app = Normalizer(app)
    names = known_names(config)
    if names is not None:
        app = KnownHosts(app, names, config)
    if config.cors_origins:
        # Keys are sent in a header that the page sets itself, so cookies (allow_credentials) are never needed.
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    app = RequestLog(app)
    return RequestIds(RootPath(app, config.root_path) if config.root_path else app)
