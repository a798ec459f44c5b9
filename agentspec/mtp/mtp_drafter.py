"""Drafts by the model's own MTP head, chained: its post-norm output stands in for the hidden that the target has not
computed yet.

Owns the chain. Knows nothing of the layer's inside, of sampling or of slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.models.protocol import StepModel
from agentspec.types import DraftSource


class MtpDrafter:
    """Runs the MTP layer over the window, so that its K/V is true for every kept token, then drafts from the last kept
    column.

    K/V that the chain writes for drafts comes from approximate hiddens; the next step's window starts at the first of
    them and overwrites each one before anything kept reads it."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def sources(self, num_drafted: int) -> tuple[DraftSource, ...]:
        return (DraftSource.MTP,) * num_drafted

    def draft(
        self,
        tokens_BT: Tensor,
        hidden_BTH: Tensor,
        start_B: Tensor,
        last_B: Tensor,
        page_table_BP: Tensor,
        num_drafted: int,
    ) -> Tensor:
        m_BTH = self._model.mtp(tokens_BT, hidden_BTH, start_B, page_table_BP)
        if num_drafted == 0:
            return tokens_BT[:, :0]
        m_B1H = m_BTH.gather(1, last_B[:, None, None].expand(-1, 1, m_BTH.shape[2]))
        position_B = start_B + last_B
        drafts = [self._model.draft_head(m_B1H)]
        for step in range(1, num_drafted):
            m_B1H = self._model.mtp(drafts[-1], m_B1H, position_B + step, page_table_BP)
            drafts.append(self._model.draft_head(m_B1H))
        return torch.cat(drafts, dim=1)
