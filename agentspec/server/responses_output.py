"""The output of one response: its items as they grow, and the events that tell a stream of them.

Owns the shapes of output items and the documented order of their events. Knows the segmenter's events; nothing of requests, of responses as a
whole or of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart

Event = dict[str, Any]
"""`type` and what belongs to it, without its sequence number."""
Ending = Literal["completed", "incomplete"]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_ARGUMENTS = "response.function_call_arguments"


class Output:
    """At most one item is open: the last one. It is closed before the next begins."""

    def __init__(self, key: str) -> None:
        """`key` makes the items' ids unique."""
        self.items: list[dict[str, Any]] = []
        """The closed ones."""
        self._key = key
        self._kind: str | None = None
        """Type of the open item."""
        self._call: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def has_answer(self) -> bool:
        """There is more than reasoning."""
        return self._kind not in (None, "reasoning") or any(item["type"] != "reasoning" for item in self.items)

    def push(self, added: Iterable[TextEvent], logprobs: Sequence[Any] = ()) -> list[Event]:
        """What the segmenter's events add. `logprobs` are of the content among them, and stand at its first piece."""
        events: list[Event] = []
        for event in added:
            if isinstance(event, ReasoningDelta):
                events += self._text("reasoning", event.text)
            elif isinstance(event, ContentDelta):
                events += self._text("message", event.text, logprobs)
                logprobs = ()
            elif isinstance(event, ToolCallStart):
                events += self.close("completed")
                self._call = {"call_id": event.id, "name": event.name}
                events += self._open("function_call")
            elif isinstance(event, ToolCallArguments):
                self._pieces.append(event.text)
                events.append({"type": f"{_ARGUMENTS}.delta", **self._place(), "delta": event.text})
            else:
                events += self.close("completed")
        return events

    def close(self, ending: Ending) -> list[Event]:
        """End the open item, if there is one. Arguments that were cut are never called done."""
        if self._kind is None:
            return []
        events: list[Event] = []
        text = "".join(self._pieces)
        if self._kind == "function_call":
            if ending == "completed":
                events.append({"type": f"{_ARGUMENTS}.done", **self._place(), "name": self._call["name"], "arguments": text})
        else:
            place = {**self._place(), "content_index": 0}
            done: Event = {"type": f"{_TEXT_EVENTS[self._kind]}.done", **place, "text": text}
            events.append(done | {"logprobs": self._logprobs} if self._kind == "message" else done)
            events.append({"type": "response.content_part.done", **place, "part": self._part()})
        item = self._item(ending)
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._kind = None
        return events

    def add_empty_message(self) -> list[Event]:
        """A turn in which nothing was said is a message without text."""
        return [*self._open("message"), *self.close("completed")]

    def _text(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events = [] if self._kind == kind else [*self.close("completed"), *self._open(kind)]
        self._pieces.append(text)
        self._logprobs += logprobs
        delta: Event = {"type": f"{_TEXT_EVENTS[kind]}.delta", **self._place(), "content_index": 0, "delta": text}
        events.append(delta | {"logprobs": logprobs} if kind == "message" else delta)
        return events

    def _open(self, kind: str) -> list[Event]:
        self._kind, self._pieces, self._logprobs = kind, [], []
        item = self._item("in_progress") | ({} if kind == "function_call" else {"content": []})
        events: list[Event] = [{"type": "response.output_item.added", "output_index": len(self.items), "item": item}]
        if kind != "function_call":
            events.append({"type": "response.content_part.added", **self._place(), "content_index": 0, "part": self._part()})
        return events

    def _place(self) -> dict[str, Any]:
        assert self._kind is not None
        return {"item_id": f"{_PREFIXES[self._kind]}_{self._key}_{len(self.items)}", "output_index": len(self.items)}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _item(self, status: str) -> dict[str, Any]:
        head = {"id": self._place()["item_id"], "type": self._kind, "status": status}
        if self._kind == "function_call":
            return {**head, **self._call, "arguments": "".join(self._pieces)}
        if self._kind == "reasoning":
            return {**head, "summary": [], "content": [self._part()]}
        return {**head, "role": "assistant", "content": [self._part()]}
