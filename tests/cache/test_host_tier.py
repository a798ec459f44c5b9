"""The host tier: what is copied, when, and what a prompt can fetch."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.cache.host_tier import HostMemory
from agentspec.errors import ConfigError
from agentspec.types import CheckpointKind
from tests.cache.test_eviction import stories, story
from tests.cache.world import BLOCK, World

SYSTEM, USER, TURN, GRID = CheckpointKind.SYSTEM, CheckpointKind.USER, CheckpointKind.TURN, CheckpointKind.GRID
ALL = 1 << 30


def new_world(
    *,
    rows: int = 3,
    host_rows: int = 20,
    host_pages: int = 200,
    ready_share: float = 1.0,
    min_fetch_blocks: int = 1,
    **more: Any,
) -> World:
    memory = HostMemory(
        num_rows=host_rows, num_pages=host_pages, ready_share=ready_share, min_fetch_blocks=min_fetch_blocks
    )
    return World(rows=rows, host_memory=memory, **more)


def on_host(world: World) -> list[int]:
    """Numbers of the stories that have a copy."""
    return sorted({key[1][0] // 1000 for key in world.live_copies()})


def stats(world: World) -> dict[str, int]:
    return world.cache.stats()


def test_evicted_checkpoint_is_fetched_from_host() -> None:
    world = new_world()
    for number in (1, 2, 3):
        world.turn(story(number))
        world.settle()
    world.turn(story(4))
    assert stories(world) == [2, 3, 4]
    assert on_host(world) == [1, 2, 3]
    assert world.turn(story(1)) == 8, "world.turn checks that the fetched row and pages hold the story"
    assert stats(world)["host_copies_fetched"] == 1
    assert stats(world)["checkpoints_lost"] == 0


def test_checkpoint_evicted_before_copy_completes_is_lost() -> None:
    world = new_world()
    for number in (1, 2, 3):
        world.turn(story(number))
    world.copy_ahead()
    world.carry_out(ALL, 1)
    world.turn(story(4))
    world.turn(story(5))
    world.carry_out(ALL, ALL)
    assert on_host(world) == [1, 3], (
        "the first copy was complete; the second was incomplete at eviction; the third checkpoint is still live"
    )
    assert stats(world)["checkpoints_lost"] == 1
    assert world.turn(story(2)) == 0


def test_nothing_is_copied_while_device_has_room() -> None:
    world = new_world(rows=8, ready_share=0.25)
    for number in range(1, 7):
        world.turn(story(number))
        world.settle()
    assert on_host(world) == [], "two rows are free"
    world.turn(story(7))
    world.settle()
    assert on_host(world) == [1], "one row is free: the next one to go is ready"
    world.turn(story(8))
    world.settle()
    assert on_host(world) == [1, 2]


def test_used_checkpoint_moves_back_in_copy_order() -> None:
    world = new_world(rows=4, ready_share=0.25)
    for number in (1, 2, 3, 4):
        world.turn(story(number))
    world.settle()
    assert on_host(world) == [1]
    world.turn(story(1))
    world.settle()
    assert on_host(world) == [1, 2], "the first one has been used: its copy stays, but it won't go soon"


def test_shared_prefix_is_copied_once() -> None:
    world = new_world(rows=10)
    system = story(0, 8)
    for number in (1, 2, 3):
        world.turn(system + story(number, 8), kinds={8: SYSTEM, 16: TURN})
    world.settle()
    assert stats(world)["host_pages_used"] == (8 + 3 * 8) // BLOCK


def test_fetch_copies_only_missing_pages() -> None:
    world = new_world(rows=4)
    system = story(0, 8)
    world.turn(system + story(1, 8), kinds={8: SYSTEM, 16: TURN})
    world.settle()
    for number in (2, 3, 4):
        world.turn(system + story(number, 8))
        world.settle()
    assert world.lengths() == [8, 16, 16, 16]
    world.carry_out(ALL, ALL)
    run = world.start([*system, *story(1, 8), 7])
    assert run.lease.fetch is not None
    (order,) = world.cache.take_copy_orders().to_device
    assert (len(order.rows), len(order.pages)) == (1, 8 // BLOCK), "the system's pages are on the device"


def test_fetch_below_min_blocks_is_skipped() -> None:
    for length, fetched in ((12, 0), (17, 16)):
        world = new_world(rows=1, min_fetch_blocks=4)
        world.turn(story(1, length))
        world.settle()
        world.turn(story(2))
        assert world.turn(story(1, length)) == fetched


def test_device_checkpoint_is_preferred_at_equal_depth() -> None:
    world = new_world()
    world.turn(story(1))
    world.settle()
    assert on_host(world) == stories(world) == [1]
    assert world.turn(story(1)) == 8
    assert stats(world)["host_copies_fetched"] == 0


def test_superseded_checkpoint_is_dropped_from_host() -> None:
    world = new_world()
    world.turn(story(1), session="a")
    world.settle()
    assert on_host(world) == [1]
    world.turn(story(1, 17), session="a")
    assert on_host(world) == []
    assert stats(world)["host_pages_used"] == 0


def test_grid_checkpoints_are_not_copied() -> None:
    world = new_world()
    world.turn(story(1), kinds={8: GRID})
    world.settle()
    assert on_host(world) == []


def test_host_evicts_least_recently_used() -> None:
    world = new_world(rows=2, host_rows=3)
    for number in (1, 2, 3):
        world.turn(story(number))
        world.settle()
    assert on_host(world) == [1, 2, 3]
    assert world.turn(story(1)) == 8
    world.settle()
    world.turn(story(4))
    world.settle()
    assert on_host(world) == [1, 3, 4], "the first one came back in between"


def test_path_larger_than_host_memory_is_not_copied() -> None:
    world = new_world(host_pages=3)
    world.turn(story(1))
    world.settle()
    world.turn(story(2, 17))
    world.settle()
    assert on_host(world) == [1]


def test_copies_that_do_not_fit_together_do_not_alternate() -> None:
    world = new_world(host_pages=5)
    world.turn(story(1, 17))
    world.turn(story(2, 17))
    world.settle()
    created = stats(world)["host_copies_created"]
    for _ in range(5):
        world.settle()
    assert stats(world)["host_copies_created"] == created == 2


def test_fetch_uses_pages_published_in_the_meantime() -> None:
    world = new_world(rows=6)
    world.turn(story(1))
    world.settle()
    for number in range(2, 8):
        world.turn(story(number))
        world.settle()
    assert 1 not in stories(world)
    run = world.start(story(1))
    assert run.lease.fetch is not None
    other = world.start(story(1), limit=0)
    assert world.compute(other, 8)
    assert world.publish(other)
    pages = world.cache.pages.num_used
    world.carry_out(ALL, 0)
    assert world.finish_fetch(run)
    assert other.lease.locked is not None
    assert run.lease.read_row == other.lease.locked.row
    assert run.lease.page_ids[:2] == other.lease.page_ids[:2]
    assert world.cache.pages.num_used == pages - 2, "what was fetched for nothing is free again"


def test_without_host_tier_no_copies_are_ordered() -> None:
    world = World(rows=2)
    for number in range(5):
        world.turn(story(number))
        world.settle()
    assert not world.cache.take_copy_orders()
    assert world.cache.host is None
    assert stats(world)["bytes_to_host"] == 0


def test_copied_bytes_are_counted_in_both_directions() -> None:
    world = new_world()
    for number in (1, 2, 3, 4):
        world.turn(story(number))
        world.settle()
    world.turn(story(1))
    assert stats(world)["bytes_to_host"] == 4 * (1000 + 2 * 10)
    assert stats(world)["bytes_to_device"] == 1000 + 2 * 10


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_rows", 0), ("num_pages", 0), ("ready_share", 1.5), ("ready_share", -0.1), ("min_fetch_blocks", 0)],
)
def test_invalid_host_memory_settings_are_refused(field: str, value: float) -> None:
    settings: dict[str, Any] = {"num_rows": 2, "num_pages": 2, field: value}
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        HostMemory(**settings)


def test_complete_copy_is_kept_when_device_pages_are_replaced() -> None:
    """Another request computes the same prefix again, and the tree adopts its pages while other copies are still
    incomplete. When an order to the host is carried out later, those pages may have a new owner and other content."""
    world = new_world(rows=6, pages=12)
    world.turn(story(1))
    world.settle()
    assert on_host(world) == [1]
    world.turn(story(2))
    world.copy_ahead()
    again = world.start([*story(1), 91, 92, 93, 94], limit=0)
    assert world.compute(again, 12)
    assert world.publish(again), "the tree adopts the lease's pages for the first two blocks"
    world.release(again)
    for number in range(3, 9):
        world.turn(story(number))
    assert 1 not in stories(world), "its pages have a new owner"
    world.settle()
    fetched = world.start(story(1))
    assert fetched.lease.fetch is not None
    world.settle()
    assert world.finish_fetch(fetched), "world.finish_fetch checks that row and pages hold the story"
