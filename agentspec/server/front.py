"""What stands before everything that a server answers, from its first second on: ids and the log, other pages' access
(CORS), the names that it is asked by, and one spelling of requests.

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
"""Headers of ours that a browser would hide from the page that asked."""


def in_front_of(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """`app`, a WaitingRoom or a Door, as it is served. Preflights are answered here, so they need no key."""
    app = Normalizer(app)
    names = known_names(config)
    if names is not None:
        app = KnownHosts(app, names, config)
    if config.cors_origins:
        # A key travels in a header that the page sets itself, so cookies and the like (allow_credentials) are never
        # needed.
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    app = RequestLog(app)
    return RequestIds(RootPath(app, config.root_path) if config.root_path else app)
