"""Copies of a sequence's own tokens as drafts: a batch of slots in plain torch. See backend.Backend. The rule for one
slot is in mtp/copies.py.

Shape letters: S slots, L positions of a text, B slots in the step, F fields, T = k+1 columns, k drafts, c copies, M
tokens compared, N = L + k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentspec.kernels.slots import OutcomeRows
from agentspec.types import MAX_COPY_MATCH


def append_text(text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
    """Reads on the host which slots emitted what."""
    outcome = OutcomeRows.of(outcome_BF)
    column_T = torch.arange(outcome.tokens_BT.shape[1], device=text_SL.device)
    position_BT = (outcome.length_B - outcome.num_emitted_B + 1)[:, None] + column_T
    is_emitted_BT = column_T < outcome.num_emitted_B[:, None]
    slot_BT = slot_ids_B[:, None].expand_as(position_BT)
    text_SL[slot_BT[is_emitted_BT], position_BT[is_emitted_BT]] = outcome.tokens_BT[is_emitted_BT].to(text_SL.dtype)


def draft_copies(
    text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor, drafts_Bk: Tensor, *, num_copies: int, min_match: int
) -> tuple[Tensor, Tensor]:
    """Reads on the host how long the longest text is, and whether any match goes on."""
    assert num_copies >= 1
    assert 1 <= min_match <= MAX_COPY_MATCH
    outcome = OutcomeRows.of(outcome_BF)
    num_drafts, is_active_B = drafts_Bk.shape[1], outcome.num_emitted_B > 0
    text_length_B = torch.where(is_active_B, outcome.length_B + 1, 0)
    longest = max(int(text_length_B.amax()), 1)
    known_BN = pad(text_SL[:, :longest].index_select(0, slot_ids_B).to(torch.int64), (0, num_drafts))
    position_N = torch.arange(known_BN.shape[1], device=text_SL.device)
    known_BN.scatter_(1, text_length_B[:, None] + position_N[:num_drafts], drafts_Bk)

    last_B = torch.where(is_active_B, text_length_B + num_drafts - 1, 0)
    suffix_BM = known_BN.gather(1, (last_B[:, None] - position_N.new_tensor(range(MAX_COPY_MATCH))).clamp(min=0))
    is_match_BN = position_N < last_B[:, None]
    length_B, end_B = torch.zeros_like(last_B), torch.zeros_like(last_B)
    for depth in range(min(MAX_COPY_MATCH, known_BN.shape[1])):
        # -1 stands before the text and equals no token.
        before_BN = pad(known_BN[:, : known_BN.shape[1] - depth], (depth, 0), value=-1)
        is_match_BN = is_match_BN & (before_BN == suffix_BM[:, depth, None])
        goes_on_B = is_match_BN.any(1)
        if not goes_on_B.any():
            break
        length_B = torch.where(goes_on_B, depth + 1, length_B)
        end_B = torch.where(goes_on_B, (is_match_BN * position_N).amax(1), end_B)

    is_found_B = length_B >= min_match
    period_B1 = (last_B - end_B).clamp(min=1)[:, None]
    place_Bc = end_B[:, None] + 1 + torch.arange(num_copies, device=text_SL.device) % period_B1
    copies_Bc = known_BN.gather(1, torch.where(is_found_B[:, None], place_Bc, 0))
    return torch.where(is_found_B[:, None], copies_Bc, 0), num_copies * is_found_B
