"""Which of a prefill's concatenated tokens belong to which sequence, and where their states go: integer tables on the
device.

A CUDA graph may hold the tables and be replayed over new contents, so sizes are capacities and unused places hold
padding. Whoever launches knows every length and fills the tables on the host (runtime/prefill_tables.py); no kernel
needs to.

A *span* is one sequence's run of consecutive tokens. A *block* is a run of at most BLOCK_TOKENS tokens of one span: a
span is cut wherever its sequence (not the span) crosses a multiple of the block size, and after every token whose state
is wanted. So a prefill that is split at such multiples computes the very blocks of one that isn't.

Shape letters: N tokens, U spans, M blocks, P pages a sequence, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OFFSET, COUNT, START, READ_ROW, FIRST_BLOCK, NUM_BLOCKS, NUM_SPAN_FIELDS = range(7)
"""Columns of `spans_UF`: index of the span's first token among the N; its tokens; the position of the first in its
sequence; the row that holds the state after `start` tokens; its blocks, which lie side by side in `blocks_MF`. Padding
spans have no tokens and no blocks, and read ZERO_ROW."""

BLOCK_OFFSET, BLOCK_COUNT, BLOCK_SPAN, SAVE_ROW, SECOND_SAVE_ROW, NUM_BLOCK_FIELDS = range(6)
"""Columns of `blocks_MF`: index of the block's first token among the N; its tokens, 1 to BLOCK_TOKENS (0: padding); its
span; the rows that get the state after its last token, NO_ROW for none. A second one is only there with a first. No row
is saved to twice."""

NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    token_ids_N: Tensor
    """int64, the spans' tokens one span after the other without gaps, padding (0) at the end."""
    position_N: Tensor
    """int64. Position of each token in its sequence; padding 0."""
    previous_N: Tensor
    """int64. Where the hidden of the token before stands in [hidden of every span's read row (U) | hiddens of this prefill (N)]: the span's index for
    the first token of a span, U + n - 1 for another token n. Padding 0."""
    spans_UF: Tensor
    """int64 [U, NUM_SPAN_FIELDS]."""
    blocks_MF: Tensor
    """int64 [M, NUM_BLOCK_FIELDS], span by span and in order, padding at the end."""
    page_table_UP: Tensor
    """int32. Pages of each span's sequence in block order, covering start + count tokens at least; padding
    SCRATCH_PAGE."""
