"""Anthropic's context_management: the edits that a body requests, and the report of applied edits in an answer.

Owns these shapes. The edits themselves are in text/context_edits.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from agentspec.text.context_edits import AppliedEdit, ClearThinking, ClearToolUses, ContextEdit

_FROM_0 = msgspec.Meta(ge=0)
_FROM_1 = msgspec.Meta(ge=1)


class InputTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_tokens"):
    value: Annotated[int, _FROM_0]


class ToolUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_uses"):
    value: Annotated[int, _FROM_0]


class ThinkingTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking_turns"):
    value: Annotated[int, _FROM_1]


class AllTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="all"):
    pass


class ClearThinkingEdit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="clear_thinking_20251015",
):
    keep: ThinkingTurns | AllTurns | Literal["all"] = ThinkingTurns(1)

    def edit(self) -> ContextEdit:
        return ClearThinking(keep_turns=self.keep.value if isinstance(self.keep, ThinkingTurns) else None)


class ClearToolUsesEdit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="clear_tool_uses_20250919",
):
    """Defaults are Anthropic's."""

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] = []
    clear_tool_inputs: bool | list[str] = False
    """A list: of these tools only."""

    def edit(self) -> ContextEdit:
        inputs = self.clear_tool_inputs
        return ClearToolUses(
            trigger="tool_uses" if isinstance(self.trigger, ToolUses) else "input_tokens",
            above=self.trigger.value,
            keep=self.keep.value,
            clear_at_least=0 if self.clear_at_least is None else self.clear_at_least.value,
            exclude_tools=frozenset(self.exclude_tools),
            clear_inputs=inputs if isinstance(inputs, bool) else frozenset(inputs),
        )


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    edits: list[ClearThinkingEdit | ClearToolUsesEdit] = []
    """Applied in this order."""


def applied_body(applied: Sequence[AppliedEdit]) -> dict[str, Any]:
    """`context_management` of an answer: the edits that changed something."""
    return {"applied_edits": [_applied(one) for one in applied]}


def count_body(applied: Sequence[AppliedEdit], prompt_len: int) -> dict[str, Any]:
    """`context_management` of a token count."""
    return {"original_input_tokens": prompt_len + sum(one.saved_len for one in applied)}


def _applied(one: AppliedEdit) -> dict[str, Any]:
    saved = max(0, one.saved_len)
    if isinstance(one.edit, ClearThinking):
        return {
            "type": "clear_thinking_20251015",
            "cleared_thinking_turns": one.num_cleared,
            "cleared_input_tokens": saved,
        }
    return {"type": "clear_tool_uses_20250919", "cleared_tool_uses": one.num_cleared, "cleared_input_tokens": saved}
