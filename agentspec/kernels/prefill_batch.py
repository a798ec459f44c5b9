"""Tables of a prefill: which of the concatenated tokens belong to which sequence, and where their states are stored.
Integers on the device.

A CUDA graph may hold the tables and be replayed over new contents, so sizes are capacities and unused entries hold
padding. The launching code knows every length and fills the tables on the host (runtime/prefill_tables.py); kernels
read lengths from the tables.

A *span* is one sequence's run of consecutive tokens. A *block* is a run of at most BLOCK_TOKENS tokens of one span: a
span is cut where its sequence (not the span) crosses a multiple of the block size, and after every token whose state
is saved. So a prefill that is split at such multiples computes the same blocks as one that is not.

Shape letters: N tokens, U spans, M blocks, P pages per sequence, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OFFSET, COUNT, START, READ_ROW, FIRST_BLOCK, NUM_BLOCKS, NUM_SPAN_FIELDS = range(7)
"""Columns of `spans_UF`: index of the span's first token among the N; its number of tokens; position of the first
token in its sequence; row that holds the state after `start` tokens; its first block and number of blocks, which are
adjacent in `blocks_MF`. Padding spans have no tokens and no blocks, and read ZERO_ROW."""

BLOCK_OFFSET, BLOCK_COUNT, BLOCK_SPAN, SAVE_ROW, SECOND_SAVE_ROW, NUM_BLOCK_FIELDS = range(6)
"""Columns of `blocks_MF`: index of the block's first token among the N; its number of tokens, 1 to BLOCK_TOKENS (0:
padding); its span; the rows that get the state after its last token, NO_ROW for none. SECOND_SAVE_ROW is set only if
SAVE_ROW is. No row is saved to twice."""

NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    token_ids_N: Tensor
    """int64, the spans' tokens, span after span without gaps, padding (0) at the end."""
    position_N: Tensor
    """int64. Position of each token in its sequence; padding 0."""
    previous_N: Tensor
    """int64. Index of the previous token's hidden in [hidden of every span's read row (U) | hiddens of this prefill
    (N)]: the span's index for the first token of a span, U + n - 1 for another token n. Padding 0."""
    spans_UF: Tensor
    """int64 [U, NUM_SPAN_FIELDS]."""
    blocks_MF: Tensor
    """int64 [M, NUM_BLOCK_FIELDS], in span order, padding at the end."""
    page_table_UP: Tensor
    """int32. Pages of each span's sequence in block order, for at least start + count tokens; padding SCRATCH_PAGE."""
