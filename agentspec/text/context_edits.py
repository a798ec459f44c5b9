"""Edits that a client wants made to its conversation before the model is shown it: old thinking dropped, old tool
results cleared.

Owns what an edit does to normalised messages (text/messages.py). Their number, roles and order stay, so that places in
them mean the same. Knows nothing of templates or tokens, whose number it asks for, and nothing of the API that calls
the edits by other names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from agentspec.text.messages import Message, call_arguments

CLEARED = "[This result was cleared to save room.]"
"""What the model reads in the place of a result."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class ClearThinking(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    """Drop the thinking of all turns but the last ones that have any. A turn goes from one message of the user to the
    next, results of tools included."""

    keep_turns: int | None
    """None: all of them."""

    def cleared(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages without, and the number of turns that lost their thinking."""
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
    """A call that has its result: places in the messages."""

    tool: str
    turn: int
    call: int
    result: int


class ClearToolUses(msgspec.Struct, frozen=True, kw_only=True, tag="tool_uses"):
    """Replace the results of all calls but the last ones, once there is more than the trigger says."""

    trigger: Literal["input_tokens", "tool_uses"] = "input_tokens"
    above: int = 100_000
    keep: int = 3
    """Of all calls, the excluded ones too."""
    clear_at_least: int = 0
    """Tokens: with fewer to save, nothing is cleared, since the cached prefix would be lost for little. 0: not where
    the placeholders are longer."""
    exclude_tools: frozenset[str] = frozenset()
    clear_inputs: bool | frozenset[str] = False
    """The arguments, too: of every cleared call, or of the calls of these tools."""

    def cleared(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages with cleared results, whatever their tokens, and how many these are."""
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
    """Turns, or tool uses."""
    saved_len: int
    """Tokens of the prompt."""


def apply(
    messages: Sequence[Message], edits: Sequence[ContextEdit], count: Callable[[Sequence[Message]], int]
) -> tuple[list[Message], tuple[AppliedEdit, ...]]:
    """The messages after the edits, made in their order, and what those did. `count`: a prompt's length in tokens; not
    asked without need."""
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
