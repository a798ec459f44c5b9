"""/v1/chat/completions: messages and tools in, one or several messages or their deltas out.

Owns the way from a ChatRequest to a TurnRequest, and from a turn's events to OpenAI's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import answer_shapes, events, openai, sse
from agentspec.server.answers import Head, metrics_body, of_choices, usage_body, usage_so_far
from agentspec.server.logprobs import content_logprobs
from agentspec.server.openai import ChatRequest
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.tables.chat import CHAT
from agentspec.server.token_room import headers
from agentspec.server.turn import Turn, TurnEnd, TurnRequest, begin
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.types import TokenScore
from agentspec.wire import FinishEvent, TokensEvent


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
        turns = await begin(service, turn_request(asked, session_of(call.headers, asked.prompt_cache_key)))
        told = headers(turns[0].clamped)
        if asked.stream:
            head = sse.StreamHead(renamed=_renamed)
            merged = events.merge(service.engine, [turn.submit for turn in turns])
            return await FrameResponse.begin(sse.frames(merged, ChatChunks(service, asked, turns), head), head, told)
        return json_response(await complete(service, asked, turns), headers=told)
    except RequestError as error:
        raise _renamed(error) from None


def _renamed(error: RequestError) -> RequestError:
    """The messages became ids."""
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


class _Costs:
    """What an answer's choices cost together, once all have ended."""

    def __init__(self, service: Service, turns: Sequence[Turn]) -> None:
        self._info = service.engine.info
        self._num_choices = len(turns)
        self._clamped = turns[0].clamped
        self._ends: list[TurnEnd] = []

    def add(self, end: TurnEnd) -> bool:
        """Says whether it was the last one."""
        self._ends.append(end)
        return len(self._ends) == self._num_choices

    def body(self) -> dict[str, Any]:
        usage = of_choices([end.usage for end in self._ends])
        reasoning_tokens = sum(end.reasoning_tokens for end in self._ends)
        return {
            "usage": usage_body(usage, reasoning_tokens, self._clamped),
            "metrics": metrics_body(usage.spec, self._info),
        }


class ChatChunks:
    """The chunks of a streamed answer (see sse.Chunks): at most one per engine event, so that token ids stay with their
    text."""

    def __init__(self, service: Service, request: ChatRequest, turns: Sequence[Turn]) -> None:
        self._head = Head(id=_id_of(turns), object="chat.completion.chunk", model=request.model)
        self._turns = turns
        self._costs = _Costs(service, turns)
        self._with_ids = bool(request.return_token_ids)
        self._with_prompt_ids = request.return_token_ids is True
        self._with_scores = request.logprobs
        self._with_usage = request.include_usage
        self._with_usage_so_far = request.usage_so_far

    def opening(self) -> list[dict[str, Any]]:
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._turns))]
        if self._with_prompt_ids:
            chunks[0]["prompt_token_ids"] = list(self._turns[0].submit.prompt_ids)
        return chunks

    def tokens(self, index: int, event: TokensEvent) -> list[dict[str, Any]]:
        delta = _delta(self._turns[index].push(event))
        return (
            [self._chunk(index, delta, event.token_ids)] if delta or self._with_ids or self._with_usage_so_far else []
        )

    def finish(self, index: int, event: FinishEvent) -> list[dict[str, Any]]:
        end = self._turns[index].finish(event)
        delta = _delta(end.events)
        chunks = [self._chunk(index, delta)] if delta else []
        chunks.append(self._chunk(index, {}, finish_reason=finish_reason(end)))
        if self._costs.add(end):
            costs = self._costs.body()
            if self._with_usage:
                chunks.append(self._head.body(choices=[], **costs))
            else:
                chunks[-1]["metrics"] = costs["metrics"]
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], ids: Iterable[int] = (), *, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self._with_scores and delta.get("content"):
            choice["logprobs"] = content_logprobs(
                self._turns[index].take_content_scores(), self._turns[index].token_bytes
            )
        if self._with_ids:
            choice["token_ids"] = list(ids)
        if self._with_usage_so_far:
            turn = self._turns[index]
            return self._head.body(
                choices=[choice], usage=usage_so_far(len(turn.submit.prompt_ids), turn.num_generated)
            )
        return self._head.body(choices=[choice], **({"usage": None} if self._with_usage else {}))


async def complete(service: Service, request: ChatRequest, turns: Sequence[Turn]) -> dict[str, Any]:
    """The whole answer: the same deltas as streamed, put together."""
    choices = [_WholeChoice(turn) for turn in turns]
    costs = _Costs(service, turns)
    async with aclosing(events.merge(service.engine, [turn.submit for turn in turns])) as merged:
        async for index, event in merged:
            choices[index].add(event)
            if isinstance(event, FinishEvent):
                costs.add(choices[index].end)
    head = Head(id=_id_of(turns), object="chat.completion", model=request.model)
    body = head.body(choices=[choice.body(index, request) for index, choice in enumerate(choices)], **costs.body())
    if request.return_token_ids is True:
        body["prompt_token_ids"] = list(turns[0].submit.prompt_ids)
    return body


class _WholeChoice:
    """One choice that is collected to its end."""

    end: TurnEnd

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._deltas: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._scores: list[TokenScore] = []

    def add(self, event: TokensEvent | FinishEvent) -> None:
        if isinstance(event, FinishEvent):
            self.end = self._turn.finish(event)
            added = self.end.events
        else:
            self._ids += event.token_ids
            added = self._turn.push(event)
        self._deltas.append(_delta(added))
        self._scores += self._turn.take_content_scores()

    def body(self, index: int, request: ChatRequest) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _joined("content", self._deltas), "refusal": None}
        reasoning = _joined("reasoning_content", self._deltas)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        calls = _assembled(self._deltas)
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        logprobs = content_logprobs(self._scores, self._turn.token_bytes) if request.logprobs else None
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(self.end),
        }
        return choice | {"token_ids": self._ids} if request.return_token_ids else choice


def finish_reason(end: TurnEnd) -> str:
    """`tool_calls` only when the model itself ended the turn and every call is whole."""
    return "tool_calls" if end.has_whole_calls else end.reason.value


def _id_of(turns: Sequence[Turn]) -> str:
    return "chatcmpl-" + turns[0].submit.request_id.partition("-")[0]


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
