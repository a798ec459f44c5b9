"""Compare placements of a mixture's shared expert: parallel to the routed experts or after them; timed and traced.

Engines over the same weights that differ only in the placement run a few steps alternately, so that clocks and heat are
the same for all. The trace shows how long other kernels ran in parallel to those of the routed experts. With
programmatic dependent launch, neighbours on one stream also overlap a little, so only the difference counts.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from benchmarks import trace
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import Case, RunningEngine, let_go

MIXTURE_MODULE = "agentspec.kernels.triton.mixture"
PLACEMENTS = {"off": "behind", "on": "beside", "among": "among"}
"""Choices of --overlap and the module's names for them: on the same stream, on a second one, or in the same launches
as one more routed expert."""
ROUTED_KERNELS = ("_gate_up_kernel", "_down_kernel")
"""Kernels that read routed experts, in their order."""

ROUNDS = 8
STEPS_A_TURN = 16
LEAD_STEPS = 3
"""Unmeasured steps at the beginning of a turn, in which the pipeline fills."""
KERNELS_BEFORE = 5
"""Kernels shown before a layer's first routed experts."""


@dataclass(kw_only=True, slots=True)
class Turns:
    """Measurements of one choice."""

    choice: str
    turns_ms: list[float] = field(default_factory=list)
    """Median step time of each turn, by the host's clock."""
    beside_us: dict[str, float] = field(default_factory=dict)
    """Microseconds per traced step in which each kernel overlapped the routed experts', in descending order."""
    layer: list[trace.Kernel] = field(default_factory=list)
    """Kernels of one layer in the middle of a traced step; empty until it is traced."""

    @property
    def step_ms(self) -> float:
        return statistics.median(self.turns_ms)

    def saved(self, baseline: Turns) -> float:
        """Saved share of the other choice's step time."""
        return 1 - self.step_ms / baseline.step_ms

    def num_won(self, baseline: Turns) -> int:
        """Number of rounds in which this one was faster than the other."""
        return sum(ours < theirs for ours, theirs in zip(self.turns_ms, baseline.turns_ms, strict=True))


@contextmanager
def overlapped(choice: str) -> Iterator[None]:
    """Within the context, steps are launched or captured with the given placement of the shared expert."""
    module: Any = importlib.import_module(
        MIXTURE_MODULE
    )  # imports Triton, which may be missing on machines without a GPU
    before, module.forced_placement = module.forced_placement, PLACEMENTS[choice]
    try:
        yield
    finally:
        module.forced_placement = before


def time_overlap(case: Case, model: PrefilledModel, device: torch.device, choices: Sequence[str]) -> list[Turns]:
    """Measure all choices. The pools of all engines exist at the same time, and are freed afterwards."""
    models = [model, *(model.sibling() for _ in choices[1:])]
    found = [Turns(choice=choice) for choice in choices]
    engines = []
    for choice, its_model in zip(choices, models, strict=True):
        with overlapped(choice):
            engines.append(RunningEngine(case, its_model, device, num_steps=ROUNDS * (STEPS_A_TURN + LEAD_STEPS) + 1))
    for _ in range(ROUNDS):
        for turns, engine in zip(found, engines, strict=True):
            turns.turns_ms.append(_turn_ms(engine))
    del engines, engine
    let_go(*models)
    return found


def _turn_ms(engine: RunningEngine) -> float:
    for _ in range(LEAD_STEPS):
        engine.step()
    moments = [time.perf_counter()]
    for _ in range(STEPS_A_TURN):
        engine.step()
        moments.append(time.perf_counter())
    engine.settle()
    return statistics.median(after - before for before, after in pairwise(moments)) * 1e3


def read_trace(turns: Turns, timeline: trace.Timeline) -> None:
    """Record the trace of an engine with this choice."""
    turns.beside_us = trace.beside(timeline, lambda name: name in ROUTED_KERNELS)
    turns.layer = one_layer(timeline)


def one_layer(timeline: trace.Timeline) -> list[trace.Kernel]:
    """Kernels of a middle layer of the last step: from shortly before its first routed experts to those of the next
    layer."""
    kernels = timeline.last_step()
    starts = [place for place, kernel in enumerate(kernels) if kernel.name == ROUTED_KERNELS[0]]
    if len(starts) < 2:
        return []
    middle = (len(starts) - 1) // 2
    return kernels[max(0, starts[middle] - KERNELS_BEFORE) : starts[middle + 1]]


def layer_table(kernels: Sequence[trace.Kernel]) -> list[str]:
    """Microseconds from the first kernel's start."""
    begin = kernels[0].start
    rows = [
        f"| {kernel.start - begin:.1f} | {kernel.end - begin:.1f} | {kernel.stream} | {kernel.name[:60]} |"
        for kernel in kernels
    ]
    return ["| from | to | stream | kernel |", "|---|---|---|---|", *rows]
