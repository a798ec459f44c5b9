"""The output of one response: its items, and the stream events that describe their growth.

Owns the shapes of output items and the documented order of their events. Knows the segmenter's events and the tools;
nothing of the rest of a request, of whole responses or of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentspec.server.carried_reasoning import encode_reasoning
from agentspec.server.custom_input import CustomInput
from agentspec.server.responses_tools import Toolset
from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallStart

Event = dict[str, Any]
"""`type` and its fields, without the sequence number."""
Ending = Literal["completed", "incomplete"]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL_EVENTS = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class Output:
    """The output items. At most one is open, the last one; it is closed before the next one starts."""

    def __init__(self, key: str, tools: Toolset, *, carries_reasoning: bool) -> None:
        """key: makes the items' ids unique. tools: the callable tools. carries_reasoning: add `encrypted_content` to
        reasoning items."""
        self.items: list[dict[str, Any]] = []
        """The closed items."""
        self._key = key
        self._tools = tools
        self._carries_reasoning = carries_reasoning
        self._kind: str | None = None
        """Type of the open item."""
        self._call: dict[str, Any] = {}
        self._custom = CustomInput()
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def has_answer(self) -> bool:
        """Whether there is an item other than reasoning."""
        return self._kind not in (None, "reasoning") or any(item["type"] != "reasoning" for item in self.items)

    def push(self, added: Iterable[TextEvent], logprobs: Sequence[Any] = ()) -> list[Event]:
        """The stream events for some segmenter events. logprobs: of the content among them, attached to its first
        piece."""
        events: list[Event] = []
        for event in added:
            if isinstance(event, ReasoningDelta):
                events += self._text("reasoning", event.text)
            elif isinstance(event, ContentDelta):
                events += self._text("message", event.text, logprobs)
                logprobs = ()
            elif isinstance(event, ToolCallStart):
                events += self.close("completed")
                events += self._open_call(event)
            elif isinstance(event, ToolCallArguments):
                events += self._add_to_call(
                    self._custom.push(event.text) if self._kind == "custom_tool_call" else event.text
                )
            else:
                events += self.close("completed")
        return events

    def close(self, ending: Ending) -> list[Event]:
        """Close the open item, if there is one. Arguments that were cut off get no `done` event."""
        if self._kind is None:
            return []
        events: list[Event] = []
        if self._kind == "custom_tool_call":
            events += self._add_to_call(self._custom.close())
        text = "".join(self._pieces)
        if self._kind in _CALL_EVENTS:
            if ending == "completed":
                said = (
                    {"input": text}
                    if self._kind == "custom_tool_call"
                    else {"name": self._call["name"], "arguments": text}
                )
                events.append({"type": f"{_CALL_EVENTS[self._kind]}.done", **self._place(), **said})
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
        """Add a message without text, for a turn without output."""
        return [*self._open("message"), *self.close("completed")]

    def _text(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events = [] if self._kind == kind else [*self.close("completed"), *self._open(kind)]
        self._pieces.append(text)
        self._logprobs += logprobs
        delta: Event = {"type": f"{_TEXT_EVENTS[kind]}.delta", **self._place(), "content_index": 0, "delta": text}
        events.append(delta | {"logprobs": logprobs} if kind == "message" else delta)
        return events

    def _open_call(self, event: ToolCallStart) -> list[Event]:
        tool = self._tools.tool(event.name)
        self._call = {"call_id": event.id, "name": tool.name} | (
            {} if tool.namespace is None else {"namespace": tool.namespace}
        )
        self._custom = CustomInput()
        return self._open("custom_tool_call" if tool.kind == "custom" else "function_call")

    def _add_to_call(self, text: str) -> list[Event]:
        """Add to the open call. For a custom tool's call the addition may be empty."""
        assert self._kind is not None
        if not text and self._kind == "custom_tool_call":
            return []
        self._pieces.append(text)
        return [{"type": f"{_CALL_EVENTS[self._kind]}.delta", **self._place(), "delta": text}]

    def _open(self, kind: str) -> list[Event]:
        self._kind, self._pieces, self._logprobs = kind, [], []
        item = self._item("in_progress") | ({} if kind in _CALL_EVENTS else {"content": []})
        events: list[Event] = [{"type": "response.output_item.added", "output_index": len(self.items), "item": item}]
        if kind not in _CALL_EVENTS:
            events.append(
                {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": self._part()}
            )
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
        if self._kind in _CALL_EVENTS:
            return {
                **head,
                **self._call,
                "input" if self._kind == "custom_tool_call" else "arguments": "".join(self._pieces),
            }
        if self._kind == "reasoning":
            reasoning = {**head, "summary": [], "content": [self._part()]}
            if self._carries_reasoning:
                reasoning["encrypted_content"] = (
                    None if status == "in_progress" else encode_reasoning("".join(self._pieces))
                )
            return reasoning
        return {**head, "role": "assistant", "content": [self._part()]}
