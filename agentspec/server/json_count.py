"""Counts the values of a JSON text as its bytes arrive: a small text may hold very many objects, which are slow to
process.

Runs at the speed of bytes' own methods and decodes nothing. For invalid JSON the counts are arbitrary, which does no
harm.
"""

from __future__ import annotations

from itertools import accumulate

MAX_PARTS = 200_000
"""Strings (field names included), arrays and objects. This many take about 20 ms to decode and as long to convert; a
session of a million tokens has 50,000."""
MAX_VALUES = 2_000_000
"""Numbers included: a prompt may be token ids."""

_STEP = 1 << 16

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS_OF_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""1 and -1 as signed bytes."""


class JsonCount:
    """A counter that is fed a text in pieces."""

    def __init__(self) -> None:
        self._in_text = False
        self._escape = b""
        """A backslash at the end of the last piece, which belongs to the next."""
        self._level = 0
        self.num_parts = 0
        self.num_values = 0
        self.num_levels = 0
        """Levels of arrays and objects in each other."""

    def feed(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _STEP):
            self._count(self._escape + bytes(data[start : start + _STEP]))

    @property
    def excess(self) -> str | None:
        """The limit that is exceeded, in words; None: within the limits."""
        if self.num_parts > MAX_PARTS:
            return f"holds more than {MAX_PARTS:,} texts, arrays and objects"
        if self.num_values > MAX_VALUES:
            return f"holds more than {MAX_VALUES:,} values"
        return None

    def _count(self, piece: bytes) -> None:
        if self._in_text and b'"' not in piece and b"\\" not in piece:
            self._escape = b""
            return
        piece = piece.replace(b"\\\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        opened = outside.count(b"[") + outside.count(b"{")
        self.num_parts += opened + (len(parts) - 1 + self._in_text) // 2
        self._in_text ^= len(parts) % 2 == 0
        self.num_values += opened + outside.count(b",")
        if brackets := outside.translate(_STEPS_OF_BRACKETS, _NOT_BRACKETS):
            levels = list(accumulate(memoryview(brackets).cast("b"), initial=self._level))
            self._level, self.num_levels = levels[-1], max(self.num_levels, max(levels))
