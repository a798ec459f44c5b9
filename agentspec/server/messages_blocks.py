"""Replaces blocks of Anthropic's messages that a text model can't read by the texts in them.

Histories contain blocks of tools that Anthropic ran (searches, fetches, code), documents, and kinds that are newer than
this server. Works on decoded bodies, before they are converted to structs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from agentspec.errors import RequestError
from agentspec.server.fields import Notes

_READ = frozenset(("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"))
"""Kinds that validation handles. An image has no text to keep, so it is not replaced here."""

_TEXTS = ("title", "context", "url", "text", "stdout", "stderr", "content", "source", "data")
"""Keys that hold texts, at any depth, in reading order."""

_CLOSED = frozenset(("base64", "url", "file", "image"))
"""Types of sources and parts that contain no text, or refer to it elsewhere."""


def readable(messages: Any, notes: Notes, tools: Collection[str]) -> Any:
    """The `messages` of a decoded body, with unreadable blocks replaced by their texts. Types of blocks that lose
    content are noted.

    tools: names that tool references may have. A block without text becomes an empty text block, so that the indices of
    the others stay. Malformed messages are left to validation."""
    if not isinstance(messages, list):
        return messages
    return [
        _message(message, f"messages[{index}]", notes, tools) if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def _message(message: dict[str, Any], field: str, notes: Notes, tools: Collection[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or all(_is_readable(block, tools) for block in content):
        return message
    return {**message, "content": _blocks(content, f"{field}.content", notes, tools)}


def _is_readable(block: Any, tools: Collection[str], *, in_result: bool = False) -> bool:
    """Whether the block can stay as it is."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and isinstance(block.get("content"), list):
        return all(_is_readable(part, tools, in_result=True) for part in block["content"])
    if in_result and kind == "tool_reference":
        name = block.get("tool_name")
        return not isinstance(name, str) or name in tools
    return not isinstance(kind, str) or kind in _READ


def _blocks(
    blocks: list[Any], field: str, notes: Notes, tools: Collection[str], *, in_result: bool = False
) -> list[Any]:
    shown = []
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        if _is_readable(block, tools, in_result=in_result):
            shown.append(block)
        elif block["type"] == "tool_result":
            shown.append(
                {**block, "content": _blocks(block["content"], f"{place}.content", notes, tools, in_result=True)}
            )
        else:
            before, behind = "\n\n" if index else "", "\n\n" if index < len(blocks) - 1 else ""
            text = _text(block, place, notes)
            mark = {"cache_control": block["cache_control"]} if "cache_control" in block else {}
            shown.append({"type": "text", "text": f"{before}{text}{behind}" if text else "", **mark})
    return shown


def _text(block: dict[str, Any], field: str, notes: Notes) -> str:
    closed: list[str] = []
    text = "\n".join(_texts({**block, "type": None}, closed))
    if closed or not text:
        if notes.strict:
            raise RequestError(f"{field}.type", block["type"], "is a block that this server can't read")
        notes.leave_out(f"messages[{block['type']}]", block)
    return text


def _texts(value: Any, closed: list[str]) -> Iterator[str]:
    """Types of unreadable parts are appended to `closed`."""
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, closed)
    elif isinstance(value, dict) and value.get("type") in _CLOSED:
        closed.append(value["type"])
    elif isinstance(value, dict):
        for name in _TEXTS:
            yield from _texts(value.get(name), closed)
