"""The shape of a route, which endpoint modules provide to the app. Knows no endpoint."""

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
    """One parsed HTTP request."""

    body: Any
    """Decoded JSON; None unless it is a POST."""
    headers: Mapping[str, str]
    """Names in lower case."""
    path: Mapping[str, str]
    """Path parameters."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Query parameters; the last value of a repeated name."""
    notes: Notes = field(default_factory=Notes)
    """Collects unknown fields of the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A route. Most fields after `handle` are for the OpenAPI document (openapi.py)."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Callable[[Service, Call], Awaitable[Response]]
    """Cancelled when the client disconnects. May raise ApiError or AgentspecError."""
    body: type[msgspec.Struct] | None = None
    """Type of the body; None: no JSON body."""
    checked: Checked = field(default_factory=dict)
    table: FieldTable = field(default_factory=dict)
    """Every known field of the body."""
    id_fields: frozenset[str] = frozenset()
    """Fields in which long lists of token ids may be arrays: see large_json.py."""
    query: Mapping[str, Mapping[str, Any]] | None = None
    """Query parameters by their JSON schemas; others are refused. None: the query is ignored."""
    answers: Literal["json", "json or events", "text", "html", "asset"] = "json"
    answer: Any = None
    """Type of a JSON answer; None: any object."""
    errors: tuple[int, ...] = ()
    """Statuses in addition to those that follow from the other fields."""
