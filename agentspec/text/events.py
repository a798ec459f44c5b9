"""What a generated turn consists of, as it comes: deltas of reasoning and content, and tool calls.

Plain data between the segmenter, the tool-call parsers and the server. Knows nothing of tokens, tags or HTTP.
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
    """Where the text begins in what was generated: characters before it, those of tags and calls included."""


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
    """JSON text of an object; of a call that was cut, its beginning."""
    as_written: dict[str, Any] = field(default_factory=dict)
    """The arguments in the order and, where the dialect has no types, the very text that the model wrote: rendering
    them reproduces the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantTurn:
    """A whole generated turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_call_cut: bool = False
    """The text ended inside a call (which isn't among `calls`): the turn can't finish with `tool_calls`."""
    cut_call: ToolCall | None = None
    """That call, if its name was complete."""

    @property
    def shown_calls(self) -> tuple[ToolCall, ...]:
        """All calls that clients were told of, the one that was cut, too."""
        return self.calls if self.cut_call is None else (*self.calls, self.cut_call)
