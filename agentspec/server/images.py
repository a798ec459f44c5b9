"""Replaces images in bodies by a text that says that an image was there.

Knows where the three APIs have their content parts. Works on decoded bodies, before they are converted to structs.
"""

from __future__ import annotations

from typing import Any

WORDS = "[There was an image here, which can't be shown to this model.]"

_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}
"""By the type of an image part (of chat, Anthropic, responses): the type of the text part in its place."""


def without_images(body: Any) -> Any:
    """A decoded body with its images replaced: in messages, items and tool results. Malformed bodies are left to
    validation."""
    if not isinstance(body, dict):
        return body
    return {
        name: list(map(_shown, value)) if name in ("messages", "input") and isinstance(value, list) else value
        for name, value in body.items()
    }


def _shown(holder: Any) -> Any:
    """A message, an item or a tool result, with the images of its content or output replaced."""
    if not isinstance(holder, dict):
        return holder
    return {
        name: _parts(value) if name in ("content", "output") and isinstance(value, list) else value
        for name, value in holder.items()
    }


def _parts(parts: list[Any]) -> list[Any]:
    return [
        _part(part, "\n" if index else "", "\n" if index < len(parts) - 1 else "") for index, part in enumerate(parts)
    ]


def _part(part: Any, before: str, behind: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_result":
        return _shown(part)
    if not isinstance(kind, str) or kind not in _TEXT_OF:
        return part
    mark = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
    return {"type": _TEXT_OF[kind], "text": before + WORDS + behind, **mark}
