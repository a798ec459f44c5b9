"""Tokenise prompts piece by piece, with the ids of each piece cached, since long prompts mostly repeat.

Pieces are the texts between added tokens. Added tokens are matched before normalisation, pre-tokenisation and merges,
and none of these crosses one, so the concatenated ids equal the ids of the whole text. With sentinels
(text/sentinels.py) only they are added tokens. Knows nothing of messages or templates.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

from agentspec.text.sentinels import ANY_SENTINEL, Sentinels
from agentspec.text.sized_cache import SizedCache, held_bytes
from agentspec.text.token_limit import TokenLimit, encode_within
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import tokens

_ENTRY_OVERHEAD_BYTES = 250


class PieceEncoder:
    """Encodes text with the tokenizer's result, faster for pieces in the cache. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, sentinels: Sentinels | None = None, *, max_bytes: int = 64 << 20) -> None:
        """`max_bytes` bounds the cached pieces and their ids together; the least recently used are evicted first."""
        self._tokenizer = tokenizer
        self._ids_of: SizedCache[str, array[int]] = SizedCache(max_bytes)
        self._ids_of_sentinels = {} if sentinels is None else sentinels.ids_of
        by_length = sorted(tokenizer.added_tokens, key=lambda token: -len(token.text))
        self._cuts = self._ids_of_sentinels.keys() or {token.text for token in by_length if token.is_cut}
        self._added = (
            ANY_SENTINEL
            if sentinels
            else re.compile("(" + ("|".join(re.escape(token.text) for token in by_length) or "(?!)") + ")")
        )

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the cache in bytes; never above `max_bytes`."""
        return self._ids_of.num_bytes

    def encode(self, text: str) -> array[int]:
        """Return the ids of a text. Without sentinels they equal those of the tokenizer's `encode`."""
        ids = tokens()
        pieces = self.pieces(text)
        known = self.ids_of(pieces)
        for piece in pieces:
            ids += known[piece]
        return ids

    def pieces(self, text: str) -> list[str]:
        """Split the text before and after each added token at which splitting is safe."""
        pieces: list[str] = []
        open_piece = ""
        for part in self._added.split(text):
            if part in self._cuts:
                pieces += [open_piece, part]
                open_piece = ""
            else:
                open_piece += part
        return [piece for piece in (*pieces, open_piece) if piece]

    def ids_of(self, pieces: Iterable[str], limit: TokenLimit | None = None) -> dict[str, array[int]]:
        """Return the ids of texts that are encoded independently, such as `pieces`. The arrays are cached: don't change
        them.

        Raises ContextLengthError when the texts that are not cached exceed the limit; nothing is cached then."""
        known: dict[str, array[int]] = {}
        unknown: dict[str, None] = {}
        for piece in pieces:
            ids = self._ids_of.get(piece)
            if piece in self._ids_of_sentinels:
                known[piece] = self._ids_of_sentinels[piece]
            elif ids is None:
                unknown[piece] = None
            else:
                known[piece] = ids
        found = encode_within(self._tokenizer, list(unknown), together=limit, added_tokens=not self._ids_of_sentinels)
        for piece, ids in zip(unknown, found, strict=True):
            known[piece] = ids
            self._ids_of.put(piece, ids, _ENTRY_OVERHEAD_BYTES + held_bytes(piece) + held_bytes(ids))
        return known
