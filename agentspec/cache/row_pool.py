"""State rows: which are free. Row ZERO_ROW and row SCRATCH_ROW belong to nobody.

Knows nothing about what a row holds, nor about checkpoints.
"""

from __future__ import annotations

from agentspec.cache.id_pool import IdPool
from agentspec.types import SCRATCH_ROW, ZERO_ROW


class RowPool(IdPool):
    """`num_rows` counts all rows of the state tensors, the zero row and the scratch row included."""

    noun = "row"

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows, num_reserved=max(ZERO_ROW, SCRATCH_ROW) + 1)
