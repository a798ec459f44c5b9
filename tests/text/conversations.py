"""Conversations and tools that several test files use."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search_flights",
            "description": "Find flights <direct & indirect>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {"type": "string"},
                    "from": {"type": "string"},
                    "seats": {"type": "integer"},
                    "direct": {"type": "boolean"},
                    "filters": {"type": "object"},
                },
                "required": ["to"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
]

SYSTEM = {"role": "system", "content": "You help with travel. Zürich, 東京 and é."}


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "  Hello there \n"}],
    "system and history": [
        SYSTEM,
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "They greet."},
        {"role": "user", "content": "Hi"},
    ],
    "tool loop": [
        SYSTEM,
        {"role": "user", "content": "Two seats to Oslo"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning": "\nI need flights.\n",
            "tool_calls": [
                call(
                    "a",
                    "search_flights",
                    {"to": "Oslo", "seats": 2, "direct": True, "filters": {"max": 1.5, "via": None}},
                ),
                call("b", "write_file", {"path": "notes.txt"}),
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": '[{"id": 7}]'},
        {"role": "tool", "tool_call_id": "b", "content": "ok"},
        {"role": "assistant", "content": None, "tool_calls": [call("c", "write_file", {})]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ],
    "results as user messages": [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "Easy."},
        {"role": "user", "content": "<tool_response>\n1\n</tool_response>"},
    ],
}
