"""What the runtime asks of a request's grammar: masks for a window, and to follow what was emitted. No torch, no
xgrammar.

runtime/grammar.py compiles real ones; tests drive the engine with simple ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

MaskRows: TypeAlias = NDArray[np.int32]
"""int32 [T, ceil(V / 32)]: bit v % 32 of word v // 32 is set when token v may come. Words of a row that allows
everything are -1. A row of zeros is a dead end: the request ends there."""

DEAD_END = "leads to a place where nothing may follow: a rule in it has no end"


class Constraint(Protocol):
    """One request's grammar and where the request stands in it."""

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        """What may follow the emitted tokens and drafts[:t], for t = 0..len(drafts): fresh rows. Stands where it stood
        afterwards.

        Rows after the first draft that isn't allowed are never read by anyone; they allow everything."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow emitted tokens, each allowed by the masks before it. A stop id, the last one of its request, ends the
        grammar."""
        ...
