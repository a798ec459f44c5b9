"""Prompt chunks on the model: target forward, MTP K/V beside it, and scores of prompt tokens where they are asked for.

Owns the order of reads and writes around a chunk. Samples nothing, and knows nothing of slots.

Shape letters: N tokens of all chunks, U chunks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.kernels.prefill_batch import READ_ROW
from agentspec.models.protocol import StepModel
from agentspec.runtime.plan import ChunkPlan
from agentspec.runtime.prefill_tables import build_tables
from agentspec.runtime.scores import ScoreRows, score_tokens
from agentspec.runtime.step_buffers import stage

_SCORED_ROWS = 32
"""Rows whose logits exist at the same time while a prompt is scored: 32 rows of 248,320 float32 are 32 MB."""


def run_chunks(model: StepModel, plans: Sequence[ChunkPlan], *, with_mtp: bool, device: torch.device) -> dict[str, ScoreRows]:
    """Run chunks of distinct sequences: states and K/V go where the plans say.

    with_mtp: also write MTP K/V. Returns scores, by request id, of the chunks that ask for them."""
    hidden_NH = run_batch(model, build_tables(plans, block_tokens=model.spec.block_tokens).on(device).batch, with_mtp=with_mtp)
    hiddens = torch.split(hidden_NH, [len(plan.token_ids) for plan in plans])
    return {plan.request_id: _score(model, plan, some_NH) for plan, some_NH in zip(plans, hiddens, strict=True) if plan.score_top is not None}


def run_batch(model: StepModel, batch: PrefillBatch, *, with_mtp: bool) -> Tensor:
    """The device's part of it, without host reads: hidden_NH."""
    # A chunk may write its state over the row that it resumes from: read the hidden of the token before it first.
    before_UH = model.read_hidden(batch.spans_UF[:, READ_ROW]) if with_mtp else None
    hidden_NH = model.prefill(batch)
    if before_UH is not None:
        model.mtp_prefill(batch, torch.cat((before_UH, hidden_NH)).index_select(0, batch.previous_N))
    return hidden_NH


def _score(model: StepModel, plan: ChunkPlan, hidden_NH: Tensor) -> ScoreRows:
    assert plan.score_top is not None
    token_N = stage([*plan.token_ids[1:], plan.next_token], torch.int64, hidden_NH.device)
    rows = [slice(first, first + _SCORED_ROWS) for first in range(0, len(token_N), _SCORED_ROWS)]
    return ScoreRows.concatenate([score_tokens(model.logits(hidden_NH[some]), token_N[some], plan.score_top) for some in rows])
