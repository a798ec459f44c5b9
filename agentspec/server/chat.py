"""/v1/chat/completions: messages and tools in, one or several messages or their deltas out.

Owns the conversion of a ChatRequest to a TurnRequest, and of a turn's events to OpenAI's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import answer_shapes, openai
from agentspec.server.answers import Head
from agentspec.server.choices import Answer, Piece
from agentspec.server.logprobs import content_logprobs
from agentspec.server.openai import ChatRequest
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.sse import StreamHead
from agentspec.server.tables.chat import CHAT
from agentspec.server.turn import Turn, TurnEnd, TurnRequest, begin_turns
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.wire import FinishEvent, TokensEvent, Usage


def turn_request(asked: ChatRequest, session_id: str | None) -> TurnRequest:
    demand, callable_names = asked.demand()
    return TurnRequest(
        messages=asked.messages,
        sampling=asked.sampling(),
        tools=[openai.shown_tool(tool) for tool in asked.tools],
        demand=demand,
        callable_names=callable_names,
        output=asked.output(),
        effort=asked.reasoning_effort,
        template_kwargs=asked.chat_template_kwargs,
        namespace=asked.cache_salt,
        session_id=session_id,
        logprobs=asked.num_top,
        forced_output=asked.forced_output,
        num_choices=asked.n,
        continues=asked.continue_final_message,
        skip_special_tokens=asked.skip_special_tokens,
    )


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/chat/completions."""
    asked = service.named(openai.parse_chat(call.body, call.notes))
    try:
        turns = await begin_turns(service, turn_request(asked, session_of(call.headers, asked.prompt_cache_key)))
        submits = [turn.submit for turn in turns]
        head = Head(
            id="chatcmpl-" + submits[0].request_id.partition("-")[0],
            object="chat.completion.chunk" if asked.stream else "chat.completion",
            model=asked.model,
        )
        made = Answer(
            asked,
            head,
            [_Choice(index, asked, turn) for index, turn in enumerate(turns)],
            service.engine.info,
            clamped=turns[0].clamped,
            prompt_ids=submits[0].prompt_ids if asked.return_token_ids is True else None,
        )
        return await made.respond(service.engine, submits, StreamHead(renamed=_renamed))
    except RequestError as error:
        raise _renamed(error) from None


def _renamed(error: RequestError) -> RequestError:
    """The error with the client's field name: prompt ids came from `messages`."""
    return type(error)("messages" if error.field == "prompt_ids" else error.field, error.value, error.reason)


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handle=answer,
        body=ChatRequest,
        checked=openai.CHAT_CHECKED,
        table=CHAT,
        answers="json or events",
        answer=answer_shapes.ChatCompletion,
    ),
)


class _Choice:
    """One running choice (see choices.Choice). It has at most one piece with text per engine event, so that token ids
    stay with their text."""

    usage: Usage
    reasoning_tokens: int

    def __init__(self, index: int, request: ChatRequest, turn: Turn) -> None:
        self._index = index
        self._request = request
        self._turn = turn
        self.prompt_ids = turn.submit.prompt_ids

    @property
    def num_generated(self) -> int:
        return self._turn.num_generated

    def opening(self) -> list[Piece]:
        return [self._piece({"role": "assistant", "content": ""})]

    def tokens(self, event: TokensEvent) -> list[Piece]:
        delta = _delta(self._turn.push(event))
        with_empty = self._request.return_token_ids or self._request.usage_so_far
        return [self._piece(delta, event.token_ids)] if delta or with_empty else []

    def finish(self, event: FinishEvent) -> list[Piece]:
        end = self._turn.finish(event)
        self.usage, self.reasoning_tokens = end.usage, end.reasoning_tokens
        delta = _delta(end.events)
        last = self._piece({}, finish_reason=finish_reason(end))
        return [self._piece(delta), last] if delta else [last]

    def whole(self, pieces: Sequence[Piece]) -> Piece:
        deltas = [piece["delta"] for piece in pieces[1:]]  # the first one is the opening
        message: dict[str, Any] = {"role": "assistant", "content": _joined("content", deltas), "refusal": None}
        reasoning = _joined("reasoning_content", deltas)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        calls = _assembled(deltas)
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        scored = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"] is not None]
        choice: Piece = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": list(chain.from_iterable(scored)), "refusal": None}
            if self._request.logprobs
            else None,
            "finish_reason": pieces[-1]["finish_reason"],
        }
        ids = (
            {"token_ids": [token for piece in pieces for token in piece["token_ids"]]}
            if self._request.return_token_ids
            else {}
        )
        return choice | ids

    def _piece(self, delta: dict[str, Any], ids: Iterable[int] = (), *, finish_reason: str | None = None) -> Piece:
        piece: Piece = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self._request.logprobs and delta.get("content"):
            piece["logprobs"] = content_logprobs(self._turn.take_content_scores(), self._turn.token_bytes)
        if self._request.return_token_ids:
            piece["token_ids"] = list(ids)
        return piece


def finish_reason(end: TurnEnd) -> str:
    """`tool_calls` only when the model itself ended the turn and every call is complete."""
    return "tool_calls" if end.has_whole_calls else end.reason.value


def _delta(added: Iterable[TextEvent]) -> dict[str, Any]:
    """OpenAI's delta for some segmenter events: text by kind, and each call's start and arguments under its index."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in added:
        if isinstance(event, ReasoningDelta):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, ContentDelta):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, ToolCallStart):
            calls[event.index] = {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
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
