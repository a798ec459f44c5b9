"""Distributions computed from their definition, and a test of draws against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.types import SamplingParams


def next_token_probs(
    logits_V: Tensor, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams
) -> Tensor:
    """Probabilities of the next token after prompt + generated, from raw logits: float64, token by token as the
    sampling parameters are defined."""
    logits = logits_V.to(torch.float64)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *generated}:
        logits[token] = (
            logits[token] / sampling.repetition_penalty
            if logits[token] > 0
            else logits[token] * sampling.repetition_penalty
        )
    for token in generated:
        logits[token] -= sampling.frequency_penalty
    for token in set(generated):
        logits[token] -= sampling.presence_penalty
    probs = (logits / sampling.temperature).softmax(0)
    order = probs.argsort(descending=True)
    order = order[probs[order] >= sampling.min_p * probs.max()]
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = probs[order] / probs[order].sum()
    order = order[(mass.cumsum(0) - mass) < sampling.top_p]
    kept = torch.zeros_like(probs)
    kept[order] = probs[order] / probs[order].sum()
    return kept


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Chi-square test over the cells that expect at least 5 draws, and one cell for all others. 0 if something
    impossible was drawn."""
    counts, expected = counts.flatten().to(torch.float64), probs.flatten() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    large = expected >= 5
    observed = torch.cat((counts[large], counts[~large].sum()[None]))
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    used = expected > 1e-9
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
