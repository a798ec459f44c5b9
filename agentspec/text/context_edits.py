"""Context edits that a client requests: drop old thinking and clear old tool results before the prompt is rendered.

Operates on normalised messages (text/messages.py). The number, roles and order of messages stay the same, so indices
stay valid. Knows nothing of templates; token counts come from a callback. The API's own names for the edits live in the
server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from agentspec.text.messages import Message, call_arguments

CLEARED = "[This result was cleared to save room.]"
"""The text that replaces a cleared result."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class ClearThinking(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    """Drop the thinking of all turns except the last `keep_turns` that have any. A turn runs from one user message to
    the next, including tool results."""

    keep_turns: int | None
    """None: keep all."""

    def cleared(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Return the edited messages and the number of turns that lost their thinking."""
        turns: list[list[int]] = [[]]
        for index, message in enumerate(messages):
            if message["role"] == "user":
                turns.append([])
            elif any(message.get(name) for name in _REASONING):
                turns[-1].append(index)
        with_thinking = [turn for turn in turns if turn]
        num_old = 0 if self.keep_turns is None else max(0, len(with_thinking) - self.keep_turns)
        shorter = list(messages)
        for index in (index for turn in with_thinking[:num_old] for index in turn):
            shorter[index] = {name: value for name, value in messages[index].items() if name not in _REASONING}
        return shorter, num_old


@dataclass(frozen=True, slots=True)
class _Use:
    """A tool call that has a result. `turn` and `result` are message indices; `call` is the index within the turn."""

    tool: str
    turn: int
    call: int
    result: int


class ClearToolUses(msgspec.Struct, frozen=True, kw_only=True, tag="tool_uses"):
    """Replace the results of all calls except the last `keep`, once the trigger's count exceeds `above`."""

    trigger: Literal["input_tokens", "tool_uses"] = "input_tokens"
    above: int = 100_000
    keep: int = 3
    """Counts all calls, including those of excluded tools."""
    clear_at_least: int = 0
    """Minimum tokens to save. Below it nothing is cleared, since the edit invalidates the cached prefix. 0: clear
    unless the placeholders are longer than the results."""
    exclude_tools: frozenset[str] = frozenset()
    clear_inputs: bool | frozenset[str] = False
    """Also clear the arguments of every cleared call, or of the calls of these tools."""

    def cleared(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Return the messages with cleared results and their number, regardless of tokens."""
        uses = _uses(messages)
        if self.trigger == "tool_uses" and len(uses) <= self.above:
            return list(messages), 0
        old = [use for use in uses[: max(0, len(uses) - self.keep)] if use.tool not in self.exclude_tools]
        shorter = list(messages)
        for use in old:
            shorter[use.result] = {**shorter[use.result], "content": CLEARED}
            if self.clear_inputs is True or (self.clear_inputs and use.tool in self.clear_inputs):
                shorter[use.turn] = _without_arguments(shorter[use.turn], use.call)
        return shorter, len(old)


ContextEdit = ClearThinking | ClearToolUses


class AppliedEdit(msgspec.Struct, frozen=True):
    """An edit that changed something."""

    edit: ContextEdit
    num_cleared: int
    """Number of turns, or of tool uses."""
    saved_len: int
    """Prompt tokens that the edit saved."""


def apply(
    messages: Sequence[Message], edits: Sequence[ContextEdit], count: Callable[[Sequence[Message]], int]
) -> tuple[list[Message], tuple[AppliedEdit, ...]]:
    """Apply the edits in order; return the edited messages and the edits that changed something. `count` returns a
    prompt's length in tokens; it is called only when needed."""
    edited = list(messages)
    applied: list[AppliedEdit] = []
    length: int | None = None
    for edit in edits:
        shorter, num_cleared = edit.cleared(edited)
        if not num_cleared:
            continue
        length = count(edited) if length is None else length
        if isinstance(edit, ClearToolUses) and edit.trigger == "input_tokens" and length <= edit.above:
            continue
        left = count(shorter)
        if isinstance(edit, ClearToolUses) and length - left < edit.clear_at_least:
            continue
        applied.append(AppliedEdit(edit, num_cleared, length - left))
        edited, length = shorter, left
    return edited, tuple(applied)


def _uses(messages: Sequence[Message]) -> list[_Use]:
    uses: list[_Use] = []
    places: dict[str, tuple[str, int, int]] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            found = places.get(message.get("tool_call_id", ""))
            if found is not None:
                uses.append(_Use(*found, index))
        else:
            calls = message.get("tool_calls", ())
            places = {call.get("id", ""): (call_arguments(call)[0], index, place) for place, call in enumerate(calls)}
    return uses


def _without_arguments(message: Message, place: int) -> Message:
    calls = list(message["tool_calls"])
    function = calls[place].get("function", calls[place])
    emptied = {**function, "arguments": {}}
    calls[place] = {**calls[place], "function": emptied} if "function" in calls[place] else emptied
    return {**message, "tool_calls": calls}
