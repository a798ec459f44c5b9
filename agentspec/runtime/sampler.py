"""The token that the target chooses at every row of a window, from the sampling tensors of the slots.

Owns the join between slot buffers and the sampling kernels. Knows nothing of acceptance.

Shape letters: B slots, T columns, V vocabulary, S slots in the buffers.
"""

from __future__ import annotations

from torch import Tensor

from agentspec.kernels.reference.sampling import draw, penalise
from agentspec.runtime.step_buffers import SlotLimits, StepBuffers


def choose_greedy(logits_BTV: Tensor) -> Tensor:
    """The most likely token, the lowest id on ties: int64 BT. Equals `choose` where no slot of the batch samples, or has penalties or bias."""
    return logits_BTV.argmax(-1)


def choose(buffers: StepBuffers, slot_ids_B: Tensor, limits: SlotLimits, logits_BTV: Tensor, tokens_BT: Tensor, position_BT: Tensor) -> Tensor:
    """The target's token after each column, by each slot's sampling parameters: int64 BT.

    tokens_BT: the window (column 0 is counted already, drafts are not); position_BT: int64, where the chosen token would stand.
    Row t assumes that drafts 0..t-1 were accepted."""
    sampling_BF = buffers.sampling_SF[slot_ids_B]
    penalised_BTV = penalise(logits_BTV, tokens_BT[:, 1:], buffers.penalty_inputs(slot_ids_B, sampling_BF))
    return draw(penalised_BTV, position_BT, buffers.draw_inputs(sampling_BF, limits))


def count_emitted(buffers: StepBuffers, slot_ids_B: Tensor, emitted_BT: Tensor, is_emitted_BT: Tensor) -> None:
    """Add emitted tokens to `counts_SV` in place. is_emitted_BT: bool."""
    cell_BT = slot_ids_B[:, None] * buffers.vocab_size + emitted_BT
    buffers.counts_SV.view(-1).scatter_add_(0, cell_BT.flatten(), is_emitted_BT.flatten().to(buffers.counts_SV.dtype))
