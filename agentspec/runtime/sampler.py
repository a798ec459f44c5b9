"""The token that the target chooses after every column of a window, and the counts that penalties read.

Owns the join between slot buffers and the sampling kernels, and forced outputs. Knows nothing of acceptance.

Shape letters: B slots, T columns, k drafts, V vocabulary, S slots in the buffers, L positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.kernels.slots import Commit, OutcomeRows, Window
from agentspec.runtime.step_buffers import StepBuffers


def choose(buffers: StepBuffers, slot_ids_B: Tensor, window: Window, logits_BTV: Tensor, *, sampled: bool, constrained: bool) -> Tensor:
    """The target's token after each column: int64 BT.

    sampled: False only if every slot is greedy without penalties and bias. constrained: False only if no slot has masks. So a batch of plain greedy
    slots needs no more than an argmax, and draws what it would draw in any company."""
    ops = kernels.backend(buffers.device)
    if not (sampled or constrained):
        chosen_BT = ops.argmax(logits_BTV.flatten(0, 1)).view_as(window.tokens_BT)
    else:
        position_BT = _next_positions(window)
        chosen_BT = ops.sample(logits_BTV, window.tokens_BT, position_BT, slot_ids_B, buffers.sampling_table, constrained=constrained)
    if buffers.forced_SL is None:
        return chosen_BT
    return _forced(buffers.forced_SL, slot_ids_B, _next_positions(window), chosen_BT)


def force_drafts(buffers: StepBuffers, slot_ids_B: Tensor, commit: Commit, drafted_Bk: Tensor) -> Tensor:
    """The next drafts, for a step that forces acceptance: whatever it accepts must be the output, where that is forced too."""
    if buffers.forced_SL is None:
        return drafted_Bk
    last_B = commit.draft_start_B + commit.num_accepted_B
    position_Bk = last_B[:, None] + torch.arange(1, drafted_Bk.shape[1] + 1, device=last_B.device)
    return _forced(buffers.forced_SL, slot_ids_B, position_Bk, drafted_Bk)


def _forced(forced_SL: Tensor, slot_ids_B: Tensor, position_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """`tokens_BT`, int64, but for the positions whose tokens are given."""
    forced_BT = forced_SL[slot_ids_B[:, None], position_BT]
    return torch.where(forced_BT < 0, tokens_BT, forced_BT.to(tokens_BT.dtype))


def _next_positions(window: Window) -> Tensor:
    """Where the token chosen after each column would stand: int64 BT."""
    return window.start_B[:, None] + torch.arange(1, window.tokens_BT.shape[1] + 1, device=window.start_B.device)


def count_emitted(counts_SV: Tensor, slot_ids_B: Tensor, commit: Commit) -> None:
    """Add what a step emitted to `counts_SV`, int32, in place. An inert slot emitted nothing."""
    num_emitted_B1 = OutcomeRows.of(commit.outcome_BF).num_emitted_B[:, None]
    is_emitted_BT = torch.arange(commit.tokens_BT.shape[1], device=counts_SV.device) < num_emitted_B1
    cell_BT = slot_ids_B[:, None] * counts_SV.shape[1] + commit.tokens_BT
    counts_SV.view(-1).scatter_add_(0, cell_BT.flatten(), is_emitted_BT.flatten().to(counts_SV.dtype))
