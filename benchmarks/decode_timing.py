"""Measurement of one case of the decode benchmark: timed without a profiler, then traced in another engine."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch

from agentspec.models.hf_config import TextConfig
from agentspec.models.shards import Rank
from benchmarks import trace
from benchmarks.experts_touched import TouchedExperts
from benchmarks.overlap import Turns
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import Case, RunningEngine
from benchmarks.step_bytes import StepBytes, step_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Number of steps of each part of a measurement."""

    warm_up: int = 12
    timed: int = 100
    host: int = 20
    traced: int = 8

    @property
    def total(self) -> int:
        """For the timed engine; the traced one runs fewer."""
        return self.warm_up + self.timed + self.host + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    step_ms: float
    """Median time from one step's results to the next one's, by the host's clock, in the overlapped loop."""
    mean_step_ms: float
    """The mean of the same; determines throughput."""
    late_step_ms: float
    """The 90th percentile of the same."""
    device_ms: float
    """Median time from the end of one step to that of the next, by the device's own events."""
    host_ms: float
    """Median time of the host to plan, launch and read a step without waiting for the device."""
    emitted: float
    """Emitted tokens per step and slot."""
    mean_context: float
    """Tokens in a slot's state, over the timed steps."""
    depths: dict[int, int]
    """Timed steps by number of drafts."""
    graphs: str
    """Description of the captured graphs."""
    start_seconds: float
    """From building the engine to the end of its warm-up: captures, compilation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    kernels: float
    """Kernels, copies and fills per step."""
    busy_ms: float
    """Time per step in which any of them ran."""
    step_ms: float
    """Time of a step under the profiler."""


@dataclass(kw_only=True, slots=True)
class Result:
    """The results of a case. `note` gives the reason for missing ones."""

    case: Case
    timing: Timing | None = None
    traced: Traced | None = None
    floor_bytes: StepBytes | None = None
    """None: the depth changes from step to step."""
    experts: TouchedExperts | None = None
    """For models with experts only."""
    overlap: list[Turns] = field(default_factory=list)
    """For each requested choice; the first one is the baseline."""
    exchange_us: float | None = None
    """Of one sum of a step's tokens over ranks, measured alone; None: a single rank holds the model."""
    num_exchanges: int = 0
    """Sums of a step over ranks."""
    note: str = ""

    @property
    def exchange_ms(self) -> float:
        """Of a step's sums."""
        return 0.0 if self.exchange_us is None else self.num_exchanges * self.exchange_us / 1e3

    def floor_ms(self, read_bandwidth: float) -> float | None:
        """With several ranks, of one rank's bytes and of the sums."""
        return None if self.floor_bytes is None else self.floor_bytes.total / read_bandwidth * 1e3 + self.exchange_ms

    @property
    def tokens_per_second(self) -> float | None:
        """With a fixed depth from the mean of the forced acceptance, which removes random variation; with the depth
        policy as measured."""
        if self.timing is None:
            return None
        if self.case.depth == "auto":
            return self.case.batch * self.timing.emitted / self.timing.mean_step_ms * 1e3
        return self.case.batch * self.case.expected_emitted / self.timing.step_ms * 1e3

    @property
    def idle_share(self) -> float | None:
        """Idle share of an untraced step, by the trace's busy time. Negative where tracing made kernels longer."""
        if self.timing is None or self.traced is None:
            return None
        return 1 - self.traced.busy_ms / self.timing.step_ms

    def as_dict(self, read_bandwidth: float) -> dict[str, Any]:
        derived = {
            "floor_ms": self.floor_ms(read_bandwidth),
            "tokens_per_second": self.tokens_per_second,
            "idle_share": self.idle_share,
        }
        return asdict(self) | derived


def time_case(case: Case, model: PrefilledModel, device: torch.device, steps: Steps) -> Timing:
    began = time.perf_counter()
    engine = RunningEngine(case, model, device, num_steps=steps.total)
    emitted_before = sum(num_tokens(engine.step()) for _ in range(steps.warm_up))
    start_seconds = time.perf_counter() - began
    num_chosen = len(engine.adaptive.chosen) if engine.adaptive else 0
    host, ends, emitted = [time.perf_counter()], [mark(device)], 0
    for _ in range(steps.timed):
        emitted += num_tokens(engine.step())
        ends.append(mark(device))
        host.append(time.perf_counter())
    engine.settle()
    step_ms = [(after - before) * 1e3 for before, after in pairwise(host)]
    return Timing(
        step_ms=statistics.median(step_ms),
        mean_step_ms=statistics.mean(step_ms),
        late_step_ms=statistics.quantiles(step_ms, n=10)[-1],
        device_ms=statistics.median(ms_between(before, after) for before, after in pairwise(ends)),
        emitted=emitted / (steps.timed * case.batch),
        mean_context=case.context + (emitted_before + emitted / 2) / case.batch,
        depths=dict(sorted(Counter(engine.adaptive.chosen[num_chosen:]).items()))
        if engine.adaptive
        else {case.max_drafts: steps.timed},
        host_ms=host_ms(engine, steps.host),
        graphs=engine.graphs,
        start_seconds=start_seconds,
    )


def num_tokens(emitted: list[list[int]]) -> int:
    return sum(map(len, emitted))


def mark(device: torch.device) -> float | torch.cuda.Event:
    """An event at the end of all launched work; on a CPU it has already passed."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    """Both must have passed."""
    if isinstance(before, float):
        assert isinstance(after, float)
        return (after - before) * 1e3
    assert isinstance(after, torch.cuda.Event)
    milliseconds: float = before.elapsed_time(after)
    return milliseconds


def host_ms(engine: RunningEngine, num_steps: int) -> float:
    """Time of the loop when the results are already available: the host's own work, including launches."""
    seconds = []
    for _ in range(num_steps):
        engine.settle()
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def trace_case(case: Case, model: PrefilledModel, device: torch.device, steps: Steps) -> trace.Timeline:
    """Trace a few steps in a new engine: the profiler must be active before a graph is captured."""
    engine = RunningEngine(case, model, device, num_steps=steps.total)
    for _ in range(steps.warm_up):
        engine.step()
    return trace.record(engine.step, steps.traced)


def summary(timeline: trace.Timeline) -> Traced:
    return Traced(kernels=timeline.kernels_a_step, busy_ms=timeline.busy_ms, step_ms=timeline.step_ms)


def floor_of(
    case: Case,
    config: TextConfig,
    timing: Timing,
    draft_vocab: int,
    *,
    experts: TouchedExperts | None = None,
    fp8_drafts: bool = False,
    fp8_pages: bool = False,
) -> StepBytes | None:
    """experts: counts in steps of this case, for a model with a mixture."""
    if case.depth == "auto":
        return None
    return step_bytes(
        config,
        batch=case.batch,
        num_drafted=case.depth,
        context=timing.mean_context,
        draft_vocab=draft_vocab,
        experts=None if experts is None else experts.means,
        fp8_drafts=fp8_drafts,
        fp8_pages=fp8_pages,
        num_copies=case.copies,
        ring_emitted=case.expected_emitted if case.state_form == "ring" else None,
        rank=Rank(0, case.ranks),
    )


def num_sums(config: TextConfig, num_drafted: int) -> int:
    """Sums over ranks in a decode step: two in each layer; for each draft two in the MTP layer and one before it."""
    return 2 * len(config.layer_types) + 3 * num_drafted
