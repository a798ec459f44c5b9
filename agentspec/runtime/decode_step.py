"""The decode step as one straight-line function: verify, sample, commit, draft and publish.

It runs eagerly and is what a CUDA graph captures: no host reads, static shapes, lengths and flags on the device. Owns
the order of a step; knows nothing of requests, scheduling or the model's layers.

Shape letters: B slots in the step, T = k+1 columns, k drafts, W = max k + 1, H hidden size, V vocabulary, P pages per
sequence, F fields, N rows of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.kernels.slots import SharedRows, Window
from agentspec.models.protocol import StepModel, VerifyBatch
from agentspec.mtp.drafter import Drafter, VerifiedWindow
from agentspec.runtime.sampler import choose, count_emitted
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.types import has_copies


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step's results, on the device."""

    outcome_BF: Tensor
    """int64, one row per slot: see OutcomeRows."""
    logits_BTV: Tensor
    """float32. Raw target logits after each column; with `row_BT` [1, N, V]."""
    row_BT: Tensor | None = None
    """int64. For windows with live columns: the row of each column's logits. Dead columns have some other row."""

    def first(self, num_slots: int) -> StepResult:
        """The first `num_slots` rows, without the batch's padding."""
        if self.row_BT is not None:
            return replace(self, outcome_BF=self.outcome_BF[:num_slots], row_BT=self.row_BT[:num_slots])
        return StepResult(outcome_BF=self.outcome_BF[:num_slots], logits_BTV=self.logits_BTV[:num_slots])


class Forward(Enum):
    """Where the hiddens of a step's windows come from."""

    RUN = auto()
    """The step runs the target forward."""
    PREFILLED = auto()
    """The first step of slots that have just joined. Prefill has already computed column 0, and its hidden is in the
    read row. There are no drafts yet, so the other columns don't matter; what the MTP layer writes for them is
    overwritten later, like that of rejected drafts."""
    RIDDEN = auto()
    """The windows were verified in a prompt pass (`open_windows`), which stored every column's hidden."""


def open_windows(buffers: StepBuffers, slot_ids_B: Tensor, num_drafted: int) -> Window:
    """Gather what the target forward of the slots' next step reads. Changes nothing.

    With copies in slots with rings, windows share their rows: num_drafted is then the mean, and a window has as many
    copies as were made for it, as long as there are rows."""
    num_columns, shared = num_drafted + 1, None
    if buffers.ring is not None and num_drafted > buffers.max_mtp_drafts:
        shared = SharedRows(len(slot_ids_B) * num_columns, own_columns=buffers.max_mtp_drafts + 1)
        num_columns = buffers.width
    return kernels.backend(buffers.device).open_window(
        buffers.slots_SF, buffers.page_table_SP, slot_ids_B, num_columns, buffers.ring, shared
    )


def verify_batch(window: Window) -> VerifyBatch:
    """Convert a window to the model's input."""
    return VerifyBatch(
        tokens_BT=window.tokens_BT,
        length_B=window.start_B,
        read_row_B=window.read_row_B,
        write_rows_BT=window.write_rows_BT,
        page_table_BP=window.page_table_BP,
        ring=window.ring,
        live=window.live,
    )


def decode_step(
    model: StepModel,
    drafter: Drafter,
    buffers: StepBuffers,
    slot_ids_B: Tensor,
    *,
    num_drafted: int,
    sampled: bool,
    constrained: bool = False,
    forward: Forward = Forward.RUN,
    choose: Callable[..., Tensor] = choose,
) -> StepResult:
    """Advance every slot of `slot_ids_B` by one window of num_drafted drafts (see `open_windows`), and draft for the
    next step: as many by the MTP head, but at most `buffers.max_mtp_drafts`, and copies behind that many.

    sampled: False only if every slot is greedy without penalties and bias. constrained: some slot has masks; the masks
    of the others are all ones. choose: as sampler.choose. Inert slots emit nothing and keep their state."""
    ops = kernels.backend(buffers.device)
    window = open_windows(buffers, slot_ids_B, num_drafted)
    hidden_BTH = _hidden(model, window, forward)
    logits_BTV = model.logits(hidden_BTH)
    live = window.live
    if live is not None:
        hidden_BTH = hidden_BTH[0, live.row_BT]

    # Verify: the target chooses a token after every column. A draft is accepted as long as it and all before it match.
    chosen_BT = choose(buffers, slot_ids_B, window, logits_BTV, sampled=sampled, constrained=constrained)
    commit = ops.commit_window(
        buffers.slots_SF,
        buffers.sampling.limits_SF,
        slot_ids_B,
        chosen_BT,
        block_tokens=buffers.block_tokens,
        ring=buffers.ring,
        live=live,
    )
    if sampled:
        count_emitted(buffers.sampling.counts_SV, slot_ids_B, commit.outcome_BF)

    # Draft: the MTP layer runs over the whole window to write its K/V, and drafts from the last emitted token.
    verified = VerifiedWindow(
        tokens_BT=chosen_BT,
        hidden_BTH=hidden_BTH,
        start_B=commit.draft_start_B,
        last_B=commit.num_accepted_B,
        later_TB=commit.later_TB,
        page_table_BP=window.page_table_BP,
    )
    drafted_Bk = drafter.draft(verified, min(num_drafted, buffers.max_mtp_drafts))
    drafts_Bk, num_valid_B = _with_copies(ops, buffers, slot_ids_B, commit.outcome_BF, drafted_Bk, num_drafted)
    ops.publish_drafts(buffers.slots_SF, slot_ids_B, commit.outcome_BF, drafts_Bk, num_valid_B)
    return StepResult(outcome_BF=commit.outcome_BF, logits_BTV=logits_BTV, row_BT=None if live is None else live.row_BT)


def _with_copies(
    ops: kernels.Backend,
    buffers: StepBuffers,
    slot_ids_B: Tensor,
    outcome_BF: Tensor,
    drafted_Bk: Tensor,
    num_drafted: int,
) -> tuple[Tensor, Tensor | None]:
    """The MTP drafts with copies behind them, and how many are valid; None: all.

    Copies are made behind this step's windows even if they have none, because the next ones may be wider; but not where
    so many slots decode that those aren't either."""
    copies = buffers.copies
    if copies is None:
        return drafted_Bk, None
    ops.append_text(copies.text_SL, slot_ids_B, outcome_BF)
    most_mtp = buffers.max_mtp_drafts
    if drafted_Bk.shape[1] < most_mtp:
        return drafted_Bk, None  # copies have fixed places, behind the most MTP drafts
    if num_drafted == most_mtp and not has_copies(len(slot_ids_B), most_mtp):
        return drafted_Bk, None
    copied_Bc, num_copied_B = ops.draft_copies(
        copies.text_SL,
        slot_ids_B,
        outcome_BF,
        drafted_Bk,
        num_copies=copies.num_copies,
        min_match=copies.min_match,
    )
    return torch.cat((drafted_Bk, copied_Bc), dim=1), num_copied_B + drafted_Bk.shape[1]


def _hidden(model: StepModel, window: Window, forward: Forward) -> Tensor:
    """The target's hidden of the last emitted token and of each draft after it."""
    if forward is Forward.RUN:
        return model.verify(verify_batch(window))
    if forward is Forward.PREFILLED:
        return model.read_hidden(window.read_row_B)[:, None].repeat(1, window.tokens_BT.shape[1], 1)
    return model.window_hidden(verify_batch(window))
