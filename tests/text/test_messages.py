"""Normalisation of client messages, and errors that name the invalid field."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.text.messages import normalise, raw_arguments
from tests.text.conversations import call


def test_messages_are_normalised_to_one_form() -> None:
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "r",
            "tool_calls": [call("1", "f", ' {"b": 1, "a": [true, null]} '), call("2", "g", "")],
        },
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
    ]
    user, assistant, first, second = normalise(sent)
    assert user == {"role": "user", "content": "ab"}
    assert assistant["content"] == ""
    assert {assistant[name] for name in ("reasoning", "reasoning_content", "thinking")} == {"r"}
    assert [made["function"]["arguments"] for made in assistant["tool_calls"]] == [{"b": 1, "a": [True, None]}, {}]
    assert list(assistant["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert (first["content"], second["content"]) == ("first", "second")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == ' {"b": 1, "a": [true, null]} ', (
        "the caller's own messages stay as they are"
    )


def test_results_without_ids_keep_their_order() -> None:
    sent: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    assert [message["content"] for message in normalise(sent)] == ["", "1", "2"]


def test_results_are_matched_to_the_calls_before_them() -> None:
    sent: list[dict[str, Any]] = []
    for round_ in ("x", "y"):
        sent.append({"role": "assistant", "tool_calls": [call(f"{round_}{index}", "f", "{}") for index in range(3)]})
        sent += [
            {"role": "tool", "tool_call_id": f"{round_}{index}", "content": f"{round_}{index}"} for index in (2, 0, 1)
        ]
    assert [message["content"] for message in normalise(sent) if message["role"] == "tool"] == [
        "x0",
        "x1",
        "x2",
        "y0",
        "y1",
        "y2",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ',
        "[1]",
        '"a"',
        "null",
        "ls -la",
        '{"a": 1} {}',
        '{"a": "\\ud800"}',
        '{"a": ' * 150 + "1" + "}" * 150,
        "[" * 100_000,
        "1" * 5000,
    ],
)
def test_non_object_arguments_are_kept_as_text(text: str) -> None:
    messages = normalise([{"role": "assistant", "tool_calls": [call("1", "f", "{}"), call("2", "g", text)]}])
    assert [raw.text for raw in raw_arguments(messages)] == [text]
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {}


UNREADABLE: tuple[Any, ...] = (
    None,
    1,
    {"effort": "low"},
    [],
    ["I think."],
    [{"type": []}],
    [{"type": "reasoning.text"}],
)
ROUTED = [
    {"type": "reasoning.summary", "summary": "s"},
    {"type": "reasoning.text", "text": "I th", "index": 0},
    {"type": "reasoning.encrypted", "data": "x"},
    {"type": "reasoning.text", "text": "ink.", "signature": None},
]
BLOCKS = [{"type": "thinking", "thinking": "I think.", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        *[
            ({name: "I think."}, "I think.")
            for name in ("reasoning_content", "reasoning", "thinking", "reasoning_text")
        ],
        ({"reasoning_details": ROUTED}, "I think."),
        ({"thinking_blocks": BLOCKS}, "I think."),
        (
            {"reasoning_content": " ", "reasoning": None, "thinking": {"of": "another"}, "reasoning_details": ROUTED},
            "I think.",
        ),
        ({"reasoning_text": "no", "thinking_blocks": BLOCKS, "reasoning_details": []}, "I think."),
        ({"reasoning": "I think.", "reasoning_content": "I think."}, "I think."),
        ({"reasoning_content": "", "reasoning": 1}, ""),
        *[({"reasoning": form}, None) for form in UNREADABLE],
        ({"reasoning_details": ROUTED[:1], "thinking_blocks": BLOCKS[1:]}, None),
    ],
)
def test_reasoning_is_read_from_known_names_and_forms(fields: dict[str, Any], reasoning: str | None) -> None:
    (message,) = normalise([{"role": "assistant", "content": "Hi", **fields}])
    expected = {"role": "assistant", "content": "Hi"}
    if reasoning is not None:
        expected |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    assert message == expected


ASSISTANT = {"role": "assistant", "tool_calls": [call("1", "f", "{}")]}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 7}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "tool_calls": [call("1", "f", [1])]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "tool", "tool_call_id": "1", "content": ""}], "messages[0].tool_call_id"),
        ([ASSISTANT, {"role": "tool", "tool_call_id": "2", "content": ""}], "messages[1].tool_call_id"),
        (
            [ASSISTANT, {"role": "user", "content": ""}, {"role": "tool", "tool_call_id": "1", "content": ""}],
            "messages[2].tool_call_id",
        ),
        ([ASSISTANT, *[{"role": "tool", "tool_call_id": "1", "content": ""}] * 2], "messages[2].tool_call_id"),
        (
            [ASSISTANT, {"role": "tool", "tool_call_id": "1", "content": ""}, {"role": "tool", "content": ""}],
            "messages[2].tool_call_id",
        ),
    ],
)
def test_invalid_message_error_names_the_field(messages: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.field == field
