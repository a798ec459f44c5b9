"""Log-probabilities of known tokens, and of the most likely alternatives at their positions.

By the model's own distribution: from raw logits, before penalties, bias, masks and temperature. Knows nothing of
requests.

Shape letters: N scored rows, V vocabulary, A alternatives per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.types import TokenScore


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRows:
    """Scores as tensors."""

    token_N: Tensor
    """int64. The scored token of each row."""
    logprob_N: Tensor
    """float32."""
    top_ids_NA: Tensor
    """int64, most likely first."""
    top_logprobs_NA: Tensor
    """float32."""

    @classmethod
    def concatenate(cls, parts: Sequence[ScoreRows]) -> ScoreRows:
        return cls(
            token_N=torch.cat([part.token_N for part in parts]),
            logprob_N=torch.cat([part.logprob_N for part in parts]),
            top_ids_NA=torch.cat([part.top_ids_NA for part in parts]),
            top_logprobs_NA=torch.cat([part.top_logprobs_NA for part in parts]),
        )

    def map(self, move: Callable[[Tensor], Tensor]) -> ScoreRows:
        """Apply `move` to each tensor."""
        return ScoreRows(
            token_N=move(self.token_N),
            logprob_N=move(self.logprob_N),
            top_ids_NA=move(self.top_ids_NA),
            top_logprobs_NA=move(self.top_logprobs_NA),
        )

    def read(self, first: int, end: int, num_alternatives: int) -> list[TokenScore]:
        """Rows first to end - 1, with num_alternatives of their alternatives; waits for the device."""
        rows = slice(first, end)
        top = (
            self.top_ids_NA[rows, :num_alternatives].tolist(),
            self.top_logprobs_NA[rows, :num_alternatives].tolist(),
        )
        columns = (self.token_N[rows].tolist(), self.logprob_N[rows].tolist(), *top)
        return [
            TokenScore(token_id=token_id, logprob=logprob, top=list(zip(top_ids, top_logprobs, strict=True)))
            for token_id, logprob, top_ids, top_logprobs in zip(*columns, strict=True)
        ]


def score_tokens(logits_NV: Tensor, token_N: Tensor, num_alternatives: int) -> ScoreRows:
    """Score one token per row. logits_NV: float32. num_alternatives: at most V of them are returned."""
    norm_N1 = logits_NV.logsumexp(-1, keepdim=True)
    top = logits_NV.topk(min(num_alternatives, logits_NV.shape[1]), dim=1)
    return ScoreRows(
        token_N=token_N,
        logprob_N=(logits_NV.gather(1, token_N[:, None]) - norm_N1).squeeze(1),
        top_ids_NA=top.indices,
        top_logprobs_NA=top.values - norm_N1,
    )
