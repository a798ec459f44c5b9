"""Rotary position embedding over the leading dimensions of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines for `apply_rope`, one row per position.

    Args:
        positions: int64 [N].
        inv_freq: float32 [A/2], radians per position.
        scale: multiplies both (YaRN's attention factor; 1 otherwise).
    Returns: two float32 [N, A/2].
    """
    angles = positions.float()[:, None] * inv_freq
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x_NHD: Tensor, cos_NA: Tensor, sin_NA: Tensor) -> Tensor:
    """Rotate dimensions 0..A-1 of every head in pairs (j, j + A/2); the other dimensions are unchanged.

    Args:
        x_NHD: [N, heads, D], any float dtype; not modified.
        cos_NA, sin_NA: float32 [N, A/2] from `rope_cos_sin`.
    Returns: [N, heads, D] in x's dtype.
    """
    half = cos_NA.shape[-1]
    cos, sin = cos_NA[:, None], sin_NA[:, None]
    low, high = x_NHD[..., :half].float(), x_NHD[..., half : 2 * half].float()
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    return torch.cat([rotated.to(x_NHD.dtype), x_NHD[..., 2 * half :]], -1)
