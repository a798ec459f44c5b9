"""The host names under which a server answers.

A page in a browser may make its own name resolve to this machine (DNS rebinding), or post here without reading the
answer (CSRF). So a server that listens on loopback only answers to loopback names, and refuses pages of other origins.
Knows ASGI and the server's settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.config import ServerConfig
from agentspec.server.bodies import answer_unread
from agentspec.server.errors import ApiError
from agentspec.server.responding import error_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?", re.ASCII)
_ORIGIN = re.compile(r"[^:]+://(.*)", re.ASCII)


class KnownHosts:
    """An ASGI layer that answers 403 to requests with an unknown host name or from another origin."""

    def __init__(self, app: ASGIApp, names: frozenset[str], config: ServerConfig) -> None:
        self._app, self._names = app, names
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(dict(scope["headers"])) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await answer_unread(error_response(error, scope["path"]), scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and _name_of(host.decode("latin-1")) not in self._names:
            return _forbidden("host", host, "this server is asked by another name", "--allowed-host NAME")
        if origin is None or "*" in self._origins or origin.decode("latin-1") in self._origins:
            return None
        page = _ORIGIN.fullmatch(origin.decode("latin-1"))
        if page is None or _name_of(page[1]) not in self._names:
            return _forbidden("origin", origin, "a page of another origin asks", "--cors-origin ORIGIN")
        return None


def known_names(config: ServerConfig) -> frozenset[str] | None:
    """Names that the server answers to, in lower case; None: any."""
    if config.allowed_hosts:
        return (
            None if "*" in config.allowed_hosts else frozenset(name.lower() for name in config.allowed_hosts) | LOOPBACK
        )
    host = config.host.lower()
    return LOOPBACK | {host} if host in LOOPBACK or host.startswith("127.") else None


def _name_of(host: str) -> str | None:
    """The name in a Host header, without its port; None if the header is malformed."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1] if found[1] is not None else found[2].rstrip(".")


def _forbidden(header: str, value: bytes, reason: str, flag: str) -> ApiError:
    shown = value[:100].decode("latin-1")
    return ApiError(
        403,
        f"{header}={shown!r}: {reason}, which is refused; serve with {flag} to allow it",
        param=header,
        code=f"{header}_not_allowed",
    )
