"""How deep decoded JSON is nested: what is deeper than any real request would only exhaust the stack of whatever walks it."""

from __future__ import annotations

from typing import Any

MAX_NESTING = 100


def is_too_deep(value: Any) -> bool:
    """Arrays and objects lie in each other more than MAX_NESTING levels deep."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for part in level for item in _items(part)]
        if not level:
            return False
    return True


def _items(part: Any) -> list[Any]:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [item for item in inner if isinstance(item, dict | list)]
