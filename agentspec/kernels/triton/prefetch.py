"""Asking for memory to be in the L2 cache before it is read.

Such a request loads nothing into registers and changes nothing, so it may name memory that another kernel still writes:
what is read later is what was written. Triton's interpreter has no cache, and no requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.launch import INTERPRETED

CAN_PREFETCH: tl.constexpr = tl.constexpr(not INTERPRETED)
LINE_BYTES: tl.constexpr = tl.constexpr(128)


@triton.jit
def prefetch(pointers, wanted=True):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of pointers. wanted: of which of them, a mask like `pointers`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64, bitcast=True), tl.full(pointers.shape, 0, tl.int32) + wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
