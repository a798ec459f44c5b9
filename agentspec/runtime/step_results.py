"""A step's results on their way from the device to the host: copies that are complete when the step is, and what they
say of each slot.

Knows the layout of outcomes; nothing of plans, graphs or models.

Shape letters: B slots, T columns of a window, k drafts, N tokens, F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.slots import OutcomeRows
from agentspec.runtime.decode_step import StepResult
from agentspec.runtime.plan import MAX_ALTERNATIVES, SlotOutcome
from agentspec.runtime.scores import ScoreRows, score_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotResults:
    """A step's results for some slots, in host memory. Complete when the step is done."""

    slots: Sequence[int]
    alternatives: Sequence[int | None]
    """For each slot: how many alternatives come with an emitted token's score; None: no scores."""
    outcome_BF: Tensor
    """See decode_step.StepResult."""
    drafts_Bk: Tensor | None
    """int64. Drafts of the slots' next windows. None: no slot is constrained."""
    max_mtp_drafts: int
    scores: ScoreRows | None
    """Of the emitted tokens. None: no slot wants scores."""

    def read(self) -> list[SlotOutcome]:
        return read_result(
            self.outcome_BF,
            self.scores,
            self.slots,
            self.alternatives,
            self.drafts_Bk,
            max_mtp_drafts=self.max_mtp_drafts,
        )


def to_host(result: Tensor) -> Tensor:
    """Start a copy to newly allocated host memory."""
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
    return host.copy_(result, non_blocking=True)


def score_result(result: StepResult) -> ScoreRows:
    """Scores of the token chosen after each column: row b * T + t is column t of slot b."""
    tokens_BT = OutcomeRows.of(result.outcome_BF).tokens_BT
    logits_NV = result.logits_BTV.flatten(0, 1)
    if result.row_BT is not None:
        logits_NV = logits_NV[result.row_BT.flatten()]
    return score_tokens(logits_NV, tokens_BT.flatten(), MAX_ALTERNATIVES)


def read_result(
    outcome_BF: Tensor,
    scores: ScoreRows | None,
    slots: Sequence[int],
    alternatives: Sequence[int | None],
    drafts_Bk: Tensor | None = None,
    *,
    max_mtp_drafts: int,
) -> list[SlotOutcome]:
    """Convert a step's result to one outcome per slot, in the order of `slots`; waits for the device.

    scores: from `score_result`; None: no slot wants scores. alternatives: for each of `slots`, how many alternatives
    come with each emitted token's score; None: no scores. drafts_Bk: the slots' drafts, int64; None: not wanted.
    max_mtp_drafts: drafts beyond this many are copies."""
    rows = OutcomeRows.of(outcome_BF.numpy())
    num_emitted_B, tokens_BT, num_valid_B = (
        rows.num_emitted_B.tolist(),
        rows.tokens_BT.tolist(),
        rows.num_valid_drafts_B.tolist(),
    )
    num_columns = rows.tokens_BT.shape[1]
    outcomes = []
    for place, slot in enumerate(slots):
        emitted_scores = None
        if (wanted := alternatives[place]) is not None:
            assert scores is not None
            emitted_scores = scores.read(place * num_columns, place * num_columns + num_emitted_B[place], wanted)
        (newer_row, older_row), (newer_len, older_len) = (
            rows.checkpoint_rows_B2[place].tolist(),
            rows.checkpoint_lens_B2[place].tolist(),
        )
        outcomes.append(
            SlotOutcome(
                slot=slot,
                emitted=tokens_BT[place][: num_emitted_B[place]],
                num_drafted=int(rows.num_offered_B[place]),
                num_accepted=int(rows.num_accepted_B[place]),
                stop=int(rows.stop_B[place]),
                length=int(rows.length_B[place]),
                checkpoints=((newer_row, newer_len), (older_row, older_len)),
                matched=num_valid_B[place] > max_mtp_drafts,
                drafts=[] if drafts_Bk is None else drafts_Bk[place, : num_valid_B[place]].tolist(),
                scores=emitted_scores,
            )
        )
    return outcomes
