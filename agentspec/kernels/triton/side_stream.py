"""A second stream for work that may run in parallel with the step's stream: fork, and join. In a CUDA graph they
become two branches.

Memory needs no further care: work on the second stream is joined before its operands and results can be freed, and
later work there begins at a later fork, after everything that the first stream did with them. Knows nothing of what is
computed. Without CUDA everything runs in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentspec.kernels.triton.launch import separate_counters

_HIGH_PRIORITY = -1
"""The forked work is short, and the main stream waits for it: its programs are scheduled before those of kernels that
fill the device."""


@contextmanager
def fork(device: torch.device) -> Iterator[None]:
    """Launch the kernels of this block on the second stream: after everything already on the current stream, in
    parallel with what is added to it later.

    Every block must be followed by `join`, before any of its tensors is freed."""
    if device.type != "cuda":
        yield
        return
    side = _stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), separate_counters():
        yield


def join(device: torch.device) -> None:
    """Make the current stream wait for everything launched under `fork`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
