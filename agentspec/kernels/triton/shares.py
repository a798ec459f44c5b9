"""Equal shares of a list of units: which program has which units, and which one has a unit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share_of(program, num_programs, total):  # type: ignore[no-untyped-def]
    """Return (begin, end) of a program's share of `total` units; both 0 from program `num_programs` on. Every other
    share has at least one unit."""
    count = tl.maximum(num_programs, 1).to(tl.int64)
    begin = (program.to(tl.int64) * total // count).to(tl.int32)
    end = ((program + 1).to(tl.int64) * total // count).to(tl.int32)
    is_used = program < num_programs
    return tl.where(is_used, begin, 0), tl.where(is_used, end, 0)


@triton.jit
def owner_of(unit, num_programs, total):  # type: ignore[no-untyped-def]
    """Return the program whose share contains a unit."""
    return (((unit + 1).to(tl.int64) * num_programs - 1) // tl.maximum(total, 1)).to(tl.int32)
