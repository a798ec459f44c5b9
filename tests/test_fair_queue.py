"""Who waits is served by turns: owners, then their sessions, weighed by what their items cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentspec.fair_queue import FairQueue, Flow

KIB = 1 << 10
QUANTUM = 64 * KIB


def test_a_session_keeps_its_order_and_nothing_is_lost_or_done_twice() -> None:
    rng = random.Random(1)
    queue, waiting, done = FairQueue[tuple[Flow, int]](QUANTUM), list[tuple[Flow, int]](), list[tuple[Flow, int]]()
    tickets = []
    for number in range(3000):
        if rng.random() < 0.5:
            flow = Flow(rng.choice("abc"), rng.choice("xyz"))
            tickets.append(queue.put((flow, number), flow, rng.choice((1, 10 * KIB, 300 * KIB))))
            waiting.append((flow, number))
        elif rng.random() < 0.2 and tickets:
            left = rng.choice(tickets)
            queue.remove(left)
            if left.item in waiting:
                waiting.remove(left.item)
        elif (ticket := queue.take()) is not None:
            assert ticket.item == next(job for job in waiting if job[0] == ticket.flow), f"seed 1, step {number}"
            waiting.remove(ticket.item)
            done.append(ticket.item)
        assert len(queue) == len(waiting)
        assert (queue.weight == 0) == (not waiting)
    assert len(done) == len(set(done)) > 500


def test_an_owner_with_many_sessions_has_one_owners_share() -> None:
    queue = FairQueue[None](QUANTUM)
    for number in range(50):
        for _ in range(20):
            queue.put(None, Flow("many", str(number)), QUANTUM)
    for _ in range(100):
        queue.put(None, Flow("one", "x"), QUANTUM)
    served = Counter(ticket.flow.owner for _ in range(150) if (ticket := queue.take()))
    assert served["one"] >= 70


def test_a_large_job_waits_for_many_small_ones_but_not_for_ever() -> None:
    """Others come all the time, each with a session of its own: what waits has its turn nevertheless."""
    queue = FairQueue[str](QUANTUM)
    queue.put("large", Flow("", "large"), 50 * QUANTUM)
    for number in range(10):
        queue.put("small", Flow("", f"first {number}"), 8 * KIB)
    number_before = 0
    while (ticket := queue.take()) is not None and ticket.item != "large":
        queue.put("small", Flow("", f"later {number_before}"), 8 * KIB)
        number_before += 1
    assert 300 <= number_before <= 600


def test_bytes_are_shared_not_jobs() -> None:
    queue, served = FairQueue[None](QUANTUM), Counter[str]()
    sizes = {"large": 400 * KIB, "small": 8 * KIB}
    for _ in range(2000):
        for name, size in sizes.items():
            queue.put(None, Flow(name), size)
        ticket = queue.take()
        assert ticket is not None
        served[ticket.flow.owner] += ticket.weight
    assert served["large"] == pytest.approx(served["small"], rel=0.1)


def test_items_of_one_weight_go_round_owners_then_sessions() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.put(f"m{number}", Flow("many", f"s{number % 3}"))
    for number in range(2):
        queue.put(f"o{number}", Flow("one"))
    taken = [ticket.item for _ in range(12) if (ticket := queue.take())]
    assert taken[:4] == ["m0", "o0", "m1", "o1"]
    assert sorted(taken[4:]) == sorted(f"m{number}" for number in range(2, 10))
    assert queue.take() is None


def test_the_last_of_the_longest_is_of_the_owner_who_has_the_most() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.put(f"m{number}", Flow("many", "x" if number else "y"))
    queue.put("o0", Flow("one"))
    last = queue.last_of_the_longest()
    assert last.item == "m3"
    queue.remove(last)
    queue.remove(last)  # which is gone already
    assert sorted(ticket.item for _ in range(5) if (ticket := queue.take())) == ["m0", "m1", "m2", "o0"]
