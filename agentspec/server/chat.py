"""/v1/chat/completions: messages and tools in, a message or its deltas out.

Owns the way from a ChatRequest to a TurnRequest, and from a turn's events to OpenAI's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import events, openai, sse
from agentspec.server.answers import Head, metrics_body, usage_body
from agentspec.server.openai import ChatRequest
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.turn import Turn, TurnEnd, TurnRequest, begin
from agentspec.text.constraints import ToolDemand
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.wire import EngineClient, FinishEvent, ModelInfo, TokensEvent


def turn_request(asked: ChatRequest, session_id: str | None) -> TurnRequest:
    return TurnRequest(
        messages=asked.messages,
        sampling=asked.sampling(),
        tools=asked.tools,
        demand=ToolDemand(choice=asked.tool_choice),
        template_kwargs=asked.chat_template_kwargs,
        namespace=asked.cache_salt,
        session_id=session_id,
    )


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/chat/completions."""
    asked = openai.parse_chat(call.body)
    service.check_model(asked.model)
    (turn,) = await begin(service, turn_request(asked, session_of(call.headers, asked.prompt_cache_key)))
    name = "chat.completion.chunk" if asked.stream else "chat.completion"
    head = Head(id=f"chatcmpl-{turn.submit.request_id}", object=name, model=asked.model)
    try:
        if asked.stream:
            chunks = ChatChunks(head, asked, turn, service.engine.info)
            return await FrameResponse.begin(sse.frames(events.generate(service.engine, turn.submit), chunks))
        return json_response(await complete(service.engine, head, asked, turn))
    except RequestError as error:
        if error.field != "prompt_ids":
            raise
        raise type(error)("messages", error.value, error.reason) from None  # the ids that the messages became


ROUTES = (Route(method="POST", path="/v1/chat/completions", handle=answer),)


class ChatChunks:
    """The chunks of one streamed turn (see sse.Chunks): at most one per engine event, so that token ids stay with their text."""

    def __init__(self, head: Head, request: ChatRequest, turn: Turn, info: ModelInfo) -> None:
        self._head = head
        self._turn = turn
        self._info = info
        self._with_ids = request.return_token_ids
        self._with_usage = request.include_usage

    def opening(self) -> list[dict[str, Any]]:
        chunk = self._chunk({"role": "assistant", "content": ""})
        return [chunk | {"prompt_token_ids": self._turn.submit.prompt_ids} if self._with_ids else chunk]

    def tokens(self, event: TokensEvent) -> list[dict[str, Any]]:
        delta = _delta(self._turn.push(event))
        return [self._chunk(delta, event.token_ids)] if delta or self._with_ids else []

    def finish(self, event: FinishEvent) -> list[dict[str, Any]]:
        end = self._turn.finish(event)
        delta, reason = _delta(end.events), finish_reason(end)
        metrics = metrics_body(event.usage.spec, self._info)
        chunks = [self._chunk(delta)] if delta else []
        last = self._chunk({}, finish_reason=reason)
        if not self._with_usage:
            return [*chunks, last | {"metrics": metrics}]
        return [*chunks, last, self._head.body(choices=[], usage=usage_body(event.usage), metrics=metrics)]

    def _chunk(self, delta: dict[str, Any], ids: Iterable[int] = (), *, finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self._with_ids:
            choice["token_ids"] = list(ids)
        return self._head.body(choices=[choice], **({"usage": None} if self._with_usage else {}))


async def complete(engine: EngineClient, head: Head, request: ChatRequest, turn: Turn) -> dict[str, Any]:
    """The whole answer: the same deltas as streamed, put together."""
    parts, end = await events.collect(engine, turn.submit)
    pushed = [turn.push(part) for part in parts]
    ended = turn.finish(end)
    deltas = [_delta(added) for added in (*pushed, ended.events)]
    message: dict[str, Any] = {"role": "assistant", "content": _joined("content", deltas)}
    reasoning = _joined("reasoning_content", deltas)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls = _assembled(deltas)
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(ended)}
    body = head.body(choices=[choice], usage=usage_body(end.usage), metrics=metrics_body(end.usage.spec, engine.info))
    if request.return_token_ids:
        choice["token_ids"] = [token for part in parts for token in part.token_ids]
        body["prompt_token_ids"] = turn.submit.prompt_ids
    return body


def finish_reason(end: TurnEnd) -> str:
    """`tool_calls` only when the model itself ended the turn and every call is whole."""
    return "tool_calls" if end.has_whole_calls else end.reason.value


def _delta(added: Iterable[TextEvent]) -> dict[str, Any]:
    """OpenAI's delta of some segmenter events: text by kind, and each call's start and arguments under its index."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in added:
        if isinstance(event, ReasoningDelta):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, ContentDelta):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, ToolCallStart):
            calls[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        elif isinstance(event, ToolCallArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _joined(name: str, deltas: Iterable[dict[str, Any]]) -> str | None:
    texts = [delta[name] for delta in deltas if name in delta]
    return "".join(texts) if texts else None


def _assembled(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls
