"""A request's position in its compiled grammar: masks for a window of drafts, and advancing over emitted tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.grammar.backend import Matcher, new_rows

MAX_MASK_SECONDS = 5.0
"""Processor time for the masks of one window. An ambiguous grammar may exceed it on a long text; then its request ends,
and the engine continues."""


class GrammarConstraint:
    """Implements runtime.constraint.Constraint. Not thread-safe."""

    def __init__(self, matcher: Matcher, num_words: int, stop_token_ids: Sequence[int], after: int | None) -> None:
        """`after`: up to this token, everything but a stop id is allowed. None: the grammar applies from the start."""
        self._matcher = matcher
        self._num_words = num_words
        self._after = after
        self._stop_ids = frozenset(stop_token_ids)
        self._is_free = after is not None

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        """Like Constraint.masks. Raises RuntimeError when the grammar takes too long."""
        begun = time.thread_time()
        rows = new_rows(len(drafts) + 1, self._num_words)
        is_free, num_accepted = self._is_free, 0
        for index, draft in enumerate([*drafts, None]):
            if is_free:
                for stop_id in self._stop_ids:
                    rows[index, stop_id // 32] &= np.int32(~(1 << stop_id % 32) if stop_id % 32 < 31 else 0x7FFFFFFF)
                is_free = draft != self._after
                if draft in self._stop_ids:
                    break
                continue
            self._matcher.fill(rows, index)
            if draft is None or not _allows(rows, index, draft):
                break
            assert self._matcher.accept(draft), f"token {draft} is in its mask"
            num_accepted += 1
            if self._matcher.is_ended:
                break
        if num_accepted:
            self._matcher.roll_back(num_accepted)
        seconds = time.thread_time() - begun
        if seconds > MAX_MASK_SECONDS:
            raise RuntimeError(f"its masks took {seconds:.1f} s of processor time")
        return rows

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_free:
                self._is_free = token_id != self._after
            else:
                assert self._matcher.accept(token_id), f"token {token_id} was emitted against its mask"


def _allows(rows: MaskRows, index: int, token_id: int) -> bool:
    return bool(int(rows[index, token_id // 32]) >> token_id % 32 & 1)
