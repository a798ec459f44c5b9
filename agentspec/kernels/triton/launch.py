"""How kernels follow one another: programmatic dependent launch, so that a kernel starts before the one ahead of it has
ended.

A kernel may be resident, and fetch weights, while its predecessor still runs. The rule that makes it safe: every
program of every kernel calls `await_previous` once, before its first access to anything but weights; what is before
that call may only read weights. Since a kernel ends only when each of its programs has passed that call, completion is
transitive: what any earlier kernel wrote is visible after it. One thing more may be read before it: what the kernel
before the previous one wrote, where the previous one calls `release_next` only after `await_previous`. Then this one
does not start before that result is complete.

When the next kernel may start is a matter of speed alone: every kernel calls `release_next`, at the latest point where
its tail begins; small kernels first.

Knows nothing of what kernels compute. Under Triton's interpreter there is nothing to overlap, and the calls vanish.
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


class LaunchOptions(TypedDict, total=False):
    PDL: bool
    launch_pdl: bool


INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module was first imported)."""

OVERLAPPED: LaunchOptions = {"PDL": False} if INTERPRETED else {"PDL": True, "launch_pdl": True}
"""Keyword arguments of every launch: kernel[grid](..., **OVERLAPPED)."""


NUM_COUNTERS = 1 << 16
"""Groups of programs that one launch may count."""

_counting_apart: ContextVar[bool] = ContextVar("_counting_apart", default=False)


def arrival_counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS], zero between kernels: the last program of a group to arrive sets its counter back. Kernels
    share them, so all that count must run one after the other: on one stream of a device, or within
    `separate_counters`.

    Cached, and made by the first call, which must come before any capture."""
    return _counters(device)[int(_counting_apart.get())]


@contextmanager
def separate_counters() -> Iterator[None]:
    """Kernels launched within count arrivals apart from all others: those of a second stream, which run one after the
    other there."""
    token = _counting_apart.set(True)
    try:
        yield
    finally:
        _counting_apart.reset(token)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step must run once before it is captured: its counters would belong to the graph, which zeroes nothing before a replay"
        )
    return torch.zeros(2, NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def release_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel's programs start as soon as there is room for them, once every program of this kernel has
    called this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until everything that earlier kernels wrote is complete and visible."""
    if PDL:
        gdc_wait()
