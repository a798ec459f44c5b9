"""What the segmenter needs of a tool-call dialect.

Owns the contract only: each dialect is one module beside this one.
"""

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
    """The call goes on."""
    DONE = enum.auto()
    """The call is complete."""
    NOT_A_CALL = enum.auto()
    """What followed the trigger is no call. Only before the call's ToolCallStart."""


@dataclass(frozen=True, slots=True)
class CallStep:
    """What one push did."""

    events: list[CallEvent]
    status: CallStatus
    rest: str = ""
    """DONE: the text after the call. NOT_A_CALL: everything since the trigger, trigger included."""


class CallParser(Protocol):
    """Reads one call, from its trigger on. The events don't depend on how the text is cut into pushes."""

    def push(self, text: str, *, final: bool = False) -> CallStep:
        """Read on. `final`: the turn is complete, no text will follow, and what is missing at the end may be forgiven.
        Never MORE when final."""
        ...

    def cut(self) -> CallStep:
        """The text was cut off here (token limit, stop string): pass on what is certain.

        MORE when the call had started: it stays without an end. Otherwise NOT_A_CALL with everything since the
        trigger."""
        ...

    @property
    def call(self) -> ToolCall:
        """The finished call, after DONE; after a cut that answered MORE, the call as far as it came."""
        ...


class Dialect(Protocol):
    """A way of writing calls into the text."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_argument_text(self) -> bool:
        """Templates write a string argument as it is, so that rendering `ToolCall.as_written` reproduces the generated
        text."""
        ...

    def triggers(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Texts that may begin a call in content."""
        ...

    def parser(self, index: int, tools: ToolSchemas, new_call_id: Callable[[], str]) -> CallParser:
        """A parser for the turn's call number `index`."""
        ...
