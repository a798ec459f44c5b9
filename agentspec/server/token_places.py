"""The positions of generated tokens in the decoded text, and the scores of each part of it.

Knows a tokenizer's bytes and the engine's scores; nothing of tags, requests or answers.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from agentspec.types import TokenScore


class TokenPlaces:
    """The tokens of one stream. Offsets are characters of the decoded text, as text/detokenizer.py decodes it.

    A token without text has no extent. A token that holds a part of a character has that character's position."""

    def __init__(self, token_bytes: Sequence[bytes], watched: Iterable[int] = ()) -> None:
        """watched: ids of added tokens whose positions are recorded."""
        self.of_id: dict[int, set[int]] = {token: set() for token in watched}
        """Positions of the watched tokens; updated in place."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._starts: list[int] = []
        self._scored: deque[tuple[int, int, TokenScore]] = deque()
        """(start, end, score) of the tokens that no `take_scores` has passed yet."""

    def add_tokens(self, ids: Sequence[int], scores: Sequence[TokenScore] | None) -> None:
        """Append tokens. scores: one entry for each, or None."""
        for index, token in enumerate(ids):
            data = self._token_bytes[token] if token < len(self._token_bytes) else b""
            start = self._length
            self._length += len(self._decoder.decode(data))
            self._starts.append(start)
            if data and token in self.of_id:
                self.of_id[token].add(self._length - len(data.decode()))
            if scores is not None and data:
                self._scored.append((start, max(self._length, start + 1), scores[index]))

    def count_before(self, offset: int) -> int:
        """Number of tokens that start before `offset`."""
        return bisect_left(self._starts, offset)

    def take_scores(self, start: int, end: int) -> list[TokenScore]:
        """Scores of the tokens that overlap start..end, each token once. Ranges must ascend from call to call; earlier
        tokens are dropped."""
        taken = []
        while self._scored and self._scored[0][0] < end:
            _, stop, score = self._scored.popleft()
            if stop > start:
                taken.append(score)
        return taken
