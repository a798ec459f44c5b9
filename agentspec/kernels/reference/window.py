"""Opening and committing the windows of a decode step: the integers of speculation, in plain torch. See backend.Backend.

Shape letters: B slots in the step, T = k+1 columns, k drafts, W = max k + 1, S slots, F fields, P pages a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, uniform
from agentspec.kernels.reference.verdict import count_matches, force_matches, truncate
from agentspec.kernels.slots import TOKENS, Commit, SlotLimits, SlotState, Window
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, STOP_ID, STOP_LENGTH, ZERO_ROW


def open_window(slots_SF: Tensor, page_table_SP: Tensor, slot_ids_B: Tensor, num_columns: int) -> Window:
    slot = SlotState.of(slots_SF.index_select(0, slot_ids_B))
    active_B = slot.active_B > 0
    active_B1 = active_B[:, None]
    return Window(
        tokens_BT=slot.tokens_BW[:, :num_columns],
        start_B=torch.where(active_B, slot.length_B, 0),
        read_row_B=torch.where(active_B, slot.read_row_B, ZERO_ROW),
        write_rows_BT=torch.where(active_B1, slot.write_rows_BW[:, :num_columns], SCRATCH_ROW),
        page_table_BP=torch.where(active_B1, page_table_SP.index_select(0, slot_ids_B), SCRATCH_PAGE),
    )


def commit_window(
    slots_SF: Tensor, limits_SF: Tensor, slot_ids_B: Tensor, chosen_BT: Tensor, forced_rate_K: Tensor | None, *, block_tokens: int
) -> Commit:
    num_columns = chosen_BT.shape[1]
    old_BF = slots_SF.index_select(0, slot_ids_B)
    old = SlotState.of(old_BF)
    limits = SlotLimits.of(limits_SF.index_select(0, slot_ids_B))
    active_B1 = (old.active_B > 0)[:, None]
    start_B = torch.where(old.active_B > 0, old.length_B, 0)

    num_offered_B = old.num_valid_drafts_B.clamp(max=num_columns - 1)
    drafts_Bk = old.tokens_BW[:, 1:num_columns]
    if forced_rate_K is None:
        tokens_BT, num_matched_B = chosen_BT, count_matches(chosen_BT, drafts_Bk, num_offered_B)
    else:
        position_Bk = start_B[:, None] + 1 + torch.arange(num_columns - 1, device=start_B.device)
        uniform_Bk = uniform(limits.seed_B[:, None].expand_as(position_Bk), position_Bk, 1, PURPOSE_FORCED_ACCEPT)[..., 0]
        tokens_BT, num_matched_B = force_matches(chosen_BT, drafts_Bk, num_offered_B, uniform_Bk, forced_rate_K)
    verdict = truncate(tokens_BT, num_matched_B, limits.stop_ids_BE, limits.length_limit_B - start_B - 1)

    last_B1 = verdict.num_accepted_B[:, None]
    num_emitted_B = verdict.num_accepted_B + 1
    length_B = start_B + num_emitted_B
    stop_B = verdict.hit_stop_id_B * STOP_ID + verdict.hit_limit_B * STOP_LENGTH
    write_rows_BW, checkpoint_rows_B2, checkpoint_lens_B2 = rotate_checkpoints(old, length_B, block_tokens)
    new = SlotState(
        active_B=(stop_B == 0).to(torch.int64),
        length_B=length_B,
        read_row_B=old.write_rows_BW.gather(1, last_B1).squeeze(1),
        num_valid_drafts_B=torch.full_like(length_B, num_columns - 1),
        checkpoint_rows_B2=checkpoint_rows_B2,
        checkpoint_lens_B2=checkpoint_lens_B2,
        tokens_BW=torch.cat((tokens_BT.gather(1, last_B1), old.tokens_BW[:, 1:]), dim=1),
        write_rows_BW=write_rows_BW,
    )
    new_BF = torch.where(active_B1, new.packed(), old_BF)
    slots_SF.index_copy_(0, slot_ids_B, new_BF)
    happened_B4 = torch.stack((num_emitted_B, verdict.num_accepted_B, num_offered_B, stop_B), dim=1)
    no_drafts_Bk = tokens_BT.new_zeros(tokens_BT.shape[0], num_columns - 1)
    happened_BF = torch.cat((happened_B4 * active_B1, new_BF[:, : SlotState.NUM_SCALARS], tokens_BT, no_drafts_Bk), dim=1)
    return Commit(tokens_BT=tokens_BT, num_accepted_B=verdict.num_accepted_B, draft_start_B=start_B + 1, happened_BF=happened_BF)


def publish_drafts(slots_SF: Tensor, slot_ids_B: Tensor, happened_BF: Tensor, drafts_Bk: Tensor) -> None:
    num_drafts = drafts_Bk.shape[1]
    if num_drafts == 0:
        return
    happened_BF[:, -num_drafts:] = drafts_Bk
    # A slot that the step has just ended is inert, and nothing reads its drafts; one that was inert before it keeps what it has.
    was_active_B1 = happened_BF[:, :1] > 0
    columns = slice(TOKENS + 1, TOKENS + 1 + num_drafts)
    old_Bk = slots_SF[:, columns].index_select(0, slot_ids_B)
    slots_SF[:, columns].index_copy_(0, slot_ids_B, torch.where(was_active_B1, drafts_Bk, old_Bk))


def rotate_checkpoints(slot: SlotState, length_B: Tensor, block_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the committed length crosses a block boundary, the write row at that boundary becomes the newer rolling checkpoint.

    The older checkpoint's row takes its place among the write rows. `slot` is the slot before the step, length_B its length after it.
    Returns (write_rows_BW, checkpoint_rows_B2, checkpoint_lens_B2)."""
    boundary_B = length_B // block_tokens * block_tokens
    column_B = boundary_B - slot.length_B - 1
    crossed_B1 = (column_B >= 0)[:, None]
    column_B1 = column_B.clamp(min=0)[:, None]
    row_B1 = slot.write_rows_BW.gather(1, column_B1)
    freed_B1 = torch.where(crossed_B1, slot.checkpoint_rows_B2[:, 1:], row_B1)
    rows_B2 = torch.cat((row_B1, slot.checkpoint_rows_B2[:, :1]), dim=1)
    lens_B2 = torch.cat((boundary_B[:, None], slot.checkpoint_lens_B2[:, :1]), dim=1)
    return (
        slot.write_rows_BW.scatter(1, column_B1, freed_B1),
        torch.where(crossed_B1, rows_B2, slot.checkpoint_rows_B2),
        torch.where(crossed_B1, lens_B2, slot.checkpoint_lens_B2),
    )
