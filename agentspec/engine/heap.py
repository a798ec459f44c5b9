"""How a process that takes large texts gives their memory back."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 1 << 20
"""A block from this size on gets pages of its own, which go back to the system when it is freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names, see mallopt(3)."""


def return_large_blocks() -> None:
    """Set glibc's thresholds once and for all. By itself it raises them, up to 32 MiB, with the first large block that
    is freed; large ones then lie between small ones that stay, and the process holds on to what the largest requests
    once took. Without effect where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)
