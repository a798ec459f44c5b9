"""Drafts from the model's own MTP head, chained: the head's post-norm output replaces the target hidden that isn't
computed yet.

Owns the chain. Knows nothing about the inside of the layer, sampling or slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import VerifiedWindow
from agentspec.types import DraftSource


class MtpDrafter:
    """Runs the MTP layer over the window, so that its K/V is exact for every accepted token, then drafts from the last
    accepted column.

    The chain writes K/V for drafts from approximate hiddens. The next step's window starts at the first of these
    positions and overwrites each before an accepted token reads it."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def sources(self, num_drafted: int) -> tuple[DraftSource, ...]:
        return (DraftSource.MTP,) * num_drafted

    def draft(self, window: VerifiedWindow, num_drafted: int) -> Tensor:
        m_B1H = self._model.mtp(
            window.tokens_BT, window.hidden_BTH, window.start_B, window.page_table_BP, last_B=window.last_B
        )
        if num_drafted == 0:
            return window.tokens_BT[:, :0]
        drafts = [self._model.draft_head(m_B1H)]
        for step in range(1, num_drafted):
            m_B1H = self._model.mtp(drafts[-1], m_B1H, window.later_TB[step], window.page_table_BP)
            drafts.append(self._model.draft_head(m_B1H))
        return torch.cat(drafts, dim=1)
