"""Streaming events of a generated turn: deltas of reasoning, content and tool calls.

Plain data that the tool-call parsers, the segmenter and the server exchange. Knows nothing of tokens, tags or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str
    at: int = field(default=0, compare=False)
    """Character offset of the text in the generated text, including tags and calls."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    """0 for the turn's first call."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str
    """A piece of the arguments' JSON text."""


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


CallEvent = ToolCallStart | ToolCallArguments | ToolCallEnd
TextEvent = ReasoningDelta | ContentDelta | CallEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call as it was generated."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; for a truncated call, its prefix."""
    as_written: dict[str, Any] = field(default_factory=dict)
    """The arguments in the order in which the model wrote them; in a dialect without types, their exact text. Rendering
    them reproduces the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantTurn:
    """A whole generated turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_call_cut: bool = False
    """The text ended inside a call, which is not in `calls`. The finish reason can't be `tool_calls`."""
    cut_call: ToolCall | None = None
    """The truncated call, if its name was complete."""

    @property
    def shown_calls(self) -> tuple[ToolCall, ...]:
        """All calls that were streamed to the client, including a truncated one."""
        return self.calls if self.cut_call is None else (*self.calls, self.cut_call)
