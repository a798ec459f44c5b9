"""The runtime's interface to a request's grammar: token masks for a window, and advancing over emitted tokens. Imports
neither torch nor xgrammar.

runtime/grammar/ compiles real grammars; tests use simple ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

MaskRows: TypeAlias = NDArray[np.int32]
"""int32 [T, ceil(V / 32)]: bit v % 32 of word v // 32 is set if token v is allowed. Words of a row that allows
everything are -1. A row of zeros is a dead end: the request ends there."""

DEAD_END = "leads to a place where nothing may follow: a rule in it has no end"


class Constraint(Protocol):
    """One request's grammar, and the request's position in it."""

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        """Allowed tokens after the emitted tokens and drafts[:t], for t = 0..len(drafts), in new rows. Doesn't change
        the position.

        Rows after the first draft that isn't allowed are never read; they allow everything."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance over emitted tokens, each allowed by the mask before it. A stop id, always a request's last token,
        ends the grammar."""
