"""Pools of keys and values in FP8, for tests of attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference.fp8_pages import dequantize_heads, quantize_heads

POISON = -128
"""Exponent of a place that was never written: no head is stored with it, and its power of two is infinite."""


def in_fp8(kv_P2SGD: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, exponents [P, 2, G, S]) of a pool in full precision. NaN stays NaN, with POISON as its exponent."""
    codes, exponents = quantize_heads(kv_P2SGD)
    exponents[kv_P2SGD.isnan().any(-1)] = POISON
    return codes, exponents.transpose(2, 3).contiguous()


def plain(kv_P2SGD: Tensor, exponent_P2GS: Tensor | None) -> Tensor:
    """The numbers of a pool of any form, on the CPU: NaN where nothing was written."""
    kv_P2SGD = kv_P2SGD.cpu()
    if exponent_P2GS is None:
        return kv_P2SGD
    exponents = exponent_P2GS.cpu().transpose(2, 3)
    return dequantize_heads(kv_P2SGD, exponents, torch.float32).masked_fill((exponents == POISON)[..., None], torch.nan)
