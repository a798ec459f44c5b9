"""Admission by session: live sessions go first, new ones wait until their working set fits."""

from __future__ import annotations

from agentspec.runtime.admission import SessionGate, WorkingSet, rows_of_sessions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(rows: int = 50, pages: int = 100, budget: int | None = None, hold: float = 5.0) -> tuple[SessionGate, Clock]:
    clock = Clock()
    return SessionGate(row_bytes=rows, page_bytes=pages, budget_bytes=budget, hold_seconds=hold, clock=clock), clock


def need(pages: int, rows: int = 10) -> WorkingSet:
    return WorkingSet(row_bytes=rows, page_bytes=pages)


def run(door: SessionGate, name: str, pages: int, rows: int = 10) -> bool:
    door.arrive(name)
    if not door.allows(name, need(pages, rows)):
        return False
    door.enter(name)
    return True


def test_sessions_enter_in_order_of_arrival_while_they_fit() -> None:
    door, _ = gate()
    assert run(door, "a", 40)
    assert run(door, "b", 40)
    assert not run(door, "c", 40)
    assert not run(door, "d", 20), "d would take the memory that c waits for"


def test_free_bytes_of_one_pool_do_not_count_for_the_other() -> None:
    door, _ = gate(rows=50, pages=100)
    assert run(door, "a", 60)
    assert not run(door, "b", 60), "120 of 150 bytes, but the pages have 100"
    door, _ = gate(rows=50, pages=100)
    assert run(door, "a", 10, rows=30)
    assert not run(door, "b", 10, rows=30), "80 of 150 bytes, but the rows have 50"


def test_budget_bounds_both_pools_together() -> None:
    door, _ = gate(rows=100, pages=100, budget=100)
    assert run(door, "a", 40, rows=10)
    assert not run(door, "b", 41, rows=10)
    assert door.allows("b", need(40, rows=10)) is False, "a refused session keeps its need"
    door.withdraw("b")
    assert run(door, "c", 40, rows=10)


def test_rows_of_sessions_is_at_least_one_per_slot() -> None:
    assert [rows_of_sessions(num_rows, max_running=4) for num_rows in (-3, 3, 4, 9)] == [4, 4, 4, 9]


def test_oldest_session_is_always_allowed() -> None:
    door, _ = gate()
    assert run(door, "a", 1_000, rows=1_000)


def test_next_session_is_the_oldest_waiting_one() -> None:
    door, _ = gate()
    assert run(door, "a", 90)
    assert not run(door, "b", 90)
    assert not run(door, "c", 90)
    assert door.is_next("b")
    door.leave("a", need(90), waits_again=False)
    door.arrive("a")
    assert [name for name in "abc" if door.is_next(name)] == ["a"]


def test_growing_session_makes_the_youngest_wait() -> None:
    door, _ = gate()
    assert run(door, "a", 40)
    assert run(door, "b", 40)
    door.leave("b", need(40), waits_again=False)
    door.leave("a", need(70), waits_again=False)
    assert not run(door, "b", 10), "b had 40 bytes and needs them again"
    assert run(door, "a", 10)


def test_session_stays_live_for_hold_seconds_after_its_turn() -> None:
    door, clock = gate(hold=5.0)
    assert run(door, "a", 90)
    door.leave("a", need(90), waits_again=False)
    clock.now = 4.9
    assert not run(door, "b", 20)
    clock.now = 5.0
    assert door.allows("b", need(20))
    assert door.num_live == 1


def test_session_that_cannot_come_back_is_dropped_at_once() -> None:
    door, _ = gate()
    assert run(door, "a", 90)
    door.leave("a", need(90), waits_again=True, comes_back=False)
    assert door.num_live == 1
    door.enter("a")
    door.leave("a", need(90), waits_again=False, comes_back=False)
    assert door.num_live == 0
    assert run(door, "b", 90)


def test_running_and_waiting_sessions_never_expire() -> None:
    door, clock = gate()
    assert run(door, "a", 90)
    assert not run(door, "b", 20)
    clock.now = 1e6
    assert door.num_live == 2
    assert not door.allows("b", need(20))


def test_retracted_turn_keeps_its_sessions_place() -> None:
    door, clock = gate()
    assert run(door, "a", 50)
    assert run(door, "b", 40)
    door.leave("a", need(60), waits_again=True)
    clock.now = 1e6
    assert door.allows("a", need(10))
    assert door.num_live == 2


def test_withdrawn_turn_is_not_counted() -> None:
    door, _ = gate()
    assert run(door, "a", 60)
    assert not run(door, "b", 60)
    door.withdraw("b")
    assert run(door, "c", 40)


def returning(door: SessionGate, clock: Clock, name: str, pages: int, away: float) -> None:
    """A session with several turns, `away` seconds between each two."""
    for turn in range(33):
        clock.now += away if turn else 0.0
        assert run(door, name, pages)
        door.leave(name, need(pages), waits_again=False)


def test_session_away_longer_than_any_recent_one_blocks_no_other() -> None:
    door, clock = gate(hold=5.0)
    returning(door, clock, "a", 90, away=0.01)
    clock.now += 0.2
    assert not run(door, "b", 20)
    clock.now += 0.06
    assert door.allows("b", need(20))
    assert door.num_live == 2
    door.arrive("a")
    assert door.is_next("a"), "it came back after all, and is older"
    assert not door.allows("b", need(20))


def test_with_slow_tools_session_is_held_for_hold_seconds() -> None:
    door, clock = gate(hold=5.0)
    returning(door, clock, "a", 90, away=0.01)
    clock.now += 2.0
    assert run(door, "a", 90)
    door.leave("a", need(90), waits_again=False)
    clock.now += 4.9
    assert not run(door, "b", 20)
    clock.now += 0.2
    assert door.allows("b", need(20))


def test_return_after_the_hold_restores_the_full_patience() -> None:
    door, clock = gate(hold=5.0)
    returning(door, clock, "a", 90, away=0.01)
    clock.now += 7.0
    assert door.num_live == 0
    assert run(door, "a", 90)
    door.leave("a", need(90), waits_again=False)
    clock.now += 4.9
    assert not run(door, "b", 20)
