"""What a server says about itself: its model, its health, its counters."""

from __future__ import annotations

from starlette.responses import Response

from agentspec.errors import EngineClosedError
from agentspec.server.responding import json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service


async def models(service: Service, call: Call) -> Response:
    """GET /v1/models."""
    info = service.engine.info
    model = {"id": info.model_id, "object": "model", "created": 0, "owned_by": "agentspec", "max_model_len": info.max_context}
    return json_response({"object": "list", "data": [model]})


async def health(service: Service, call: Call) -> Response:
    """GET /health: 200 while the engine runs, else 503."""
    if not service.engine.alive:
        raise EngineClosedError("the engine is not running")
    return json_response({"status": "ok"})


async def stats(service: Service, call: Call) -> Response:
    """GET /stats: every counter of the engine, as JSON."""
    return json_response(await service.engine.stats())


ROUTES = (
    Route(method="GET", path="/v1/models", handle=models),
    Route(method="GET", path="/health", handle=health),
    Route(method="GET", path="/stats", handle=stats),
)
