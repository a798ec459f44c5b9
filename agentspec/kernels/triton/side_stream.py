"""A second stream for work that may run beside the step's own: fork, and join. Captured in a CUDA graph, the two are
its branches.

Memory needs no further care: what forks also joins before its operands and its result can be given back, and whatever
runs on the second stream next begins at a later fork, behind all that the first stream did with them. Knows nothing of
what is computed. Without CUDA everything runs in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentspec.kernels.triton.launch import separate_counters

_HIGH_PRIORITY = -1
"""What runs beside is short, and waited for: its programs go before those that fill the device meanwhile."""


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is launched within runs after everything that the current stream has been given, and beside what that is
    given from now on.

    Every block must be followed by `join`, before any of its tensors is let go."""
    if device.type != "cuda":
        yield
        return
    side = _stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), separate_counters():
        yield


def join(device: torch.device) -> None:
    """What the current stream is given from now on runs after all that was launched `beside`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
