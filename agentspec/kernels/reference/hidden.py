"""The hidden column of the state rows: the last token's post-final-norm hidden, so that the MTP head resumes exactly."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from agentspec.kernels.spans import Span
from agentspec.kernels.traffic import touches_pools


@touches_pools
def read_hidden(hidden_RH: Tensor, rows: Tensor) -> Tensor:
    """Gather one vector a row.

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
def write_hidden_prefill(hidden_RH: Tensor, hidden_NH: Tensor, spans: Sequence[Span]) -> None:
    """Store the hidden of the token that ends each wanted count to its row, in place.

    Args:
        hidden_RH: pool [R, H], modified. hidden_NH: [N, H], the spans' tokens concatenated.
    """
    for span in spans:
        for count, row in span.state_writes:
            hidden_RH[row] = hidden_NH[span.offset + count - 1]
