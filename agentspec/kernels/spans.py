"""How the prefill kernels know which of their concatenated tokens belong to which sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One sequence's run of tokens inside the N tokens of a prefill call. The host knows every length."""

    offset: int
    """Index of the first token among the N."""
    count: int
    start: int
    """Position of the first token in its sequence."""
    read_row: int
    """Row that holds the state after `start` tokens."""
    state_writes: tuple[tuple[int, int], ...]
    """(count, row): after `count` tokens of the span the state goes to `row`. Counts ascend and may repeat; every row is
    written. The last one is the span's."""
    page_ids: Tensor
    """int32 [P], the sequence's pages, covering start + count tokens at least."""
