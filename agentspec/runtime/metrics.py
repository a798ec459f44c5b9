"""Counters of the whole engine, as `engine.stats()` and `/stats` show them: plain numbers, written by the scheduler and
the step loop."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

from agentspec.types import FinishReason
from agentspec.wire import Usage

GAP_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
"""Seconds: upper bounds, inclusive, of the groups in which gaps are counted; a last group has those above."""

_FINE_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_VLLM_BOUNDS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
REQUEST_BOUNDS = _FINE_BOUNDS + _VLLM_BOUNDS
"""Seconds, for parts of a request: those that vLLM has, and some below."""

STEP_TOKEN_BOUNDS = (1.0, *(2.0**power for power in range(3, 15)))


@dataclass(slots=True)
class Histogram:
    """Observations by upper bound, inclusive."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """One for each bound, not cumulated; the last for what exceeds them all."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _of_requests() -> Histogram:
    return Histogram(REQUEST_BOUNDS)


@dataclass(slots=True)
class EngineMetrics:
    """Everything counts since the engine started."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    preemptions: int = 0
    steps: int = 0
    """Launched plans."""
    first_slots: int = 0
    """First steps, slot by slot: tokens that came with the prompt."""
    decode_steps: int = 0
    """Launched plans with at least one decoding slot."""
    decode_slots: int = 0
    """Slots over all decode steps."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache, at first admission."""
    prefill_tokens: int = 0
    """Tokens that prefill computed, those after a preemption included."""
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    checkpoints_skipped: int = 0
    """Wanted checkpoints for which no row could be had."""
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))
    """Times between two steps of a running stream, as the host had their results, by GAP_BOUNDS."""
    gap_seconds: float = 0.0
    """Their sum."""
    longest_gap_seconds: float = 0.0
    queue_seconds: Histogram = field(default_factory=_of_requests)
    """From a request's arrival to the first step that computes some of its prompt, copies from the host's memory
    included. This and the next three are observed when a request ends, each if it came so far; see
    runtime/request_times.py."""
    prompt_seconds: Histogram = field(default_factory=_of_requests)
    """From there to its first token, as the host had it."""
    decode_seconds: Histogram = field(default_factory=_of_requests)
    """From there to its last token."""
    inference_seconds: Histogram = field(default_factory=_of_requests)
    """Both together."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKEN_BOUNDS))
    """Of a step: tokens that prefill computed, and tokens that were emitted."""

    def count_gap(self, seconds: float) -> None:
        self.gap_counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        self.gap_seconds += seconds
        self.longest_gap_seconds = max(self.longest_gap_seconds, seconds)

    def count_finished(self, reason: FinishReason, usage: Usage) -> None:
        self.finished[reason.value] += 1
        self.drafted_tokens += usage.spec.num_drafted
        self.accepted_tokens += usage.spec.num_accepted

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gap_bounds": list(GAP_BOUNDS)}
