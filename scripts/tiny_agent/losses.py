"""Next-token losses over a tied head that never hold all logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from scripts.tiny_agent.packing import Packed

KIND_WEIGHTS = (0.1, 0.5, 1.0)
"""Of a token to be predicted, by the mask's value: see render.py."""
_CHUNK = 16384


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one head at every token of a batch."""

    loss: Tensor
    """Weighted mean, differentiable."""
    nll_T: Tensor
    """Negative log-likelihood of the target, float32 [T]; undefined where the weight is 0."""
    right_T: Tensor
    """bool [T]: the target is the most likely token."""


def shifted_targets(tokens_T: Tensor, mask_T: Tensor, packed: Packed, shift: int) -> tuple[Tensor, Tensor]:
    """(the token `shift` further on, int64 [T]; its weight, float32 [T], 0 where it belongs to another sequence)."""
    kind_T = mask_T.roll(-shift)
    weights_T = sum(weight * (kind_T == kind).float() for kind, weight in enumerate(KIND_WEIGHTS))
    return tokens_T.roll(-shift), weights_T * packed.has_next(shift)


def score(
    hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, weights_T: Tensor, *, compile_terms: bool = False
) -> Scores:
    """Cross entropy of targets under logits hidden @ head^T, weighted; computed together with its gradient, some tokens
    at a time."""
    shares_T = weights_T / weights_T.sum().clamp(min=1e-9)
    loss, nll_T, right_T = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TH, head_VH, targets_T, shares_T, _compiled_terms() if compile_terms else _terms
    )
    return Scores(loss, nll_T, right_T)


def mtp_loss(losses: Sequence[Tensor], step_weights: Sequence[float]) -> Tensor:
    """Mean of the chain's losses, weighted by step."""
    return cast(
        Tensor, sum(weight * loss for weight, loss in zip(step_weights, losses, strict=True)) / sum(step_weights)
    )


def _terms(logits_NV: Tensor, targets_N: Tensor, shares_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nll, target is the argmax, gradient of the weighted nll by the logits in their dtype)."""
    logits32 = logits_NV.float()
    highest = logits32.amax(-1, keepdim=True)
    exponentials = (logits32 - highest).exp()
    total = exponentials.sum(-1, keepdim=True)
    is_target = torch.arange(logits_NV.shape[-1], device=logits_NV.device) == targets_N[:, None]
    of_target = torch.where(is_target, logits32, 0.0).sum(-1, keepdim=True)
    nll_N = (total.log() + highest - of_target).squeeze(-1)
    gradient_NV = ((exponentials / total - is_target.float()) * shares_N[:, None]).to(logits_NV.dtype)
    return nll_N, (of_target == highest).squeeze(-1), gradient_NV


_compiled: list[Callable[..., Any]] = []


def _compiled_terms() -> Callable[..., Any]:
    if not _compiled:
        _compiled.append(torch.compile(_terms, dynamic=False))
    return _compiled[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, shares_T: Tensor, terms: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        head = head_VH.to(hidden_TH.dtype)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_hidden_TH = torch.empty_like(hidden_TH) if needs_gradient else None
        d_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        nlls, rights = [], []
        for begin in range(0, hidden_TH.shape[0], _CHUNK):
            part = slice(begin, begin + _CHUNK)
            nll_N, right_N, d_logits_NV = terms(hidden_TH[part] @ head.t(), targets_T[part], shares_T[part])
            nlls.append(nll_N)
            rights.append(right_N)
            if d_hidden_TH is not None:
                torch.mm(d_logits_NV, head, out=d_hidden_TH[part])
            if d_head_VH is not None:
                d_head_VH += d_logits_NV.t() @ hidden_TH[part]
        nll_T, right_T = torch.cat(nlls), torch.cat(rights)
        ctx.save_for_backward(d_hidden_TH, d_head_VH)
        ctx.mark_non_differentiable(nll_T, right_T)
        return (nll_T * shares_T).sum(), nll_T, right_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TH, d_head_VH = ctx.saved_tensors
        d_loss = gradients[0]
        return (
            d_hidden_TH * d_loss if ctx.needs_input_grad[0] else None,
            d_head_VH * d_loss if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )
