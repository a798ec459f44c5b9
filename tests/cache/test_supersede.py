"""Supersede: a request that resumes from a checkpoint and publishes a deeper one of the same kind frees the first
one."""

from __future__ import annotations

import pytest

from agentspec.types import CheckpointKind
from tests.cache.world import World

SYSTEM, USER, TURN, BRANCH, GRID = (
    CheckpointKind.SYSTEM,
    CheckpointKind.USER,
    CheckpointKind.TURN,
    CheckpointKind.BRANCH,
    CheckpointKind.GRID,
)


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_deeper_publish_supersedes_resumed_checkpoint(kind: CheckpointKind) -> None:
    world = World()
    world.turn(range(8), kinds={8: kind})
    assert world.turn(range(17), kinds={16: kind}) == 8
    assert world.lengths() == ([8, 16] if kind in (SYSTEM, BRANCH, GRID) else [16])


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_deeper_publish_supersedes_own_earlier_publish(kind: CheckpointKind) -> None:
    world = World()
    world.turn(range(20), kinds={8: kind, 12: kind, 16: kind})
    assert world.lengths() == ([8, 12, 16] if kind in (SYSTEM, BRANCH, GRID) else [16])


@pytest.mark.parametrize("kind", [USER, TURN])
def test_supersede_applies_only_within_same_kind(kind: CheckpointKind) -> None:
    for other in set(CheckpointKind) - {kind}:
        world = World()
        world.turn(range(8), kinds={8: kind})
        world.turn(range(17), kinds={16: other})
        assert world.lengths() == [8, 16]


def test_shallower_publish_supersedes_nothing() -> None:
    world = World()
    run = world.start(range(20))
    assert world.compute(run, 8)
    assert world.snapshot(run)
    assert world.compute(run, 16)
    assert world.publish(run)
    assert world.publish(run, TURN, 8)
    assert world.lengths() == [8, 16]


def test_tool_loop_of_300_turns_leaves_three_checkpoints() -> None:
    world = World(pages=400)
    prompt = 20
    for turn in range(300):
        hit = world.turn(range(prompt + 4), kinds={8: SYSTEM, 16: USER, prompt: TURN}, session="s", hold_seconds=5.0)
        assert hit == (0 if turn == 0 else prompt - 4), "each turn resumes where the last one ended"
        prompt += 4
    assert world.lengths() == [8, 16, prompt - 4]
    stats = world.cache.stats()
    assert stats["checkpoints_peak"] == 4, "old and new TURN at once, for a moment"
    assert stats["checkpoints_created"] == 302
    assert stats["checkpoints_superseded"] == 299
    assert stats["checkpoints_evicted"] == 0
    assert stats["tree_pages"] == (prompt - 4) // 4


def test_superseded_checkpoint_is_kept_until_unlocked() -> None:
    world = World()
    world.turn(range(8))
    first, second = world.start(range(17)), world.start([*range(8), *range(50, 60)])
    assert world.compute(first, 16)
    assert world.publish(first)
    assert world.lengths() == [8, 16], "the second request may not have read the row yet"
    world.release(first)
    assert world.lengths() == [8, 16]
    world.release(second)
    assert world.lengths() == [16]
    assert world.cache.stats()["checkpoints_superseded"] == 1


def test_checkpoint_superseded_by_two_requests_is_dropped() -> None:
    world = World()
    world.turn(range(8))
    first, second = world.start(range(17)), world.start([*range(8), *range(50, 60)])
    for run in (first, second):
        assert world.compute(run, 16)
        assert world.publish(run)
    assert world.lengths() == [16, 16]


def test_superseded_checkpoint_can_still_be_resumed() -> None:
    world = World()
    world.turn(range(8))
    first, second = world.start(range(17)), world.start([*range(8), *range(50, 60)])
    assert world.compute(first, 16)
    assert world.publish(first)
    third = world.start([*range(8), *range(70, 80)])
    assert third.length == 8
    world.release(second)
    assert world.lengths() == [8, 16]
    world.release(third)
    assert world.lengths() == [16]


def test_superseded_checkpoint_is_dropped_when_hold_ends() -> None:
    world = World()
    world.turn(range(8), session="a", hold_seconds=5.0)
    world.turn(range(17), kinds={16: TURN}, session="b")
    assert world.lengths() == [8, 16]
    world.clock.now += 5
    world.cache.available_rows()
    world.audit()
    assert world.lengths() == [16]


def test_republishing_supersedes_shallower_checkpoint() -> None:
    """The deeper checkpoint supersedes the shallower one even if another request published it."""
    world = World()
    world.turn(range(8))
    run = world.start(range(30))
    world.turn(range(17), kinds={12: SYSTEM, 16: TURN})  # another request of the same story overtakes
    assert world.lengths() == [8, 12, 16]
    assert world.compute(run, 16)
    assert not world.publish(run)
    world.release(run)
    assert world.lengths() == [12, 16]


def test_republished_superseded_checkpoint_is_kept() -> None:
    world = World()
    world.turn(range(8))
    reader, first = world.start(range(20)), world.start(range(20))
    assert world.compute(first, 16)
    assert world.publish(first)
    again = world.start(range(12), limit=0)
    assert world.compute(again, 8)
    assert not world.publish(again)
    for run in (reader, first, again):
        world.release(run)
    assert world.lengths() == [8, 16]


def test_checkpoint_of_another_request_is_not_superseded() -> None:
    world = World()
    run = world.start(range(30))
    world.turn(range(13))
    assert world.compute(run, 20)
    assert world.publish(run)
    world.release(run)
    assert world.lengths() == [12, 20], "the request neither resumed from it nor published it"


def test_superseded_row_is_reusable_at_once() -> None:
    world = World(rows=2)
    world.turn(range(8))
    run = world.start(range(21))
    assert world.compute(run, 16)
    assert world.publish(run)
    assert world.compute(run, 20), "takes the row of the checkpoint at 8"
    assert world.lengths() == [16]
    assert world.cache.stats()["checkpoints_evicted"] == 0
