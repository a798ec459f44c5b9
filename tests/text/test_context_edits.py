"""Context edits: what they clear, when, and that message indices stay valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from agentspec.text.context_edits import CLEARED, ClearThinking, ClearToolUses, ContextEdit, apply
from agentspec.text.messages import Message, normalise
from tests.text.conversations import call

SIZE = 50
"""Length of a result in characters."""


def loop(*tools: str) -> list[dict[str, Any]]:
    """Return a question, a turn that calls each tool, and the results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look"}]
    for number, tool in enumerate(tools):
        calls = [call(f"c{number}", tool, {"where": "there"})]
        messages.append(
            {"role": "assistant", "content": "", "reasoning_content": f"Thought {number}.", "tool_calls": calls}
        )
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}".rjust(SIZE)})
    return messages


def count(messages: Sequence[Message]) -> int:
    """Return the number of characters of all contents and thinking."""
    return sum(len(message.get("content", "")) + len(message.get("reasoning_content", "")) for message in messages)


def edited(messages: list[dict[str, Any]], *edits: ContextEdit) -> tuple[list[Message], list[tuple[int, int]]]:
    before = normalise(messages)
    kept = json.dumps(before)
    after, applied = apply(before, edits, count)
    assert json.dumps(before) == kept, "the messages themselves were changed"
    assert [message["role"] for message in after] == [message["role"] for message in before]
    return after, [(one.num_cleared, one.saved_len) for one in applied]


def results(messages: list[Message]) -> list[str]:
    return [message["content"].strip() for message in messages if message["role"] == "tool"]


def test_old_results_are_cleared_above_a_number_of_uses() -> None:
    messages = loop("a", "b", "a", "b", "a")
    assert edited(messages, ClearToolUses(trigger="tool_uses", above=5))[1] == []
    after, applied = edited(messages, ClearToolUses(trigger="tool_uses", above=4, keep=2))
    assert results(after) == [CLEARED] * 3 + ["3", "4"]
    assert applied == [(3, 3 * (SIZE - len(CLEARED)))]
    assert all(
        message["tool_calls"][0]["function"]["arguments"] == {"where": "there"}
        for message in after
        if message["role"] == "assistant"
    )


def test_old_results_are_cleared_above_a_number_of_tokens() -> None:
    messages = loop("a", "b", "a", "b")
    size = count(normalise(messages))
    assert edited(messages, ClearToolUses(above=size))[1] == []
    assert edited(messages, ClearToolUses(above=size - 1))[1] == [(1, SIZE - len(CLEARED))]
    assert edited(messages, ClearToolUses(above=0, keep=4))[1] == []
    assert edited(messages, ClearToolUses(above=0, keep=0))[1] == [(4, 4 * (SIZE - len(CLEARED)))]


def test_nothing_is_cleared_below_clear_at_least() -> None:
    saved = SIZE - len(CLEARED)
    assert edited(loop("a", "b"), ClearToolUses(above=0, keep=0, clear_at_least=2 * saved + 1))[1] == []
    assert edited(loop("a", "b"), ClearToolUses(above=0, keep=0, clear_at_least=2 * saved))[1] == [(2, 2 * saved)]


def test_excluded_tools_keep_their_results() -> None:
    after, applied = edited(loop("a", "b", "a", "b"), ClearToolUses(above=0, keep=1, exclude_tools=frozenset({"b"})))
    assert (results(after), applied[0][0]) == ([CLEARED, "1", CLEARED, "3"], 2)


@pytest.mark.parametrize(("inputs", "emptied"), [(False, []), (True, ["a", "b"]), (frozenset({"b"}), ["b"])])
def test_clear_inputs_clears_call_arguments(inputs: bool | frozenset[str], emptied: list[str]) -> None:
    after, _ = edited(loop("a", "b", "c"), ClearToolUses(above=0, keep=1, clear_inputs=inputs))
    calls = [message["tool_calls"][0]["function"] for message in after if message["role"] == "assistant"]
    assert [function["name"] for function in calls if function["arguments"] == {}] == emptied


def test_results_of_one_turn_are_counted_one_by_one() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "f", {"x": 1}), call("b", "f", {"x": 2})]},
        {"role": "tool", "tool_call_id": "b", "content": "second".rjust(SIZE)},
        {"role": "tool", "tool_call_id": "a", "content": "first".rjust(SIZE)},
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": "And?"},
    ]
    after, _ = edited(messages, ClearToolUses(above=0, keep=1, clear_inputs=True))
    assert results(after) == [CLEARED, "second"]
    assert [one["function"]["arguments"] for one in after[1]["tool_calls"]] == [{}, {"x": 2}]
    short = json.loads(json.dumps(messages).replace(" " * 30, ""))
    assert edited(short, ClearToolUses(above=0, keep=1))[1] == [], (
        "the placeholder is longer than what it would replace"
    )


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, ["0", "1", "0", "0"]), (3, ["0", "1", "0", "0"]), (2, ["0", "0"]), (1, ["0"])]
)
def test_clear_thinking_keeps_the_last_turns(keep: int | None, kept: list[str]) -> None:
    """The thinking of a tool loop belongs to one turn; turns without thinking are not counted."""
    messages = [
        *loop("a", "b"),
        *loop("a"),
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
        *loop("a"),
    ]
    after, applied = edited(messages, ClearThinking(keep_turns=keep))
    thoughts = [message["reasoning_content"][8] for message in after if message.get("reasoning_content")]
    assert thoughts == kept
    assert not any("thinking" in message for message in after if "reasoning_content" not in message)
    assert [number for number, _ in applied] == ([3 - keep] if keep in (1, 2) else [])


def test_edits_are_applied_in_order() -> None:
    """Tokens saved by the first edit may keep the second one below its trigger."""
    messages = [*loop("a", "b"), *loop("a", "b")]
    size = count(normalise(messages))
    tools = ClearToolUses(above=size - 1, keep=0)
    thoughts = 2 * len("Thought 0.")
    assert edited(messages, ClearThinking(keep_turns=1), tools)[1] == [(1, thoughts)]
    assert edited(messages, tools, ClearThinking(keep_turns=1))[1] == [(4, 4 * (SIZE - len(CLEARED))), (1, thoughts)]
