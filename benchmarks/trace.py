"""Kernels and idle times of some steps, as recorded by torch's profiler.

Tracing slows small kernels down, so these times aren't used as measurements: the idle time is an upper bound.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of trace events that occupy the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel, copy or fill on the device. Microseconds."""

    name: str
    start: float
    duration: float
    stream: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Kernels of some steps in order of their start."""

    kernels: list[Kernel]
    num_steps: int

    @property
    def kernels_a_step(self) -> float:
        return len(self.kernels) / self.num_steps

    @property
    def busy_ms(self) -> float:
        """Time per step in which at least one kernel ran."""
        return sum(end - start for start, end in _spans(self.kernels)) / self.num_steps / 1e3

    @property
    def step_ms(self) -> float:
        """Time per traced step, from the first kernel's start to the last one's end."""
        return (max(kernel.end for kernel in self.kernels) - self.kernels[0].start) / self.num_steps / 1e3

    @property
    def idle_share(self) -> float:
        """Idle share of the traced time."""
        return 1 - self.busy_ms / self.step_ms

    def last_step(self) -> list[Kernel]:
        """The kernels of the last step, for steps with equal numbers of kernels."""
        return self.kernels[-round(self.kernels_a_step) :]


def record(step: Callable[[], object], num_steps: int) -> Timeline:
    """Trace calls of `step` on an idle device, until the device is idle again."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return timeline(json.loads(path.read_text(encoding="utf-8")), num_steps)


def timeline(trace: Mapping[str, Any], num_steps: int) -> Timeline:
    """Read a trace in Chrome's format. Raises ValueError if it contains no GPU work."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in ON_THE_GPU]
    if not events:
        raise ValueError("the trace holds no kernel: the profiler saw nothing run on a GPU")
    kernels = [
        Kernel(
            name=event["name"],
            start=float(event["ts"]),
            duration=float(event["dur"]),
            stream=int(event.get("args", {}).get("stream", 0)),
        )
        for event in events
    ]
    return Timeline(kernels=sorted(kernels, key=lambda kernel: kernel.start), num_steps=num_steps)


def _spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """The union of the kernels' times. With programmatic dependent launch, neighbours overlap."""
    spans: list[tuple[float, float]] = []
    for kernel in kernels:
        if spans and kernel.start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], kernel.end)
        else:
            spans.append((kernel.start, kernel.end))
    return spans


def beside(timeline: Timeline, is_one: Callable[[str], bool]) -> dict[str, float]:
    """Microseconds per step in which each other kernel overlapped one of the named kernels, in descending order."""
    spans = _spans(kernel for kernel in timeline.kernels if is_one(kernel.name))
    found: dict[str, float] = {}
    for kernel in timeline.kernels:
        if is_one(kernel.name):
            continue
        first = bisect_left(spans, kernel.start, key=lambda span: span[1])
        for start, end in spans[first:]:
            if start >= kernel.end:
                break
            found[kernel.name] = (
                found.get(kernel.name, 0.0) + (min(end, kernel.end) - max(start, kernel.start)) / timeline.num_steps
            )
    return dict(sorted(((name, us) for name, us in found.items() if us > 0), key=lambda item: -item[1]))


@dataclass(slots=True)
class KernelShare:
    """All calls of one kernel."""

    name: str
    calls: int = 0
    covered_us: float = 0.0
    """Time that no earlier kernel covers, so that the sum over all kernels is the busy time."""
    gap_us: float = 0.0
    """Idle time right before its calls."""


def by_name(timeline: Timeline) -> list[KernelShare]:
    """Sums by kernel name, in descending order of time; a gap counts for the kernel after it."""
    shares: dict[str, KernelShare] = {}
    reached = timeline.kernels[0].start
    for kernel in timeline.kernels:
        share = shares.setdefault(kernel.name, KernelShare(kernel.name))
        share.calls += 1
        share.gap_us += max(0.0, kernel.start - reached)
        share.covered_us += max(0.0, kernel.end - max(reached, kernel.start))
        reached = max(reached, kernel.end)
    return sorted(shares.values(), key=lambda share: share.covered_us, reverse=True)
