"""The loop: launch the next step, then read the results of the one before.

With overlap the host is one step behind: while the device runs step n+1, the host reads step n, publishes, streams and
releases. Without it each step is read before the next is planned. Both give the same tokens.

Owns the order of things; the scheduler owns the decisions. Single-threaded: everything here runs on the
engine's one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from agentspec.cache.host_tier import CopyOrders
from agentspec.mtp.token_counts import TokenCounts
from agentspec.runtime.flight import Flight
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.plan import Executor, StepOutcome
from agentspec.runtime.request import Request
from agentspec.runtime.request_times import RequestTimes
from agentspec.runtime.scheduler import Scheduler
from agentspec.wire import Event, TokensEvent

_PREPARE_EVERY = 128
"""Steps of a loop that is never idle between two pieces of what its start has left."""


class DepthPolicy(Protocol):
    """Chooses how many drafts a step verifies; mtp/depth_policy.py has the implementations."""

    def choose(self, batch_size: int) -> int: ...

    def observe(self, *, num_drafted: int, slots: list[tuple[int, int]], seconds: float) -> None:
        """What a decode step did: per slot (drafts offered, drafts accepted), and the device time of the step."""
        ...


class Copier(Protocol):
    """Carries out copy orders beside the steps; runtime/host_copies.py has the real one."""

    def launch(self, orders: CopyOrders) -> None:
        """Start the orders: after all that was launched before. Must not wait for the device."""
        ...

    def poll(self) -> tuple[int, int]:
        """Orders that have been carried out: all up to these numbers, to the host and to the device."""
        ...


class StepLoop:
    """Drives one scheduler and one executor."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        depth_policy: DepthPolicy,
        metrics: EngineMetrics,
        overlap: bool,
        token_counts: TokenCounts | None = None,
        copier: Copier | None = None,
        prepare: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """token_counts: where to count what is served; None: nowhere. copier: None: the cache has no host tier.
        prepare: see the method; None: the start leaves nothing. clock: seconds, for metrics alone."""
        self.scheduler = scheduler
        self.metrics = metrics
        self.executor = executor
        """May be wrapped before the first step: by a clock, say."""
        self._depth_policy = depth_policy
        self._overlap = overlap
        self._token_counts = token_counts
        self._copier = copier
        self._prepare = prepare
        self._num_launched = 0
        self._clock = clock
        self._times = RequestTimes(metrics)
        self._in_flight: deque[tuple[Flight, Any]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)
        self._times.arrive(request.request_id, self._clock())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        """End every request; their events come with the next steps."""
        self.scheduler.abort_all()

    def prepare(self) -> bool:
        """Do a piece, of some 50 ms, of what the start has left for a quiet moment. Returns whether there was one."""
        return self._prepare is not None and self._prepare()

    def run_once(self) -> list[Event]:
        """Plan and launch one step, read what is due, and return the events in order."""
        if self._copier is not None:
            self.scheduler.copied(*self._copier.poll())
        flight = self.scheduler.plan(self._depth_policy.choose)
        events = self.scheduler.drain_events()
        if flight.copies:
            assert self._copier is not None
            self._copier.launch(flight.copies)
        launched = not flight.plan.is_empty
        if flight.plan.chunks:
            self._times.begin((chunk.request_id for chunk in flight.plan.chunks), self._clock())
        if launched:
            self._in_flight.append((flight, self.executor.launch(flight.plan)))
            self._num_launched += 1
            if self._num_launched % _PREPARE_EVERY == 0:
                self.prepare()
        behind = 1 if launched and self._overlap else 0
        while len(self._in_flight) > behind:
            events.extend(self._collect())
        if events:
            self._times.note(events, self._clock())
        return events

    def _collect(self) -> list[Event]:
        flight, ticket = self._in_flight.popleft()
        outcome = self.executor.collect(ticket)
        self._observe(flight, outcome)
        events = self.scheduler.apply(flight, outcome)
        num_tokens = sum(len(chunk.token_ids) for chunk in flight.plan.chunks)
        num_tokens += sum(len(event.token_ids) for event in events if isinstance(event, TokensEvent))
        if num_tokens:
            self.metrics.step_tokens.observe(num_tokens)
        if self._token_counts is not None:
            for event in events:
                if isinstance(event, TokensEvent):
                    self._token_counts.add_tokens(event.token_ids)
        return events

    def _observe(self, flight: Flight, outcome: StepOutcome) -> None:
        verified = set(flight.plan.decode_slots)
        offered = [
            (slot.num_drafted, slot.num_accepted) for slot in outcome.slots if slot.emitted and slot.slot in verified
        ]
        if offered:
            seconds = 0.0 if outcome.rode else outcome.decode_seconds  # what is left of a step says nothing of its k
            self._depth_policy.observe(num_drafted=flight.plan.num_drafted, slots=offered, seconds=seconds)
        now = self._clock()
        for slot in outcome.slots:
            request = flight.occupants[slot.slot]
            if slot.emitted and request.stepped_at is not None:
                self.metrics.count_gap(now - request.stepped_at)
            if slot.emitted:
                request.stepped_at = now
