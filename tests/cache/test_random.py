"""Random cache operations: a hit's row and pages always contain exactly the state of their prefix.

`World` audits structure, ownership, counters and contents after every operation. Two more properties are checked here.
Everything that the cache reports as available can be taken, to the last page and row. And where there is room for
everything, checkpoints are removed only by the supersede rule, which `Ledger` implements again in the simplest form.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentspec.cache.host_tier import HostMemory
from agentspec.types import CheckpointKind, tokens
from tests.cache.world import BLOCK, PAGE_BYTES, ROW_BYTES, Key, Run, World

SYSTEM, USER, TURN, BRANCH, GRID = (
    CheckpointKind.SYSTEM,
    CheckpointKind.USER,
    CheckpointKind.TURN,
    CheckpointKind.BRANCH,
    CheckpointKind.GRID,
)


def host(num_rows: int, num_pages: int, ready_share: float) -> dict[str, Any]:
    return {
        "host_memory": HostMemory(num_rows=num_rows, num_pages=num_pages, ready_share=ready_share, min_fetch_blocks=1)
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "small pools": {"rows": 9, "pages": 30, "ghost_blocks": 40},
    "few rows": {"rows": 4, "pages": 120, "ghost_blocks": 40},
    "few pages": {"rows": 40, "pages": 14, "ghost_blocks": 10},
    "tight budget": {"rows": 40, "pages": 120, "budget_bytes": 7 * ROW_BYTES + 20 * PAGE_BYTES, "ghost_blocks": 40},
    "least budget": {"rows": 40, "pages": 120, "budget_bytes": 2 * ROW_BYTES + 12 * PAGE_BYTES, "ghost_blocks": 5},
    "no ghosts": {"rows": 9, "pages": 30, "ghost_blocks": 0},
}
HOST_SETTINGS = {
    "large host": SETTINGS["small pools"] | host(30, 90, 0.5),
    "few host rows": SETTINGS["small pools"] | host(3, 40, 1.0),
    "few host pages": SETTINGS["small pools"] | host(9, 9, 1.0),
    "host, tight budget": SETTINGS["tight budget"] | host(30, 90, 0.2),
    "host, no ghosts": SETTINGS["no ghosts"] | host(6, 40, 1.0),
}
MAX_BLOCKS = 12
NUM_OPERATIONS = 5000
NUM_HOST_OPERATIONS = 4000


class Traffic:
    """Random requests over a few stories with shared prefixes, with the patterns of agents: continue, branch,
    repeat."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.stories: list[tuple[str, list[int]]] = [("", []), ("salt", [])]

    def sequence(self) -> tuple[str, list[int]]:
        rng = self.rng
        namespace, story = rng.choice(self.stories)
        kept = len(story) if rng.random() < 0.75 else rng.randint(0, len(story))
        ids = story[:kept] + [rng.randint(0, 2) for _ in range(rng.randint(1, 6 * BLOCK))]
        ids = ids[: MAX_BLOCKS * BLOCK]
        self.stories.append((namespace, ids))
        if len(self.stories) > 12:
            del self.stories[rng.randrange(2, len(self.stories))]
        return namespace, ids

    def step(self) -> None:
        world, rng = self.world, self.rng
        if not world.runs or (len(world.runs) < 4 and rng.random() < 0.2):
            namespace, ids = self.sequence()
            limit = rng.choice([None, None, None, 0, len(ids), rng.randint(0, len(ids))])
            world.start(ids, namespace=namespace, session=rng.choice([None, "a", "b", "c"]), limit=limit)
            return
        if world.cache.host is not None and rng.random() < 0.3:
            world.copy_ahead()
            world.carry_out(rng.choice([0, 1, 9]), rng.choice([0, 1, 1, 9]))
        run = rng.choice(world.runs)
        if run.lease.fetch is not None and not world.finish_fetch(run):
            return
        action = rng.choices(
            ["compute", "snapshot", "publish", "publish snapshot", "release", "rows", "wait", "promise", "clear"],
            [40, 10, 40, 10, 10, 3, 3, 3, 0.4],
        )[0]
        if action == "compute":
            aligned = rng.random() < 0.8
            length = min(run.length + rng.randint(1, 3 * BLOCK), len(run.sequence))
            if not world.compute(run, max(run.length, length // BLOCK * BLOCK if aligned else length)):
                self.retract(run)
        elif action == "snapshot" and run.state_row in run.lease.own_rows:
            if run.length not in run.snapshots:
                world.snapshot(run)
        elif action == "publish" and run.length and run.length % BLOCK == 0 and run.state_row in run.lease.own_rows:
            self.publish(run, None)
        elif action == "publish snapshot":
            lengths = [length for length in run.snapshots if length and length % BLOCK == 0]
            if lengths:
                self.publish(run, rng.choice(lengths))
        elif action == "release":
            self.release(run)
        elif action == "rows":
            rows = world.take_rows(run, rng.randint(0, 3))
            world.cache.give_rows(run.lease, rows or [])
            world.audit()
        elif action == "wait":
            world.clock.now += rng.choice([0.5, 3.0])
            world.audit()
        elif action == "promise":
            self.take_all_that_is_available()
            world.audit()
        elif action == "clear":
            self.clear()
            world.audit()

    def publish(self, run: Run, length: int | None) -> None:
        self.world.publish(run, self.kind(), length)

    def kind(self) -> CheckpointKind:
        return self.rng.choices([SYSTEM, USER, TURN, BRANCH, GRID], [1, 3, 12, 1, 1])[0]

    def release(self, run: Run) -> None:
        self.world.release(run, self.rng.choice([0.0, 2.0, 5.0]))

    def retract(self, run: Run) -> None:
        """Out of room: release a random request, as the scheduler does. A request that runs alone always fits, unless
        it holds snapshots."""
        assert len(self.world.runs) > 1 or run.snapshots, f"{self.world.note}: a request alone finds no room"
        victim = self.rng.choice(self.world.runs)
        if victim.lease.fetch is not None:
            self.world.carry_out(1 << 30, 0)
            assert self.world.finish_fetch(victim)
        self.release(victim)

    def clear(self) -> None:
        self.world.cache.clear()

    def take_all_that_is_available(self) -> None:
        cache = self.world.cache
        probe = cache.acquire(cache.match("", tokens()))
        held = self.rng.random() < 0.5
        if self.rng.random() < 0.5:
            num_pages = cache.available_pages(including_held=held)
            sessions = set(cache.checkpoints.holds)
            assert not held or not cache.grow_pages(probe, num_pages + 1)
            assert cache.grow_pages(probe, num_pages)
        else:
            num_rows = cache.available_rows(including_held=held)
            sessions = set(cache.checkpoints.holds)
            assert not held or cache.take_rows(probe, num_rows + 1) is None
            assert cache.take_rows(probe, num_rows) is not None
        assert held or set(cache.checkpoints.holds) == sessions, "a held checkpoint went although others could"
        self.world.audit()
        cache.release(probe)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests_keep_contents_correct(name: str, seed: int) -> None:
    world = World(**SETTINGS[name], note=f"{name}, seed {seed}")
    traffic = Traffic(world, seed)
    for _ in range(NUM_OPERATIONS):
        traffic.step()
    stats = world.cache.stats()
    assert stats["checkpoints_created"] > 100
    assert stats["checkpoints_evicted"] > 10, "the setting is meant to be tight"
    empty(world)


@pytest.mark.parametrize("name", HOST_SETTINGS)
def test_random_requests_with_late_host_copies_keep_contents_correct(name: str) -> None:
    world = World(**HOST_SETTINGS[name], note=f"{name}, seed 0")
    traffic = Traffic(world, 0)
    for _ in range(NUM_HOST_OPERATIONS):
        traffic.step()
    stats = world.cache.stats()
    assert stats["host_copies_fetched"] > 10, stats
    assert stats["host_copies_created"] > 80, stats
    assert stats["checkpoints_lost"] > 5, "some go before their copy is complete"
    empty(world)


def empty(world: World) -> None:
    while world.runs:
        if world.runs[0].lease.fetch is not None:
            world.carry_out(1 << 30, 0)
            world.finish_fetch(world.runs[0])
        world.release(world.runs[0])
    world.cache.clear()
    world.audit()
    assert world.cache.used_bytes == 0
    assert world.cache.tree.roots == {}


@dataclass
class Standing:
    kind: CheckpointKind
    readers: set[Run] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)
    superseded: bool = False


class Ledger(Traffic):
    """The supersede rule implemented again, on a dict from prefix to checkpoint, in a world with room for
    everything."""

    RANK = (GRID, TURN, USER, BRANCH, SYSTEM)

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.standing: dict[Key, Standing] = {}
        self.used: dict[Run, list[tuple[Key, Standing]]] = {}
        self.reads: dict[Run, Key | None] = {}
        self.deepest: dict[Run, tuple[Key, Standing] | None] = {}
        self.reach: dict[Run, int] = {}
        self.until: dict[str, float] = {}

    def step(self) -> None:
        before = list(self.world.runs)
        super().step()
        for run in self.world.runs:
            if run not in before:
                self.entered(run)
        for session in [session for session, until in self.until.items() if until <= self.world.clock.now]:
            self.end_hold(session)
        self.world.cache.available_rows()  # the cache ends holds when it looks at the clock
        self.world.audit()
        assert {key: (entry.kind, entry.superseded) for key, entry in self.standing.items()} == {
            key: (checkpoint.kind, checkpoint.superseded) for key, checkpoint in self.world.live().items()
        }, self.world.note

    def entered(self, run: Run) -> None:
        key = (run.namespace, tuple(run.sequence[: run.lease.num_cached]))
        found = self.standing.get(key) if run.lease.num_cached else None
        self.used[run], self.reads[run], self.deepest[run], self.reach[run] = [], None, None, run.lease.num_cached
        if found is not None:
            found.readers.add(run)
            self.used[run], self.reads[run], self.deepest[run] = [(key, found)], key, (key, found)
        if run.lease.session_id is not None:
            self.end_hold(run.lease.session_id)

    def publish(self, run: Run, length: int | None) -> None:
        kind = self.kind()
        depth = run.length if length is None else length
        key = (run.namespace, tuple(run.sequence[:depth]))
        entry = self.standing.get(key)
        assert self.world.publish(run, kind, length) == (entry is None)
        if entry is not None:
            entry.superseded = False
            entry.kind = max(entry.kind, kind, key=self.RANK.index)
            deepest = self.deepest[run]
            if deepest is None or len(deepest[0][1]) < depth:
                self.deepest[run] = (key, entry)
        else:
            entry = self.standing[key] = Standing(kind)
            self.used[run].append((key, entry))
            if self.reach[run] <= depth:
                self.stop_reading(run)
                entry.readers.add(run)
                self.reads[run], self.deepest[run], self.reach[run] = key, (key, entry), depth
        for old_key, old in list(self.used[run]):
            if (
                self.standing.get(old_key) is old
                and old.kind == kind
                and len(old_key[1]) < depth
                and kind in (USER, TURN)
            ):
                self.used[run].remove((old_key, old))
                old.superseded = True
                if self.reads[run] == old_key:
                    self.stop_reading(run)
                self.settle(old_key)

    def release(self, run: Run) -> None:
        seconds = self.rng.choice([0.0, 2.0, 5.0])
        self.world.release(run, seconds)
        session, candidates = run.lease.session_id, [self.deepest[run]]
        read = self.reads[run]
        if read is not None:
            candidates.append((read, self.standing[read]))
        alive = [(key, entry) for key, entry in filter(None, candidates) if self.standing.get(key) is entry]
        if session is not None and seconds and alive and not alive[0][1].superseded:
            self.end_hold(session)
            alive[0][1].holders.add(session)
            self.until[session] = self.world.clock.now + seconds
        self.stop_reading(run)

    def stop_reading(self, run: Run) -> None:
        key = self.reads[run]
        self.reads[run] = None
        if key is not None:
            self.standing[key].readers.remove(run)
            self.settle(key)

    def end_hold(self, session: str) -> None:
        self.until.pop(session, None)
        for key in list(self.standing):
            if session in self.standing[key].holders:
                self.standing[key].holders.remove(session)
                self.settle(key)

    def settle(self, key: Key) -> None:
        entry = self.standing.get(key)
        if entry is not None and entry.superseded and not entry.readers and not entry.holders:
            del self.standing[key]

    def clear(self) -> None:
        """Do nothing: in this world checkpoints must be removed only by the supersede rule."""

    def take_all_that_is_available(self) -> None:
        """Do nothing, as in `clear`."""


@pytest.mark.parametrize("seed", range(2))
def test_without_eviction_only_supersede_removes_checkpoints(seed: int) -> None:
    world = World(rows=150, pages=400, note=f"seed {seed}")
    ledger = Ledger(world, seed)
    for _ in range(2000):
        ledger.step()
    stats = world.cache.stats()
    assert stats["checkpoints_evicted"] == 0
    assert stats["checkpoints_superseded"] > 10, stats
