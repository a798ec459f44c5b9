"""Where a mixture's shared expert runs: beside the routed ones against behind them, in the same minutes, and by a
trace.

Engines over the same weights, which differ in nothing else, take turns of a few steps each, so that clocks and heat are
the same for all. The trace tells how long kernels of the routed experts ran while others did. With programmatic
dependent launch neighbours on one stream overlap a little too: what counts is the difference.
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
"""Choices of --overlap, in the words of that module: on the same stream, on a second one, or in the same launches as
one more routed expert."""
ROUTED_KERNELS = ("_gate_up_kernel", "_down_kernel")
"""Those that read routed experts, in their order."""

ROUNDS = 8
STEPS_A_TURN = 16
LEAD_STEPS = 3
"""At the beginning of a turn, not measured: the loop fills again."""
KERNELS_BEFORE = 5
"""Shown of a layer ahead of its first routed experts."""


@dataclass(kw_only=True, slots=True)
class Turns:
    """What was measured of one choice."""

    choice: str
    turns_ms: list[float] = field(default_factory=list)
    """A step's median in each turn, by the host's clock."""
    beside_us: dict[str, float] = field(default_factory=dict)
    """Microseconds a traced step in which each kernel ran beside the routed experts', most first."""
    layer: list[trace.Kernel] = field(default_factory=list)
    """Kernels of one layer in the middle of a traced step; empty until it is traced."""

    @property
    def step_ms(self) -> float:
        return statistics.median(self.turns_ms)

    def saved(self, baseline: Turns) -> float:
        """Share of the other choice's step that this one doesn't take."""
        return 1 - self.step_ms / baseline.step_ms

    def num_won(self, baseline: Turns) -> int:
        """Rounds in which this one was faster than the other."""
        return sum(ours < theirs for ours, theirs in zip(self.turns_ms, baseline.turns_ms, strict=True))


@contextmanager
def overlapped(choice: str) -> Iterator[None]:
    """What is launched or captured inside runs the shared expert where PLACEMENTS says."""
    module: Any = importlib.import_module(MIXTURE_MODULE)  # imports Triton, which machines without a GPU may not have
    before, module.forced_placement = module.forced_placement, PLACEMENTS[choice]
    try:
        yield
    finally:
        module.forced_placement = before


def time_overlap(case: Case, model: PrefilledModel, device: torch.device, choices: Sequence[str]) -> list[Turns]:
    """The pools of all engines stand beside each other; they are gone afterwards."""
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
    """Note what the trace of an engine with this choice shows."""
    turns.beside_us = trace.beside(timeline, lambda name: name in ROUTED_KERNELS)
    turns.layer = one_layer(timeline)


def one_layer(timeline: trace.Timeline) -> list[trace.Kernel]:
    """Of the last step, from a little ahead of the first routed experts of a layer in its middle to those of the
    next."""
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
