"""How far two texts are the same."""

from __future__ import annotations

from typing import AnyStr


def common_length(first: AnyStr, second: AnyStr) -> int:
    """Characters (of bytes: bytes) at the beginning that both have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # by halves: comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
