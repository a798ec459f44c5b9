"""Information about the server: its model, version, health and counters."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from agentspec import version as installed_version
from agentspec.server import answer_shapes
from agentspec.server.door import PROBES
from agentspec.server.responding import json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service
from agentspec.wire import ModelInfo


async def models(service: Service, call: Call) -> Response:
    """GET /v1/models."""
    return json_response(
        {"object": "list", "data": [_model(name, service.engine.info) for name in service.listed_names]}
    )


async def model(service: Service, call: Call) -> Response:
    """GET /v1/models/{model}: 404 unless it is served by this name."""
    service.answer_name(call.path["model"])
    return json_response(_model(call.path["model"], service.engine.info))


async def version(service: Service, call: Call) -> Response:
    """GET /version."""
    return json_response({"version": installed_version()})


async def health(service: Service, call: Call) -> Response:
    """GET /health, /ping, /ready, /live: 200 while the engine runs and sends its heartbeat, else 503."""
    service.engine.check_alive()
    return json_response({"status": "ok"})


async def stats(service: Service, call: Call) -> Response:
    """GET /stats: every counter of the engine, as JSON."""
    return json_response(await service.engine.stats())


ROUTES = (
    Route(method="GET", path="/v1/models", handle=models, answer=answer_shapes.ModelList),
    Route(method="GET", path="/v1/models/{model:path}", handle=model, answer=answer_shapes.Model),
    Route(method="GET", path="/version", handle=version, answer=answer_shapes.Version),
    *(
        Route(method="GET", path=path, handle=health, answer=answer_shapes.Health, errors=(503,))
        for path in sorted(PROBES)
    ),
    Route(method="GET", path="/stats", handle=stats, errors=(503,)),
)


def _model(name: str, info: ModelInfo) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentspec", "max_model_len": info.max_context}
