"""Sampling of tokens from logits: penalties, masks, filters and Gumbel-max draws, in plain torch.

Owns the mathematics of sampling. Knows nothing of slots or steps, and of drafts only the tokens in a row's context.

Order (as in vLLM): masks, logit bias, repetition, frequency and presence penalties, temperature, min-p, top-k, top-p.
Filters cut by value: tokens that tie with the last kept one are kept too, so results do not depend on how a sort
breaks ties.

Shape letters: B requests, T rows per request, N = B*T rows, V vocabulary, X = ceil(V / 32) words, k drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.reference.philox import PURPOSE_TOKEN, uniform
from agentspec.kernels.slots import (
    FREQUENCY,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    LiveColumns,
    SamplingTable,
    SlotLimits,
)

LEAST_DIVISOR = 1e-15
"""Smallest divisor of logits. A smaller positive temperature or repetition penalty would overflow float32, and gives
the same draws as this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyInputs:
    """Inputs of penalties and bias; one row per request in every field."""

    counts_BV: Tensor
    """int32. How often each token was generated so far."""
    prompt_seen_BV: Tensor
    """bool. Tokens of the prompt."""
    bias_BV: Tensor
    """float32. Added to the logits first."""
    repetition_B: Tensor
    """float32. 1: none."""
    frequency_B: Tensor
    """float32. 0: none."""
    presence_B: Tensor
    """float32. 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawInputs:
    """Sampling parameters: B rows that broadcast over T."""

    temperature_B: Tensor
    """float32. 0: greedy."""
    top_k_B: Tensor
    """int64, 1 to V. V: keep all."""
    top_p_B: Tensor
    """float32. Infinity: keep all (with 1.0, the rounding of a cumulative sum could cut the tail)."""
    log_min_p_B: Tensor
    """float32. Minus infinity: keep all."""
    seed_B: Tensor
    """int64, 0 to 2**63 - 1."""


def sample(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    position_BT: Tensor,
    slot_ids_B: Tensor,
    table: SamplingTable,
    *,
    constrained: bool,
    live: LiveColumns | None = None,
) -> Tensor:
    """See backend.Backend.sample. Row t assumes that drafts 0..t-1 were accepted."""
    if live is not None:
        logits_BTV = logits_BTV[0, live.row_BT]
    sampling_BF = table.sampling_SF[slot_ids_B]
    limits = SlotLimits.of(table.limits_SF[slot_ids_B])
    penalties = PenaltyInputs(
        counts_BV=table.counts_SV[slot_ids_B],
        prompt_seen_BV=table.prompt_seen_SV[slot_ids_B],
        bias_BV=table.bias_SV[slot_ids_B],
        repetition_B=sampling_BF[:, REPETITION],
        frequency_B=sampling_BF[:, FREQUENCY],
        presence_B=sampling_BF[:, PRESENCE],
    )
    inputs = DrawInputs(
        temperature_B=sampling_BF[:, TEMPERATURE],
        top_k_B=limits.top_k_B,
        top_p_B=sampling_BF[:, TOP_P],
        log_min_p_B=sampling_BF[:, LOG_MIN_P],
        seed_B=limits.seed_B,
    )
    if constrained:
        logits_BTV = apply_mask(logits_BTV, table.mask_SWX[:, : tokens_BT.shape[1]].index_select(0, slot_ids_B))
    return draw(penalise(logits_BTV, tokens_BT[:, 1:], penalties), position_BT, inputs)


def penalise(logits_BTV: Tensor, drafts_Bk: Tensor, inputs: PenaltyInputs) -> Tensor:
    """Apply bias and penalties. Row t's context is the generated tokens counted in `inputs` plus drafts 0..t-1 (k = T
    - 1).

    logits_BTV: float32, not changed. Returns a new float32 BTV. Repetition: arXiv 1909.05858; presence and frequency:
    OpenAI's definition."""
    B, T, _ = logits_BTV.shape
    counts_BTV = inputs.counts_BV[:, None]
    if T > 1:
        in_context_Tk = torch.ones(T, T - 1, dtype=torch.int32, device=logits_BTV.device).tril_(-1)
        counts_BTV = counts_BTV.repeat(1, T, 1).scatter_add_(
            2, drafts_Bk[:, None].expand(B, T, T - 1), in_context_Tk.expand(B, T, T - 1)
        )
    generated_BTV = counts_BTV > 0
    logits_BTV = logits_BTV + inputs.bias_BV[:, None]
    factor_BTV = torch.where(
        generated_BTV | inputs.prompt_seen_BV[:, None], inputs.repetition_B[:, None, None].clamp(min=LEAST_DIVISOR), 1.0
    )
    logits_BTV = torch.where(logits_BTV > 0, logits_BTV / factor_BTV, logits_BTV * factor_BTV)
    return (
        logits_BTV - inputs.frequency_B[:, None, None] * counts_BTV - inputs.presence_B[:, None, None] * generated_BTV
    )


