"""Keys and values in pages of 8-bit floats: how kernels round, store and read them. Definition:
kernels/reference/fp8_pages.py.

Kernels take such a pool as bytes, and a pointer to its exponents. Of a pool in full precision that pointer is None, and
nothing here is compiled in.
Shape letters: M tokens, S keys, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.reference import fp8_pages
from agentspec.kernels.triton.fp8_activations import fp8_bits
from agentspec.kernels.triton.linear_tiles import decode_e4m3

_LEAST = tl.constexpr(fp8_pages.EXPONENTS[0])
_GREATEST = tl.constexpr(fp8_pages.EXPONENTS[1])
_CODE_BITS = tl.constexpr(fp8_pages.CODE_BITS)
_MOST_MANTISSA = tl.constexpr(fp8_pages.MOST_MANTISSA)


def as_bytes(kv_P2SGD: Tensor, exponent_P2GS: Tensor | None) -> Tensor:
    """The pool as kernels take it."""
    assert kv_P2SGD.is_contiguous()
    if exponent_P2GS is None:
        return kv_P2SGD
    assert exponent_P2GS.is_contiguous()
    return kv_P2SGD.view(torch.uint8)


@triton.jit
def store_heads(place_MD, x_MD, mask_MD, exponents, exponent_M, is_real_M):  # type: ignore[no-untyped-def]
    """Store the heads x_MD, which have the activations' dtype. exponent_M: where the exponent of each is."""
    if exponents is None:
        tl.store(place_MD, x_MD, mask=mask_MD)
    else:
        x_MD = x_MD.to(tl.float32)
        bits = tl.max(tl.abs(x_MD), axis=1).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - (127 + _CODE_BITS) + ((bits & 0x7FFFFF) > _MOST_MANTISSA).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, _LEAST), _GREATEST)
        tl.store(place_MD, fp8_bits(x_MD * power(-exponent)[:, None]), mask=mask_MD)
        tl.store(exponents + exponent_M, exponent.to(tl.int8), mask=is_real_M)


@triton.jit
def multipliers(place_S, is_key_S):  # type: ignore[no-untyped-def]
    """The powers of two of keys or values, float32 [S], whose exponents are at place_S; 1 where is_key_S is false: what
    is there was never written."""
    return power(tl.load(place_S, mask=is_key_S, other=0).to(tl.int32))


@triton.jit
def decoded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a pool, without their powers of two, in the activations' dtype: exact."""
    if x.dtype == tl.uint8:
        x = decode_e4m3(x, dtype)
    return x


@triton.jit
def power(exponent):  # type: ignore[no-untyped-def]
    """2^exponent exactly, from int32, in float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
