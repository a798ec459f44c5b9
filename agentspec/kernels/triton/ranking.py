"""Floats as order-preserving integers, for kernels that search and compare scores.

An order key is an int32 that orders as its float32 does, so that thresholds are found exactly by bisecting integers. A
rank packs a score and its token into one int64: the best token of a row is then a plain maximum, independent of the
reduction order. Knows nothing of sampling.

Formula: IEEE 754 numbers of one sign order as their bits, negative ones in reverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEY_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)
LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))
"""Below the key of every number."""
LOWEST_RANK: tl.constexpr = tl.constexpr(-(2**63))
"""Below the rank of every token."""


@triton.jit
def order_key(value):  # type: ignore[no-untyped-def]
    """int32 order key of a float32. Both zeros have the same key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of_key(key):  # type: ignore[no-untyped-def]
    """The float32 of an int32 key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def rank(score, token):  # type: ignore[no-untyped-def]
    """int64 rank: a higher score ranks higher; of equal scores the lower token ranks higher. A NaN ranks first or
    last. token: below 2**31."""
    return (order_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of_rank(ranks):  # type: ignore[no-untyped-def]
    """int64 token of a rank."""
    return 0x7FFFFFFF - (ranks & 0x7FFFFFFF)
