"""Tokens in the order of columns in which 4-bit words have them, for matrix instructions whose right operand is in
shared memory: linear_hopper.py.

A lane t of four has a word's columns 8 t + 0..7 of 32, but the instruction takes its pairs from columns 2 t and 8 + 2 t
of each 16 (four_bit_tiles.py has the words). A product doesn't depend on the order of columns, so tokens take that of
the weights: column 8 t + 4 j + 2 h + e goes to 16 j + 8 h + 2 t + e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.launch import await_previous, overlapped, release_next

_BLOCK = 1024
"""Columns of a program."""


def in_order_of_words(x_NK: Tensor) -> Tensor:
    """x with its columns in that order, contiguous. K is a multiple of 32."""
    num_tokens, depth = x_NK.shape
    assert depth % 32 == 0, f"{depth} columns"
    assert x_NK.stride(1) == 1
    out = torch.empty(num_tokens, depth, dtype=x_NK.dtype, device=x_NK.device)
    if num_tokens:
        _order_kernel[(num_tokens, triton.cdiv(depth, _BLOCK))](
            out, x_NK, x_NK.stride(0), depth, BLOCK=_BLOCK, num_warps=4, **overlapped()
        )
    return out


@triton.jit
def _order_kernel(out, x, x_stride, depth, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j, h, t, e = at // 16 % 2, at // 8 % 2, at // 2 % 4, at % 2
    column = at // 32 * 32 + 8 * t + 4 * j + 2 * h + e
    tl.store(out + n * depth + at, tl.load(x + n * x_stride + column, mask=at < depth), mask=at < depth)
