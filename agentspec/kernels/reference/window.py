"""Opening and committing the windows of a decode step: the integer bookkeeping of speculation, in plain torch. See
backend.Backend.

Shape letters: B slots in the step, T = k+1 columns, k drafts, W = max k + 1, S slots, F fields, P pages per sequence,
K forced rates, N rows of a forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, uniform
from agentspec.kernels.reference.verdict import count_matches, truncate
from agentspec.kernels.slots import (
    TOKENS,
    Commit,
    LiveColumns,
    OutcomeRows,
    RingWindow,
    SharedRows,
    SlotLimits,
    SlotState,
    Window,
)
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, STOP_ID, STOP_LENGTH, ZERO_ROW, RingShape


def open_window(
    slots_SF: Tensor,
    page_table_SP: Tensor,
    slot_ids_B: Tensor,
    num_columns: int,
    ring: RingShape | None = None,
    shared: SharedRows | None = None,
) -> Window:
    slot = SlotState.of(slots_SF.index_select(0, slot_ids_B))
    active_B = slot.active_B > 0
    active_B1 = active_B[:, None]
    ring_window = None if ring is None else _ring_window(slot, slot_ids_B, num_columns, ring)
    live = None
    if shared is not None:
        assert ring is not None
        assert ring_window is not None
        scratch = (len(slots_SF) - 1) * ring.capacity
        live = live_columns(slot, slot.tokens_BW[:, :num_columns], ring_window.entries_BT, shared, scratch)
    return Window(
        tokens_BT=slot.tokens_BW[:, :num_columns],
        start_B=torch.where(active_B, slot.length_B, 0),
        read_row_B=torch.where(active_B, slot.read_row_B, ZERO_ROW),
        write_rows_BT=torch.where(active_B1, slot.write_rows_BW[:, :num_columns], SCRATCH_ROW),
        page_table_BP=torch.where(active_B1, page_table_SP.index_select(0, slot_ids_B), SCRATCH_PAGE),
        ring=ring_window,
        live=live,
    )


def live_columns(
    slot: SlotState[Tensor], tokens_BT: Tensor, entries_BT: Tensor, shared: SharedRows, scratch: int
) -> LiveColumns:
    """The rows of a forward. scratch: an entry of the padding slot, for dead rows."""
    num_slots, num_columns = tokens_BT.shape
    assert shared.num_rows >= num_slots * shared.own_columns
    device = tokens_BT.device
    wanted_B = (1 + slot.num_valid_drafts_B.clamp(max=num_columns - 1)) * (slot.active_B > 0)
    own_B = wanted_B.clamp(max=shared.own_columns)
    more_B = wanted_B - own_B
    left_B = shared.num_rows - own_B.sum() - (more_B.cumsum(0) - more_B)
    count_B = own_B + torch.minimum(more_B, left_B.clamp(min=0))
    end_B = count_B.cumsum(0)
    first_B = end_B - count_B
    row_N = torch.arange(shared.num_rows, device=device)
    is_live_N = row_N < end_B[-1]
    slot_N = torch.where(is_live_N, (end_B <= row_N[:, None]).sum(1), 0)
    cell_N = torch.where(is_live_N, slot_N * num_columns + row_N - first_B[slot_N], 0)
    column_T = torch.arange(num_columns, device=device)
    last_B1 = (count_B - 1).clamp(min=0)[:, None]
    return LiveColumns(
        first_B=first_B,
        count_B=count_B,
        row_BT=(first_B[:, None] + torch.minimum(column_T, last_B1)).clamp(max=shared.num_rows - 1),
        cell_N=cell_N,
        token_N=torch.where(is_live_N, tokens_BT.flatten()[cell_N], 0),
        entry_N=torch.where(is_live_N, entries_BT.flatten()[cell_N], scratch),
    )


def _ring_window(slot: SlotState[Tensor], slot_ids_B: Tensor, num_columns: int, ring: RingShape) -> RingWindow:
    active_B = slot.active_B > 0
    start_B = torch.where(active_B, slot.length_B, 0)
    read_length_B = torch.where(active_B, slot.read_length_B, 0)
    fold_length_B = torch.maximum(start_B // ring.fold_tokens * ring.fold_tokens, read_length_B)
    position_BT = start_B[:, None] + torch.arange(num_columns, device=start_B.device)
    return RingWindow(
        slot_B=slot_ids_B,
        start_B=start_B,
        read_length_B=read_length_B,
        fold_length_B=fold_length_B,
        fold_row_B=torch.where(fold_length_B > read_length_B, slot.write_rows_BW[:, 0], SCRATCH_ROW),
        entries_BT=slot_ids_B[:, None] * ring.capacity + position_BT % ring.capacity,
    )


def commit_window(
    slots_SF: Tensor,
    limits_SF: Tensor,
    slot_ids_B: Tensor,
    chosen_BT: Tensor,
    *,
    block_tokens: int,
    ring: RingShape | None = None,
    live: LiveColumns | None = None,
) -> Commit:
    num_columns = chosen_BT.shape[1]
    old_BF = slots_SF.index_select(0, slot_ids_B)
    old = SlotState.of(old_BF)
    limits = SlotLimits.of(limits_SF.index_select(0, slot_ids_B))
    active_B = old.active_B > 0
    start_B = torch.where(active_B, old.length_B, 0)

    num_offered_B = _num_offered(old, num_columns, live)
    num_matched_B = count_matches(chosen_BT, old.tokens_BW[:, 1:num_columns], num_offered_B)
    verdict = truncate(chosen_BT, num_matched_B, limits.stop_ids_BE, limits.length_limit_B - start_B - 1)

    last_B1 = verdict.num_accepted_B[:, None]
    num_emitted_B = verdict.num_accepted_B + 1
    length_B = start_B + num_emitted_B
    stop_B = verdict.hit_stop_id_B * STOP_ID + verdict.hit_limit_B * STOP_LENGTH
    new_BF = old_BF.clone()
    new = SlotState.of(new_BF)
    new.active_B.copy_(stop_B == 0)
    new.length_B.copy_(length_B)
    if ring is None:
        new.read_row_B.copy_(old.write_rows_BW.gather(1, last_B1).squeeze(1))
        new.read_length_B.copy_(length_B)
        rotated = rotate_checkpoints(old, length_B, block_tokens)
    else:
        folded_B, read_length_B = folded(old, start_B, ring)
        new.read_row_B.copy_(torch.where(folded_B, old.write_rows_BW[:, 0], old.read_row_B))
        new.read_length_B.copy_(read_length_B)
        rotated = rotate_folded(new, block_tokens)
    new.num_valid_drafts_B.fill_(num_columns - 1)
    new.tokens_BW[:, :1] = chosen_BT.gather(1, last_B1)
    for field, values in zip((new.write_rows_BW, new.checkpoint_rows_B2, new.checkpoint_lens_B2), rotated, strict=True):
        field.copy_(values)
    new_BF = torch.where(active_B[:, None], new_BF, old_BF)
    slots_SF.index_copy_(0, slot_ids_B, new_BF)

    # In the order of OutcomeRows' columns.
    counts_B4 = torch.stack((num_emitted_B, verdict.num_accepted_B, num_offered_B, stop_B), dim=1) * active_B[:, None]
    outcome_BF = torch.cat((counts_B4, new_BF[:, :TOKENS], chosen_BT), dim=1)
    return Commit(
        num_accepted_B=verdict.num_accepted_B,
        draft_start_B=start_B + 1,
        later_TB=length_B + torch.arange(num_columns, device=length_B.device)[:, None],
        outcome_BF=outcome_BF,
    )


def _num_offered(slot: SlotState[Tensor], num_columns: int, live: LiveColumns | None) -> Tensor:
    """Valid drafts in each slot's window; undefined for an inert slot."""
    num_valid_B = slot.num_valid_drafts_B.clamp(max=num_columns - 1)
    return num_valid_B if live is None else torch.minimum(num_valid_B, (live.count_B - 1).clamp(min=0))


