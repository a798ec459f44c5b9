"""The step: verify, sample, commit, draft and publish, as one straight-line function.

It is the eager path and the body that a CUDA graph captures: no host reads, static shapes, lengths and flags on the device. Owns
the order of a step; knows nothing of requests, scheduling or the layers of the model.

Shape letters: B slots in the step, T = k+1 columns, k drafts, W = max k + 1, H hidden size, V vocabulary, P pages a sequence, F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, uniform
from agentspec.kernels.reference.sampling import apply_mask
from agentspec.models.protocol import StepModel, VerifyBatch
from agentspec.mtp.drafter import Drafter
from agentspec.mtp.verify import count_matches, force_matches, truncate
from agentspec.runtime.plan import MAX_ALTERNATIVES, STOP_ID, STOP_LENGTH, SlotOutcome
from agentspec.runtime.sampler import choose, choose_greedy, count_emitted
from agentspec.runtime.scores import ScoreRows, score_tokens
from agentspec.runtime.step_buffers import SlotLimits, SlotState, StepBuffers
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did, in fresh tensors."""

    happened_BF: Tensor
    """int64, one row a slot; `read_result` names its columns."""
    scores: ScoreRows | None
    """Of the tokens chosen after each column: row b * T + t belongs to column t of slot b. None: not asked for."""


