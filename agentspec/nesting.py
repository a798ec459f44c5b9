"""How deep decoded JSON is nested: what is deeper than any real request would only exhaust the stack of whatever walks it."""

from __future__ import annotations

from typing import Any

MAX_NESTING = 100


def may_be_too_deep(text: bytes | bytearray) -> bool:
    """JSON text has brackets enough to be nested too deep. Most has not, and a long prompt's ids need no look at each of them."""
    return text.count(b"[") + text.count(b"{") > MAX_NESTING


def is_too_deep(value: Any) -> bool:
    """Arrays and objects, as JSON is decoded, lie in each other more than MAX_NESTING levels deep."""
    level: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 2):
        level = [item for part in level for item in _values(part) if type(item) is list or type(item) is dict]
        if not level:
            return False
    return True


def _values(part: Any) -> Any:
    return part.values() if type(part) is dict else part
