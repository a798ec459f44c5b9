"""Columns of a prefill's tables as constants that kernels can use. kernels/prefill_batch.py defines them."""

from __future__ import annotations

import triton.language as tl

from agentspec.kernels import prefill_batch

OFFSET, COUNT, START, READ_ROW, FIRST_BLOCK, NUM_BLOCKS, NUM_SPAN_FIELDS = (
    tl.constexpr(column)
    for column in (
        prefill_batch.OFFSET,
        prefill_batch.COUNT,
        prefill_batch.START,
        prefill_batch.READ_ROW,
        prefill_batch.FIRST_BLOCK,
        prefill_batch.NUM_BLOCKS,
        prefill_batch.NUM_SPAN_FIELDS,
    )
)
"""Of `spans_UF`."""
BLOCK_OFFSET, BLOCK_COUNT, BLOCK_SPAN, SAVE_ROW, SECOND_SAVE_ROW, NUM_BLOCK_FIELDS = (
    tl.constexpr(column)
    for column in (
        prefill_batch.BLOCK_OFFSET,
        prefill_batch.BLOCK_COUNT,
        prefill_batch.BLOCK_SPAN,
        prefill_batch.SAVE_ROW,
        prefill_batch.SECOND_SAVE_ROW,
        prefill_batch.NUM_BLOCK_FIELDS,
    )
)
"""Of `blocks_MF`."""
