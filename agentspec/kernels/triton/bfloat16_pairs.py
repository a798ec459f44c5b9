"""bfloat16 where a thread has pairs of neighbours: one instruction for each conversion to float32, of which Triton's
own takes two, and one for two sums, of which Triton's take seven."""

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


@gluon.jit
def sum_of(x, y):  # type: ignore[no-untyped-def]
    """x + y in bfloat16, of Gluon's kernels: rounded once. A float32 sum that is then rounded, as torch's are, has the
    same bits, because float32 has more than twice bfloat16's digits and its range."""
    return gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )
