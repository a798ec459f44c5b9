"""Mixture of experts: routing, and the weighted sum of the routed experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from agentspec.kernels.weights import Weight


def route_top_k(logits_NX: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over ALL experts in float32, keep the top_k, then optionally divide by their sum.

    Args:
        logits_NX: [N, X], any float dtype.
    Returns: (weights_NJ float32, expert_ids_NJ int64), most likely first.
    """
    weights_NJ, expert_ids_NJ = logits_NX.float().softmax(-1).topk(top_k, -1)
    if normalize:
        weights_NJ = weights_NJ / weights_NJ.sum(-1, keepdim=True)
    return weights_NJ, expert_ids_NJ


def mix_experts(
    x_NH: Tensor, weights_NJ: Tensor, expert_ids_NJ: Tensor, gate_up_X2IH: Weight, down_XHI: Weight
) -> Tensor:
    """Sum over the chosen experts of weight * down(silu(gate(x)) * up(x)).

    Experts that aren't in the stack, whose ids are below 0 or beyond it, add nothing.

    Args:
        x_NH: [N, H], activation dtype.
        weights_NJ: float32 [N, J]. expert_ids_NJ: int64 [N, J].
        gate_up_X2IH: [X, 2I, H], gate rows first. down_XHI: [X, H, I].
    Returns: [N, H] in x's dtype. A token's sum runs in expert order, whatever else is in the batch.

    The reference reads the ids on the host, so that it computes only experts that some token chose.
    """
    y_NH = torch.zeros_like(x_NH)
    is_held_NJ = (expert_ids_NJ >= 0) & (expert_ids_NJ < gate_up_X2IH.shape[0])
    for expert in torch.unique(expert_ids_NJ[is_held_NJ]).tolist():
        token, choice = (expert_ids_NJ == expert).nonzero(as_tuple=True)
        gate, up = linear(x_NH[token], gate_up_X2IH.matrix(expert).dequantize(x_NH.dtype)).chunk(2, -1)
        out = linear(silu(gate) * up, down_XHI.matrix(expert).dequantize(x_NH.dtype))
        y_NH.index_add_(0, token, (out * weights_NJ[token, choice, None]).to(x_NH.dtype))
    return y_NH
