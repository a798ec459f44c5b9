"""Random rounds of prompt chunks: several sequences grow by runs of any length and leave states at the end and in
between."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from agentspec.runtime.plan import ChunkPlan
from agentspec.types import ZERO_ROW, tokens

ROWS_EACH = 5


@dataclass(kw_only=True, slots=True)
class Growing:
    """One sequence, and the rows that hold its states."""

    rows: list[int]
    pages: list[int]
    known: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    """Row -> length of the state that it holds."""
    read_row: int = ZERO_ROW


class ChunkRounds:
    """`sequences` hold the state after all rounds so far."""

    def __init__(self, *, seed: int, num_sequences: int, max_length: int, block_tokens: int, vocab_size: int) -> None:
        self._rng = rng = random.Random(seed)
        self._max_length, self._block, self._vocab_size = max_length, block_tokens, vocab_size
        pages_each = -(-max_length // block_tokens)
        self.num_rows, self.num_pages = 2 + num_sequences * ROWS_EACH, 1 + num_sequences * pages_each
        rows, pages = (
            rng.sample(range(2, self.num_rows), self.num_rows - 2),
            rng.sample(range(1, self.num_pages), self.num_pages - 1),
        )
        self.sequences = [
            Growing(rows=rows[i::num_sequences], pages=pages[i::num_sequences]) for i in range(num_sequences)
        ]

    def next(self, *, most: int = 5) -> list[ChunkPlan]:
        """Chunks of 1 to `most` sequences. A full sequence starts again."""
        rng = self._rng
        chosen = rng.sample(range(len(self.sequences)), rng.randint(1, min(most, len(self.sequences))))
        longest = rng.choice([2, self._block, 5 * self._block, self._max_length])
        return [self._chunk(f"s{i}", self.sequences[i], longest) for i in chosen]

    def _chunk(self, name: str, sequence: Growing, longest: int) -> ChunkPlan:
        rng, start = self._rng, len(sequence.known)
        if start == self._max_length:
            sequence.known, sequence.states, sequence.read_row, start = [], {}, ZERO_ROW, 0
        count = rng.randint(1, min(longest, self._max_length - start))
        ids = tokens(rng.randrange(self._vocab_size) for _ in range(count))
        # The end state may go to the row that the chunk resumes from, and to a second one; states on the way go to
        # others.
        end_row, *other_rows = rng.sample(sequence.rows, ROWS_EACH)
        other_rows = [row for row in other_rows if row != sequence.read_row]
        boundaries = range(self._block - start % self._block, count, self._block)
        wanted = sorted(rng.sample(boundaries, min(len(boundaries), rng.randint(0, 2))))
        writes = [(end, other_rows.pop()) for end in wanted]
        if rng.random() < 0.3:
            writes.append((count, other_rows.pop()))
        writes.append((count, end_row))
        chunk = ChunkPlan(
            request_id=name,
            token_ids=ids,
            start=start,
            read_row=sequence.read_row,
            state_writes=tuple(writes),
            page_ids=sequence.pages,
            next_token=None,
        )
        sequence.known += ids
        sequence.read_row = end_row
        for end, row in writes:
            sequence.states[row] = start + end
        return chunk
