"""Deferred tools of /v1/messages: shown where a search result names them, so that the prompt before it stays the
same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.errors import RequestError
from agentspec.server.fields import Notes
from agentspec.server.messages_request import parse_messages, turn_request
from agentspec.server.turn import TurnRequest, shown_tools
from agentspec.text.chat_template import ChatTemplate, MessageMark, ToolsMark
from agentspec.text.prompt import PromptAsk, PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
FIND: dict[str, Any] = {"name": "find", "description": "Finds tools.", "input_schema": {"type": "object"}}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Läsé.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
PLAIN: dict[str, Any] = {"name": "plain", "input_schema": {"type": "object"}}
HOSTED: dict[str, Any] = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
DEFER: dict[str, Any] = {"defer_loading": True}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]},
]
LOOK_SHOWN = (
    '<function>{"description": "Läsé.", "name": "look", '
    '"parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}</function>'
)
PLAIN_SHOWN = '<function>{"name": "plain", "parameters": {"type": "object"}}</function>'


def turn(
    tools: list[dict[str, Any]], *parts: dict[str, Any] | str, notes: Notes | None = None, **extra: Any
) -> TurnRequest:
    """The turn after a result with these parts; strings are names of tools."""
    found = [{"type": "tool_reference", "tool_name": part} if isinstance(part, str) else part for part in parts]
    messages = (
        [*ASKED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]}]
        if found
        else ASKED[:1]
    )
    body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, **extra}
    return turn_request(parse_messages(body, notes), None, frozenset())


def shown(asked: TurnRequest) -> list[str]:
    return [tool["function"]["name"] for tool in shown_tools(asked)]


def test_deferred_tool_is_shown_where_a_result_names_it() -> None:
    notes = Notes(strict=True)
    tools = [FIND, {**LOOK, **DEFER}, {**PLAIN, **DEFER}]
    assert shown(turn(tools, notes=notes)) == ["find"]
    asked = turn(tools, "look", notes=notes)
    assert (shown(asked), asked.messages[2]["content"]) == (["find"], f"<functions>\n{LOOK_SHOWN}\n</functions>")
    both = turn(
        tools,
        {"type": "text", "text": "Two: "},
        "plain",
        {"type": "tool_reference", "tool_name": "look", **MARK},
        notes=notes,
    )
    assert both.messages[2]["content"] == f"Two: <functions>\n{PLAIN_SHOWN}\n{LOOK_SHOWN}\n</functions>"
    assert both.marked == [MessageMark(2)]


def test_required_calls_exclude_tools_not_yet_shown() -> None:
    tools = [FIND, {**LOOK, **DEFER}, {**PLAIN, **DEFER}]
    assert turn(tools).callable_names is None, "calls of tools not yet shown are left to the client"
    assert turn(tools, "look", tool_choice={"type": "any"}).callable_names == frozenset({"find", "look"})
    assert turn([FIND, LOOK], tool_choice={"type": "any"}).callable_names is None
    assert turn(tools, tool_choice={"type": "tool", "name": "plain"}).demand.name == "plain"


def test_deferred_tools_are_shown_at_once_without_a_search_tool() -> None:
    assert shown(turn([{**LOOK, **DEFER}, {**PLAIN, **DEFER}])) == ["look", "plain"]
    assert shown(turn([HOSTED, FIND, {**LOOK, **DEFER}])) == ["find", "look"], (
        "Anthropic's search tool isn't available here"
    )


def test_reference_to_an_unknown_tool_is_left_out() -> None:
    notes = Notes()
    assert (
        turn([FIND, {**LOOK, **DEFER}], "gone", "look", notes=notes)
        .messages[2]["content"]
        .endswith(f"{LOOK_SHOWN}\n</functions>")
    )
    assert notes.unknown == ["messages[tool_reference]"]
    with pytest.raises(RequestError) as raised:
        turn([FIND], "gone", notes=Notes(strict=True))
    assert raised.value.field == "messages[2].content[0].content[0].type"


def test_tool_cache_marks_count_only_shown_tools() -> None:
    assert turn([{**LOOK, **DEFER, **MARK}, FIND]).marked == []
    assert turn([FIND, {**LOOK, **DEFER}, {**PLAIN, **MARK}]).marked == [ToolsMark(2)]


def test_found_tool_keeps_the_prompt_prefix() -> None:
    """As in Claude Code: tools that were found are inserted in the middle of `tools`."""
    tokenizer, template = Tokenizer.from_directory(bundled.DIRECTORY), ChatTemplate.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    assert template is not None
    prompts = PromptBuilder(tokenizer, template, TurnMemory())

    def text(asked: TurnRequest) -> str:
        return tokenizer.spell(prompts.build(PromptAsk(asked.messages, shown_tools(asked))).prompt_ids)

    placeholder = {"name": "reserved", "input_schema": {"type": "object"}, **DEFER}
    before = text(turn([FIND, PLAIN, placeholder], {"type": "text", "text": ""}))
    after = text(turn([FIND, {**LOOK, **DEFER}, PLAIN, placeholder], "look"))
    assert after.startswith(before[: before.rindex("\n</tool_response>")])
    assert after.count(json.dumps(LOOK["description"], ensure_ascii=False)) == 1
    assert "reserved" not in after
