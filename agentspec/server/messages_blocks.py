"""Blocks of Anthropic's messages that a model of text can't be shown as they are: what they hold as text, or nothing.

Histories carry the blocks of tools that Anthropic ran (searches, fetches, code), documents, and kinds that are newer
than this server. Knows of bodies as they came: what is done here is done before structs read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from agentspec.errors import RequestError
from agentspec.server.fields import Notes

_READ = frozenset(("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"))
"""Left to the structs, which take them or say what is wrong. An image is no block with a text: it is not left out
here."""

_TEXTS = ("title", "context", "url", "text", "stdout", "stderr", "content", "source", "data")
"""Where blocks hold texts, at any depth, in the order in which they are read."""

_CLOSED = frozenset(("base64", "url", "file", "image"))
"""Types of sources and parts whose content is no text, or is somewhere else."""


def readable(messages: Any, notes: Notes, tools: Collection[str]) -> Any:
    """The `messages` of a body, as they came, with texts in the place of blocks that only have some. What is lost is
    noted, by its type. `tools`: names that results may refer to.

    A block without text becomes an empty one, so that the places of the others stay. What is wrong is left to the
    structs."""
    if not isinstance(messages, list):
        return messages
    return [
        _message(message, f"messages[{index}]", notes, tools) if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def _message(message: dict[str, Any], field: str, notes: Notes, tools: Collection[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or all(_is_whole(block, tools) for block in content):
        return message
    return {**message, "content": _blocks(content, f"{field}.content", notes, tools)}


def _is_whole(block: Any, tools: Collection[str], *, in_result: bool = False) -> bool:
    """Nothing is to be done about it."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and isinstance(block.get("content"), list):
        return all(_is_whole(part, tools, in_result=True) for part in block["content"])
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
        if _is_whole(block, tools, in_result=in_result):
            shown.append(block)
        elif block["type"] == "tool_result":
            shown.append(
                {**block, "content": _blocks(block["content"], f"{place}.content", notes, tools, in_result=True)}
            )
        else:
            before, behind = "\n\n" if index else "", "\n\n" if index < len(blocks) - 1 else ""
            text = _text(block, place, notes)
            mark = {name: block[name] for name in ("cache_control",) if name in block}
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
    """What can't be read is added to `closed` by its type."""
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
