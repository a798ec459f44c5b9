"""Request bodies: every documented field works or is refused with its name and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.server.fields import Notes, Treatment, named
from agentspec.server.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion, shown_tool
from agentspec.server.tables.chat import CHAT as CHAT_TABLE
from agentspec.server.tables.completions import COMPLETIONS
from agentspec.text.constraints import OutputForm, ToolDemand
from agentspec.text.messages import normalise
from agentspec.types import tokens

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}

CONTINUED: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}

CHAT_REFUSED = named(Treatment.REFUSED, CHAT_TABLE)
COMPLETION_REFUSED = named(Treatment.REFUSED, COMPLETIONS)
SOMETHING = {"some": "thing"}


@pytest.mark.parametrize("field", CHAT_REFUSED)
def test_chat_refuses_unsupported_fields(field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_chat({**CHAT, field: SOMETHING})
    assert raised.value.field == field
    assert repr(SOMETHING) in str(raised.value)
    for harmless in (None, *CHAT_TABLE[field].idle):
        parse_chat({**CHAT, field: harmless})


@pytest.mark.parametrize("field", COMPLETION_REFUSED)
def test_completions_refuse_unsupported_fields(field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_completion({**COMPLETION, field: SOMETHING})
    assert raised.value.field == field
    assert repr(SOMETHING) in str(raised.value)
    for harmless in (None, *COMPLETIONS[field].idle):
        parse_completion({**COMPLETION, field: harmless})


def test_fields_that_change_an_answer_stay_refused() -> None:
    """By name, whichever client sends it: the tables may grow, but must keep these."""
    chat = {"audio", "function_call", "functions", "modalities", "prompt_logprobs", "web_search_options"}
    assert chat | {"chat_template", "documents", "regex", "logits_processors"} <= set(CHAT_REFUSED)
    assert {"prompt_logprobs", "suffix", "response_format", "tools", "messages"} <= set(COMPLETION_REFUSED)


@pytest.mark.parametrize("field", named(Treatment.ACCEPTED, CHAT_TABLE))
def test_fields_without_effect_are_accepted_with_any_value(field: str) -> None:
    notes = Notes()
    assert parse_chat({**CHAT, field: SOMETHING}, notes) == parse_chat(CHAT)
    assert not notes.unknown


def test_unknown_fields_are_left_out_and_noted() -> None:
    notes = Notes()
    extra = {
        "temprature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True, "other": 1},
        "response_format": {"type": "text", "x": 1},
    }
    taken = parse_chat({**CHAT, **extra}, notes)
    assert notes.unknown == ["temprature", "stream_options.other", "response_format.x"]
    assert taken == parse_chat(
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"}}
    )


@pytest.mark.parametrize(("field", "extra"), [("temprature", {"temprature": None}), ("logprobs.x", {"logprobs.x": 1})])
def test_strict_notes_refuse_unknown_fields(field: str, extra: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="is not a field of this endpoint") as raised:
        parse_chat({**CHAT, **extra}, Notes(strict=True))
    assert raised.value.field == field


def test_nested_nulls_mean_absent() -> None:
    extra = {
        "stream": True,
        "stream_options": {"include_usage": None},
        "structured_outputs": {"regex": "a", "choice": None},
        "logit_bias": None,
    }
    assert parse_chat({**CHAT, **extra}) == parse_chat(
        {**CHAT, "stream": True, "stream_options": {}, "structured_outputs": {"regex": "a"}}
    )


def test_tables_and_structs_name_the_same_fields() -> None:
    for struct, table in ((ChatRequest, CHAT_TABLE), (CompletionRequest, COMPLETIONS)):
        assert set(named(Treatment.WORKS, table)) == set(struct.__struct_encode_fields__)


def test_0_does_not_equal_the_idle_value_false() -> None:
    with pytest.raises(RequestError, match="echo=0"):
        parse_chat({**CHAT, "echo": 0})


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"tool_choice": allowed("auto", "g"), "tools": [TOOL]}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tool_choice": allowed("auto", "f"), "tools": [TOOL, OTHER_TOOL]}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("required"), "tools": [TOOL]}, "tool_choice.allowed_tools.tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "g", "strict": "very"}}]},
            "tools[1].function.strict",
        ),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"reasoning_effort": ["some"]}, "reasoning_effort"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema"),
        ({"response_format": AS_SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0]"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": 1, "add_generation_prompt": False}, "continue_final_message"),
        (CONTINUED, "messages[0].role"),
        (
            {**CONTINUED, "messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
        ),
        ({"model": None}, "model"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_chat_errors_name_the_field(extra: dict[str, Any], field: str) -> None:
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
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 200}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"tools": [TOOL]}, "tools"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_completions_errors_name_the_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_completion({**COMPLETION, **extra})
    assert raised.value.field == field


@pytest.mark.parametrize("body", [[], "text", 3, None])
def test_body_that_is_not_an_object_is_refused(body: Any) -> None:
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
            "min_tokens": 4,
        }
    ).sampling()
    assert sampling.min_tokens == 4
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        7,
        0.5,
        0.9,
        20,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (
        {5: -100.0},
        11,
        ("a", "b"),
        (3,),
        True,
    )


@pytest.mark.parametrize(
    "parse", [lambda extra: parse_chat({**CHAT, **extra}), lambda extra: parse_completion({**COMPLETION, **extra})]
)
def test_vllm_clients_default_values_are_accepted(parse: Callable[[dict[str, Any]], Any]) -> None:
    assert parse({"top_k": -1, "skip_special_tokens": True}).sampling() == parse({}).sampling()


def test_defaults_equal_openais() -> None:
    assert parse_chat(CHAT).sampling().max_tokens is None
    assert parse_completion(COMPLETION).sampling().max_tokens == 16
    assert parse_completion({**COMPLETION, "max_tokens": None, "stop": "x"}).sampling().stop == ("x",)


@pytest.mark.parametrize(
    ("extra", "kind", "source", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
        ({"response_format": AS_SCHEMA}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}"}}, "json_schema", {}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}}, "json_schema", {}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}},
            "regex",
            "a+",
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        ({"guided_json": '{"type": "integer"}'}, "json_schema", {"type": "integer"}, "guided_json"),
        ({"guided_regex": "a+", "guided_json": None}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "root ::= [a]"}, "ebnf", "root ::= [a]", "guided_grammar"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_output_forms_are_parsed(extra: dict[str, Any], kind: Any, source: Any, field: str) -> None:
    expected = OutputForm(kind=kind, source=source, field=field)
    assert parse_chat({**CHAT, **extra}).output() == expected
    if "response_format" not in extra:
        assert parse_completion({**COMPLETION, **extra}).output() == expected


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", ToolDemand(), None),
        ("none", ToolDemand(choice="none"), None),
        ("required", ToolDemand(choice="required"), None),
        ({"type": "function", "function": {"name": "g"}}, ToolDemand(choice="required", name="g"), None),
        (allowed("auto", "g", "f"), ToolDemand(), None),
        (allowed("required", "g", "f"), ToolDemand(choice="required"), None),
        (allowed("required", "g"), ToolDemand(choice="required"), frozenset({"g"})),
    ],
    ids=repr,
)
def test_tool_choices_are_converted_to_demands(choice: Any, expected: ToolDemand, names: frozenset[str] | None) -> None:
    body = {**CHAT, "tools": [TOOL, OTHER_TOOL], "tool_choice": choice}
    assert parse_chat(body).demand() == (expected, names)
    demand, _ = parse_chat({**body, "parallel_tool_calls": False}).demand()
    assert demand == ToolDemand(choice=expected.choice, name=expected.name, parallel=False)


@pytest.mark.parametrize(
    ("extra", "num_top"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)]
)
def test_chat_logprobs_fields_set_num_top(extra: dict[str, Any], num_top: int | None) -> None:
    assert parse_chat({**CHAT, **extra}).num_top == num_top


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [tokens([1, 2])]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [tokens([1]), tokens([2, 3])]),
        (["a", [1]], ["a", tokens([1])]),
        ([2**31], [[2**31]]),
    ],
)
def test_prompt_forms_are_accepted(prompt: Any, expected: list[Any]) -> None:
    """Ids become arrays, but for those that no model has, which the engine refuses."""
    assert parse_completion({**COMPLETION, "prompt": prompt}).prompts() == expected


def test_returned_messages_are_accepted() -> None:
    returned = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "tool_calls": [CALL],
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    thinking = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    messages = [parts, returned, {"role": "tool", "tool_call_id": "c1", "content": "r"}, thinking]
    assert parse_chat({**CHAT, "messages": messages}).messages == messages


def test_empty_contents_and_nulls_are_accepted() -> None:
    calls = [
        {"id": "c1", "type": None, "function": {"name": "f", "arguments": None}},
        {"id": "c2", "function": {"name": "f", "arguments": ""}},
    ]
    messages = [
        {"role": "system", "content": "", "name": "rules"},
        {"role": "user", "content": [], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "f",
        },
        {"role": "tool", "tool_call_id": "c2", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": []},
        {"role": "assistant"},
    ]
    normal = normalise(parse_chat({**CHAT, "messages": messages}).messages)
    assert [message["content"] for message in normal] == ["", "", "", "ab", "", "", ""]
    assert [call["function"]["arguments"] for call in normal[2]["tool_calls"]] == [{}, {}]


def test_extra_message_fields_are_left_out_without_a_note() -> None:
    notes = Notes()
    call = {
        **CALL,
        "index": 0,
        "provider_specific_fields": {},
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
    }
    returned = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "parsed": None,
        "images": [],
        "thinking_blocks": [],
        "phase": "x",
    }
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {**CHAT, "messages": [{"role": "user", "content": [part], "mood": "good"}, returned]}
    normal = normalise(parse_chat(body, notes).messages)
    assert not notes.unknown
    assert normal == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
    ]


def test_tool_is_shown_without_foreign_keys() -> None:
    tool = {
        "function": {"parameters": {"b": 1}, "name": "f", "x": 1, "description": None},
        "type": "function",
        "cache_control": {"type": "ephemeral"},
    }
    (sent,) = parse_chat({**CHAT, "tools": [tool]}).tools
    assert shown_tool(sent) == {"function": {"parameters": {"b": 1}, "name": "f"}, "type": "function"}


def test_tools_keep_their_order_of_keys() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    (kept,) = parse_chat({**CHAT, "tools": [tool]}).tools
    assert list(kept) == ["function", "type"]
    assert list(kept["function"]) == ["parameters", "name"]


@pytest.mark.parametrize(
    "extra",
    [
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "description": None}}]},
        {"tool_choice": "none", "parallel_tool_calls": False, "logprobs": False, "top_logprobs": 0, "n": 1},
        {"response_format": {"type": "text"}, "reasoning_effort": None},
        {"user": "u", "safety_identifier": "s", "metadata": {"k": "v"}},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"temperature": 1, "tools": None, "stop": None},
    ],
)
def test_clients_default_fields_are_accepted(extra: dict[str, Any]) -> None:
    assert parse_chat({**CHAT, **extra}).model == "m"
