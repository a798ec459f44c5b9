"""A hash-chain model that emits scripted tokens after scripted prompts, so that a real engine can answer with, for
example, a tool call.

It stays a hash chain: the next token is looked up by the hash of everything before it, so a wrong row or a stale page
changes its output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.types import BLOCK_TOKENS
from tests.fakes.hash_chain import HashChainModel


class ScriptedModel(HashChainModel):
    """StepModel; every draft of a scripted token is right."""

    def __init__(
        self,
        *,
        num_tokens: int = 265,
        stop_id: int | None = None,
        max_context: int = 8192,
        seed: int = 0,
        stop_chance: float = 0.0,
    ) -> None:
        """stop_chance: share of contexts, outside scripts, in which `stop_id` is by far the most likely token."""
        super().__init__(
            seed=seed,
            num_real_tokens=num_tokens,
            num_padding_tokens=0,
            block_tokens=BLOCK_TOKENS,
            max_context=max_context,
            draft_accuracy=0.5,
        )
        stop_ids = () if stop_id is None else (stop_id,)
        self._spec = dataclasses.replace(self._spec, name="scripted", stop_token_ids=stop_ids)
        self._next: dict[int, int] = {}
        if stop_id is not None and stop_chance > 0:
            ends = torch.rand(len(self._table), generator=torch.Generator().manual_seed(seed)) < stop_chance
            self._table[ends, stop_id] = 40.0

    def script(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Emit `output` after `prompt`."""
        before = self.reference_hidden([*prompt, *output])[len(prompt) - 1 : -1]
        self._next.update(zip(before.tolist(), output, strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        for place, told in self._told(hidden):
            logits.view(-1, logits.shape[-1])[place] = -40.0
            logits.view(-1, logits.shape[-1])[place, told] = 40.0
        return logits

    def draft_head(self, m: Tensor) -> Tensor:
        drafts = super().draft_head(m)
        for place, told in self._told(m):
            drafts.view(-1)[place] = told
        return drafts

    def _told(self, hidden: Tensor) -> list[tuple[int, int]]:
        hashes: list[int] = torch.flatten(hidden[..., 0]).tolist()
        return [(place, self._next[value]) for place, value in enumerate(hashes) if value in self._next]