def force_acceptance(
    slots_SF: Tensor,
    limits_SF: Tensor,
    slot_ids_B: Tensor,
    chosen_BT: Tensor,
    rate_K: Tensor,
    live: LiveColumns | None = None,
) -> Tensor:
    slot_BF = slots_SF.index_select(0, slot_ids_B)
    slot, limits = SlotState.of(slot_BF), SlotLimits.of(limits_SF.index_select(0, slot_ids_B))
    num_drafts = chosen_BT.shape[1] - 1
    column_k = torch.arange(num_drafts, device=chosen_BT.device)
    position_Bk = slot.length_B[:, None] + 1 + column_k
    uniform_Bk = uniform(limits.seed_B[:, None].expand_as(position_Bk), position_Bk, 1, PURPOSE_FORCED_ACCEPT)[..., 0]
    num_offered_B1 = _num_offered(slot, num_drafts + 1, live)[:, None]
    is_valid_Bk = (column_k < num_offered_B1) & (slot.active_B[:, None] > 0)
    drafts_Bk = slot.tokens_BW[:, 1 : num_drafts + 1]
    matches_Bk = drafts_Bk == chosen_BT[:, :-1]
    num_rated = min(num_drafts, len(rate_K))
    matches_Bk[:, :num_rated] = uniform_Bk[:, :num_rated] < rate_K[:num_rated]
    stands_Bk = (matches_Bk & is_valid_Bk).cumprod(1) > 0
    forced_BT = torch.cat((torch.where(stands_Bk, drafts_Bk, chosen_BT[:, :-1]), chosen_BT[:, -1:]), dim=1)
    drafts_Bk.masked_fill_(is_valid_Bk & ~stands_Bk, -1)
    slots_SF.index_copy_(0, slot_ids_B, slot_BF)
    return forced_BT


