"""Prompt chunks on the model: target forward, MTP K/V beside it, and scores of prompt tokens where they are asked for.

Owns the order of reads and writes around a chunk. Samples nothing, and knows nothing of slots.

Shape letters: N tokens of a chunk, C chunks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentspec.models.protocol import PrefillChunk, StepModel
from agentspec.runtime.plan import ChunkPlan
from agentspec.runtime.scores import ScoreRows, score_tokens
from agentspec.runtime.step_buffers import stage

_SCORED_ROWS = 32
"""Rows whose logits exist at the same time while a prompt is scored: 32 rows of 248,320 float32 are 32 MB."""


def run_chunks(model: StepModel, plans: Sequence[ChunkPlan], *, with_mtp: bool, device: torch.device) -> dict[str, ScoreRows]:
    """Run chunks of distinct sequences: states and K/V go where the plans say.

    with_mtp: also write MTP K/V. Returns scores, by request id, of the chunks that ask for them."""
    chunks = [
        PrefillChunk(
            token_ids=stage(np.array(plan.token_ids, dtype=np.int64), torch.int64, device),
            start=plan.start,
            read_row=plan.read_row,
            state_writes=plan.state_writes,
            page_ids=stage(plan.page_ids, torch.int32, device),
        )
        for plan in plans
    ]
    # A chunk may write its state over the row that it resumes from: read the hidden of the token before it first.
    before_CH = model.read_hidden(stage([plan.read_row for plan in plans], torch.int64, device)) if with_mtp else None
    hiddens = model.prefill(chunks)
    if before_CH is not None:
        previous = [torch.cat((before_CH[i : i + 1], hidden_NH[:-1])) for i, hidden_NH in enumerate(hiddens)]
        model.mtp_prefill(chunks, previous)
    return {
        plan.request_id: _score(model, plan, chunk, hidden_NH)
        for plan, chunk, hidden_NH in zip(plans, chunks, hiddens, strict=True)
        if plan.score_top is not None
    }


def _score(model: StepModel, plan: ChunkPlan, chunk: PrefillChunk, hidden_NH: Tensor) -> ScoreRows:
    assert plan.score_top is not None
    next_token_1 = stage([plan.next_token], torch.int64, hidden_NH.device)
    token_N = torch.cat((chunk.token_ids[1:], next_token_1))
    rows = [slice(first, first + _SCORED_ROWS) for first in range(0, len(token_N), _SCORED_ROWS)]
    return ScoreRows.concatenate([score_tokens(model.logits(hidden_NH[some]), token_N[some], plan.score_top) for some in rows])
