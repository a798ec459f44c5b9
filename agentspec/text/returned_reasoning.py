"""Reasoning in the histories that clients send back, in the field names and forms of this and other servers.

Knows nothing of templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks", "reasoning_text")
"""The first name with text is used, before blocks among the content parts; the others repeat it or are empty."""

_BLOCKS = {"reasoning.text": "text", "thinking": "thinking"}
"""Type of a block in a list (OpenRouter's `reasoning_details`, LiteLLM's `thinking_blocks`) -> field that holds its
text. Blocks of other types hold summaries or encrypted data."""


def returned_reasoning(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of a message; None when it has none in a known form."""
    content = message.get("content")
    forms = [
        *(_text(message[name]) for name in _NAMES if name in message),
        _text(content) if isinstance(content, list) else None,
    ]
    texts = [text for text in forms if text is not None]
    return next((text for text in texts if text.strip()), texts[0] if texts else None)


def _text(form: object) -> str | None:
    if isinstance(form, str):
        return form
    if not isinstance(form, list):
        return None
    texts = [text for block in form if (text := _block_text(block)) is not None]
    return "".join(texts) if texts else None


def _block_text(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(kind, str) or kind not in _BLOCKS:
        return None
    text = block.get(_BLOCKS[kind])
    return text if isinstance(text, str) else None
