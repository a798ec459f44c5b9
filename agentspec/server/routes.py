"""The shape of a route: what an endpoint's module offers to the app. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from agentspec.server.fields import Checked, FieldTable, Notes
from agentspec.server.service import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One HTTP request, read."""

    body: Any
    """Decoded JSON; None unless it is a POST."""
    headers: Mapping[str, str]
    """Names in lower case."""
    path: Mapping[str, str]
    """Parameters of the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    """What stands behind the path; of a name given twice, the last."""
    owner: str = ""
    """The name of the key that the request brought; "" where no key is asked for."""
    notes: Notes = field(default_factory=Notes)
    """Of what the body holds that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What stands behind `handle` is for the API's own description (openapi.py)."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Callable[[Service, Call], Awaitable[Response]]
    """Runs for as long as the client listens. May raise ApiError or AgentspecError."""
    body: type[msgspec.Struct] | None = None
    """What the body holds; None: no JSON body."""
    checked: Checked = field(default_factory=dict)
    table: FieldTable = field(default_factory=dict)
    """Every known field of the body."""
    query: Mapping[str, Mapping[str, Any]] | None = None
    """Parameters of the query by their JSON schemas; others are refused. None: whatever stands there is ignored."""
    answers: Literal["json", "json or events", "text", "html", "asset"] = "json"
    answer: Any = None
    """Type of a JSON answer; None: any object."""
    errors: tuple[int, ...] = ()
    """Statuses beside those that follow from the rest."""
