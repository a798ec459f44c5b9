"""The sampling fields of every API of OpenAI's shape. Ranges are those of types.SamplingParams, which the engine
checks."""

from __future__ import annotations

from typing import Any

import msgspec

from agentspec.types import SamplingParams


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields of a body. From top_k on some are not OpenAI's; vLLM's clients send them."""

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
        """SamplingParams of these fields and of an API's own."""
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
    """In the engine's convention: -1 disables it, as does 0."""
    return 0 if asked == -1 else asked
