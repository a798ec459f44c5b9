"""A score and its token in one int64, which orders by score and then by lower token: the best of any tokens is a
maximum, in whatever order it is taken. kernels/triton/ranking.py computes the same."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST = 0x7FFFFFFF


def pack_best(score: Tensor, token: Tensor) -> Tensor:
    """score: float32; both zeros are equal, and a NaN comes before or after all numbers. token: int64, from 0 and below
    2**31."""
    bits = score.where(score != 0, 0.0).view(torch.int32).to(torch.int64)
    return (bits.where(bits >= 0, bits ^ _LAST) << 32) | (_LAST - token)


def token_of(packed: Tensor) -> Tensor:
    """int64."""
    return _LAST - (packed & _LAST)
