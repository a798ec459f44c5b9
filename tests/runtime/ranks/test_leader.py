"""Leader and followers in one process: what the leader compares, and what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agentspec.cache.host_tier import CopyOrder, CopyOrders
from agentspec.errors import RankError
from agentspec.runtime.plan import SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.ranks.follower import Follower
from agentspec.runtime.ranks.leader import Channel, LedCopies, LedExecutor
from agentspec.runtime.ranks.ring import Ring

SLOTS = 3


class Counting:
    """An executor whose outcomes depend on the plans so far; the `wrong` plan's has another token in its last slot."""

    def __init__(self, wrong: int | None = None) -> None:
        self.plans: list[StepPlan] = []
        self.wrong = wrong
        self.num_prepared = 0
        self.deferred = 2

    def launch(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        return len(self.plans)

    def is_done(self, ticket: int) -> bool:
        return True

    def collect(self, ticket: int) -> StepOutcome:
        slots = self.plans[ticket - 1].decode_slots
        return StepOutcome(slots=[self._outcome(slot, ticket, slot == slots[-1]) for slot in slots])

    def _outcome(self, slot: int, number: int, is_last: bool) -> SlotOutcome:
        token = number + (is_last and number == self.wrong)
        return SlotOutcome(
            slot=slot,
            emitted=[token],
            num_drafted=0,
            num_accepted=0,
            stop=0,
            length=number,
            checkpoints=((1, 0), (2, 0)),
        )

    @property
    def has_deferred(self) -> bool:
        return self.deferred > 0

    def prepare(self) -> bool:
        self.deferred -= 1
        return True


class Copies:
    """A copier that carries out what `limit` allows."""

    def __init__(self) -> None:
        self.limit = 100
        self.orders: list[CopyOrders] = []

    def launch(self, orders: CopyOrders) -> None:
        self.orders.append(orders)

    def poll(self) -> tuple[int, int]:
        return (
            min(self.limit, sum(len(orders.to_host) for orders in self.orders)),
            min(self.limit, sum(len(orders.to_device) for orders in self.orders)),
        )


class Watch:
    def __init__(self) -> None:
        self.error: RankError | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def explain(self, error: Exception) -> RankError | None:
        return self.error

    def fail(self, error: RankError) -> None:
        self.error = error


@contextmanager
def ranks(
    *executors: Any, check_every: int = 1, copiers: tuple[Any, ...] = ()
) -> Iterator[tuple[Channel, Watch, list[Follower]]]:
    """A channel to followers that run on threads."""
    ring = Ring.create(num_readers=len(executors), num_slots=SLOTS)
    watch, ends = Watch(), threading.Event()
    followers = [
        Follower(ring, place, executor, copiers[place] if copiers else None, check_every=check_every)
        for place, executor in enumerate(executors)
    ]
    threads = [threading.Thread(target=follower.run, args=(ends.is_set,)) for follower in followers]
    for thread in threads:
        thread.start()
    try:
        yield Channel(ring, watch, check_every=check_every), watch, followers
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        ring.close()


def plan(number: int) -> StepPlan:
    return StepPlan(decode_slots=[number % SLOTS, (number + 1) % SLOTS], num_drafted=number % 3)


def run(channel: Channel, count: int, *, overlap: bool) -> list[StepOutcome]:
    led: LedExecutor = LedExecutor(Counting(), channel)
    outcomes, tickets = [], []
    for number in range(1, count + 1):
        tickets.append(led.launch(plan(number)))
        if len(tickets) > overlap:
            outcomes.append(led.collect(tickets.pop(0)))
    return outcomes + [led.collect(ticket) for ticket in tickets]


@pytest.mark.parametrize("check_every", [1, 3, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_followers_run_the_leaders_plans(check_every: int, overlap: bool) -> None:
    first, second = Counting(), Counting()
    with ranks(first, second, check_every=check_every) as (channel, watch, _):
        outcomes = run(channel, 200, overlap=overlap)
        assert len(outcomes) == 200
        assert watch.error is None
        assert channel.num_plans == 200
        until(lambda: len(first.plans) == len(second.plans) == 200)
    assert first.plans == second.plans == [plan(number) for number in range(1, 201)]


@pytest.mark.parametrize(
    ("check_every", "wrong", "named"),
    [(1, 17, "plan 17"), (8, 17, "one of the plans 17 to 24"), (8, 24, "one of the plans 17 to 24")],
)
def test_a_difference_is_found_and_named(check_every: int, wrong: int, named: str) -> None:
    with ranks(Counting(), Counting(wrong), check_every=check_every) as (channel, watch, _):
        with pytest.raises(RankError) as raised:
            run(channel, 200, overlap=True)
        slot = plan(wrong).decode_slots[-1]
        assert str(raised.value) == f"rank 2 and rank 0 differ in {named}: slot {slot} had another outcome"
        assert watch.error is raised.value


def test_no_outcome_of_a_plan_with_a_difference_is_used() -> None:
    with ranks(Counting(5)) as (channel, _, _):
        led = LedExecutor(Counting(), channel)
        for number in range(1, 5):
            led.collect(led.launch(plan(number)))
        ticket = led.launch(plan(5))
        with pytest.raises(RankError):
            led.collect(ticket)


def test_every_rank_prepares_as_often() -> None:
    follower, leader = Counting(), Counting()
    with ranks(follower) as (channel, _, _):
        led = LedExecutor(leader, channel)
        assert [led.prepare() for _ in range(4)] == [True, True, False, False]
        led.collect(led.launch(plan(1)))
        assert (leader.deferred, follower.deferred) == (0, 0)


def test_a_copy_is_complete_when_it_is_so_on_every_rank() -> None:
    mine, slow = Copies(), Copies()
    slow.limit = 0
    with ranks(Counting(), copiers=(slow,)) as (channel, _, _):
        led = LedCopies(mine, channel, lambda: None)
        order = CopyOrder(1, [(1, 2)], [])
        led.launch(CopyOrders([order], [order]))
        led.launch(CopyOrders([CopyOrder(2, [], [(3, 4)])]))
        until(lambda: len(slow.orders) == 2)
        assert mine.poll() == (2, 1)
        assert led.poll() == (0, 0)
        slow.limit = 1
        until(lambda: led.poll() == (1, 1))
        mine.limit, slow.limit = 1, 2
        until(lambda: slow.poll() == (2, 1))
        assert led.poll() == (1, 1)
    assert [(one.to_host, one.to_device) for one in slow.orders] == [
        (one.to_host, one.to_device) for one in mine.orders
    ]


def test_an_error_of_a_step_is_explained_by_the_rank_behind_it() -> None:
    class Failing(Counting):
        def launch(self, plan: StepPlan) -> int:
            raise RuntimeError("connection reset")

    with ranks(Counting()) as (channel, watch, _):
        led = LedExecutor(Failing(), channel)
        with pytest.raises(RuntimeError, match="connection reset"):
            led.launch(plan(1))
        cause = RankError("rank 1 was killed by SIGKILL")
        watch.explain = lambda error: cause  # type: ignore[method-assign]
        with pytest.raises(RankError) as raised:
            led.launch(plan(2))
        assert raised.value is cause
        watch.fail(cause)
        with pytest.raises(RankError):
            led.launch(plan(3))


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        pass
