"""Features of Anthropic's servers that are missing here, in bodies of /v1/messages: server tools, and their blocks in
histories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import RequestError
from agentspec.server.fields import Notes
from agentspec.server.messages_request import parse_count, parse_messages, turn_request
from agentspec.server.turn import TurnRequest
from agentspec.server.unknown_fields import HEADER
from agentspec.text.chat_template import MessageMark, ToolsMark
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
PDF: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
}
FOUND: dict[str, Any] = {
    "type": "web_search_result",
    "title": "Lamps",
    "url": "https://lamps.example",
    "encrypted_content": "Eo8P",
    "page_age": "1 day",
}


def turn(extra: dict[str, Any], notes: Notes | None = None) -> TurnRequest:
    return turn_request(
        parse_messages({"model": "m", "max_tokens": 9, "messages": [USER], **extra}, notes), None, frozenset()
    )


def names(asked: TurnRequest) -> list[str]:
    return [tool["function"]["name"] for tool in asked.tools]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20250910",
        "code_execution_20250825",
        "tool_search_tool_bm25_20251119",
        "text_editor_20250728",
        "computer_20250124",
        "computer_toolset_20260801",
        "advisor_20260301",
        "mcp_toolset",
    ],
)
def test_server_tools_are_left_out_and_named(kind: str) -> None:
    notes = Notes()
    asked = turn(
        {"tools": [{"type": kind, "mcp_server_name": "x", "max_uses": 3, "display_width_px": 9, "configs": {}}, TOOL]},
        notes,
    )
    assert (names(asked), notes.unknown) == (["look"], [f"tools[{kind}]"])
    with pytest.raises(RequestError) as raised:
        turn({"tools": [TOOL, {"type": kind}]}, Notes(strict=True))
    assert raised.value.field == "tools[1].type"


@pytest.mark.parametrize(
    ("kind", "name"), [("bash_20250124", "bash"), ("bash_20241022", "bash"), ("memory_20250818", "memory")]
)
def test_tools_with_a_known_schema_are_shown(kind: str, name: str) -> None:
    notes = Notes(strict=True)
    asked = turn(
        {"tools": [{"type": kind, "name": name, **MARK}], "tool_choice": {"type": "tool", "name": name}}, notes
    )
    (tool,) = asked.tools
    assert (tool["function"]["name"], asked.demand.name, asked.marked) == (name, name, [ToolsMark(1)])
    assert "command" in tool["function"]["parameters"]["properties"]
    assert tool["function"]["description"]


def test_left_out_tool_can_not_be_forced() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(RequestError, match="web_search_20250305") as raised:
        turn({"tools": [search, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}})
    assert raised.value.field == "tool_choice.name"
    assert turn({"tools": [search], "tool_choice": {"type": "auto"}}).tools == []
    assert turn({"tools": [search, TOOL], "tool_choice": {"type": "any"}}).demand.choice == "required"


def test_tool_cache_marks_count_only_shown_tools() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", **MARK}
    assert turn({"tools": [hosted, TOOL]}).marked == []
    assert turn({"tools": [TOOL, hosted]}).marked == [ToolsMark(1)]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "A lamp."},
                "title": "Lamps",
            },
            "Lamps\nA lamp.",
        ),
        (
            {
                "type": "document",
                "source": {
                    "type": "content",
                    "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "lamp."}],
                },
            },
            "A\nlamp.",
        ),
        (
            {
                "type": "search_result",
                "source": "lamps.example",
                "title": "Lamps",
                "content": [{"type": "text", "text": "A lamp."}],
            },
            None,
        ),
        (
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [FOUND, FOUND]},
            "Lamps\nhttps://lamps.example\n" * 2,
        ),
        (
            {
                "type": "mcp_tool_result",
                "tool_use_id": "s",
                "is_error": False,
                "content": [{"type": "text", "text": "A lamp."}],
            },
            "A lamp.",
        ),
        ({"type": "mcp_tool_result", "tool_use_id": "s", "content": "A lamp."}, "A lamp."),
        (
            {
                "type": "web_fetch_tool_result",
                "content": {
                    "type": "web_fetch_result",
                    "url": "https://l.example",
                    "content": {"type": "document", "source": {"type": "text", "data": "A"}},
                },
            },
            "https://l.example\nA",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "content": {"stdout": "ok\n", "stderr": "odd", "return_code": 0, "content": []},
            },
            "ok\n\nodd",
        ),
        (
            {"type": "text_editor_code_execution_tool_result", "content": {"file_type": "text", "content": "A lamp."}},
            "A lamp.",
        ),
        ({"type": "advisor_tool_result", "content": {"type": "advisor_result", "text": "Look."}}, "Look."),
        ({"type": "compaction", "content": "They looked for a lamp.", "signature": "x"}, "They looked for a lamp."),
        ({"type": "something_new", "title": "A lamp"}, "A lamp"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_texts_of_unknown_blocks_are_kept(block: dict[str, Any], text: str | None) -> None:
    notes = Notes(strict=True)
    words = "Lamps\nA lamp.\nlamps.example" if text is None else text.strip()
    asked = turn(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "See:"}, block, {"type": "text", "text": "So?"}]}
            ]
        },
        notes,
    )
    assert asked.messages == [{"role": "user", "content": f"See:\n\n{words}\n\nSo?"}]
    history = [USER, {"role": "assistant", "content": [block]}, USER]
    assert turn({"messages": history}, notes).messages[1] == {"role": "assistant", "content": words}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "lamps"}},
        {"type": "mcp_tool_use", "id": "s", "name": "find", "server_name": "x", "input": {}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        {
            "type": "tool_search_tool_result",
            "content": {"tool_references": [{"type": "tool_reference", "tool_name": "look"}]},
        },
        {"type": "container_upload", "file_id": "f"},
        {"type": "compaction", "content": None},
        {"type": "something_new"},
        PDF,
    ],
    ids=lambda block: block["type"],
)
def test_blocks_without_text_are_left_out_and_named(block: dict[str, Any]) -> None:
    notes = Notes()
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Well"}, block, {"type": "text", "text": "."}]},
        USER,
    ]
    assert turn({"messages": messages}, notes).messages[1] == {"role": "assistant", "content": "Well."}
    assert notes.unknown == [f"messages[{block['type']}]"]
    with pytest.raises(RequestError) as raised:
        turn({"messages": messages}, Notes(strict=True))
    assert raised.value.field == "messages[1].content[1].type"


def test_unreadable_document_keeps_its_title_and_is_named() -> None:
    notes = Notes()
    asked = turn({"messages": [{"role": "user", "content": [{**PDF, "title": "lamps.pdf"}]}]}, notes)
    assert (asked.messages, notes.unknown) == ([{"role": "user", "content": "lamps.pdf"}], ["messages[document]"])


def test_unknown_parts_of_results_are_replaced_by_their_texts() -> None:
    notes = Notes()
    parts = [
        {"type": "text", "text": "One."},
        {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "Two."}], **MARK},
        {"type": "tool_reference", "tool_name": "look"},
    ]
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    asked = turn(
        {
            "messages": [
                USER,
                use,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]},
            ]
        },
        notes,
    )
    assert asked.messages[2]["content"] == "One.\n\nT\nTwo.\ns\n\n"
    assert asked.marked == [MessageMark(2)]
    assert notes.unknown == ["messages[tool_reference]"], "no tool has this name"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [PDF, {"type": "image", "source": {}}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [PDF, {"type": "text"}]}], "messages[0].content[1]"),
    ],
    ids=str,
)
def test_errors_keep_the_clients_field_names(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        turn({"messages": messages})
    assert raised.value.field.startswith(field)


def test_count_accepts_the_same_bodies() -> None:
    notes = Notes()
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
    asked = parse_count({"model": "m", "messages": [{"role": "user", "content": [PDF]}], "tools": tools}, notes)
    assert names(turn_request(asked, None, frozenset())) == ["look"]
    assert notes.unknown == ["messages[document]", "tools[web_search_20250305]"]


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"])
def test_answer_header_names_left_out_blocks_and_tools(connect: Connect, path: str) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {**TOOL, "input_schema": {"type": "object", "properties": 5}},
    ]
    body = {"model": "scripted", "max_tokens": 9, "messages": [USER], "tools": tools[:1], "metadata": {"user_id": "u"}}

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with connect(ScriptedEngine([*said("well"), ended()])) as client:
            headers = {
                "anthropic-version": "2023-06-01",
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
            }
            wrong = {**body, "tools": [tools[0], {**tools[1], "strict": True}], "tool_choice": {"type": "any"}}
            return await client.post(path, json=body, headers=headers), await client.post("/v1/messages", json=wrong)

    answer, refused = asyncio.run(run())
    assert (answer.status_code, answer.headers[HEADER]) == (200, "tools[web_search_20250305]"), answer.text
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tools[1].input_schema"), refused.text
