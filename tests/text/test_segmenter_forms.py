"""Content in a requested form: no tag in it is recognised, except calls in place of the form."""

from __future__ import annotations

import pytest

from agentspec.text.events import AssistantTurn
from agentspec.text.segmenter import Segmenter
from agentspec.text.tool_calls import DIALECTS, ToolSchemas

TOOLS = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": {}}}])
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
TAGGED = '{"a": "</think> <think> <function=f> ' + CALL.replace("\n", "") + '"}'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("hm</think>\n\n" + TAGGED, "hm", TAGGED, 0),
        ("hm</think>\n\n<think> is what I say", "hm", "<think> is what I say", 0),
        ("hm</think>\n\n<tool_", "hm", "<tool_", 0),
        ("hm</think>\n\nso: " + CALL, "hm", "so: " + CALL, 0),
    ],
)
def test_tags_in_a_form_are_text(
    text: str, reasoning: str, content: str, num_calls: int, has_tools: bool, size: int
) -> None:
    turn = segmented(text, size, has_tools=has_tools)
    assert (turn.reasoning, turn.content, len(turn.calls)) == (reasoning, content, num_calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", [f"hm</think>\n\n{CALL}", f"hm {CALL}", f"hm</think>\n\n{CALL}\n{CALL}"])
def test_calls_in_place_of_a_form_are_recognised(text: str, size: int) -> None:
    turn = segmented(text, size, has_tools=True)
    assert (turn.reasoning, turn.content, len(turn.calls)) == ("hm", "", text.count(CALL))


def test_answer_without_reasoning_starts_with_the_form() -> None:
    turn = segmented("<think>" + TAGGED, 2, has_tools=False, reasoning_open=False)
    assert (turn.reasoning, turn.content) == ("", "<think>" + TAGGED)


def segmented(text: str, size: int, *, has_tools: bool, reasoning_open: bool = True) -> AssistantTurn:
    segmenter = Segmenter(
        reasoning_open=reasoning_open,
        dialect=DIALECTS["qwen3_coder"],
        tools=TOOLS if has_tools else None,
        has_form=True,
    )
    for start in range(0, len(text), size):
        segmenter.push(text[start : start + size])
    segmenter.finish()
    return segmenter.turn
