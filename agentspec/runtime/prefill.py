"""Prompt chunks on the model: target forward, MTP K/V beside it, and scores of prompt tokens where they are asked for.

Owns the order of reads and writes around a chunk. Samples nothing, and knows nothing of slots.

Shape letters: N tokens of a chunk, H hidden size, V vocabulary, A alternatives a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentspec.models.protocol import PrefillChunk, StepModel
from agentspec.runtime.plan import ChunkPlan
from agentspec.runtime.step_buffers import stage
from agentspec.types import TokenScore

_SCORED_ROWS = 32
"""Rows whose logits exist at the same time while a prompt is scored: 32 rows of 248,320 float32 are 32 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkScores:
    """Scores of a chunk, still on the device."""

    targets_N: Tensor
    """int64. The token after each row."""
    logprobs_N: Tensor
    """float32."""
    top_ids_NA: Tensor
    """int64, most likely first."""
    top_logprobs_NA: Tensor
    """float32."""

    def read(self) -> list[TokenScore]:
        """Wait for the device and convert."""
        columns = (self.targets_N.tolist(), self.logprobs_N.tolist(), self.top_ids_NA.tolist(), self.top_logprobs_NA.tolist())
        return [
            TokenScore(token_id=token_id, logprob=logprob, top=list(zip(top_ids, top_logprobs, strict=True)))
            for token_id, logprob, top_ids, top_logprobs in zip(*columns, strict=True)
        ]


def run_chunks(model: StepModel, plans: Sequence[ChunkPlan], *, with_mtp: bool, device: torch.device) -> dict[str, ChunkScores]:
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


def _score(model: StepModel, plan: ChunkPlan, chunk: PrefillChunk, hidden_NH: Tensor) -> ChunkScores:
    assert plan.score_top is not None
    next_token_1 = stage([plan.next_token], torch.int64, hidden_NH.device)
    targets_N = torch.cat((chunk.token_ids[1:], next_token_1))
    logprobs, top_ids, top_logprobs = [], [], []
    for first in range(0, len(targets_N), _SCORED_ROWS):
        rows = slice(first, first + _SCORED_ROWS)
        logprobs_nV = model.logits(hidden_NH[rows]).log_softmax(-1)
        logprobs.append(logprobs_nV.gather(1, targets_N[rows, None]).squeeze(1))
        top = logprobs_nV.topk(plan.score_top, dim=1)
        top_ids.append(top.indices)
        top_logprobs.append(top.values)
    return ChunkScores(targets_N=targets_N, logprobs_N=torch.cat(logprobs), top_ids_NA=torch.cat(top_ids), top_logprobs_NA=torch.cat(top_logprobs))
