"""The shape of a route: what an endpoint's module offers to the app. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from agentspec.server.service import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One HTTP request, read."""

    body: Any
    """Decoded JSON; None for a GET."""
    headers: Mapping[str, str]
    """Names in lower case."""
    path: Mapping[str, str]
    """Parameters of the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Callable[[Service, Call], Awaitable[Response]]
    """Runs for as long as the client listens. May raise ApiError or AgentspecError."""
