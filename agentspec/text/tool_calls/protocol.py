"""The interface between the segmenter and the tool-call dialects."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentspec.text.events import CallEvent, ToolCall
from agentspec.text.tool_calls.schemas import ToolSchemas

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"


class CallStatus(enum.Enum):
    MORE = enum.auto()
    """The call continues."""
    DONE = enum.auto()
    """The call is complete."""
    NOT_A_CALL = enum.auto()
    """The text after the trigger is not a call. Only before the call's ToolCallStart."""


@dataclass(frozen=True, slots=True)
class CallStep:
    """The result of one push."""

    events: list[CallEvent]
    status: CallStatus
    rest: str = ""
    """DONE: the text after the call. NOT_A_CALL: everything since the trigger, trigger included."""


class CallParser(Protocol):
    """Parses one call, from its trigger on. The events don't depend on how the text is chunked."""

    def push(self, text: str, *, final: bool = False) -> CallStep:
        """Parse more text. `final`: no text follows, and missing closing tags may be tolerated. Never returns MORE when
        final."""

    def cut(self) -> CallStep:
        """End a truncated text (token limit, stop string), and return the events that are certain.

        MORE when the call had started: it stays open. Otherwise NOT_A_CALL with everything since the trigger."""

    @property
    def call(self) -> ToolCall:
        """The complete call after DONE; the truncated call after a `cut` that returned MORE."""


class Dialect(Protocol):
    """A format in which models write calls."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_argument_text(self) -> bool:
        """Whether templates write string arguments unchanged, so that rendering `ToolCall.as_written` reproduces the
        generated text."""

    def triggers(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Return the texts that may begin a call in content."""

    def parser(self, index: int, tools: ToolSchemas, new_call_id: Callable[[], str]) -> CallParser:
        """Return a parser for the call with this index in the turn."""
