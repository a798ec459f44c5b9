"""Tokenising long prompts that mostly repeat: piece by piece between added tokens, with the pieces' ids remembered.

Added tokens are matched before any normalisation, pre-tokenisation or merge, and none of these crosses one; so the ids of the pieces in a
row are the ids of the whole text. Knows nothing of messages or templates.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from agentspec.text.tokenizer import Tokenizer


class PieceEncoder:
    """Encodes text like its tokenizer, only faster when it has seen most of it. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, max_characters: int = 16 << 20) -> None:
        """`max_characters`: of the remembered pieces together; the least recently used go first."""
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._num_characters = 0
        self._ids_of: OrderedDict[str, list[int]] = OrderedDict()
        by_length = sorted(tokenizer.added_tokens, key=lambda token: -len(token.text))
        self._cuts = {token.text for token in by_length if token.is_cut}
        self._added = re.compile("(" + "|".join(re.escape(token.text) for token in by_length) + ")") if by_length else None

    def encode(self, text: str) -> list[int]:
        """Equal to the tokenizer's own `encode`."""
        ids: list[int] = []
        for piece in self.pieces(text):
            ids += self.encode_piece(piece)
        return ids

    def pieces(self, text: str) -> list[str]:
        """The text, cut before and behind every added token beside which it may be cut."""
        pieces: list[str] = []
        open_piece = ""
        for part in self._added.split(text) if self._added else [text]:
            if part in self._cuts:
                pieces += [open_piece, part]
                open_piece = ""
            else:
                open_piece += part
        return [piece for piece in (*pieces, open_piece) if piece]

    def encode_piece(self, piece: str) -> list[int]:
        """The ids of one of the `pieces`. They are remembered: not to be changed."""
        ids = self._ids_of.get(piece)
        if ids is not None:
            self._ids_of.move_to_end(piece)
            return ids
        ids = self._tokenizer.encode(piece)
        self._ids_of[piece] = ids
        self._num_characters += len(piece)
        while self._num_characters > self._max_characters:
            forgotten, _ = self._ids_of.popitem(last=False)
            self._num_characters -= len(forgotten)
        return ids
