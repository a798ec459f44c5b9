"""Counters of the whole engine, shown by `engine.stats()` and `/stats`: plain numbers, written by the scheduler and the
step loop."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from agentspec.types import FinishReason, Histogram
from agentspec.wire import Usage

GAP_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
"""Seconds: inclusive upper bounds of the gap histogram's groups; a last group counts longer gaps."""

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
"""Seconds, for parts of a request: vLLM's bounds, and some finer ones below."""

STEP_TOKEN_BOUNDS = (1.0, *(2.0**power for power in range(3, 15)))


_of_requests = partial(Histogram, REQUEST_BOUNDS)


@dataclass(slots=True)
class EngineMetrics:
    """All counts are since the engine started."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    preemptions: int = 0
    steps: int = 0
    """Launched plans."""
    first_slots: int = 0
    """First steps, counted per slot: each gives the token after a prompt."""
    decode_steps: int = 0
    """Launched plans with at least one decoding slot."""
    decode_slots: int = 0
    """Slots, summed over all decode steps."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache, counted at first admission."""
    prefill_tokens: int = 0
    """Tokens that prefill computed, including those computed again after a preemption."""
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    checkpoints_skipped: int = 0
    """Checkpoints left out because no row was free."""
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))
    """Times between two steps of a running stream, when the host had their results, by GAP_BOUNDS."""
    gap_seconds: float = 0.0
    """Their sum."""
    longest_gap_seconds: float = 0.0
    queue_seconds: Histogram = field(default_factory=_of_requests)
    """From a request's arrival to the first step that computes some of its prompt, including copies from host memory.
    This and the next three are observed when a request ends, each if the request got that far; see
    runtime/request_times.py."""
    prompt_seconds: Histogram = field(default_factory=_of_requests)
    """From that step to the first token, when the host had it."""
    decode_seconds: Histogram = field(default_factory=_of_requests)
    """From the first token to the last."""
    inference_seconds: Histogram = field(default_factory=_of_requests)
    """Prompt and decode together."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKEN_BOUNDS))
    """Tokens per step: computed by prefill, plus emitted."""

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
