"""Memory bandwidth of the device, for the floors of other benchmarks, measured in the same run."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

GPU_BYTES = 4 * 2**30
"""Size of each buffer: eighty times the L2 cache of an H100."""
CPU_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Bytes per second."""

    copy: float
    """Read and written bytes of a large copy."""
    read: float
    """The faster of a bare read kernel and torch's sum."""


def measure_bandwidth(device: torch.device, *, num_bytes: int | None = None) -> Bandwidth:
    """num_bytes: size of each of the two buffers, a multiple of 32 KiB; None: large enough to make caches
    irrelevant."""
    num_bytes = num_bytes or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.empty(num_bytes // 4, device=device).normal_()  # random: zeros can be faster than real data
    target = torch.empty_like(source)
    read = median_seconds(lambda: source.sum(), device)
    if device.type == "cuda":
        kernel = importlib.import_module(
            "benchmarks.read_kernel"
        )  # imports Triton, which may be missing on machines without a GPU
        sums = torch.full((source.numel() // kernel.READ_BLOCK,), torch.nan, device=device)
        read = min(read, median_seconds(lambda: kernel.read_all(source, sums), device))
        assert torch.allclose(sums, source.view(len(sums), -1).sum(1), rtol=1e-3, atol=0.1), (
            "the read kernel didn't read everything"
        )
    copy = median_seconds(lambda: target.copy_(source), device)
    return Bandwidth(copy=2 * num_bytes / copy, read=num_bytes / read)


def median_seconds(run: Callable[[], object], device: torch.device, *, repeats: int = 11) -> float:
    """Device time of `run`, after a warm-up."""
    for _ in range(3):
        run()
    if device.type == "cpu":
        moments = [time.perf_counter()]
        for _ in range(repeats):
            run()
            moments.append(time.perf_counter())
        return statistics.median(after - before for before, after in pairwise(moments))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(before.elapsed_time(after) for before, after in pairwise(events))
    return milliseconds / 1e3
