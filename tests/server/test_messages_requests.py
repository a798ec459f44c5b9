"""Bodies of /v1/messages: every documented field works or is refused with its name; blocks are converted to template
messages."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import RequestError
from agentspec.server.fields import Notes, Treatment, named
from agentspec.server.messages_request import CountRequest, MessagesRequest, parse_count, parse_messages, turn_request
from agentspec.server.tables.messages import COUNT, MESSAGES
from agentspec.server.turn import TurnRequest
from agentspec.text.chat_template import MessageMark, ToolsMark
from agentspec.text.constraints import OutputForm, ToolDemand

USER: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 2000, "messages": [USER]}
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
MARK: dict[str, Any] = {"type": "ephemeral"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "Well"}
READS = frozenset({"enable_thinking", "reasoning_effort", "preserve_thinking"})
USE: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "look", "input": {"where": "there"}}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
FORM: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
KEEP_ALL: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "a lamp"}


def turn(extra: dict[str, Any], reads: frozenset[str] = READS) -> TurnRequest:
    return turn_request(parse_messages({**BODY, **extra}), None, reads)


def text(words: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **extra}


def test_every_documented_field_is_in_the_table() -> None:
    params = pytest.importorskip("anthropic.types.message_create_params").MessageCreateParamsBase
    headers = {"user_profile_id", "workspace_id"}
    documented = set(params.__annotations__) - headers
    assert documented <= set(MESSAGES)
    counted = pytest.importorskip("anthropic.types.message_count_tokens_params").MessageCountTokensParams
    assert set(counted.__annotations__) - headers <= set(COUNT)
    for struct, table in ((MessagesRequest, MESSAGES), (CountRequest, COUNT)):
        assert set(named(Treatment.WORKS, table)) == set(struct.__struct_encode_fields__)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"context_management": []}, "context_management"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        (
            {"context_management": {"edits": [KEEP_ALL, {"type": "clear_images_20300101"}]}},
            "context_management.edits[1].type",
        ),
        ({"context_management": {"edits": [{**KEEP_ALL, "keep": "some"}]}}, "context_management.edits[0].keep"),
        (
            {"context_management": {"edits": [{**KEEP_ALL, "keep": {"type": "thinking_turns", "value": 0}}]}},
            "context_management.edits[0].keep.value",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "turns", "value": 3}}]
                }
            },
            "context_management.edits[0].trigger.type",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]
                }
            },
            "context_management.edits[0].keep.value",
        ),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [text("x"), RESULT]}]}, "messages[0].content[1].tool_use_id"),
        ({"messages": [USER, {"role": "user", "content": [RESULT]}]}, "messages[1].content[0].tool_use_id"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages[1].role"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]}, BEGUN]}, "messages[2].role"),
        ({"messages": [USER, BEGUN], "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [RESULT, RESULT]},
                ]
            },
            "messages[2].content[1].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [text("x", cache_control={"type": "forever"})]}]},
            "messages[0].content[0].cache_control.type",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl"),
        ({"system": [text(str(number), cache_control=MARK) for number in range(5)]}, "cache_control"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools[0].type"),
        ({"tools": [{"type": ["custom"], "name": "look"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": 5}]}, "tools[0].name"),
        ({"tools": [SEARCH, {"name": "look"}]}, "tools[1]"),
        ({"tools": [TOOL, {"name": "look"}]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"output_format": {**FORM, "schema": {}}, "output_config": {"format": FORM}}, "output_format"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_field_name(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as raised:
        turn(extra)
    assert raised.value.field == field


@pytest.mark.parametrize(
    "extra",
    [
        {"speed": "standard", "mcp_servers": [], "container": None},
        {"service_tier": "standard_only", "metadata": {"user_id": "u"}},
        {
            "tools": [
                {
                    **TOOL,
                    "type": "custom",
                    "allowed_callers": ["direct"],
                    "defer_loading": False,
                    "input_examples": [],
                    "strict": False,
                }
            ]
        },
        {
            "tools": [
                {
                    **TOOL,
                    "allowed_callers": ["code_execution_20250825"],
                    "defer_loading": True,
                    "input_examples": [{"where": "here"}],
                }
            ]
        },
        {"tools": [{**TOOL, "eager_input_streaming": False}, {**TOOL, "eager_input_streaming": True}]},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [KEEP_ALL]}},
        {"fallbacks": "default", "billing_policy": {"type": "billing_policy"}, "fallback_credit_token": "t"},
        {"thinking": {"type": "enabled", "budget_tokens": 31999}},
        {"thinking": {"type": "enabled", "budget_tokens": 1}},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{**text("x"), "citations": [{"type": "char_location", "cited_text": "y"}]}],
                }
            ]
        },
        {"messages": [{"role": "user", "content": [text("x", citations=None, cache_control=None)]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{**USE, "caller": {"type": "direct"}}]},
                {"role": "user", "content": [RESULT]},
            ]
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{**USE, "caller": {"type": "code_execution_20250825", "tool_id": "s"}}],
                },
                USER,
            ]
        },
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(extra: dict[str, Any]) -> None:
    turn(extra)


def test_sampling_fields_reach_the_turn() -> None:
    asked = turn({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["a", "b"], "cache_salt": "s"})
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.stop) == (
        0.5,
        0.9,
        7,
        2000,
        ("a", "b"),
    )
    assert asked.namespace == "s"


def test_tools_are_converted_to_functions() -> None:
    asked = turn({"tools": [TOOL, {"name": "plain", "input_schema": {"type": "object"}, "strict": True}]})
    assert asked.tools == [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": TOOL["input_schema"]}},
        {"type": "function", "function": {"name": "plain", "parameters": {"type": "object"}, "strict": True}},
    ]


@pytest.mark.parametrize(
    ("choice", "demand"),
    [
        (None, ToolDemand()),
        ({"type": "auto"}, ToolDemand()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolDemand(parallel=False)),
        ({"type": "any"}, ToolDemand(choice="required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolDemand(choice="required", parallel=False)),
        ({"type": "tool", "name": "look"}, ToolDemand(choice="required", name="look")),
        ({"type": "none"}, ToolDemand(choice="none")),
    ],
    ids=str,
)
def test_tool_choice_is_converted_to_a_demand(choice: dict[str, Any] | None, demand: ToolDemand) -> None:
    assert turn({"tools": [TOOL], "tool_choice": choice}).demand == demand


def test_output_format_is_converted_to_an_output_form() -> None:
    asked = turn({"output_config": {"format": FORM}})
    assert asked.output == OutputForm(kind="json_schema", source=FORM["schema"], field="output_config.format.schema")
    older = OutputForm(kind="json_schema", source=FORM["schema"], field="output_format.schema")
    assert (
        turn({"output_format": FORM}).output
        == turn({"output_format": FORM, "output_config": {"format": FORM}}).output
        == older
    )
    assert turn({}).output is None


@pytest.mark.parametrize(
    ("extra", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"context_management": {"edits": [KEEP_ALL]}}, {"preserve_thinking": True}),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, {}),
    ],
    ids=str,
)
def test_thinking_sets_the_template_variable(extra: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert turn(extra).template_kwargs == kwargs


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}], ids=str
)
def test_thinking_has_no_effect_without_a_template_variable(thinking: dict[str, Any]) -> None:
    extra = {"thinking": thinking, "output_config": {"effort": "whatever"}, "context_management": {"edits": [KEEP_ALL]}}
    assert turn(extra, frozenset()).template_kwargs == {}


@pytest.mark.parametrize(
    "thinking", [{}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}], ids=str
)
def test_continued_answer_switches_thinking_off(thinking: dict[str, Any]) -> None:
    asked = turn({"messages": [USER, BEGUN], **thinking})
    assert asked.continues
    assert asked.messages[-1] == BEGUN
    assert asked.template_kwargs == {"enable_thinking": False}
    assert turn({"messages": [USER, BEGUN], **thinking}, frozenset()).template_kwargs == {}
    assert not turn({"messages": [USER, BEGUN, USER], **thinking}).continues


def test_blocks_are_converted_to_messages() -> None:
    messages = [
        {"role": "user", "content": [text("One. "), text("Two.")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("Let me "),
                text("look."),
                USE,
            ],
        },
        {"role": "assistant", "content": [{**USE, "id": "c2"}]},
        {
            "role": "user",
            "content": [
                {**RESULT, "tool_use_id": "c2", "content": [text("gone"), text("!")], "is_error": True},
                RESULT,
                text("So?"),
            ],
        },
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Thanks"},
    ]
    asked = turn({"system": [text("Be "), text("brief.")], "messages": messages})
    function = {"name": "look", "arguments": {"where": "there"}}
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One. Two."},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm. ",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "Error: gone!"},
        {"role": "tool", "tool_call_id": "c1", "content": "a lamp"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize(
    "order", [[RESULT, text("So?")], [text("So?"), RESULT], [text("So"), RESULT, text("?")]], ids=str
)
def test_tool_results_precede_the_text_of_their_message(order: list[dict[str, Any]]) -> None:
    asked = turn({"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": order}]})
    assert asked.messages[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "a lamp"},
        {"role": "user", "content": "So?"},
    ]


def test_empty_text_beside_results_makes_no_user_message() -> None:
    asked = turn(
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT, text("")]}]}
    )
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool"]


def test_results_without_content_are_empty_texts() -> None:
    call = {"role": "assistant", "content": [USE]}
    asked = turn(
        {"messages": [USER, call, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}]}
    )
    assert asked.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": ""}


def test_nulls_mean_absent() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": None, "cache_control": None}
    messages = [
        {"role": "user", "content": [text("a", cache_control=None, citations=None)]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": None}, text(""), use]},
        {"role": "user", "content": [{**RESULT, "content": None, "is_error": None, "cache_control": None}]},
        {"role": "assistant", "content": None},
        {"role": "system", "content": [text("Be brief.", cache_control=None)]},
    ]
    tool = {**TOOL, "description": None, "type": None, "strict": None, "cache_control": None}
    choice = {"type": "auto", "disable_parallel_tool_use": None}
    notes = Notes()
    body = {
        **BODY,
        "messages": messages,
        "tools": [tool],
        "tool_choice": choice,
        "output_config": {"effort": None, "format": None},
        "system": None,
    }
    asked = turn_request(
        parse_messages({**body, "thinking": {"type": "enabled", "budget_tokens": 9, "display": None}}, notes),
        None,
        READS,
    )
    assert [message["content"] for message in asked.messages] == ["a", "", "", "", "Be brief."]
    assert asked.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
    assert not notes.unknown


def test_cache_control_is_converted_to_cache_marks() -> None:
    marked = {"cache_control": MARK}
    assert turn({"tools": [{**TOOL, **marked}, {**TOOL, "name": "b"}], "system": "s"}).marked == [ToolsMark(1)]
    assert turn({"system": [text("abc", **marked), text("d", **marked)]}).marked == [MessageMark(0, 3), MessageMark(0)]
    assert turn({"messages": [{"role": "user", "content": [text("document", **marked), text("question")]}]}).marked == [
        MessageMark(0, 8)
    ]
    assert turn({**marked, "system": "s"}).marked == [MessageMark(1)]
    loop = [
        USER,
        {"role": "assistant", "content": [{**USE, **marked}]},
        {"role": "user", "content": [{**RESULT, **marked}, text("?")]},
    ]
    assert turn({"messages": loop}).marked == [MessageMark(1), MessageMark(2)]
    nested = {**RESULT, "content": [text("a lamp", **marked)]}
    assert turn(
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [nested]}]}
    ).marked == [MessageMark(2)]


def test_count_accepts_all_fields_of_the_prompt() -> None:
    rest = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert (
        turn_request(parse_count({**rest, "system": "s", "tools": [TOOL]}), None, READS).messages[0]["role"] == "system"
    )
    with pytest.raises(RequestError, match="container"):
        parse_count({**BODY, "container": "c"})
    assert parse_count(BODY) == parse_count(rest)
