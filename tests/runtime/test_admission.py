"""Admission by session: live sessions go ahead, new ones wait until their working set fits."""

from __future__ import annotations

from agentspec.runtime.admission import SessionGate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(budget: int = 100, hold: float = 5.0) -> tuple[SessionGate, Clock]:
    clock = Clock()
    return SessionGate(budget_bytes=budget, hold_seconds=hold, clock=clock), clock


def test_new_sessions_enter_while_they_fit() -> None:
    door, _ = gate()
    for name in ("a", "b"):
        assert door.allows(name, 40)
        door.enter(name, 40)
    assert not door.allows("c", 40)
    assert door.allows("c", 20)


def test_a_live_session_always_goes_ahead() -> None:
    door, _ = gate()
    door.enter("a", 90)
    door.leave("a", 90)
    assert door.allows("a", 1_000)
    assert not door.allows("b", 20)


def test_a_session_stays_live_for_the_hold_after_its_turn() -> None:
    door, clock = gate(hold=5.0)
    door.enter("a", 90)
    door.leave("a", 90)
    clock.now = 4.9
    assert not door.allows("b", 20)
    clock.now = 5.0
    assert door.allows("b", 20)
    assert door.num_live == 0


def test_a_running_session_never_expires() -> None:
    door, clock = gate()
    door.enter("a", 90)
    clock.now = 1e6
    assert not door.allows("b", 20)


def test_footprint_follows_the_last_turn() -> None:
    door, _ = gate()
    door.enter("a", 90)
    door.leave("a", 30)
    assert door.allows("b", 70)


def test_requests_without_a_session_leave_no_trace() -> None:
    door, _ = gate()
    door.enter(None, 90)
    door.leave(None, 90)
    assert door.allows("a", 100)
    assert door.allows(None, 100)
    door.enter("a", 100)
    assert not door.allows(None, 1)
