"""The audit detects every planted fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentspec.cache import invariants
from agentspec.cache.leases import Lease
from agentspec.cache.prefix_tree import LOCK, NEED, Checkpoint, Node
from agentspec.types import CheckpointKind
from tests.cache.world import World


def a_world() -> World:
    """A checkpoint at 8, a ghost below it to 16, a held checkpoint of another story, and a running request that resumed
    from 8."""
    world = World()
    world.turn(range(20), kinds={8: CheckpointKind.SYSTEM, 16: CheckpointKind.GRID})
    world.turn(range(100, 109), session="held", hold_seconds=5.0)
    run = world.start([*range(8), *range(50, 60)])
    assert world.compute(run, 12)
    deep = next(checkpoint for key, checkpoint in world.live().items() if len(key[1]) == 16)
    world.cache.checkpoints._drop(deep)
    world.audit()
    return world


def lease(world: World) -> Lease:
    return world.runs[0].lease


def anchor(world: World) -> Node:
    node = lease(world).anchor
    assert node is not None
    return node


def held(world: World) -> Checkpoint:
    return world.cache.checkpoints.holds["held"].checkpoint


def forget_hold(world: World) -> None:
    """End the hold on a superseded checkpoint without removing the checkpoint."""
    checkpoint = held(world)
    world.cache.checkpoints.supersede(checkpoint)
    world.cache.checkpoints._remove_hold("held", checkpoint)


FAULTS: dict[str, Callable[[World], object]] = {
    "a page is lost": lambda world: (world.cache.pages._returned.clear(), world.cache.pages.take(1)),
    "a page is free and used": lambda world: world.cache.pages.free((anchor(world).page_ids or [])[:1]),
    "a row has two owners": lambda world: lease(world).own_rows.add(lease(world).read_row),
    "a reserved row is owned": lambda world: lease(world).own_rows.add(1),
    "a page of the tree counts as the lease's": lambda world: lease(world).own_pages.add(lease(world).page_ids[0]),
    "pages were swapped under a lease": lambda world: lease(world).page_ids.__setitem__(0, 150),
    "a page twice in a sequence": lambda world: lease(world).page_ids.append(lease(world).page_ids[0]),
    "a lock too many": lambda world: world.cache.tree.ref(anchor(world), LOCK),
    "a lock too few": lambda world: world.cache.tree.unref(anchor(world), LOCK),
    "unreferenced pages are kept": lambda world: world.cache.tree.ref(held(world).node, NEED),
    "pages of a live row are gone": lambda world: setattr(anchor(world), "page_ids", None),
    "a row lock is lost": lambda world: setattr(lease(world).locked, "num_locks", 0),
    "a count of locked rows is off": lambda world: setattr(world.cache.checkpoints, "num_locked", 0),
    "a count of kept rows is off": lambda world: setattr(world.cache.checkpoints, "num_kept", 5),
    "a hold without a holder": lambda world: held(world).holders.clear(),
    "a superseded checkpoint without lock or hold": forget_hold,
    "a checkpoint is missing from the eviction queue": lambda world: world.cache.checkpoints.order._rows._heap.clear(),
    "ghost blocks are miscounted": lambda world: setattr(world.cache.tree, "num_ghost_blocks", 1),
    "a ghost is unknown": lambda world: world.cache.tree.ghosts.clear(),
    "a node under a wrong key": lambda world: setattr(anchor(world), "run", bytes(32)),
    "a depth is off": lambda world: setattr(anchor(world), "depth", 12),
    "a dead checkpoint counts as live": lambda world: setattr(anchor(world), "checkpoint", None),
    "over the budget": lambda world: setattr(world.cache, "budget_bytes", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_audit_detects_planted_fault(name: str) -> None:
    world = a_world()
    FAULTS[name](world)
    with pytest.raises(AssertionError):
        invariants.check(world.cache)
