"""Makes a process return the memory of large texts to the system."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 1 << 20
"""A block of at least this size gets its own pages, which go back to the system when it is freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names, see mallopt(3)."""


def return_large_blocks() -> None:
    """Fix glibc's thresholds. By default glibc raises them, up to 32 MiB, when the first large block is freed. Large
    blocks then lie between small ones that stay, and the process keeps the memory that its largest requests once used.
    No effect with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)


def return_free_memory() -> None:
    """Return what is free to the system, also between blocks in use, where small parts of large texts lay. Takes some
    milliseconds. No effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
