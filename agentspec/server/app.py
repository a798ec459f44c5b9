"""The HTTP app: parses bodies, dispatches to routes, sends responses.

Owns no request logic: each endpoint's module provides its routes. Talks to the engine through wire.EngineClient alone,
and never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentspec.errors import OverloadedError
from agentspec.files import is_too_deep, may_be_too_deep
from agentspec.server import chat, completions, messages, metrics, openapi, page, responses, status, tokens
from agentspec.server.deadlines import NO_LIMITS, TimeLimits
from agentspec.server.errors import ApiError, api_error
from agentspec.server.fields import Notes
from agentspec.server.images import without_images
from agentspec.server.large_json import LARGE_BYTES, LargeJson, invalid, too_deep
from agentspec.server.normalizer import Normalizer
from agentspec.server.pipeline import TextPipeline
from agentspec.server.recorder import Figures, RecordedEngine
from agentspec.server.request_log import NOTE, NotedEngine
from agentspec.server.responding import WatchedResponse, error_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service
from agentspec.server.tenants import NOBODY, TENANT, Tenant
from agentspec.server.unknown_fields import HEADER
from agentspec.wire import EngineClient

MAX_BODY_BYTES = 64 * 2**20

ROUTES: tuple[Route, ...] = openapi.described(
    (
        *chat.ROUTES,
        *completions.ROUTES,
        *messages.ROUTES,
        *responses.ROUTES,
        *status.ROUTES,
        *tokens.ROUTES,
        *metrics.ROUTES,
        *page.ROUTES,
    )
)


def create_app(
    engine: EngineClient,
    text: TextPipeline | None,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    names: tuple[str, ...] = (),
    strict_fields: bool = False,
    drops_images: bool = False,
    tenants: Mapping[str, Tenant] | None = None,
    limits: TimeLimits = NO_LIMITS,
    root_path: str = "",
    max_open: int | None = None,
) -> FastAPI:
    """The ASGI app for one engine.

    text: None for a checkpoint without a tokenizer, which serves token-id prompts only. names: see Service.
    strict_fields: refuse bodies with unknown fields, instead of leaving these out. drops_images: replace images by a
    text, instead of refusing them. tenants: the tenants whose counters /metrics shows; a request with a key has its
    tenant in its scope. root_path: the prefix that clients write before every path. max_open: prompts and choices that
    may run or wait at the same time; None: no limit."""
    figures = Figures()
    service = Service(
        engine=RecordedEngine(engine, figures, max_open=max_open),
        text=text,
        figures=figures,
        tenants=tenants or {},
        names=names,
        strict_fields=strict_fields,
        drops_images=drops_images,
        root_path=root_path,
        max_open=max_open,
    )
    app = FastAPI(title="agentspec", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    large = LargeJson()
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _endpoint(service, route, max_body_bytes, large, limits),
            methods=[route.method],
            response_model=None,
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Normalizer)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in OpenAI's error shape."""
    assert isinstance(error, HTTPException)
    described = ApiError(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
    )
    return error_response(described, request.url.path)


def _endpoint(
    service: Service, route: Route, max_body_bytes: int, large: LargeJson, limits: TimeLimits
) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        """Read the body, then run the route until it has answered or the client disconnects."""
        tenant = request.scope.get(TENANT) or NOBODY
        try:
            data = await _read(request, max_body_bytes) if route.method == "POST" else None
            own, note = service.of(tenant), request.scope.get(NOTE)
            engine = own.engine if note is None else NotedEngine(own.engine, note)
            asked = replace(own, engine=limits.of_request(engine))  # the limits count from here
            body = None if data is None else await _decoded(data, large, route.id_fields, tenant.name)
        except (ApiError, OverloadedError) as error:
            return error_response(error if isinstance(error, ApiError) else api_error(error), request.url.path)
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone: this is never sent
        if service.drops_images:
            body = without_images(body)
        call = Call(
            body=body,
            headers=request.headers,
            path=request.path_params,
            query=request.query_params,
            notes=Notes(strict=service.strict_fields),
        )
        return WatchedResponse(lambda: _answer(asked, route, call, request.url.path))

    return endpoint


async def _answer(service: Service, route: Route, call: Call, path: str) -> Response:
    """The route's response, with a header that lists the request's unknown fields."""
    response = await route.handle(service, call)
    if call.notes.unknown:
        response.headers[HEADER] = service.unknown.note_fields(
            call.notes.unknown, path=path, client=call.headers.get("user-agent", "")
        )
    return response


async def _read(request: Request, max_bytes: int) -> bytes | bytearray:
    """Read the body. Behind a Door it arrives as one part, and is not copied."""
    parts = [part async for part in request.stream() if part]
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(body) > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    return body


async def _decoded(body: bytes | bytearray, large: LargeJson, id_fields: Container[str], owner: str) -> Any:
    if len(body) > LARGE_BYTES:
        return await large.decode(body, id_fields, owner)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(str(error)) from None
    if may_be_too_deep(body) and is_too_deep(value):
        raise too_deep()
    return value
