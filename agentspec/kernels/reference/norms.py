"""The model family's two RMS norms. A weight of zero means gain 1 in one and gain 0 in the other, so they are separate
functions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm: x / rms(x) * (1 + weight), computed in float32, then cast.

    Args:
        x: [..., D], any float dtype.
        weight: [D]; 0 means gain 1.
    Returns: [..., D] in x's dtype.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: Literal["silu", "sigmoid"]) -> Tensor:
    """Plain-gain RMS norm, then the gate: o / rms(o) * weight * gate(z), computed in float32, then cast.

    Args:
        o: [..., D], output of the recurrence per value head.
        z: [..., D].
        weight: float32 [D]; 1 means gain 1.
        gate: activation of z.
    Returns: [..., D] in z's dtype.
    """
    o32, z32 = o.float(), z.float()
    normed = o32 * torch.rsqrt(o32.square().mean(-1, keepdim=True) + eps) * weight
    return (normed * (silu(z32) if gate == "silu" else torch.sigmoid(z32))).to(z.dtype)
