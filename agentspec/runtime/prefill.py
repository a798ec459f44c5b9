"""Prompt chunks on the model: target forward, in which decode windows may ride, MTP K/V, and requested scores of prompt
tokens.

Owns the order of reads and writes around a chunk. Samples nothing, and knows nothing of slots.

Shape letters: N tokens of all chunks, U chunks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.kernels.prefill_batch import READ_ROW
from agentspec.models.protocol import StepModel, VerifyBatch
from agentspec.runtime.plan import ChunkPlan
from agentspec.runtime.prefill_tables import PrefillSizes, build_tables
from agentspec.runtime.scores import ScoreRows, score_tokens
from agentspec.runtime.step_buffers import stage

_SCORED_ROWS = 32
"""Rows whose logits exist at the same time while a prompt is scored: 32 rows of 248,320 float32 are 32 MB."""


def run_chunks(
    model: StepModel,
    plans: Sequence[ChunkPlan],
    *,
    with_mtp: bool,
    device: torch.device,
    sizes: PrefillSizes | None = None,
    windows: VerifyBatch | None = None,
) -> dict[str, ScoreRows]:
    """Run chunks of distinct sequences: states and K/V go where the plans say.

    with_mtp: also write MTP K/V. sizes: of the tables, None: exactly what the chunks need. windows: as in `run_batch`.
    Returns the requested scores, by request id."""
    tables = build_tables(plans, block_tokens=model.spec.block_tokens, sizes=sizes)
    hidden_NH = run_batch(model, tables.on(device).batch, with_mtp=with_mtp, windows=windows)
    lengths = [len(plan.token_ids) for plan in plans]
    hiddens = torch.split(hidden_NH[: sum(lengths)], lengths)
    scored = [
        (plan, some_NH)
        for plan, some_NH in zip(plans, hiddens, strict=True)
        if plan.score_top is not None and plan.scored_ids
    ]
    return {plan.request_id: _score(model, plan, some_NH) for plan, some_NH in scored}


def run_batch(model: StepModel, batch: PrefillBatch, *, with_mtp: bool, windows: VerifyBatch | None = None) -> Tensor:
    """Run a batch on the device, without host reads; returns hidden_NH.

    windows: of slots that are not among the batch's sequences. They are verified in the same forward, which leaves
    their states, keys and values, and hiddens where StepModel.verify does."""
    # A chunk may overwrite the row that it resumes from, so read the hidden of the token before it first.
    before_UH = model.read_hidden(batch.spans_UF[:, READ_ROW]) if with_mtp else None
    hidden_NH = model.prefill(batch) if windows is None else model.ride(batch, windows)[0]
    if before_UH is not None:
        model.mtp_prefill(batch, torch.cat((before_UH, hidden_NH)).index_select(0, batch.previous_N))
    return hidden_NH


def _score(model: StepModel, plan: ChunkPlan, hidden_NH: Tensor) -> ScoreRows:
    assert plan.score_top is not None
    token_N = stage(np.array(plan.scored_ids, dtype=np.int64), torch.int64, hidden_NH.device)
    parts = zip(torch.split(hidden_NH[: len(token_N)], _SCORED_ROWS), torch.split(token_N, _SCORED_ROWS), strict=True)
    return ScoreRows.concatenate(
        [score_tokens(model.logits(some_NH), some_N, plan.score_top) for some_NH, some_N in parts]
    )
