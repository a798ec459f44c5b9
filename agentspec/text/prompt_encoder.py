"""A rendered prompt to token ids: text piece by piece, generated turns by their own ids, and what stood in the
conversation's last prompt as it was.

The ids are those that the whole would have without that memory. Knows nothing of messages or templates.
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
    """Characters start..end of the rendered prompt are the text of these generated ids."""

    start: int
    end: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A text with its ids, which are not to be changed. A segment is a stretch, or a piece of the text between two of
    them."""

    text: str
    stretches: tuple[Stretch, ...]
    ids: array[int]
    char_ends: array[int]
    """Characters up to the end of each segment."""
    token_ends: array[int]
    """Ids up to there."""

    @property
    def num_bytes(self) -> int:
        """About what it holds in memory, the stretches' ids included: the turn memory may let go of them first."""
        of_stretches = sum(_STRETCH_BYTES + held_bytes(stretch.token_ids) for stretch in self.stretches)
        return (
            _ENTRY_OVERHEAD_BYTES
            + of_stretches
            + sum(map(held_bytes, (self.text, self.ids, self.char_ends, self.token_ends)))
        )


_NOTHING = EncodedPrompt("", (), tokens(), array("q"), array("q"))


class PromptEncoder:
    """Encodes prompts and remembers the last one of each conversation. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, sentinels: Sentinels | None = None, *, max_bytes: int = 64 << 20) -> None:
        """`sentinels`: in the prompts they alone are added tokens; None: added tokens are what spells one. `max_bytes`:
        of the remembered prompts together; the least recently used go first."""
        self._pieces = PieceEncoder(tokenizer, sentinels)
        self._margin = 1 if sentinels else max((len(token.text) for token in tokenizer.added_tokens), default=1)
        self._prompts: SizedCache[bytes, EncodedPrompt] = SizedCache(max_bytes)

    @property
    def num_bytes(self) -> int:
        """About what the remembered prompts hold in memory; never above max_bytes."""
        return self._prompts.num_bytes

    def encode(
        self, text: str, stretches: Sequence[Stretch], keys: Sequence[bytes] = (), limit: TokenLimit | None = None
    ) -> EncodedPrompt:
        """The text with the stretches' own ids in their places.

        `keys`: of the conversation, from the empty one on (text/turn_memory.py). The prompt is remembered under the
        last one, in the place of the one that it continues; none: neither. Raises ContextLengthError for more ids than
        the limit, and remembers nothing of them."""
        key = next((key for key in reversed(keys) if key in self._prompts), None)
        known = None if key is None else self._prompts.get(key)
        prompt = self._continued(known or _NOTHING, text, stretches, limit)
        if keys:
            if key is not None:
                self._prompts.pop(key)
            self._prompts.put(keys[-1], prompt, prompt.num_bytes)
        return prompt

    def token_offset(self, prompt: EncodedPrompt, mark: int) -> int:
        """Ids that lie before a place in the text whatever follows it there: inside of a token or a stretch, those
        before it."""
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
        """The prompt, with the segments that it has in common with a known one taken from there."""
        num_kept = self._num_common(known, text, stretches)
        ids = known.ids[: known.token_ends[num_kept - 1] if num_kept else 0]
        char_ends, token_ends = known.char_ends[:num_kept], known.token_ends[:num_kept]
        place = char_ends[-1] if num_kept else 0
        left = stretches[sum(stretch.end <= place for stretch in stretches) if num_kept else 0 :]
        starts, stops = [place, *(stretch.end for stretch in left)], [*(stretch.start for stretch in left), len(text)]
        between = [self._pieces.pieces(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        ids_of = self._pieces.ids_of(chain.from_iterable(between), limit)
        for pieces, stretch in zip_longest(between, left):
            for piece in pieces:
                ids += ids_of[piece]
                place += len(piece)
                char_ends.append(place)
                token_ends.append(len(ids))
            if stretch is not None:
                ids += stretch.token_ids
                place = stretch.end
                char_ends.append(place)
                token_ends.append(len(ids))
        if limit is not None:
            limit.check(len(ids))
        return EncodedPrompt(text, tuple(stretches), ids, char_ends, token_ends)

    def _num_common(self, known: EncodedPrompt, text: str, stretches: Sequence[Stretch]) -> int:
        """Segments of the known prompt that the text begins with, too. Where an added token begins depends on no more
        than that token's own length behind it, so what is so far before the first difference is cut as it was. The end
        of a text is no cut."""
        pairs = zip_longest(known.stretches, stretches)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), ())
        same = min([common_length(known.text, text), *(stretch.start for stretch in differing if stretch is not None)])
        return bisect_right(known.char_ends, same - self._margin)
