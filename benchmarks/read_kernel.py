"""A kernel that only reads memory, to measure the read bandwidth for floors. Import it only where Triton is
installed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

READ_BLOCK = 8192
"""float32 values that a program reads: with 8 warps, eight loads of 16 bytes in flight a thread."""


@triton.jit
def _read(values, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes one float per BLOCK values, so that writes are negligible."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + program, tl.sum(tl.load(values + offsets), 0))


def read_all(values: Tensor, sums: Tensor) -> None:
    """Sum float32 values in runs of READ_BLOCK; `sums` has one element for each run."""
    assert sums.numel() * READ_BLOCK == values.numel()
    _read[(sums.numel(),)](values, sums, BLOCK=READ_BLOCK, num_warps=8)
