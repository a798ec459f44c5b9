"""The Drafter protocol, and a drafter that proposes nothing.

Knows the tokens, hiddens and pages that a step passes in; knows nothing about slots, sampling or acceptance.

Shape letters: B slots, T columns of the window, H hidden size, P pages per sequence, k drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentspec.types import DraftSource


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedWindow:
    """What the target made of a step's window, which a drafter continues."""

    tokens_BT: Tensor
    """int64. The target's tokens at positions start..start+T-1; columns after `last_B` are not part of the sequence."""
    hidden_BTH: Tensor
    """Column t is the target's hidden of the token before tokens_BT[:, t]."""
    start_B: Tensor
    """int64. At least 1."""
    last_B: Tensor
    """int64. The last column that is part of the sequence."""
    later_TB: Tensor
    """int64. Row i: the position i tokens behind that of column `last_B`."""
    page_table_BP: Tensor
    """int32."""


class Drafter(Protocol):
    """Proposes point-mass drafts. Runs inside the captured step: no host reads, static shapes."""

    def sources(self, num_drafted: int) -> tuple[DraftSource, ...]:
        """The source of the draft at each position of a proposal of `num_drafted`. The same for every slot and step, so
        the host knows it."""

    def draft(self, window: VerifiedWindow, num_drafted: int) -> Tensor:
        """Draft the `num_drafted` tokens after column `last_B` of each slot's window: int64 [B, num_drafted]; no more
        than the window has columns.

        Also called with num_drafted 0, because a drafter may have its own state to update."""


class NullDrafter:
    """No drafts: plain decoding, or a model without an MTP head."""

    def sources(self, num_drafted: int) -> tuple[DraftSource, ...]:
        return ()

    def draft(self, window: VerifiedWindow, num_drafted: int) -> Tensor:
        assert num_drafted == 0, "the null drafter can't draft"
        return window.tokens_BT[:, :0]
