"""How much of a text's end must wait because it may be the beginning of a marker (a stop string, a tag).

Knows nothing of what the markers mean.
"""

from __future__ import annotations

from collections.abc import Iterable


class Holdback:
    """Finds the longest end of a text that is a proper beginning of one of the markers."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(markers)

    def held(self, text: str) -> int:
        """Characters at the end of `text` that must wait for more; 0 when none."""
        return max((_held_for(marker, text) for marker in self._markers), default=0)


def _held_for(marker: str, text: str) -> int:
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0
