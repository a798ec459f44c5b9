"""Samples the target's token after every column of a window, and counts emitted tokens for the penalties.

Connects the slot buffers with the sampling kernels. Knows nothing of acceptance.

Shape letters: B slots, T columns, V vocabulary, S slots in the buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.kernels.slots import OutcomeRows, Window
from agentspec.runtime.step_buffers import StepBuffers


def choose(
    buffers: StepBuffers, slot_ids_B: Tensor, window: Window, logits_BTV: Tensor, *, sampled: bool, constrained: bool
) -> Tensor:
    """The target's token after each column: int64 BT. logits_BTV: [1, N, V] where the window has live columns.

    sampled: False only if every slot is greedy without penalties and bias. constrained: False only if no slot has
    masks. A batch of plain greedy slots needs only an argmax, which gives the same tokens as the full sampler."""
    ops = kernels.backend(buffers.device)
    if not (sampled or constrained):
        chosen_N = ops.argmax(logits_BTV.flatten(0, 1))
        return chosen_N.view_as(window.tokens_BT) if window.live is None else chosen_N[window.live.row_BT]
    return ops.sample(
        logits_BTV,
        window.tokens_BT,
        next_positions(window),
        slot_ids_B,
        buffers.sampling,
        constrained=constrained,
        live=window.live,
    )


def next_positions(window: Window) -> Tensor:
    """Position of the token chosen after each column: int64 BT."""
    return window.start_B[:, None] + torch.arange(1, window.tokens_BT.shape[1] + 1, device=window.start_B.device)


def count_emitted(counts_SV: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
    """Add a step's emitted tokens to `counts_SV`, int32, in place. An inert slot emitted nothing."""
    outcome = OutcomeRows.of(outcome_BF)
    is_emitted_BT = torch.arange(outcome.tokens_BT.shape[1], device=counts_SV.device) < outcome.num_emitted_B[:, None]
    cell_BT = slot_ids_B[:, None] * counts_SV.shape[1] + outcome.tokens_BT
    counts_SV.view(-1).scatter_add_(0, cell_BT.flatten(), is_emitted_BT.flatten().to(counts_SV.dtype))
