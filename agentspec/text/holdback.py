"""How much of a text's end must be held back, because it may be the prefix of a marker (a stop string or tag).

Knows nothing of the meaning of markers.
"""

from __future__ import annotations

from collections.abc import Iterable


class Holdback:
    """Finds the longest suffix of a text that is a proper prefix of a marker."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(markers)

    def held(self, text: str) -> int:
        """Return the number of characters at the end of `text` to hold back."""
        return max((_held_for(marker, text) for marker in self._markers), default=0)


def _held_for(marker: str, text: str) -> int:
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0
