"""Programmatic dependent launch: a kernel may start before the previous kernel has ended.

A kernel may be resident, and fetch weights, while its predecessor still runs. The rule that makes this safe: every
program of every kernel calls `await_previous` once, before its first access to anything but weights. Since a kernel
ends only when each of its programs has passed that call, completion is transitive: everything that earlier kernels
wrote is visible after it. Two exceptions may be read before the call. The first are the results from before a kernel
that calls `release_next` only after `await_previous`: they are complete before the next kernel starts, and so for all
kernels behind that one. The second is what was written before an ordinary launch (as torch's are) that lies between,
because that starts when everything before it has ended (gated_delta_ring.py, `reads_early`).

The time of `release_next` affects speed only. Every kernel calls it at the latest when its tail begins; small kernels
call it first.

Knows nothing of what kernels compute. Triton's interpreter has no overlap, and the calls compile to nothing there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentspec.kernels.triton.machine import launches_early


class LaunchOptions(TypedDict, total=False):
    PDL: bool
    launch_pdl: bool


INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module was first imported)."""

_OVERLAPPED: LaunchOptions = {"PDL": True, "launch_pdl": True}
ONE_BY_ONE: LaunchOptions = {"PDL": False}
"""Launch options with which a kernel starts when the one before has ended."""

NUM_COUNTERS = 1 << 16
"""Maximum number of program groups that one launch may count."""

_counts_separately: ContextVar[bool] = ContextVar("_counts_separately", default=False)


def arrival_counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS], zero between kernels: the last program of a group to arrive resets its counter. Kernels
    share the counters, so all kernels that count must run one after the other: on one stream of a device, or within
    `separate_counters`.

    Cached, and allocated by the first call, which must precede any capture."""
    return _counters(device)[int(_counts_separately.get())]


@contextmanager
def separate_counters() -> Iterator[None]:
    """Give the kernels launched within their own counters: for a second stream, on which they run one after the
    other."""
    token = _counts_separately.set(True)
    try:
        yield
    finally:
        _counts_separately.reset(token)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step must run once before it is captured: counters allocated during the capture would belong to the "
            "graph, which does not zero them before a replay"
        )
    with torch.inference_mode(mode=False):  # they also serve calls outside
        return torch.zeros(2, NUM_COUNTERS, dtype=torch.int32, device=device)


def overlapped() -> LaunchOptions:
    """Keyword arguments of every launch: kernel[grid](..., **overlapped()). Devices before Hopper have no such
    launches, and no instructions for them: there kernels run one after the other."""
    return ONE_BY_ONE if INTERPRETED or not launches_early() else _OVERLAPPED


@triton.jit
def release_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Allow the next kernel's programs to start as resources permit, once every program of this kernel has called
    this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all writes of earlier kernels are complete and visible."""
    if PDL:
        gdc_wait()
