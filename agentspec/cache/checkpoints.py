"""The set of live checkpoints: creation, use, locks, holds, and removal.

A checkpoint is removed when it is evicted, when it is superseded and has no lock or hold left, or by `clear`. Its row
becomes free, and so do the pages that only it needed. An evicted checkpoint may still have a copy in the host tier. A
*lock* belongs to a lease that may still read the row. A *hold* belongs to a session that is running a tool and is
expected back within seconds: its checkpoint is evicted last.

Uses the tree, the row pool and the host tier. Knows nothing about the pages of leases, byte budgets, or the reasons for
publishing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from agentspec.cache.eviction import EvictionOrder
from agentspec.cache.host_tier import HostTier
from agentspec.cache.id_pool import IdPool
from agentspec.cache.prefix_tree import HOLD, NEED, Checkpoint, Node, PrefixTree
from agentspec.types import BY_PROTECTION, CheckpointKind


@dataclass(slots=True)
class Hold:
    """A session's hold on the checkpoint of its last turn."""

    checkpoint: Checkpoint
    until: float


class CheckpointSet:
    """Attributes without underscore are read-only for other modules."""

    def __init__(
        self, tree: PrefixTree, rows: IdPool, clock: Callable[[], float], host: HostTier | None = None
    ) -> None:
        self.live: dict[Checkpoint, None] = {}
        """In order of creation."""
        self.order = EvictionOrder(self.live, None if host is None else _needs_copy)
        self.holds: dict[str, Hold] = {}
        self.num_locked = 0
        self.num_kept = 0
        """Locked, held, or both."""
        self.peak_live = 0
        self.num_created = 0
        self.num_superseded = 0
        self.num_evicted = 0
        self._tree = tree
        self._rows = rows
        self._host = host
        self._clock = clock
        self._expiries: list[tuple[float, str]] = []
        self._tick = 0

    def count_evictable(self, *, including_held: bool) -> int:
        return len(self.live) - (self.num_locked if including_held else self.num_kept)

    def create(self, node: Node, row: int, kind: CheckpointKind) -> Checkpoint:
        """Create a checkpoint at a node whose path has all its pages. `row` is owned by the tree from now on."""
        checkpoint = Checkpoint(row=row, kind=kind, node=node, last_used=0)
        node.checkpoint = checkpoint
        self._tree.ref(node, NEED)
        self.live[checkpoint] = None
        self.num_created += 1
        self.peak_live = max(self.peak_live, len(self.live))
        self.touch(checkpoint)
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        """Mark the checkpoint as just used."""
        self._tick += 1
        checkpoint.last_used = self._tick
        checkpoint.abandoned = False
        if self._host is not None:
            self._host.after_use(checkpoint)
        self.order.queue(checkpoint)

    def abandon(self, checkpoint: Checkpoint) -> None:
        """Mark that the session continued elsewhere: the checkpoint is evicted before all that are likely to be
        reused."""
        checkpoint.abandoned = True
        self.order.queue(checkpoint)

    def republish(self, checkpoint: Checkpoint, kind: CheckpointKind) -> None:
        """Handle a publish at an existing checkpoint: it is no longer superseded, and keeps the more protected of both
        kinds."""
        checkpoint.superseded = False
        checkpoint.kind = max(checkpoint.kind, kind, key=BY_PROTECTION.index)
        self.touch(checkpoint)

    def lock(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_locks += 1
        if checkpoint.num_locks == 1:
            self.num_locked += 1
            self.num_kept += not checkpoint.holders

    def unlock(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_locks -= 1
        if not checkpoint.num_locks:
            self.num_locked -= 1
            self.num_kept -= not checkpoint.holders
            self._drop_or_queue(checkpoint)

    def hold(self, session_id: str, checkpoint: Checkpoint, seconds: float) -> None:
        """Hold a checkpoint for a session, instead of the one that the session held before."""
        self.end_hold(session_id)
        if not checkpoint.holders:
            self.num_kept += not checkpoint.num_locks
        checkpoint.holders.add(session_id)
        self._tree.ref(checkpoint.node, HOLD)
        hold = self.holds[session_id] = Hold(checkpoint, self._clock() + seconds)
        heapq.heappush(self._expiries, (hold.until, session_id))
        self.order.queue(checkpoint)

    def end_hold(self, session_id: str) -> None:
        """End the session's hold, if it has one."""
        hold = self.holds.get(session_id)
        if hold is not None:
            self._remove_hold(session_id, hold.checkpoint)
            self._drop_or_queue(hold.checkpoint)

    def expire_holds(self) -> None:
        """End the holds whose time has passed."""
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            until, session_id = heapq.heappop(self._expiries)
            hold = self.holds.get(session_id)
            if hold is not None and hold.until == until:
                self.end_hold(session_id)

    def supersede(self, checkpoint: Checkpoint) -> None:
        """Mark that a deeper checkpoint replaces this one: it is removed as soon as it has no lock and no hold."""
        checkpoint.superseded = True
        self._drop_or_queue(checkpoint)

    def evict_for_pages(self) -> None:
        """Evict the next checkpoint that frees pages."""
        self._evict(self.order.pop_for_pages())

    def evict_for_row(self) -> None:
        """Evict the next checkpoint. Frees a row, and pages if nothing deeper needs them."""
        self._evict(self.order.pop_for_row())

    def clear(self) -> None:
        """Remove all checkpoints that aren't locked, held ones too, and all copies in the host tier."""
        if self._host is not None:
            self._host.clear()
        for checkpoint in [checkpoint for checkpoint in self.live if checkpoint.is_evictable]:
            self._drop(checkpoint)

    def unref(self, node: Node, level: int) -> None:
        """Do PrefixTree.unref, and queue the checkpoint that may have become the deepest of its path."""
        above = self._tree.unref(node, level)
        if level == NEED and above is not None and above.checkpoint is not None:
            self.order.queue(above.checkpoint)

    def _drop_or_queue(self, checkpoint: Checkpoint) -> None:
        """Remove a superseded checkpoint that has no lock and no hold; queue any other one. Call after a lock, a hold,
        or the reason to keep it has gone."""
        if checkpoint.superseded and not checkpoint.num_locks and not checkpoint.holders:
            self.num_superseded += 1
            if self._host is not None:
                self._host.drop_copy(checkpoint.node)
            self._drop(checkpoint)
        else:
            self.order.queue(checkpoint)

    def _evict(self, checkpoint: Checkpoint | None) -> None:
        assert checkpoint is not None, "the counters promised room, but there is nothing to evict"
        self.num_evicted += 1
        if self._host is not None:
            self._host.before_eviction(checkpoint)
        self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        assert not checkpoint.num_locks
        for session_id in list(checkpoint.holders):
            self._remove_hold(session_id, checkpoint)
        if self._host is not None:
            self._host.clear_ready(checkpoint)
        checkpoint.alive = False
        checkpoint.node.checkpoint = None
        del self.live[checkpoint]
        self._rows.free((checkpoint.row,))
        self.unref(checkpoint.node, NEED)

    def _remove_hold(self, session_id: str, checkpoint: Checkpoint) -> None:
        del self.holds[session_id]
        checkpoint.holders.remove(session_id)
        if not checkpoint.holders:
            self.num_kept -= not checkpoint.num_locks
        self.unref(checkpoint.node, HOLD)


def _needs_copy(checkpoint: Checkpoint) -> bool:
    return (
        checkpoint.is_evictable
        and checkpoint.ready_blocks is None
        and checkpoint.likely_reused
        and not checkpoint.superseded
    )