def apply_mask(logits_BTV: Tensor, mask_BTX: Tensor) -> Tensor:
    """Set every token whose bit is not set to minus infinity: bit v % 32 of word v // 32 is token v. Returns a new
    float32 BTV.

    mask_BTX: int32. Where a mask row is all ones, the row of logits is returned bit for bit."""
    bit_32 = torch.arange(32, dtype=torch.int32, device=mask_BTX.device)
    is_allowed_BTV = (mask_BTX[..., None].bitwise_right_shift(bit_32) & 1).flatten(2)[..., : logits_BTV.shape[2]] > 0
    return torch.where(is_allowed_BTV, logits_BTV, -torch.inf)


def keep_threshold(tempered_BTV: Tensor, inputs: DrawInputs) -> Tensor:
    """The lowest tempered logit that min-p, top-k and top-p keep: float32 [B, T, 1]. At least the largest logit is
    kept.

    Probabilities are summed in float64: in float32 the sum of 248,320 values is off by about 1e-5, while a top-p of
    0.9999 cuts a tail of 1e-4."""
    ordered_BTV = tempered_BTV.sort(dim=-1, descending=True).values
    min_p_BT1 = ordered_BTV[..., :1] + inputs.log_min_p_B[:, None, None]
    top_k_BT1 = ordered_BTV.gather(-1, (inputs.top_k_B - 1)[:, None, None].expand(-1, ordered_BTV.shape[1], 1))
    cut_BT1 = torch.maximum(min_p_BT1, top_k_BT1)
    probs_BTV = torch.where(ordered_BTV >= cut_BT1, ordered_BTV, -torch.inf).softmax(-1, dtype=torch.float64)
    before_BTV = probs_BTV.cumsum(-1) - probs_BTV
    num_kept_BT1 = (before_BTV < inputs.top_p_B[:, None, None]).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(cut_BT1, ordered_BTV.gather(-1, num_kept_BT1 - 1))


def gumbel_noise(seed_BT: Tensor, position_BT: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise, float32 [B, T, num_tokens], finite. Depends on seed, position and token id only."""
    return uniform(seed_BT, position_BT, num_tokens, PURPOSE_TOKEN).log_().neg_().log_().neg_().to(torch.float32)


def draw(logits_BTV: Tensor, position_BT: Tensor, inputs: DrawInputs) -> Tensor:
    """Draw one token from every row by the Gumbel-max trick: int64 BT.

    logits_BTV: float32, after penalties; position_BT: int64, absolute position of the drawn token. The noise is
    multiplied by the temperature, instead of dividing the logits by it: temperature 0 is then exactly argmax, lowest
    id on ties."""
    if inputs.temperature_B.device.type == "cpu" and not inputs.temperature_B.any():
        return logits_BTV.argmax(-1)  # the same, without sort and noise; on a device, reading the values would wait
    B, T, V = logits_BTV.shape
    temperature_B11 = inputs.temperature_B[:, None, None]
    tempered_BTV = logits_BTV / torch.where(temperature_B11 > 0, temperature_B11.clamp(min=LEAST_DIVISOR), 1.0)
    noise_BTV = gumbel_noise(inputs.seed_B[:, None].expand(B, T), position_BT, V)
    score_BTV = torch.where(
        tempered_BTV >= keep_threshold(tempered_BTV, inputs), logits_BTV + temperature_B11 * noise_BTV, -torch.inf
    )
    return score_BTV.argmax(-1)
