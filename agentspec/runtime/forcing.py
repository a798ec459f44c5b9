"""For benchmarks only: drafts that are accepted at given rates, and outputs that requests bring with them.

Wraps the step, which knows nothing of it: changes the target's tokens before the commit, and the drafts after the step.
The rest of the engine only reports forced acceptance, or refuses what can't be combined with it.

Shape letters: B slots, T columns, k drafts, K rates, S slots in the buffers, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, uniform
from agentspec.kernels.slots import Window
from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import Drafter, VerifiedWindow
from agentspec.runtime.decode_step import StepResult, decode_step
from agentspec.runtime.plan import SlotJoin
from agentspec.runtime.sampler import choose, next_positions
from agentspec.runtime.step_buffers import StepBuffers, stage
from agentspec.types import DraftSource


class Forcing:
    """Forced acceptance and forced outputs of one executor's slots."""

    def __init__(self, buffers: StepBuffers, *, rates: Sequence[float] | None, allow_output: bool) -> None:
        """rates: chance that an MTP draft is accepted, given that those before it are; None: the target decides. Copies
        are accepted where they equal the target's choice.
        allow_output: requests may bring their output."""
        self._rate_K = None if rates is None else stage(rates, torch.float32, buffers.device)
        num_slots, num_pages = buffers.page_table_SP.shape
        shape = (num_slots, num_pages * buffers.block_tokens)
        self._output_SL = torch.full(shape, -1, dtype=torch.int32, device=buffers.device) if allow_output else None
        """int32. Tokens of forced outputs at their positions in the sequence. Padding -1 (the target chooses)."""
        self._is_right_SLK = None
        """bool. Whether the rates accept the draft of a forced token, by the draft's place in its window. Padding True
        (drafts stay as they are)."""
        if self._rate_K is not None and allow_output:
            self._is_right_SLK = torch.ones(*shape, len(self._rate_K), dtype=torch.bool, device=buffers.device)

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Store the forced outputs of requests that enter a slot."""
        if self._output_SL is None:
            return
        for join in joins:
            output_L = self._output_SL[join.slot].fill_(-1)
            if self._is_right_SLK is not None:
                self._is_right_SLK[join.slot] = True
            if join.forced_output is None:
                continue
            start = len(join.prompt_ids)
            stop = start + len(join.forced_output)
            output_L[start:stop] = stage(np.array(join.forced_output), torch.int32, output_L.device)
            if self._is_right_SLK is not None and self._rate_K is not None:
                position_N = torch.arange(start, stop, device=output_L.device)
                drawn_N1 = uniform(torch.full_like(position_N, join.seed), position_N, 1, PURPOSE_FORCED_ACCEPT)
                self._is_right_SLK[join.slot, start:stop] = drawn_N1 < self._rate_K

    def step(
        self,
        model: StepModel,
        drafter: Drafter,
        buffers: StepBuffers,
        slot_ids_B: Tensor,
        *,
        num_drafted: int,
        **variant: Any,
    ) -> StepResult:
        """Like decode_step."""
        if self._output_SL is not None and self._is_right_SLK is not None:
            drafter = _ForcedDrafter(drafter, self._output_SL, self._is_right_SLK, slot_ids_B)
        return decode_step(model, drafter, buffers, slot_ids_B, num_drafted=num_drafted, choose=self._choose, **variant)

    def _choose(
        self, buffers: StepBuffers, slot_ids_B: Tensor, window: Window, logits_BTV: Tensor, **variant: bool
    ) -> Tensor:
        chosen_BT = choose(buffers, slot_ids_B, window, logits_BTV, **variant)
        if self._output_SL is not None:
            chosen_BT = _forced(self._output_SL, slot_ids_B, next_positions(window), chosen_BT)
        if self._rate_K is None:
            return chosen_BT
        return kernels.backend(buffers.device).force_acceptance(
            buffers.slots_SF, buffers.sampling.limits_SF, slot_ids_B, chosen_BT, self._rate_K, window.live
        )


class _ForcedDrafter:
    """Drafts the forced tokens, where there are any: an accepted draft is emitted as it is.

    A draft that the rates refuse is another token, so that copies behind it are as useless as behind a wrong draft."""

    def __init__(self, drafter: Drafter, output_SL: Tensor, is_right_SLK: Tensor, slot_ids_B: Tensor) -> None:
        self._drafter, self._output_SL, self._slot_ids_B = drafter, output_SL, slot_ids_B
        self._is_right_SLK = is_right_SLK

    def sources(self, num_drafted: int) -> tuple[DraftSource, ...]:
        return self._drafter.sources(num_drafted)

    def draft(self, window: VerifiedWindow, num_drafted: int) -> Tensor:
        drafts_Bk = self._drafter.draft(window, num_drafted)
        place_k = torch.arange(num_drafted, device=drafts_Bk.device)
        position_Bk = (window.start_B + window.last_B)[:, None] + 1 + place_k
        right_Bk = _forced(self._output_SL, self._slot_ids_B, position_Bk, drafts_Bk)
        is_right_Bk = self._is_right_SLK[self._slot_ids_B[:, None], position_Bk, place_k]
        return torch.where(is_right_Bk, right_Bk, (right_Bk - 1).abs())


def _forced(output_SL: Tensor, slot_ids_B: Tensor, position_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """`tokens_BT`, int64, replaced by the forced tokens where there are any."""
    forced_BT = output_SL[slot_ids_B[:, None], position_BT]
    return torch.where(forced_BT < 0, tokens_BT, forced_BT.to(tokens_BT.dtype))
