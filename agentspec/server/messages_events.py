"""A turn as Anthropic's API tells it: content blocks, stop reason and usage, as the events of a stream or put together.

Owns these shapes. Knows turns and their text events, and nothing of requests or HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from agentspec.errors import EngineClosedError
from agentspec.server import sse
from agentspec.server.answers import metrics_body
from agentspec.server.messages_edits import applied_body
from agentspec.server.token_room import usage_part
from agentspec.server.turn import Turn, TurnEnd
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart
from agentspec.types import BLOCK_TOKENS, FinishReason
from agentspec.wire import Event, FinishEvent, ModelInfo, TokensEvent, Usage

StreamEvent = dict[str, Any]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""What this API's streams have in the place of sse.KEEP_ALIVE."""


class MessageEvents:
    """The events of one message: `opening` once, `tokens` as they come, `finish` once."""

    def __init__(
        self, turn: Turn, info: ModelInfo, *, model: str, omits_thinking: bool, tells_edits: bool = False
    ) -> None:
        """tells_edits: of the conversation, whether any was made or not."""
        self._turn = turn
        self._tells_edits = tells_edits
        self._info = info
        self._model = model
        self._omits_thinking = omits_thinking
        self._kind: str | None = None
        """Of the block that is open."""
        self._index = -1
        self._thought: list[str] = []

    def opening(self) -> list[StreamEvent]:
        """What of the prompt was cached is known only in the end: until then all of it counts as input."""
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

    def tokens(self, event: TokensEvent) -> list[StreamEvent]:
        return self._told(self._turn.push(event))

    def finish(self, event: FinishEvent) -> list[StreamEvent]:
        """The rest of the text, the stop reason, and what the answer cost. Raises EngineClosedError for a turn that was
        aborted."""
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
        """A block of this kind is open afterwards: none is opened if it is already, and one of another kind is
        closed."""
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


def put_together(told: Iterable[StreamEvent]) -> dict[str, Any]:
    """The whole message that the events of a finished stream tell. A call that was cut has no input: its JSON text is
    not complete."""
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
        message["content"][index]["input"] = _object("".join(parts))
    return message


async def frames(
    events: AsyncGenerator[Event, None], told: MessageEvents, path: str, head: sse.StreamHead
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream, one item per engine event, ended by message_stop or an error event.

    An error before the first event is raised while `head` isn't sent."""
    started = False
    async with aclosing(events):
        try:
            async for event in events:
                opening = [] if started else told.opening()
                started = True
                added = told.finish(event) if isinstance(event, FinishEvent) else told.tokens(event)
                if opening or added:
                    yield b"".join(map(_frame, opening + added))
        except Exception as error:
            if not (started or head.is_sent):
                raise
            yield _frame(head.described(error).body(path))


def usage_body(usage: Usage, *, marked_end: int, thinking_tokens: int) -> dict[str, Any]:
    """Anthropic's usage, whose three counts of input add up to the prompt: what the cache had, what the client's marks
    (`marked_end`: tokens up to the last one) added to it, and the rest."""
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
    """Names the text. Clients take a block without a signature for none that they may send back."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()


def _object(text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return value


def _frame(event: StreamEvent) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
