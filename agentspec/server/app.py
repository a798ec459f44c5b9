"""The HTTP door: routes, bodies and sessions in, responses out.

Owns no request logic beyond the way to it (openai.py says what a request may hold; chat.py and completions.py answer it). Talks
to the engine through wire.EngineClient alone, and never imports torch.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentspec.errors import EngineClosedError, RequestError
from agentspec.server import chat, completions, events, openai, sse
from agentspec.server.answers import Head
from agentspec.server.errors import ApiError, api_error
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responding import FrameResponse, WatchedResponse, error_response, json_response
from agentspec.wire import EngineClient, Submit

MAX_BODY_BYTES = 64 * 2**20
SESSION_HEADER = "x-session-id"


def create_app(engine: EngineClient, text: TextPipeline | None) -> FastAPI:
    """The server of one engine. `text` is None for a checkpoint without a tokenizer: token-id prompts only."""
    app = FastAPI(title="agentspec", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(engine, text)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET"], response_model=None)
    app.add_api_route("/stats", routes.stats, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's error shape."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


class _Routes:
    def __init__(self, engine: EngineClient, text: TextPipeline | None) -> None:
        self._engine = engine
        self._text = text

    async def chat(self, request: Request) -> Response:
        return await _answer(request, self._chat)

    async def completions(self, request: Request) -> Response:
        return await _answer(request, self._completions)

    async def models(self) -> Response:
        info = self._engine.info
        model = {"id": info.model_id, "object": "model", "created": 0, "owned_by": "agentspec", "max_model_len": info.max_context}
        return json_response({"object": "list", "data": [model]})

    async def health(self) -> Response:
        if not self._engine.alive:
            return error_response(api_error(EngineClosedError("the engine is not running")))
        return json_response({"status": "ok"})

    async def stats(self) -> Response:
        return json_response(await self._engine.stats())

    async def _chat(self, body: Any, session_header: str | None) -> Response:
        asked = openai.parse_chat(body)
        self._check_model(asked.model)
        session_id = session_header or asked.prompt_cache_key
        turn = chat.ChatTurn(asked, self._text, self._engine.info, request_id=uuid.uuid4().hex, session_id=session_id)
        name = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = Head(id=f"chatcmpl-{turn.submit.request_id}", object=name, model=asked.model)
        try:
            if asked.stream:
                return await self._stream(turn.submit, chat.ChatChunks(head, asked, turn, self._engine.info))
            return json_response(await chat.complete(self._engine, head, asked, turn))
        except RequestError as error:
            if error.field != "prompt_ids":
                raise
            raise type(error)("messages", error.value, error.reason) from None  # the ids that the messages became

    async def _completions(self, body: Any, session_header: str | None) -> Response:
        asked = openai.parse_completion(body)
        self._check_model(asked.model)
        request_id, session_id = uuid.uuid4().hex, session_header or asked.prompt_cache_key
        head = Head(id=f"cmpl-{request_id}", object="text_completion", model=asked.model)
        submits = [
            completions.submit_of(asked, ids, request_id=f"{request_id}-{index}", session_id=session_id)
            for index, ids in enumerate(completions.encode_prompts(asked, self._text))
        ]
        if asked.stream:
            (submit,) = submits
            return await self._stream(submit, completions.CompletionChunks(head, asked, submit.prompt_ids, self._text, self._engine.info))
        return json_response(await completions.complete(self._engine, head, asked, submits, self._text))

    async def _stream(self, submit: Submit, chunks: sse.Chunks) -> Response:
        return await FrameResponse.begin(sse.frames(events.generate(self._engine, submit), chunks))

    def _check_model(self, name: str) -> None:
        served = self._engine.info.model_id
        if name != served:
            raise ApiError(404, f"model={name!r}: not served here; this server has {served!r}", param="model", code="model_not_found")


async def _answer(request: Request, handle: Callable[[Any, str | None], Awaitable[Response]]) -> Response:
    """Read the body, then let `handle` work for as long as the client listens."""
    try:
        body = await _json_body(request)
    except ApiError as error:
        return error_response(error)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    session = request.headers.get(SESSION_HEADER)
    return WatchedResponse(lambda: handle(body, session))


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
