"""The page at `/`: a chat with tools against the served model.

Static files from `static/`, read once. They load nothing from elsewhere, so the page works without a network. It is a
client like any other: it knows the HTTP API and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from agentspec.server.errors import ApiError
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_FILES = {
    path.name: (path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in Path(__file__).with_name("static").iterdir()
}

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The model's output can't become a script, and no key typed here is sent to another host."""


async def page(service: Service, call: Call) -> Response:
    """GET /."""
    return _file("index.html")


async def asset(service: Service, call: Call) -> Response:
    """GET /static/{name}."""
    return _file(call.path["name"])


ROUTES = (
    Route(method="GET", path="/", handle=page, answers="html"),
    Route(method="GET", path="/static/{name}", handle=asset, answers="asset"),
)


def _file(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, f"/static/{name}: no such file")
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type, headers=_HEADERS)
