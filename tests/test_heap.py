"""A process returns large freed memory blocks to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
from agentspec.heap import return_large_blocks
return_large_blocks()
def rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
before, small = rss(), []
for _ in range(20):
    large = [bytearray(3 << 20) for _ in range(8)]
    small.append(bytearray(100_000))  # stays allocated after the large ones
    del large
print(rss() - before)
"""


SMALL = """
from agentspec.heap import return_free_memory
def rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
before = rss()
pieces = [bytearray(100_000) for _ in range(400)]
kept = pieces[::10]
del pieces
held = rss() - before
return_free_memory()
print(held, rss() - before)
"""

ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is called is glibc's")


@ON_GLIBC
def test_free_memory_between_blocks_in_use_is_returned_to_the_system() -> None:
    shown = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=True)
    held, after = map(float, shown.stdout.split())
    assert held > 30, "without the call, the system has nothing back"
    assert after < 8, "MiB that are held; the blocks in use are 4"


@ON_GLIBC
def test_large_freed_blocks_are_returned_to_the_system() -> None:
    shown = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert float(shown.stdout) < 8, "MiB that are held; the small blocks are 2"
