"""Who waits is served by turns, weighed by bytes, and what waits is bounded."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentspec.errors import OverloadedError
from agentspec.server.fair_queue import QUANTUM_BYTES, FairQueue, Flow

KIB = 1 << 10


def roomy() -> FairQueue:
    return FairQueue(max_bytes=1 << 40, max_owner_bytes=1 << 40)


def test_a_session_keeps_its_order_and_nothing_is_lost_or_done_twice() -> None:
    rng = random.Random(1)
    queue, waiting, done = roomy(), list[tuple[Flow, int]](), list[tuple[Flow, int]]()
    tickets = []
    for number in range(3000):
        if rng.random() < 0.5:
            flow = Flow(rng.choice("abc"), rng.choice("xyz"))
            tickets.append(queue.put((flow, number), flow, rng.choice((0, 10 * KIB, 300 * KIB))))
            waiting.append((flow, number))
        elif rng.random() < 0.2 and tickets:
            left = rng.choice(tickets)
            queue.remove(left)
            if left.job in waiting:
                waiting.remove(left.job)
        elif (ticket := queue.take()) is not None:
            assert ticket.job == next(job for job in waiting if job[0] == ticket.flow), f"seed 1, step {number}"
            waiting.remove(ticket.job)
            done.append(ticket.job)
        assert len(queue) == len(waiting)
        assert (queue.num_bytes == 0) == (not waiting)
    assert len(done) == len(set(done)) > 500


def test_an_owner_with_many_sessions_has_one_owners_share() -> None:
    queue = roomy()
    for number in range(50):
        for _ in range(20):
            queue.put(None, Flow("many", str(number)), QUANTUM_BYTES)
    for _ in range(100):
        queue.put(None, Flow("one", "x"), QUANTUM_BYTES)
    served = Counter(ticket.flow.owner for _ in range(150) if (ticket := queue.take()))
    assert served["one"] >= 70


def test_a_large_job_waits_for_many_small_ones_but_not_for_ever() -> None:
    """Others come all the time, each with a session of its own: what waits has its turn nevertheless."""
    queue = roomy()
    queue.put("large", Flow("", "large"), 50 * QUANTUM_BYTES)
    for number in range(10):
        queue.put("small", Flow("", f"first {number}"), 8 * KIB)
    number_before = 0
    while (ticket := queue.take()) is not None and ticket.job != "large":
        queue.put("small", Flow("", f"later {number_before}"), 8 * KIB)
        number_before += 1
    assert 300 <= number_before <= 600


def test_bytes_are_shared_not_jobs() -> None:
    queue, served = roomy(), Counter[str]()
    sizes = {"large": 400 * KIB, "small": 8 * KIB}
    for _ in range(2000):
        for name, size in sizes.items():
            queue.put(None, Flow(name), size)
        ticket = queue.take()
        assert ticket is not None
        served[ticket.flow.owner] += ticket.num_bytes
    assert served["large"] == pytest.approx(served["small"], rel=0.1)


def test_what_waits_is_bounded_for_each_owner_and_for_all() -> None:
    queue = FairQueue(max_bytes=1000 * KIB, max_owner_bytes=500 * KIB)
    huge = queue.put(None, Flow("a"), 5000 * KIB)
    with pytest.raises(OverloadedError, match="of this client") as refused:
        queue.put(None, Flow("a", "another session"), 1)
    assert refused.value.retry_after >= 1
    with pytest.raises(OverloadedError, match="of all clients"):
        queue.put(None, Flow("b"), 1)
    queue.remove(huge)
    for owner in "ab":
        queue.put(None, Flow(owner), 490 * KIB)
    with pytest.raises(OverloadedError, match="of all clients"):
        queue.put(None, Flow("c"), 100 * KIB)
    queue.put(None, Flow("a"), 0)
    queue.put(None, Flow("a"), 0)
    with pytest.raises(OverloadedError, match="of this client"):
        queue.put(None, Flow("a"), 0)  # even what is empty counts