def publish_drafts(
    slots_SF: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor | None = None
) -> None:
    num_drafts = drafts_Bk.shape[1]
    if num_drafts == 0:
        return
    outcome = OutcomeRows.of(outcome_BF)
    # A slot that this step has ended is inert, and its drafts are never read; a slot that was inert before keeps its
    # drafts.
    was_active_B1 = outcome.num_emitted_B[:, None] > 0
    slot_drafts_Sk = SlotState.of(slots_SF).tokens_BW[:, 1 : 1 + num_drafts]
    old_Bk = slot_drafts_Sk.index_select(0, slot_ids_B)
    slot_drafts_Sk.index_copy_(0, slot_ids_B, torch.where(was_active_B1, drafts_Bk, old_Bk))
    if num_valid_B is not None:
        valid_S, was_active_B = SlotState.of(slots_SF).num_valid_drafts_B, was_active_B1[:, 0]
        outcome.num_valid_drafts_B.copy_(torch.where(was_active_B, num_valid_B, outcome.num_valid_drafts_B))
        valid_S.index_copy_(0, slot_ids_B, outcome.num_valid_drafts_B)


def rotate_checkpoints(slot: SlotState[Tensor], length_B: Tensor, block_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the committed length crosses a block boundary, make the write row at that boundary the newer rolling
    checkpoint.

    The row of the older checkpoint replaces it among the write rows. `slot` is the slot before the step, length_B its
    length after it. Returns (write_rows_BW, checkpoint_rows_B2, checkpoint_lens_B2)."""
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


def folded(slot: SlotState[Tensor], start_B: Tensor, ring: RingShape) -> tuple[Tensor, Tensor]:
    """Whether the forward of the step that begins at `start_B` stores a state, and the read length after it."""
    fold_length_B = start_B // ring.fold_tokens * ring.fold_tokens
    return fold_length_B > slot.read_length_B, torch.maximum(fold_length_B, slot.read_length_B)


def rotate_folded(slot: SlotState[Tensor], block_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """For slots with rings: where the read row holds a new state at a block boundary, make it the newer rolling
    checkpoint.

    The row of the older checkpoint becomes the row that the next state is stored to. The read row stays: the new
    checkpoint is the state that the ring starts from. `slot` is the slot after its read row and read length were
    updated. Returns (write_rows_BW, checkpoint_rows_B2, checkpoint_lens_B2)."""
    own_B1, length_B1 = slot.write_rows_BW[:, :1], slot.read_length_B[:, None]
    is_new_B1 = (
        (length_B1 % block_tokens == 0)
        & (length_B1 != slot.checkpoint_lens_B2[:, :1])
        & (slot.read_row_B[:, None] == own_B1)
    )
    next_B1 = torch.where(is_new_B1, slot.checkpoint_rows_B2[:, 1:], own_B1)
    rows_B2 = torch.cat((own_B1, slot.checkpoint_rows_B2[:, :1]), dim=1)
    lens_B2 = torch.cat((length_B1, slot.checkpoint_lens_B2[:, :1]), dim=1)
    return (
        torch.cat((next_B1, slot.write_rows_BW[:, 1:]), dim=1),
        torch.where(is_new_B1, rows_B2, slot.checkpoint_rows_B2),
        torch.where(is_new_B1, lens_B2, slot.checkpoint_lens_B2),
    )
