"""A turn in Anthropic's shapes: content blocks, stop reason and usage, as stream events or as one message.

Owns these shapes. Knows turns and their text events, and nothing of requests or HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from agentspec.errors import EngineClosedError
from agentspec.server.answers import metrics_body
from agentspec.server.errors import ANTHROPIC_ROOT, ApiError
from agentspec.server.messages_edits import applied_body
from agentspec.server.token_room import usage_part
from agentspec.server.turn import Turn, TurnEnd
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.types import BLOCK_TOKENS, FinishReason
from agentspec.wire import Event, FinishEvent, ModelInfo, Usage

StreamEvent = dict[str, Any]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""The keep-alive of this API's streams, in place of sse.KEEP_ALIVE."""


class MessageEvents:
    """The events of one message. Implements sse.Streamed."""

    def __init__(
        self, turn: Turn, info: ModelInfo, *, model: str, omits_thinking: bool, tells_edits: bool = False
    ) -> None:
        """tells_edits: report context edits, even if none was applied."""
        self._turn = turn
        self._tells_edits = tells_edits
        self._info = info
        self._model = model
        self._omits_thinking = omits_thinking
        self._kind: str | None = None
        """Type of the open block."""
        self._index = -1
        self._thought: list[str] = []

    def opening(self) -> list[StreamEvent]:
        """The first events. The number of cached tokens is known only at the end: until then the whole prompt counts as
        input."""
        submit = self._turn.submit
        message: dict[str, Any] = {
            "id": f"msg_{submit.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                **usage_body(Usage(prompt_tokens=len(submit.prompt_ids)), marked_end=0, thinking_tokens=0),
                "service_tier": "standard",
            },
        }
        return [{"type": "message_start", "message": message}]

    def convert(self, event: Event) -> list[StreamEvent]:
        return self._finish(event) if isinstance(event, FinishEvent) else self._told(self._turn.push(event))

    def failed(self, error: ApiError) -> list[StreamEvent]:
        return [error.body(ANTHROPIC_ROOT)]

    def _finish(self, event: FinishEvent) -> list[StreamEvent]:
        """The rest of the text, the stop reason and the usage. Raises EngineClosedError for an aborted turn."""
        end = self._turn.finish(event)
        told = [*self._told(end.events), *self._closed()]
        usage = usage_body(end.usage, marked_end=self._turn.prompt.marked_end, thinking_tokens=end.reasoning_tokens)
        usage |= usage_part(self._turn.clamped)
        delta = {
            "type": "message_delta",
            "delta": _stop(end),
            "usage": usage,
            "metrics": metrics_body(end.usage.spec, self._info),
        }
        if self._tells_edits:
            delta["context_management"] = applied_body(self._turn.prompt.applied)
        return [*told, delta, {"type": "message_stop"}]

    def _told(self, added: Iterable[TextEvent]) -> list[StreamEvent]:
        told: list[StreamEvent] = []
        for event in added:
            if isinstance(event, ReasoningDelta):
                told += self._opened({"type": "thinking", "thinking": "", "signature": ""})
                self._thought.append(event.text)
                if not self._omits_thinking:
                    told.append(self._delta({"type": "thinking_delta", "thinking": event.text}))
            elif isinstance(event, ContentDelta):
                told += self._opened({"type": "text", "text": ""})
                told.append(self._delta({"type": "text_delta", "text": event.text}))
            elif isinstance(event, ToolCallStart):
                told += self._closed()
                told += self._opened({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            elif isinstance(event, ToolCallArguments):
                told.append(self._delta({"type": "input_json_delta", "partial_json": event.text}))
        return told

    def _opened(self, block: dict[str, Any]) -> list[StreamEvent]:
        """Make sure that a block of this kind is open: close one of another kind, and open a new one if needed."""
        if self._kind == block["type"]:
            return []
        closed = self._closed()
        self._kind = block["type"]
        self._index += 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _closed(self) -> list[StreamEvent]:
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        told: list[StreamEvent] = []
        if kind == "thinking":
            told.append(self._delta({"type": "signature_delta", "signature": _signature("".join(self._thought))}))
        return [*told, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def assembled_message(told: Iterable[StreamEvent]) -> dict[str, Any]:
    """Assemble the whole message from the events of a finished stream. A call that was cut off gets an empty input,
    since its JSON text is incomplete."""
    message: dict[str, Any] = {}
    inputs: dict[int, list[str]] = {}
    for event in told:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                inputs.setdefault(event["index"], []).append(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message |= {name: event[name] for name in ("metrics", "context_management") if name in event}
    for index, parts in inputs.items():
        with suppress(ValueError):  # a call that was cut off keeps its empty input
            message["content"][index]["input"] = json.loads("".join(parts))
    return message


def usage_body(usage: Usage, *, marked_end: int, thinking_tokens: int) -> dict[str, Any]:
    """Anthropic's usage. Its three input counts add up to the prompt: tokens read from the cache, tokens that the
    client's cache marks added to it (up to `marked_end`, the end of the last mark), and the rest."""
    cached = usage.cached_tokens
    added = max(0, min(marked_end, usage.prompt_tokens) // BLOCK_TOKENS * BLOCK_TOKENS - cached)
    return {
        "input_tokens": usage.prompt_tokens - cached - added,
        "cache_creation_input_tokens": added,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def _stop(end: TurnEnd) -> dict[str, Any]:
    if end.reason is FinishReason.ABORT:
        raise EngineClosedError("the request was aborted")
    if isinstance(end.stop_match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_match}
    if end.reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if end.has_whole_calls else "end_turn", "stop_sequence": None}


def _signature(thinking: str) -> str:
    """A hash of the text. Clients don't send back a thinking block without a signature."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()
