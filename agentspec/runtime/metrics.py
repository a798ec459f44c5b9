"""Counters of the whole engine, as `engine.stats()` and `/stats` show them: plain integers, written by the scheduler and the step loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from agentspec.types import FinishReason
from agentspec.wire import Usage


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

    def count_finished(self, reason: FinishReason, usage: Usage) -> None:
        self.finished[reason.value] += 1
        self.drafted_tokens += usage.spec.num_drafted
        self.accepted_tokens += usage.spec.num_accepted

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
