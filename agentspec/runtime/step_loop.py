"""The step loop: launch the next step, then read the results of the previous one.

With overlap the host is one step behind: while the device runs step n+1, the host reads step n, publishes, streams and
releases. Without overlap each step is read before the next is planned. Both give the same tokens.

Owns the order of these actions; the scheduler makes the decisions. Single-threaded: everything runs on the engine's
thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agentspec.cache.host_tier import CopyOrders, HostMemory
from agentspec.cache.hybrid_cache import HybridCache
from agentspec.mtp.token_counts import TokenCounts
from agentspec.runtime.admission import SessionGate, rows_of_sessions
from agentspec.runtime.fairness import FairShare
from agentspec.runtime.flight import Flight
from agentspec.runtime.memory_plan import running_rows
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.pace import Pace
from agentspec.runtime.plan import Executor, StepOutcome
from agentspec.runtime.request import Request
from agentspec.runtime.request_times import RequestTimes
from agentspec.runtime.scheduler import Scheduler
from agentspec.types import ModelSpec, SlotResult, WindowShape
from agentspec.wire import Event, TokensEvent

_PREPARE_EVERY = 128
"""While the loop is never idle, deferred start-up work runs every this many steps."""


class WindowPolicy(Protocol):
    """Chooses which drafts a step verifies; implementations are in mtp/window_policy.py."""

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        """num_matched: slots that had copies in the last window that the host knows of."""

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        """Learn from a decode step: the result of each slot, and the device time of the step."""


class Copier(Protocol):
    """Carries out copy orders beside the steps; runtime/host_copies.py has the real one."""

    def launch(self, orders: CopyOrders) -> None:
        """Start the orders, after all work launched before. Must not wait for the device."""

    def poll(self) -> tuple[int, int]:
        """Completed orders, to the host and to the device: all up to these numbers."""


class StepLoop:
    """Drives one scheduler and one executor."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        window_policy: WindowPolicy,
        metrics: EngineMetrics,
        overlap: bool,
        token_counts: TokenCounts | None = None,
        copier: Copier | None = None,
        prepare: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """token_counts: counts the served tokens; None: they are not counted. copier: None: the cache has no host tier.
        prepare: see the method; None: the start defers nothing. clock: seconds, for metrics only."""
        self.scheduler = scheduler
        self.metrics = metrics
        self.executor = executor
        """May be wrapped before the first step, for example to measure time."""
        self._window_policy = window_policy
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
        self.scheduler.add_request(request)
        self._times.add_request(request.request_id, self._clock())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        """End every request; their last events come with the next steps."""
        self.scheduler.abort_all()

    def prepare(self) -> bool:
        """Do one piece, about 50 ms, of what the start has deferred. Returns whether there was one."""
        return self._prepare is not None and self._prepare()

    def run_once(self) -> list[Event]:
        """Plan and launch one step, read the results that are due, and return the events in order."""
        if self._copier is not None:
            self.scheduler.copied(*self._copier.poll())
        flight = self.scheduler.plan(self._window_policy.choose)
        events = self.scheduler.drain_events()
        if flight.copies:
            assert self._copier is not None
            self._copier.launch(flight.copies)
        launched = not flight.plan.is_empty
        if flight.plan.chunks:
            self._times.begin_prompts((chunk.request_id for chunk in flight.plan.chunks), self._clock())
        if launched:
            self._in_flight.append((flight, self.executor.launch(flight.plan)))
            self._num_launched += 1
            if self._num_launched % _PREPARE_EVERY == 0:
                self.prepare()
        behind = 1 if launched and self._overlap else 0
        while len(self._in_flight) > behind:
            events.extend(self._collect())
        if events:
            self._times.record_events(events, self._clock())
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
            SlotResult(
                offered=slot.num_drafted,
                offered_copies=max(0, slot.num_drafted - flight.shape.num_mtp),
                accepted=slot.num_accepted,
                matched=flight.occupants[slot.slot].matched,
                was_matched=slot.slot in flight.matched,
            )
            for slot in outcome.slots
            if slot.emitted and slot.slot in verified
        ]
        if offered:
            seconds = (
                0.0 if outcome.rode else outcome.decode_seconds
            )  # the rest of the step doesn't depend on k alone; don't learn from it
            self._window_policy.observe(shape=flight.shape, slots=offered, seconds=seconds)
        now = self._clock()
        for slot in outcome.slots:
            request = flight.occupants[slot.slot]
            if slot.emitted and request.stepped_at is not None:
                self.metrics.count_gap(now - request.stepped_at)
            if slot.emitted:
                request.stepped_at = now


def new_step_loop(
    *,
    spec: ModelSpec,
    num_rows: int,
    num_pages: int,
    cache_bytes: int | None = None,
    host_memory: HostMemory | None = None,
    prefix_cache: bool = True,
    max_running: int,
    max_draft_tokens: int,
    has_ring: bool = False,
    pace: Pace,
    hold_seconds: float,
    fair_cost: float,
    executor: Executor,
    window_policy: WindowPolicy,
    overlap: bool,
    token_counts: TokenCounts | None = None,
    copier: Copier | None = None,
    prepare: Callable[[], bool] | None = None,
    clock: Callable[[], float],
) -> StepLoop:
    """A step loop with its scheduler and its cache.

    num_rows, num_pages: of the device's pools, with reserved ones. cache_bytes: bound on rows and pages together; None:
    each pool is its own bound. has_ring: slots have rings. fair_cost: see FairShare. clock: seconds. The rest as for
    StepLoop."""
    own_rows = running_rows(max_running, max_draft_tokens, has_ring=has_ring)
    row_bytes, page_bytes = spec.row_bytes, spec.page_bytes
    cache = HybridCache(
        num_rows=num_rows,
        num_pages=num_pages,
        row_bytes=row_bytes,
        page_bytes=page_bytes,
        block_tokens=spec.block_tokens,
        enabled=prefix_cache,
        budget_bytes=cache_bytes,
        host_memory=host_memory,
        clock=clock,
    )
    gate = SessionGate(
        row_bytes=rows_of_sessions(num_rows - own_rows, max_running) * row_bytes,
        page_bytes=(num_pages - 1) * page_bytes,
        budget_bytes=None if cache_bytes is None else cache_bytes - own_rows * row_bytes,
        hold_seconds=hold_seconds,
        clock=clock,
    )
    metrics = EngineMetrics()
    scheduler = Scheduler(
        cache=cache,
        gate=gate,
        fair=FairShare(clock, cost=fair_cost),
        metrics=metrics,
        max_running=max_running,
        max_draft_tokens=max_draft_tokens,
        has_ring=has_ring,
        pace=pace,
        block_tokens=spec.block_tokens,
        row_bytes=row_bytes,
        page_bytes=page_bytes,
        hold_seconds=hold_seconds,
    )
    return StepLoop(
        scheduler=scheduler,
        executor=executor,
        window_policy=window_policy,
        metrics=metrics,
        overlap=overlap,
        token_counts=token_counts,
        copier=copier,
        prepare=prepare,
        clock=clock,
    )
