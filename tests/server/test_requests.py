"""Request bodies: every documented field is known, works, or is refused by name and value."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.server.openai import CHAT_HARMLESS, COMPLETION_HARMLESS, parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CHAT_REFUSED: list[tuple[str, Any]] = [
    ("audio", {"voice": "alloy"}),
    ("function_call", "auto"),
    ("functions", [{"name": "f"}]),
    ("logprobs", True),
    ("modalities", ["text", "audio"]),
    ("moderation", {"model": "omni"}),
    ("n", 2),
    ("parallel_tool_calls", False),
    ("prediction", {"type": "content", "content": "x"}),
    ("prompt_cache_retention", "24h"),
    ("reasoning_effort", "high"),
    ("response_format", {"type": "json_object"}),
    ("service_tier", "priority"),
    ("store", True),
    ("top_logprobs", 5),
    ("verbosity", "high"),
    ("web_search_options", {}),
]
COMPLETION_REFUSED: list[tuple[str, Any]] = [("best_of", 2), ("n", 3), ("suffix", "end")]


def test_tables_cover_every_field_that_is_not_served() -> None:
    assert {name for name, _ in CHAT_REFUSED} == set(CHAT_HARMLESS)
    assert {name for name, _ in COMPLETION_REFUSED} == set(COMPLETION_HARMLESS)


@pytest.mark.parametrize(("field", "value"), CHAT_REFUSED, ids=[name for name, _ in CHAT_REFUSED])
def test_chat_refuses_what_it_does_not_serve(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        parse_chat({**CHAT, field: value})
    assert raised.value.field == field
    assert repr(value) in str(raised.value)
    for harmless in (None, *CHAT_HARMLESS[field]):
        parse_chat({**CHAT, field: harmless})


@pytest.mark.parametrize(("field", "value"), COMPLETION_REFUSED, ids=[name for name, _ in COMPLETION_REFUSED])
def test_completions_refuse_what_they_do_not_serve(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        parse_completion({**COMPLETION, field: value})
    assert raised.value.field == field
    assert repr(value) in str(raised.value)
    for harmless in (None, *COMPLETION_HARMLESS[field]):
        parse_completion({**COMPLETION, field: harmless})


def test_true_is_not_taken_for_the_harmless_one() -> None:
    with pytest.raises(RequestError, match="n=True"):
        parse_chat({**CHAT, "n": True})


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"temprature": None}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "g", "strict": True}}]}, "tools[1].function.strict"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls[0].function"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"model": None}, "model"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_chat_names_the_wrong_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_chat({**CHAT, **extra})
    assert raised.value.field == field
    assert field in str(raised.value)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"messages": []}, "messages"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[True]]}, "prompt[0]"),
        ({"prompt": 7}, "prompt"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"logprobs": -1, "echo": True}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True}, "stream"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"tools": [TOOL]}, "tools"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_completions_name_the_wrong_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_completion({**COMPLETION, **extra})
    assert raised.value.field == field


@pytest.mark.parametrize("body", [[], "text", 3, None])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(RequestError, match="body="):
        parse_chat(body)


def test_sampling_fields_reach_the_engine() -> None:
    sampling = parse_chat(
        {
            **CHAT,
            "max_completion_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -100},
            "seed": 11,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "ignore_eos": True,
        }
    ).sampling()
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (7, 0.5, 0.9, 20, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (
        {5: -100.0},
        11,
        ("a", "b"),
        (3,),
        True,
    )


def test_defaults_are_those_of_openai() -> None:
    assert parse_chat(CHAT).sampling().max_tokens is None
    assert parse_completion(COMPLETION).sampling().max_tokens == 16
    assert parse_completion({**COMPLETION, "max_tokens": None, "stop": "x"}).sampling().stop == ("x",)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompt_forms(prompt: Any, expected: list[Any]) -> None:
    assert parse_completion({**COMPLETION, "prompt": prompt}).prompts() == expected


def test_messages_as_clients_return_them_are_taken() -> None:
    returned = {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None, "annotations": [], "tool_calls": [CALL]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    thinking = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    messages = [parts, returned, {"role": "tool", "tool_call_id": "c1", "content": "r"}, thinking]
    assert parse_chat({**CHAT, "messages": messages}).messages == messages


def test_tools_keep_their_order_of_keys() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    (kept,) = parse_chat({**CHAT, "tools": [tool]}).tools
    assert list(kept) == ["function", "type"]
    assert list(kept["function"]) == ["parameters", "name"]


@pytest.mark.parametrize(
    "extra",
    [
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False, "description": None}}]},
        {"user": "u", "safety_identifier": "s", "metadata": {"k": "v"}},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"temperature": 1, "tools": None, "stop": None},
    ],
)
def test_what_clients_send_without_asking_for_more_is_taken(extra: dict[str, Any]) -> None:
    assert parse_chat({**CHAT, **extra}).model == "m"
