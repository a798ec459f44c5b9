"""Images in bodies, for a server that was told to do without them: words that say that one was there.

Knows where the three APIs have their parts, in bodies as they came: what is done here is done before structs read them.
"""

from __future__ import annotations

from typing import Any

WORDS = "[There was an image here, which can't be shown to this model.]"

_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}
"""By the type of an image (chat's, Anthropic's, that of responses): the type of a text in its place."""


def without_images(body: Any) -> Any:
    """A decoded body with texts in the place of images: in messages, in items and in the results of tools. What is
    wrong is left to others."""
    if not isinstance(body, dict):
        return body
    return {name: _without(value) if name in ("messages", "input") else value for name, value in body.items()}


def _without(messages: Any) -> Any:
    return [_shown(message) for message in messages] if isinstance(messages, list) else messages


def _shown(holder: Any) -> Any:
    """A message, an item or a result of a tool, whose parts are in its content or its output."""
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
    mark = {name: part[name] for name in ("cache_control",) if name in part}
    return {"type": _TEXT_OF[kind], "text": before + WORDS + behind, **mark}
