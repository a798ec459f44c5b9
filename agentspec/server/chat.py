"""/v1/chat/completions: messages and tools in, a message or its deltas out.

Owns the way from a ChatRequest to its answer. Where reasoning, content and calls begin is the segmenter's business; how a prompt
is made, the prompt builder's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentspec.errors import RequestError
from agentspec.server import events
from agentspec.server.answers import Head, metrics_body, usage_body
from agentspec.server.openai import ChatRequest
from agentspec.server.pipeline import TextPipeline
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.types import FinishReason
from agentspec.wire import EngineClient, FinishEvent, ModelInfo, Submit, TokensEvent


class ChatTurn:
    """One turn on its way: its submit, and what its text has become so far."""

    def __init__(self, request: ChatRequest, text: TextPipeline | None, info: ModelInfo, *, request_id: str, session_id: str | None) -> None:
        """Builds the prompt. Raises RequestError for messages that can't be rendered, or without a chat template."""
        if text is None or text.prompts is None:
            lacks = "tokenizer" if text is None else "chat template"
            raise RequestError("messages", request.messages, f"this checkpoint has no {lacks}: use /v1/completions")
        tools = request.tools if request.tool_choice == "auto" and request.tools else None
        self._builder = text.prompts
        self._prompt = prompt = text.prompts.build(request.messages, tools, request.chat_template_kwargs, namespace=request.cache_salt)
        self.submit = Submit(
            request_id=request_id,
            prompt_ids=prompt.prompt_ids,
            sampling=request.sampling(),
            breakpoints=prompt.breakpoints,
            session_id=session_id,
            namespace=request.cache_salt,
        )
        self._segmenter = text.segmenter(tools, reasoning_open=prompt.reasoning_open)
        self._stop_ids = info.stop_token_ids
        self._ids: list[int] = []

    def push(self, event: TokensEvent) -> dict[str, Any]:
        """The delta that one event adds; empty while its text waits for more."""
        self._ids += event.token_ids
        return _delta(self._segmenter.push(event.text))

    def finish(self, event: FinishEvent) -> tuple[dict[str, Any], str]:
        """The last delta, and why the turn ended. Keeps the turn's ids for the prompt that returns it.

        `tool_calls` only when the model itself ended the turn and every call is whole."""
        is_own_end = event.reason is FinishReason.STOP and event.stop_match in self._stop_ids
        last = [*self._segmenter.push(event.text), *self._segmenter.finish(is_cut=not is_own_end)]
        turn = self._segmenter.turn
        self._builder.remember(self._prompt, turn, self._ids, is_cut=not is_own_end)
        calls = turn.calls and not turn.is_call_cut and event.reason is FinishReason.STOP
        return _delta(last), "tool_calls" if calls else event.reason.value


class ChatChunks:
    """The chunks of one streamed turn (see sse.Chunks): at most one per engine event, so that token ids stay with their text."""

    def __init__(self, head: Head, request: ChatRequest, turn: ChatTurn, info: ModelInfo) -> None:
        self._head = head
        self._turn = turn
        self._info = info
        self._with_ids = request.return_token_ids
        self._with_usage = request.include_usage

    def opening(self) -> list[dict[str, Any]]:
        chunk = self._chunk({"role": "assistant", "content": ""})
        return [chunk | {"prompt_token_ids": self._turn.submit.prompt_ids} if self._with_ids else chunk]

    def tokens(self, event: TokensEvent) -> list[dict[str, Any]]:
        delta = self._turn.push(event)
        return [self._chunk(delta, event.token_ids)] if delta or self._with_ids else []

    def finish(self, event: FinishEvent) -> list[dict[str, Any]]:
        delta, reason = self._turn.finish(event)
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


async def complete(engine: EngineClient, head: Head, request: ChatRequest, turn: ChatTurn) -> dict[str, Any]:
    """The whole answer: the same deltas as streamed, put together."""
    parts, end = await events.collect(engine, turn.submit)
    deltas = [turn.push(part) for part in parts]
    last, reason = turn.finish(end)
    message: dict[str, Any] = {"role": "assistant", "content": _joined("content", [*deltas, last])}
    reasoning = _joined("reasoning_content", [*deltas, last])
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls = _assembled([*deltas, last])
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    answer = head.body(choices=[choice], usage=usage_body(end.usage), metrics=metrics_body(end.usage.spec, engine.info))
    if request.return_token_ids:
        choice["token_ids"] = [token for part in parts for token in part.token_ids]
        answer["prompt_token_ids"] = turn.submit.prompt_ids
    return answer


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
