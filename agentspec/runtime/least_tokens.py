"""`min_tokens` as a constraint: no stop id before that many tokens, on top of any grammar. No torch.

Stop ids that may not come yet are banned by the window's masks, as a grammar bans tokens: they are never sampled, and
no draft of one is accepted. Stop strings are handled by the detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentspec.runtime.constraint import Constraint, MaskRows

MET = "can't be kept: what the output must be is complete before so many tokens"


class LeastTokens:
    """Implements constraint.Constraint, alone or on top of a grammar's."""

    def __init__(self, inner: Constraint | None, *, num_tokens: int, stop_ids: Sequence[int], vocab_size: int) -> None:
        """inner: the grammar's constraint; None: there is none. num_tokens: how many must come before one of
        `stop_ids`."""
        self.inner = inner
        self._num_left = num_tokens
        self._first_emptied: int | None = None
        allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.bool_)
        allowed[list(stop_ids)] = False
        self._row_X = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def is_met(self) -> bool:
        """Enough tokens came: from now on only `inner` applies."""
        return self._num_left <= 0

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        """Like Constraint.masks."""
        rows = self.free_rows(len(drafts) + 1) if self.inner is None else self.inner.masks(drafts)
        had_any = rows.any(axis=1)
        rows[: max(0, self._num_left)] &= self._row_X
        emptied = had_any & ~rows.any(axis=1)
        self._first_emptied = int(emptied.argmax()) if emptied.any() else None
        return rows

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_left -= len(token_ids)
        if self.inner is not None:
            self.inner.advance(token_ids)

    def emptied(self, column: int) -> bool:
        """Whether the ban on stop ids is what leaves no allowed token after this column, by the last masks."""
        return self._first_emptied == column

    def free_rows(self, num_rows: int) -> MaskRows:
        """Masks that allow everything."""
        return np.full((num_rows, len(self._row_X)), -1, dtype=np.int32)
