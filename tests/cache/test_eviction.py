"""Eviction order: LRU over checkpoints, GRID first, held last, locked never; and one budget in bytes for rows and
pages."""

from __future__ import annotations

import pytest

from agentspec.types import CheckpointKind
from tests.cache.world import PAGE_BYTES, ROW_BYTES, World

SYSTEM, USER, TURN, GRID = CheckpointKind.SYSTEM, CheckpointKind.USER, CheckpointKind.TURN, CheckpointKind.GRID


def story(number: int, count: int = 9) -> list[int]:
    return [number * 1000 + index for index in range(count)]


def stories(world: World) -> list[int]:
    """Numbers of the stories that have a checkpoint."""
    return sorted({key[1][0] // 1000 for key in world.live()})


def test_least_recently_used_is_evicted_first() -> None:
    world = World(rows=3)
    for number in (1, 2, 3):
        world.turn(story(number))
    assert world.turn(story(1)) == 8  # a use
    world.turn(story(4))
    assert stories(world) == [1, 3, 4]
    world.turn(story(5))
    assert stories(world) == [1, 4, 5]


def test_republishing_counts_as_use() -> None:
    world = World(rows=3)
    world.turn(story(1))
    world.turn(story(2))
    run = world.start(story(1), limit=0)
    assert world.compute(run, 8)
    assert not world.publish(run)
    world.release(run)
    world.turn(story(3))
    world.turn(story(4))
    assert stories(world) == [1, 3, 4]


def test_grid_checkpoints_are_evicted_first() -> None:
    world = World(rows=3)
    world.turn(story(1))
    world.turn(story(2), kinds={8: GRID})
    world.turn(story(3))
    world.turn(story(4))
    assert stories(world) == [1, 3, 4]


def test_grid_checkpoint_republished_as_system_is_requeued() -> None:
    world = World(rows=3)
    world.turn(story(1), kinds={8: GRID})
    world.turn(story(2), kinds={8: GRID})
    run = world.start(story(1), limit=0)
    assert world.compute(run, 8)
    assert not world.publish(run, SYSTEM)
    world.release(run)
    world.turn(story(3))
    world.turn(story(4))
    assert stories(world) == [1, 3, 4]


def test_abandoned_turn_is_evicted_first() -> None:
    world = World(rows=4)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.turn(story(2))
    world.turn(story(3), session="a")  # rendered anew: story 1 has no future
    world.turn(story(4))
    assert stories(world) == [1, 2, 3, 4]
    world.turn(story(2, 5))  # touches nothing of story 1
    world.turn(story(5))
    assert 1 not in stories(world)


def test_continued_turn_keeps_eviction_order() -> None:
    world = World(rows=4)
    world.turn(story(1, 9), session="a", hold_seconds=5.0)
    assert world.turn(story(1, 11), session="a") == 8
    world.turn(story(2), kinds={8: GRID})
    world.turn(story(3))
    world.turn(story(4))
    world.turn(story(5))
    assert 1 in stories(world), "the GRID checkpoint goes first"


def test_resumed_turn_is_no_longer_abandoned() -> None:
    world = World(rows=3)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.turn(story(2), session="a")
    assert world.turn(story(1)) == 8
    world.turn(story(3))
    world.turn(story(4))
    assert stories(world) == [1, 3, 4]


def test_page_eviction_skips_checkpoints_that_free_no_pages() -> None:
    world = World(pages=10)
    world.turn(story(1, 25), kinds={8: SYSTEM, 24: TURN})
    run = world.start(story(2, 24))
    assert world.compute(run, 20)
    assert world.lengths() == [8], "the SYSTEM row is older, but its pages are needed at 24 as well"


def test_locked_checkpoints_are_never_evicted() -> None:
    world = World(rows=3, pages=6)
    world.turn(story(1))
    reader = world.start(story(1))
    run = world.start(story(2, 30))
    assert world.compute(run, 16)
    assert world.take_rows(run, 1) is not None
    assert world.take_rows(run, 1) is None
    assert not world.compute(run, 20)
    assert (world.cache.available_rows(), world.cache.available_pages()) == (0, 0)
    world.release(reader)
    assert (world.cache.available_rows(), world.cache.available_pages()) == (1, 2)
    assert world.compute(run, 20)


def test_published_checkpoint_of_running_request_is_locked() -> None:
    """So a preempted request can resume from its last checkpoint."""
    world = World(rows=3)
    first = world.start(story(1, 30))
    assert world.compute(first, 8)
    assert world.publish(first)
    second = world.start(story(2, 30))
    assert world.take_rows(second, 2) is not None
    assert world.take_rows(second, 1) is None
    assert world.lengths() == [8]


def test_impossible_request_evicts_nothing() -> None:
    world = World(rows=4, pages=8)
    for number in (1, 2, 3):
        world.turn(story(number))
    run = world.start(story(4, 60))
    assert world.take_rows(run, 5) is None
    assert not world.cache.grow_pages(run.lease, 9)
    assert stories(world) == [1, 2, 3]
    assert world.cache.grow_pages(run.lease, 8)
    assert stories(world) == []


def test_held_checkpoints_are_evicted_last() -> None:
    world = World(rows=3)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.turn(story(2))
    world.turn(story(3))
    assert world.cache.available_rows() == 2
    assert world.cache.available_rows(including_held=True) == 3
    world.turn(story(4))
    world.turn(story(5))
    assert stories(world) == [1, 4, 5]
    run = world.start(story(6))
    assert world.take_rows(run, 3) is not None, "nothing else can go any more"
    assert stories(world) == []
    assert world.cache.stats()["sessions_held"] == 0


@pytest.mark.parametrize(("seconds", "left"), [(4.9, [1, 4]), (5.0, [3, 4])])
def test_hold_expires_with_clock(seconds: float, left: list[int]) -> None:
    world = World(rows=2)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.turn(story(3))
    world.clock.now += seconds
    world.turn(story(4))
    assert stories(world) == left


def test_hold_ends_with_next_turn() -> None:
    world = World(rows=2)
    world.turn(story(1), session="a", hold_seconds=50.0)
    world.turn(story(2))
    world.release(world.start(story(1), session="a"))  # a turn that leaves without a hold
    world.turn(story(2))
    world.turn(story(3))
    assert stories(world) == [2, 3]


def test_session_holds_only_last_turn() -> None:
    world = World(rows=2)
    world.turn(story(1), session="a", hold_seconds=50.0)
    world.turn(story(2), session="a", hold_seconds=50.0)
    world.turn(story(3))
    assert stories(world) == [2, 3]
    assert world.cache.stats()["sessions_held"] == 1


def test_later_hold_outlives_earlier_expiry() -> None:
    world = World(rows=2)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.clock.now += 4
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.clock.now += 4
    world.turn(story(2))
    world.turn(story(3))
    assert stories(world) == [1, 3]


def test_checkpoint_held_by_two_sessions() -> None:
    world = World(rows=2)
    world.turn(story(1), session="a", hold_seconds=5.0)
    world.turn(story(1), session="b", hold_seconds=9.0)
    world.turn(story(2))
    world.clock.now += 6
    world.turn(story(3))
    assert stories(world) == [1, 3]
    world.clock.now += 6
    world.turn(story(2))
    assert stories(world) == [2, 3]


def test_no_hold_without_session_or_seconds() -> None:
    world = World()
    world.turn(story(1), hold_seconds=5.0)
    world.turn(story(2), session="a")
    assert world.cache.stats()["sessions_held"] == 0


def test_held_pages_are_available_only_with_including_held() -> None:
    world = World(pages=6)
    world.turn(story(1, 17), session="a", hold_seconds=5.0)
    assert world.cache.available_pages() == 2
    assert world.cache.available_pages(including_held=True) == 6


def test_budget_bounds_rows_and_pages_together() -> None:
    world = World(budget_bytes=3 * ROW_BYTES + 6 * PAGE_BYTES)
    for number in range(5):
        world.turn(story(number))
    assert stories(world) == [2, 3, 4]
    world.turn(story(5, 13))
    assert stories(world) == [4, 5], "three rows fit, but not with 2 + 2 + 3 pages"
    run = world.start(story(6))
    assert world.take_rows(run, 3) is not None
    assert world.take_rows(run, 1) is None
    assert stories(world) == []
    assert world.cache.available_rows() == 0
    assert world.cache.available_pages() == 6
    assert not world.cache.grow_pages(run.lease, 7)
    assert world.cache.grow_pages(run.lease, 6)
    assert world.cache.available_bytes() == 0


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_minimum_budget_serves_requests_in_sequence(blocks: int) -> None:
    """The budget is one request's pages and its row: every request runs, whatever the one before left in the cache."""
    for limit in ("budget", "pools"):
        exact = blocks * PAGE_BYTES + 2 * ROW_BYTES
        world = World(budget_bytes=exact) if limit == "budget" else World(rows=2, pages=blocks)
        for number in (1, 2, 1, 1, 3, 3, 2):
            run = world.start(story(number, blocks * 4 + 1), session=str(number))
            for length in range(run.length + 4, blocks * 4 + 1, 4):
                assert world.compute(run, length), f"{limit}: {length} of {blocks * 4} tokens"
                world.publish(run)
            world.release(run, hold_seconds=5.0)
            assert len(stories(world)) >= 1


def test_one_byte_below_minimum_budget_fails_cleanly() -> None:
    world = World(budget_bytes=2 * PAGE_BYTES + ROW_BYTES - 1)
    run = world.start(story(1))
    assert not world.compute(run, 8)
    assert world.cache.stats()["rows_used"] == 0
    world.release(run)
    assert world.cache.used_bytes == 0


def test_stats_count_created_superseded_and_evicted() -> None:
    world = World(rows=3)
    world.turn(story(1, 17), kinds={8: TURN, 16: TURN})
    world.turn(story(2), kinds={8: SYSTEM})
    world.turn(story(3))
    world.turn(story(4))
    stats = world.cache.stats()
    assert (stats["checkpoints_created"], stats["checkpoints_superseded"], stats["checkpoints_evicted"]) == (5, 1, 1)
    assert (stats["checkpoints_live"], stats["checkpoints_peak"]) == (3, 3)
    assert (stats["checkpoints_live_system"], stats["checkpoints_live_turn"], stats["checkpoints_live_grid"]) == (
        1,
        2,
        0,
    )
    assert (stats["rows_used"], stats["rows_free"], stats["rows_peak"]) == (3, 0, 3)
    assert stats["pages_used"] == stats["tree_pages"] == 6
    assert stats["ghost_blocks"] == 4
