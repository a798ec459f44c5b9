"""Encode rendered prompts: text piece by piece, generated turns by their own ids, and known segments from a cache.

Caching never changes the ids. Knows nothing of messages or templates.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from agentspec.text.common_length import common_length
from agentspec.text.piece_encoder import PieceEncoder
from agentspec.text.sentinels import Sentinels
from agentspec.text.sized_cache import SizedCache, held_bytes
from agentspec.text.token_limit import TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import tokens

_ENTRY_OVERHEAD_BYTES = 1000
_STRETCH_BYTES = 150


@dataclass(frozen=True, slots=True)
class Stretch:
    """Characters start..end (exclusive) of the rendered prompt are the text of these generated ids."""

    start: int
    end: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A text and its ids, which must not be changed. A segment is a stretch, or a piece of the text between two
    stretches."""

    text: str
    stretches: tuple[Stretch, ...]
    ids: array[int]
    char_ends: array[int]
    """Character offset of the end of each segment."""
    token_ends: array[int]
    """Token offset of the end of each segment."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes. Includes the ids of the stretches, since the turn memory may evict them
        earlier."""
        of_stretches = sum(_STRETCH_BYTES + held_bytes(stretch.token_ids) for stretch in self.stretches)
        return (
            _ENTRY_OVERHEAD_BYTES
            + of_stretches
            + sum(map(held_bytes, (self.text, self.ids, self.char_ends, self.token_ends)))
        )


_NOTHING = EncodedPrompt("", (), tokens(), array("q"), array("q"))


class PromptEncoder:
    """Encodes prompts and caches the last one of each conversation. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, sentinels: Sentinels | None = None, *, max_bytes: int = 64 << 20) -> None:
        """`sentinels`: the only added tokens in the prompts; None: text that spells an added token becomes it.
        `max_bytes` bounds the cached prompts; the least recently used are evicted first."""
        self._pieces = PieceEncoder(tokenizer, sentinels)
        self._margin = 1 if sentinels else max((len(token.text) for token in tokenizer.added_tokens), default=1)
        self._prompts: SizedCache[bytes, EncodedPrompt] = SizedCache(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the cached prompts in bytes; never above `max_bytes`."""
        return self._prompts.num_bytes

    def encode(
        self, text: str, stretches: Sequence[Stretch], keys: Sequence[bytes] = (), limit: TokenLimit | None = None
    ) -> EncodedPrompt:
        """Encode a text, with the ids of each stretch in its place.

        `keys`: of the conversation, from the empty one on (text/turn_memory.py). The prompt replaces the prompt that it
        continues and is cached under the last key; without keys the cache is not used. Raises ContextLengthError beyond
        the limit, and caches nothing then."""
        key = next((key for key in reversed(keys) if key in self._prompts), None)
        known = None if key is None else self._prompts.get(key)
        prompt = self._continued(known or _NOTHING, text, stretches, limit)
        if keys:
            if key is not None:
                self._prompts.pop(key)
            self._prompts.put(keys[-1], prompt, prompt.num_bytes)
        return prompt

    def token_offset(self, prompt: EncodedPrompt, mark: int) -> int:
        """Return the number of ids before a text offset that don't depend on the text after it. An offset inside a
        token or a stretch is rounded down to its start."""
        segment = bisect_left(prompt.char_ends, mark)
        if not mark or prompt.char_ends[segment] == mark:
            return prompt.token_ends[segment] if mark else 0
        start, first = (prompt.char_ends[segment - 1], prompt.token_ends[segment - 1]) if segment else (0, 0)
        if any(stretch.start == start and stretch.end > mark for stretch in prompt.stretches):
            return first
        head = prompt.text[start:mark]
        ids = prompt.ids[first : prompt.token_ends[segment]]
        return first + common_length(ids.tobytes(), self._pieces.ids_of([head])[head].tobytes()) // ids.itemsize

    def _continued(
        self, known: EncodedPrompt, text: str, stretches: Sequence[Stretch], limit: TokenLimit | None
    ) -> EncodedPrompt:
        """Encode a prompt, copying the leading segments that it shares with a known one."""
        num_kept = self._num_common(known, text, stretches)
        ids = known.ids[: known.token_ends[num_kept - 1] if num_kept else 0]
        char_ends, token_ends = known.char_ends[:num_kept], known.token_ends[:num_kept]
        place = char_ends[-1] if num_kept else 0
        left = stretches[sum(stretch.end <= place for stretch in stretches) if num_kept else 0 :]
        starts, stops = [place, *(stretch.end for stretch in left)], [*(stretch.start for stretch in left), len(text)]
        between = [self._pieces.pieces(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        ids_of = self._pieces.ids_of(chain.from_iterable(between), limit)
        for pieces, stretch in zip_longest(between, left):
            segments = [(len(piece), ids_of[piece]) for piece in pieces]
            if stretch is not None:
                segments.append((stretch.end - stretch.start, stretch.token_ids))
            for num_characters, segment_ids in segments:
                ids += segment_ids
                place += num_characters
                char_ends.append(place)
                token_ends.append(len(ids))
        if limit is not None:
            limit.check(len(ids))
        return EncodedPrompt(text, tuple(stretches), ids, char_ends, token_ends)

    def _num_common(self, known: EncodedPrompt, text: str, stretches: Sequence[Stretch]) -> int:
        """Return the number of leading segments that the text shares with the known prompt.

        Whether an added token begins at a place depends on at most that token's length of text after it. So segments
        that end this margin before the first difference are split the same way. The end of a text is not a split
        point."""
        pairs = zip_longest(known.stretches, stretches)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), ())
        same = min([common_length(known.text, text), *(stretch.start for stretch in differing if stretch is not None)])
        return bisect_right(known.char_ends, same - self._margin)
