"""How a token is drawn, as every API of OpenAI's shape asks for it. Ranges are those of types.SamplingParams, which the
engine checks."""

from __future__ import annotations

from typing import Any

import msgspec

from agentspec.types import SamplingParams


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body. From top_k on not all of them are OpenAI's; vLLM's clients send them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """See top_k_of."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False

    def sampling_with(self, **further: Any) -> SamplingParams:
        """These fields, and what else an API takes."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=top_k_of(self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            **further,
        )


def top_k_of(asked: int) -> int:
    """As the engine has it: -1 keeps all, as 0 does."""
    return 0 if asked == -1 else asked
