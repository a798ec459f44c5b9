"""How many values a JSON text holds, counted as its bytes come: what is small as text may be large as objects, and slow
for whoever walks over them.

Counts at the speed of bytes' own methods, and decodes nothing. Of a text that is no JSON it says something, which is
all that is needed.
"""

from __future__ import annotations

MAX_PARTS = 200_000
"""Texts (names of fields too), arrays and objects. As many take some 20 ms to decode and as long to convert; a session
of a million tokens has 50,000."""
MAX_VALUES = 2_000_000
"""The numbers, too: a prompt may be ids."""

_STEP = 1 << 16


class JsonCount:
    """Feed it a text in pieces."""

    def __init__(self) -> None:
        self._in_text = False
        self._escape = b""
        """A backslash at the end of the last piece, which belongs to the next."""
        self.num_parts = 0
        self.num_values = 0

    def feed(self, data: bytes | bytearray) -> None:
        for start in range(0, len(data), _STEP):
            self._count(self._escape + data[start : start + _STEP])

    @property
    def excess(self) -> str | None:
        """In words what there is too much of."""
        if self.num_parts > MAX_PARTS:
            return f"holds more than {MAX_PARTS:,} texts, arrays and objects"
        if self.num_values > MAX_VALUES:
            return f"holds more than {MAX_VALUES:,} values"
        return None

    def _count(self, piece: bytes) -> None:
        piece = piece.replace(b"\\\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        opened = outside.count(b"[") + outside.count(b"{")
        self.num_parts += opened + (len(parts) - 1 + self._in_text) // 2
        self._in_text ^= len(parts) % 2 == 0
        self.num_values += opened + outside.count(b",")
