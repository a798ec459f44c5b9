"""The hidden column of the state rows: the post-final-norm hidden of the last token, from which the MTP head resumes
exactly."""

from __future__ import annotations

from torch import Tensor

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.traffic import touches_pools


@touches_pools
def read_hidden(hidden_RH: Tensor, rows: Tensor) -> Tensor:
    """Gather one vector per row.

    Args:
        hidden_RH: pool [R, H]. rows: int64 [B].
    Returns: [B, H], a new tensor.
    """
    return hidden_RH[rows]


@touches_pools
def write_hidden(hidden_RH: Tensor, hidden_BTH: Tensor, write_rows_BT: Tensor) -> None:
    """Store column t's hidden to row write_rows_BT[:, t], in place.

    Args:
        hidden_RH: pool [R, H], modified. hidden_BTH: [B, T, H]. write_rows_BT: int64 [B, T].
    """
    hidden_RH[write_rows_BT] = hidden_BTH


@touches_pools
def save_hidden(hidden_NH: Tensor, hidden_RH: Tensor, batch: PrefillBatch) -> None:
    for span in read_spans(batch):
        for block in span.blocks:
            for row in block.save_rows:
                hidden_RH[row] = hidden_NH[block.end - 1]
