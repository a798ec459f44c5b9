"""The leader's side: an executor and a copier that tell the followers first, and compare what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from agentspec.cache.host_tier import CopyOrders
from agentspec.errors import RankError
from agentspec.runtime.plan import StepOutcome, StepPlan
from agentspec.runtime.ranks.follower import RankExecutor
from agentspec.runtime.ranks.messages import Prepare, encode
from agentspec.runtime.ranks.ring import NUM_CHECKS, Ring, Writer, pauses
from agentspec.runtime.ranks.sums import SlotSums, first_difference
from agentspec.runtime.step_loop import Copier


class Watch(Protocol):
    """Knows how the other ranks' processes are; engine/ranks.py has the real one."""

    def check(self) -> None:
        """Raise RankError if a rank has died or is stuck."""

    def explain(self, error: Exception) -> RankError | None:
        """The RankError behind an error of a step on this rank, for example of a sum whose peer has died; None: it has
        another cause. May wait a little for it to show."""

    def fail(self, error: RankError) -> None:
        """End all ranks because of this error."""


class Channel:
    """The followers, as one: sends messages in order, and counts plans."""

    def __init__(self, ring: Ring, watch: Watch, *, check_every: int) -> None:
        """check_every: plans between two comparisons of all ranks' outcomes. 1: a step's outcome is used only after
        all ranks have had the same."""
        self.ring, self.check_every = ring, check_every
        self._watch = watch
        self._writer = Writer(ring, watch.check)
        self._num_plans = 0
        self._sums = SlotSums(ring.num_slots)
        self._num_summed = 0
        self._waiting: deque[tuple[int, Any]] = deque()
        """(number, sums) of the leader's check entries that not all followers have reached."""

    @property
    def num_plans(self) -> int:
        """Sent so far."""
        return self._num_plans

    def send(self, message: StepPlan | CopyOrders | Prepare) -> None:
        """Raises RankError if a rank has died or is stuck."""
        self._watch.check()
        self._writer.send(encode(message))
        self._num_plans += isinstance(message, StepPlan)

    def compare(self, outcome: StepOutcome) -> None:
        """Add the leader's next outcome, and compare it with the followers' as far as they are. Raises RankError: that
        names rank, plan and slot, or if a rank has died or is stuck. Then the outcome may be wrong, since sums that
        wait for a dead rank are left out."""
        self._watch.check()
        self._sums.add(outcome)
        self._num_summed += 1
        if self._num_summed % self.check_every == 0:
            self._waiting.append((self._num_summed, self._sums.copy()))
        # A follower far ahead of another one must not overwrite what hasn't been compared.
        most_waiting = 1 if self.check_every == 1 else NUM_CHECKS // 2
        for _ in pauses():
            while self._waiting and self._least_done() >= self._waiting[0][0]:
                self._compare(*self._waiting.popleft())
            if len(self._waiting) < most_waiting:
                return
            self._watch.check()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context for work in which this rank meets the others: an error that another rank has caused becomes that
        RankError."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            cause = self._watch.explain(error)
            if cause is None:
                raise
            raise cause from error

    def least_copied(self) -> tuple[int, int]:
        """Orders that every follower has carried out: (to the host, to the device)."""
        reports = [self.ring.report(reader) for reader in range(self.ring.num_readers)]
        return min(report.to_host for report in reports), min(report.to_device for report in reports)

    def _least_done(self) -> int:
        return min(self.ring.report(reader).done for reader in range(self.ring.num_readers))

    def _compare(self, number: int, mine: Any) -> None:
        for reader in range(self.ring.num_readers):
            theirs, sums = self.ring.check(reader, number // self.check_every)
            assert theirs == number, f"rank {reader + 1} has overwritten check {number} with {theirs}"
            slot = first_difference(mine, sums)
            if slot is not None:
                self._fail(reader + 1, number, slot)

    def _fail(self, rank: int, number: int, slot: int) -> NoReturn:
        first = number - self.check_every + 1
        plans = f"plan {number}" if first == number else f"one of the plans {first} to {number}"
        error = RankError(f"rank {rank} and rank 0 differ in {plans}: slot {slot} had another outcome")
        self._watch.fail(error)
        raise error


class LedExecutor:
    """A plan.Executor whose plans all ranks run."""

    def __init__(self, executor: RankExecutor, channel: Channel) -> None:
        self.own = executor
        """Of this rank."""
        self._channel = channel

    def launch(self, plan: StepPlan) -> Any:
        """Raises RankError if a rank has died or is stuck."""
        self._channel.send(plan)
        with self._channel.explained():
            return self.own.launch(plan)

    def collect(self, ticket: Any) -> StepOutcome:
        """Raises RankError also if ranks differ."""
        with self._channel.explained():
            outcome = self.own.collect(ticket)
        self._channel.compare(outcome)
        return outcome

    def prepare(self) -> bool:
        """See StepLoop.prepare: every rank does its piece."""
        if not self.own.has_deferred:
            return False
        self._channel.send(Prepare())
        with self._channel.explained():
            return self.own.prepare()


class LedCopies:
    """A step_loop.Copier whose orders all ranks carry out. An order is complete when it is so on every rank."""

    def __init__(self, copier: Copier, channel: Channel, close: Callable[[], None]) -> None:
        self._copier, self._channel = copier, channel
        self.close = close

    def launch(self, orders: CopyOrders) -> None:
        self._channel.send(orders)
        self._copier.launch(orders)

    def poll(self) -> tuple[int, int]:
        to_host, to_device = self._copier.poll()
        least_to_host, least_to_device = self._channel.least_copied()
        return min(to_host, least_to_host), min(to_device, least_to_device)
