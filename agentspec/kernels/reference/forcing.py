"""Benchmarks only: drafts that stand at given rates, whatever the target chose, in plain torch. See backend.Backend.

Shape letters: B slots in the step, T = k+1 columns, k drafts, W = max k + 1, S slots, F fields, K rates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, uniform
from agentspec.kernels.slots import SlotLimits, SlotState


def force_acceptance(slots_SF: Tensor, limits_SF: Tensor, slot_ids_B: Tensor, chosen_BT: Tensor, rate_K: Tensor) -> Tensor:
    slot_BF = slots_SF.index_select(0, slot_ids_B)
    slot, limits = SlotState.of(slot_BF), SlotLimits.of(limits_SF.index_select(0, slot_ids_B))
    num_drafts = chosen_BT.shape[1] - 1
    column_k = torch.arange(num_drafts, device=chosen_BT.device)
    position_Bk = slot.length_B[:, None] + 1 + column_k
    uniform_Bk = uniform(limits.seed_B[:, None].expand_as(position_Bk), position_Bk, 1, PURPOSE_FORCED_ACCEPT)[..., 0]
    is_valid_Bk = (column_k < slot.num_valid_drafts_B[:, None]) & (slot.active_B[:, None] > 0)
    stands_Bk = ((uniform_Bk < rate_K[:num_drafts]) & is_valid_Bk).cumprod(1) > 0
    drafts_Bk = slot.tokens_BW[:, 1 : num_drafts + 1]
    forced_BT = torch.cat((torch.where(stands_Bk, drafts_Bk, chosen_BT[:, :-1]), chosen_BT[:, -1:]), dim=1)
    drafts_Bk.masked_fill_(is_valid_Bk & ~stands_Bk, -1)
    slots_SF.index_copy_(0, slot_ids_B, slot_BF)
    return forced_BT
