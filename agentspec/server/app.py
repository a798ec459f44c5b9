"""The HTTP door: bodies in, routes found, responses out.

Owns no request logic: each endpoint's module offers its routes. Talks to the engine through wire.EngineClient alone, and never
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentspec.server import chat, completions, status
from agentspec.server.errors import ApiError
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responding import WatchedResponse, error_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service
from agentspec.wire import EngineClient

MAX_BODY_BYTES = 64 * 2**20

ROUTES: tuple[Route, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *status.ROUTES,
)


def create_app(engine: EngineClient, text: TextPipeline | None) -> FastAPI:
    """The server of one engine. `text` is None for a checkpoint without a tokenizer: token-id prompts only."""
    service = Service(engine=engine, text=text)
    app = FastAPI(title="agentspec", docs_url=None, redoc_url=None, openapi_url=None)
    for route in ROUTES:
        app.add_api_route(route.path, _endpoint(service, route), methods=[route.method], response_model=None)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's error shape."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


def _endpoint(service: Service, route: Route) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        """Read the body, then let the route work for as long as the client listens."""
        try:
            body = None if route.method == "GET" else await _json_body(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        call = Call(body=body, headers=request.headers, path=request.path_params)
        return WatchedResponse(lambda: route.handle(service, call))

    return endpoint


async def _json_body(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    try:
        return msgspec.json.decode(bytes(body))
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
