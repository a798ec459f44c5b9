"""A tokenizer that needs no files and never changes, so that token counts of recorded sessions can be compared with
exact figures.

The bundled tokenizer is trained again whenever tiny-agent's sessions change, which changes its counts.
"""

from __future__ import annotations

import re
from array import array
from zlib import crc32

_PIECES = re.compile(r"<\|?\w+\|?>|</\w+>|\s?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]{1,4}|_|\s{1,8}")
"""Control tokens and tags; runs of letters with the blank before them; digits; punctuation; blanks. Every character is
in some piece."""

_NUM_PIECE_IDS = 150_000


class RegexPieces:
    """Splits text into short pieces and hashes each to an id. Token counts are near a BPE's, and equal text has equal
    ids."""

    name = "regex-pieces"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> array[int]:
        ids = self._ids
        return array("i", [ids.get(piece) or self._add(piece) for piece in _PIECES.findall(text)])

    def _add(self, piece: str) -> int:
        return self._ids.setdefault(piece, 1 + crc32(piece.encode("utf-8", "surrogatepass")) % _NUM_PIECE_IDS)
