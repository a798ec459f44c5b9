"""Texts that other people wrote, replaced by words of ours: a recording keeps the shape of what agents send, not their
prompts.

Names, types, ids, numbers and short words stay, since that is what a server looks at. The same text becomes the same
words, so what was equal stays equal, and about as long as it was.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

_PROSE = frozenset(
    (
        "content",
        "definition",
        "description",
        "encrypted_content",
        "instructions",
        "signature",
        "summary",
        "system",
        "text",
        "thinking",
    )
)
"""Keys of texts, however short these are."""
_LONG = 48
"""Characters from which on any other value is taken for a text, too."""
_KEPT = frozenset(("$schema", "arguments", "id", "input", "name", "namespace", "type", "user_id"))
"""Keys whose values stay: the calls are scripted by us."""

_TEXT = (
    "the agent reads a file then runs one of its tools and tells what it found in a few plain words for the "
    "user who asked"
)


def reworded(value: Any, key: str = "") -> Any:
    """A request's body with other words."""
    if isinstance(value, dict):
        return {name: reworded(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [reworded(inner, key) for inner in value]
    if isinstance(value, str) and key not in _KEPT and (key in _PROSE or len(value) >= _LONG):
        return _words(value)
    return value


def _words(text: str) -> str:
    if not text.strip():
        return text
    rng, words, made = random.Random(zlib.crc32(text.encode())), _TEXT.split(), ""
    while len(made) < len(text):
        made += rng.choice(words) + " "
    return made[: len(text)].rstrip() or "a"
