"""A follower's loop: take each message of the leader, do on the own part of the model what the leader does on its own,
and report.

The leader's scheduler decides everything; a follower reads no clock and measures nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from agentspec.cache.host_tier import CopyOrders
from agentspec.runtime.plan import Executor, StepOutcome, StepPlan
from agentspec.runtime.ranks.messages import decode
from agentspec.runtime.ranks.ring import Reader, Report, Ring, pauses
from agentspec.runtime.ranks.sums import SlotSums
from agentspec.runtime.step_loop import Copier

_DONE, _TO_HOST, _TO_DEVICE = (Report._fields.index(name) for name in ("done", "to_host", "to_device"))


class RankExecutor(Executor, Protocol):
    """An executor whose plans every rank runs."""

    def is_done(self, ticket: Any) -> bool:
        """Whether `collect` would not wait for the device."""

    def prepare(self) -> bool:
        """See StepLoop.prepare."""

    @property
    def has_deferred(self) -> bool:
        """Whether `prepare` would do anything."""


class Follower:
    """Runs the leader's messages."""

    def __init__(
        self,
        ring: Ring,
        reader: int,
        executor: RankExecutor,
        copier: Copier | None,
        *,
        check_every: int,
        watch: Callable[[int, StepOutcome], None] = lambda number, outcome: None,
    ) -> None:
        """reader: this rank's place among the followers, from 0. check_every: plans between two check entries. watch:
        told each plan's number and outcome before it is summed."""
        self._ring, self._index = ring, reader
        self._messages = Reader(ring, reader)
        self._executor, self._copier = executor, copier
        self._check_every = check_every
        self._sums = SlotSums(ring.num_slots)
        self._num_done = 0
        self._running: deque[Any] = deque()
        self._watch = watch

    def run(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Follow the leader until `is_ended`; without it, until the process ends."""
        while not is_ended():
            for _ in pauses():
                if self.advance() or is_ended():
                    break

    def advance(self) -> bool:
        """Do what there is to do now; False: nothing."""
        message = self._messages.poll()
        if isinstance(message, bytes):
            self._take(message)
        self._poll_copies()
        while self._running and self._executor.is_done(self._running[0]):
            self._collect()
        return message is not None

    def _take(self, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, StepPlan):
            self._running.append(self._executor.launch(message))
        elif isinstance(message, CopyOrders):
            assert self._copier is not None
            self._copier.launch(message)
        else:
            self._executor.prepare()

    def _collect(self) -> None:
        outcome = self._executor.collect(self._running.popleft())
        number = self._num_done + 1
        self._watch(number, outcome)
        self._sums.add(outcome)
        if number % self._check_every == 0:
            self._ring.put_check(self._index, number // self._check_every, number, self._sums.copy())
        self._num_done = number
        self._ring.put(self._index, _DONE, number)

    def _poll_copies(self) -> None:
        if self._copier is not None:
            to_host, to_device = self._copier.poll()
            self._ring.put(self._index, _TO_HOST, to_host)
            self._ring.put(self._index, _TO_DEVICE, to_device)
