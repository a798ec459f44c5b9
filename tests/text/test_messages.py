"""What clients send becomes one form; what can't be used is named."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.text.messages import normalise, raw_arguments
from tests.text.conversations import call


def test_one_form() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call("1", "f", ' {"b": 1, "a": [true, null]} '), call("2", "g", "")]},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
    ]
    user, assistant, first, second = normalise(sent)
    assert user == {"role": "user", "content": "ab"}
    assert "content" not in assistant
    assert {assistant[name] for name in ("reasoning", "reasoning_content", "thinking")} == {"r"}
    assert [made["function"]["arguments"] for made in assistant["tool_calls"]] == [{"b": 1, "a": [True, None]}, {}]
    assert list(assistant["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert (first["content"], second["content"]) == ("first", "second")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == ' {"b": 1, "a": [true, null]} ', "the caller's own messages stay as they are"


def test_results_without_ids_keep_their_order() -> None:
    sent = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    assert [message.get("content") for message in normalise(sent)] == [None, "1", "2"]


def test_each_run_of_results_belongs_to_the_calls_before_it() -> None:
    sent: list[dict[str, Any]] = []
    for round_ in ("x", "y"):
        sent.append({"role": "assistant", "tool_calls": [call(f"{round_}{index}", "f", "{}") for index in range(3)]})
        sent += [{"role": "tool", "tool_call_id": f"{round_}{index}", "content": f"{round_}{index}"} for index in (2, 0, 1)]
    assert [message["content"] for message in normalise(sent) if message["role"] == "tool"] == ["x0", "x1", "x2", "y0", "y1", "y2"]


@pytest.mark.parametrize(
    "text", ['{"a": ', "[1]", '"a"', "null", "ls -la", '{"a": 1} {}', '{"a": "\\ud800"}', '{"a": ' * 150 + "1" + "}" * 150, "[" * 100_000, "1" * 5000]
)
def test_arguments_that_are_no_object_are_kept_as_text(text: str) -> None:
    messages = normalise([{"role": "assistant", "tool_calls": [call("1", "f", "{}"), call("2", "g", text)]}])
    assert [raw.text for raw in raw_arguments(messages)] == [text]
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {}


ASSISTANT = {"role": "assistant", "tool_calls": [call("1", "f", "{}")]}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 7}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "reasoning": 1}], "messages[0].reasoning"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [call("1", "f", [1])]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "tool", "tool_call_id": "1", "content": ""}], "messages[0].tool_call_id"),
        ([ASSISTANT, {"role": "tool", "tool_call_id": "2", "content": ""}], "messages[1].tool_call_id"),
        ([ASSISTANT, {"role": "user", "content": ""}, {"role": "tool", "tool_call_id": "1", "content": ""}], "messages[2].tool_call_id"),
        ([ASSISTANT, *[{"role": "tool", "tool_call_id": "1", "content": ""}] * 2], "messages[2].tool_call_id"),
        ([ASSISTANT, {"role": "tool", "tool_call_id": "1", "content": ""}, {"role": "tool", "content": ""}], "messages[2].tool_call_id"),
    ],
)
def test_what_cannot_be_used_is_named(messages: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.field == field