def decode_step(
    model: StepModel,
    drafter: Drafter,
    buffers: StepBuffers,
    slot_ids_B: Tensor,
    *,
    num_drafted: int,
    sampled: bool,
    constrained: bool = False,
    scored: bool = False,
    forced_rate_K: Tensor | None = None,
) -> StepResult:
    """Advance every slot of `slot_ids_B` by one window of num_drafted drafts, and draft as many for the next step.

    sampled: False only if every slot is greedy without penalties and bias. constrained: some slot has masks; the others' are all ones.
    scored: also score what is emitted. forced_rate_K: float32, benchmarks only, see force_matches. Inert slots emit nothing and keep everything."""
    num_columns = num_drafted + 1
    old_BF = buffers.slots_SF.index_select(0, slot_ids_B)
    old = SlotState.of(old_BF)
    limits = SlotLimits.of(buffers.limits_SF.index_select(0, slot_ids_B))
    active_B = old.active_B > 0
    active_B1 = active_B[:, None]

    # Target forward. An inert slot reads the zero row at length 0 and writes to scratch.
    tokens_BT = old.tokens_BW[:, :num_columns]
    drafts_Bk = tokens_BT[:, 1:]
    start_B = torch.where(active_B, old.length_B, 0)
    page_table_BP = torch.where(active_B1, buffers.page_table_SP.index_select(0, slot_ids_B), SCRATCH_PAGE)
    window = VerifyBatch(
        tokens_BT=tokens_BT,
        length_B=start_B,
        read_row_B=torch.where(active_B, old.read_row_B, ZERO_ROW),
        write_rows_BT=torch.where(active_B1, old.write_rows_BW[:, :num_columns], SCRATCH_ROW),
        page_table_BP=page_table_BP,
    )
    hidden_BTH = model.verify(window)
    logits_BTV = model.logits(hidden_BTH)

    # Verify: the target chooses a token after every column; drafts stand as far as they are what it chose.
    column_T = torch.arange(num_columns, device=slot_ids_B.device)
    position_BT = start_B[:, None] + 1 + column_T
    num_offered_B = old.num_valid_drafts_B.clamp(max=num_drafted)
    allowed_BTV = apply_mask(logits_BTV, buffers.mask_SWX[:, :num_columns].index_select(0, slot_ids_B)) if constrained else logits_BTV
    emitted_BT = choose(buffers, slot_ids_B, limits, allowed_BTV, tokens_BT, position_BT) if sampled else choose_greedy(allowed_BTV)
    if forced_rate_K is None:
        num_matched_B = count_matches(emitted_BT, drafts_Bk, num_offered_B)
    else:
        uniform_Bk = uniform(limits.seed_B[:, None].expand(-1, num_drafted), position_BT[:, :-1], 1, PURPOSE_FORCED_ACCEPT)[..., 0]
        emitted_BT, num_matched_B = force_matches(emitted_BT, drafts_Bk, num_offered_B, uniform_Bk, forced_rate_K)
    verdict = truncate(emitted_BT, num_matched_B, limits.stop_ids_BE, limits.length_limit_B - start_B - 1)

    # Commit: one pointer for the state, two for the rolling checkpoints.
    last_B1 = verdict.num_accepted_B[:, None]
    num_emitted_B = verdict.num_accepted_B + 1
    length_B = start_B + num_emitted_B
    stop_B = verdict.hit_stop_id_B * STOP_ID + verdict.hit_limit_B * STOP_LENGTH
    write_rows_BW, checkpoint_rows_B2, checkpoint_lens_B2 = rotate_checkpoints(old, length_B, buffers.block_tokens)
    if sampled:
        count_emitted(buffers, slot_ids_B, emitted_BT, (column_T <= last_B1) & active_B1)

    # Draft: the MTP layer sees the whole window, for its K/V, and drafts from the last emitted token.
    drafted_Bk = drafter.draft(emitted_BT, hidden_BTH, start_B + 1, verdict.num_accepted_B, page_table_BP, num_drafted)

    # Publish: the next window into the slot, and what happened into the result.
    new = SlotState(
        active_B=(stop_B == 0).to(torch.int64),
        length_B=length_B,
        read_row_B=old.write_rows_BW.gather(1, last_B1).squeeze(1),
        num_valid_drafts_B=torch.full_like(length_B, num_drafted),
        checkpoint_rows_B2=checkpoint_rows_B2,
        checkpoint_lens_B2=checkpoint_lens_B2,
        tokens_BW=torch.cat((emitted_BT.gather(1, last_B1), drafted_Bk, old.tokens_BW[:, num_columns:]), dim=1),
        write_rows_BW=write_rows_BW,
    )
    new_BF = torch.where(active_B1, new.packed(), old_BF)
    buffers.slots_SF.index_copy_(0, slot_ids_B, new_BF)
    happened_B4 = torch.stack((num_emitted_B, verdict.num_accepted_B, num_offered_B, stop_B), dim=1)
    happened_BF = torch.cat((happened_B4 * active_B1, new_BF[:, : SlotState.NUM_SCALARS], emitted_BT, drafted_Bk), dim=1)
    scores = score_tokens(logits_BTV.flatten(0, 1), emitted_BT.flatten(), MAX_ALTERNATIVES) if scored else None
    return StepResult(happened_BF=happened_BF, scores=scores)


def read_result(result: StepResult, slots: Sequence[int], alternatives: Sequence[int | None]) -> list[SlotOutcome]:
    """The host's view of a step's result, one outcome a slot in the order of its slot ids; waits for the device.

    alternatives: for each of `slots`, how many come with the score of each emitted token; None: no scores."""
    outcomes = []
    for place, (slot, row) in enumerate(zip(slots, result.happened_BF.tolist(), strict=True)):
        num_emitted, num_accepted, num_offered, stop, _, length, _, _, newer_row, older_row, newer_len, older_len, *tokens = row
        num_columns = (len(tokens) + 1) // 2
        wanted, scores = alternatives[place], None
        if wanted is not None:
            assert result.scores is not None
            scores = result.scores.read(place * num_columns, place * num_columns + num_emitted, wanted)
        outcomes.append(
            SlotOutcome(
                slot=slot,
                emitted=tokens[:num_emitted],
                num_drafted=num_offered,
                num_accepted=num_accepted,
                stop=stop,
                length=length,
                checkpoints=((newer_row, newer_len), (older_row, older_len)),
                drafts=tokens[num_columns:],
                scores=scores,
            )
        )
    return outcomes


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
