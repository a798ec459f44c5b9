"""Round robin over owners and their sessions, weighted by the cost of their items."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentspec.fair_queue import FairQueue, Flow

KIB = 1 << 10
QUANTUM = 64 * KIB


def test_sessions_keep_their_order_and_no_item_is_lost_or_repeated() -> None:
    rng = random.Random(1)
    queue, waiting, done = FairQueue[tuple[Flow, int]](QUANTUM), list[tuple[Flow, int]](), list[tuple[Flow, int]]()
    tickets = []
    for number in range(3000):
        if rng.random() < 0.5:
            flow = Flow(rng.choice("abc"), rng.choice("xyz"))
            tickets.append(queue.enqueue((flow, number), flow, rng.choice((1, 10 * KIB, 300 * KIB))))
            waiting.append((flow, number))
        elif rng.random() < 0.2 and tickets:
            left = rng.choice(tickets)
            queue.remove(left)
            if left.item in waiting:
                waiting.remove(left.item)
        elif (ticket := queue.dequeue()) is not None:
            assert ticket.item == next(job for job in waiting if job[0] == ticket.flow), f"seed 1, step {number}"
            waiting.remove(ticket.item)
            done.append(ticket.item)
        assert len(queue) == len(waiting)
        assert (queue.weight == 0) == (not waiting)
    assert len(done) == len(set(done)) > 500


def test_an_owner_with_many_sessions_gets_one_owners_share() -> None:
    queue = FairQueue[None](QUANTUM)
    for number in range(50):
        for _ in range(20):
            queue.enqueue(None, Flow("many", str(number)), QUANTUM)
    for _ in range(100):
        queue.enqueue(None, Flow("one", "x"), QUANTUM)
    served = Counter(ticket.flow.owner for _ in range(150) if (ticket := queue.dequeue()))
    assert served["one"] >= 70


def test_a_large_item_waits_for_many_small_ones_but_not_forever() -> None:
    """New sessions arrive all the time, but the large item is served nevertheless."""
    queue = FairQueue[str](QUANTUM)
    queue.enqueue("large", Flow("", "large"), 50 * QUANTUM)
    for number in range(10):
        queue.enqueue("small", Flow("", f"first {number}"), 8 * KIB)
    number_before = 0
    while (ticket := queue.dequeue()) is not None and ticket.item != "large":
        queue.enqueue("small", Flow("", f"later {number_before}"), 8 * KIB)
        number_before += 1
    assert 300 <= number_before <= 600


def test_shares_are_by_weight_not_by_number_of_items() -> None:
    queue, served = FairQueue[None](QUANTUM), Counter[str]()
    sizes = {"large": 400 * KIB, "small": 8 * KIB}
    for _ in range(2000):
        for name, size in sizes.items():
            queue.enqueue(None, Flow(name), size)
        ticket = queue.dequeue()
        assert ticket is not None
        served[ticket.flow.owner] += ticket.weight
    assert served["large"] == pytest.approx(served["small"], rel=0.1)


def test_items_of_equal_weight_alternate_by_owner_then_session() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.enqueue(f"m{number}", Flow("many", f"s{number % 3}"))
    for number in range(2):
        queue.enqueue(f"o{number}", Flow("one"))
    taken = [ticket.item for _ in range(12) if (ticket := queue.dequeue())]
    assert taken[:4] == ["m0", "o0", "m1", "o1"]
    assert sorted(taken[4:]) == sorted(f"m{number}" for number in range(2, 10))
    assert queue.dequeue() is None


def test_last_of_the_longest_belongs_to_the_owner_with_the_most_weight() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.enqueue(f"m{number}", Flow("many", "x" if number else "y"))
    queue.enqueue("o0", Flow("one"))
    last = queue.last_of_the_longest()
    assert last.item == "m3"
    queue.remove(last)
    queue.remove(last)  # already removed
    assert sorted(ticket.item for _ in range(5) if (ticket := queue.dequeue())) == ["m0", "m1", "m2", "o0"]
