"""Pools of keys and values in FP8, for tests of attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference.fp8_pages import dequantize_heads, quantize_heads

POISON = -128
"""Exponent of a place that was never written: no head is stored with it, and its power of two is infinite."""


def in_fp8(kv_P2SGD: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, exponents) of a pool in full precision. NaN stays NaN, with POISON as its exponent."""
    codes, exponents = quantize_heads(kv_P2SGD)
    exponents[kv_P2SGD.isnan().any(-1)] = POISON
    return codes, exponents


def plain(kv_P2SGD: Tensor, exponent_P2SG: Tensor | None) -> Tensor:
    """The numbers of a pool of any form, on the CPU: NaN where nothing was written."""
    kv_P2SGD = kv_P2SGD.cpu()
    if exponent_P2SG is None:
        return kv_P2SGD
    exponent_P2SG = exponent_P2SG.cpu()
    return dequantize_heads(kv_P2SGD, exponent_P2SG, torch.float32).masked_fill(
        (exponent_P2SG == POISON)[..., None], torch.nan
    )
