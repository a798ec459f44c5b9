"""How much of a text's end must wait because it may be the beginning of a marker (a stop string, a tag).

Knows nothing of what the markers mean.
"""

from __future__ import annotations

from collections.abc import Iterable


class Holdback:
    """Finds the longest end of a text that is a proper beginning of one of the markers."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._longest = max(map(len, self._beginnings), default=0)

    def held(self, text: str) -> int:
        """Characters at the end of `text` that must wait for more; 0 when none."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
