"""Keys and values as 8-bit floats, with one power of two for each head of each token.

x[d] = code[d] * 2^exponent, where 2^exponent is the least power of two for which no code exceeds the largest 8-bit
float. So what is stored of a token depends on that token alone, never on others, on their order or on how a prompt was
cut. And every stored number is exact in bfloat16 (except for heads that are below 2^-117 as a whole): pages in FP8 give
the same results as pages in bfloat16 that hold the rounded numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.weights import FP8

EXPONENTS = (-126, 120)
"""Least and greatest. Both powers of two and their reciprocals are normal float32 numbers."""
CODE_BITS = 8
"""448, the largest code, is 1.75 * 2^8."""
MOST_MANTISSA = 0x600000
"""The mantissa bits of 1.75 in float32."""


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round the heads x [..., D] to the nearest codes: (codes [..., D] float8_e4m3fn, exponents [...] int8)."""
    bits = x.float().abs().amax(-1).view(torch.int32)
    exponents = (bits >> 23) - 127 - CODE_BITS + ((bits & 0x7FFFFF) > MOST_MANTISSA).int()
    exponents = exponents.clamp(*EXPONENTS)
    return (x.float() * _power(-exponents)[..., None]).to(FP8), exponents.to(torch.int8)


def dequantize_heads(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The heads that codes [..., D] and exponents [...] stand for, in dtype."""
    return (codes.float() * _power(exponents.int())[..., None]).to(dtype)


def _power(exponents: Tensor) -> Tensor:
    """2^exponent exactly, from int32, in float32."""
    return ((exponents + 127) << 23).view(torch.float32)
