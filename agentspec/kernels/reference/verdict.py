"""Acceptance and truncation of a batch of windows: the rule of mtp/acceptance.py as pure tensor functions.

Shape letters: B slots, T = k+1 columns, k drafts, E stop ids per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Acceptance result of each slot's window."""

    num_accepted_B: Tensor
    """int64. Accepted drafts; columns 0..num_accepted are emitted."""
    hit_stop_id_B: Tensor
    """bool. The last emitted token is a stop id."""
    hit_limit_B: Tensor
    """bool. The last emitted token fills the length limit and is no stop id."""


def count_matches(chosen_BT: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor) -> Tensor:
    """Count the leading drafts that equal the target's tokens: int64 [B]. Columns from num_valid on were drafted for
    another prefix and count as rejected."""
    return torch.minimum((chosen_BT[:, :-1] == drafts_Bk).cumprod(1).sum(1), num_valid_B)


def truncate(tokens_BT: Tensor, num_matched_B: Tensor, stop_ids_BE: Tensor, room_B: Tensor) -> Verdict:
    """Cut the window after its first stop id, and at the length limit.

    room_B: int64, tokens that may still be emitted, at least 1. stop_ids_BE: int64, padded with -1. A stop id at the
    limit counts as a stop id."""
    num_columns = tokens_BT.shape[1]
    is_stop_BT = (tokens_BT[:, :, None] == stop_ids_BE[:, None, :]).any(2)
    column_T = torch.arange(num_columns, device=tokens_BT.device)
    first_stop_B = torch.where(is_stop_BT, column_T, num_columns).amin(1)
    last_B = torch.minimum(num_matched_B, room_B - 1)
    hit_stop_id_B = first_stop_B <= last_B
    return Verdict(
        num_accepted_B=torch.minimum(first_stop_B, last_B),
        hit_stop_id_B=hit_stop_id_B,
        hit_limit_B=(last_B == room_B - 1) & ~hit_stop_id_B,
    )
