"""Length of the common prefix of two texts."""

from __future__ import annotations

from typing import AnyStr


def common_length(first: AnyStr, second: AnyStr) -> int:
    """Return the length of the common prefix, in characters (bytes for bytes)."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # binary search: comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
