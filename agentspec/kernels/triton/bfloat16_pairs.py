"""bfloat16 in float32 where a thread has pairs of neighbours: one instruction each. Triton's own conversion takes
two."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HALVES = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_HALVES = gl.constexpr(HALVES.value)


@gluon.jit
def in_float32(x):  # type: ignore[no-untyped-def]
    """Of Gluon's kernels."""
    return gl.inline_asm_elementwise(_HALVES, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
