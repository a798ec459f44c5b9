"""The checkpoints that stand in the tree: birth, use, locks, holds, and the ways in which they go.

A checkpoint goes when it is evicted, or superseded and nobody locks or holds it any more, or cleared. Its row is free
then, and so are the pages that it alone kept; what is evicted may live on as a copy in the host tier. A *lock* is a
lease that may still read the row; a *hold* is a session whose tool runs and who will be back in seconds: its checkpoint
is evicted last.

Knows the tree, the row pool and the host tier; knows nothing about pages of leases, budgets, or why somebody publishes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from agentspec.cache.eviction import EvictionOrder
from agentspec.cache.host_tier import HostTier
from agentspec.cache.prefix_tree import HOLD, NEED, Checkpoint, Node, PrefixTree
from agentspec.cache.row_pool import RowPool
from agentspec.types import BY_PROTECTION, CheckpointKind


@dataclass(slots=True)
class Hold:
    """A session's claim on the checkpoint of its last turn."""

    checkpoint: Checkpoint
    until: float


class CheckpointSet:
    """Attributes without underscore are read-only to everybody else."""

    def __init__(
        self, tree: PrefixTree, rows: RowPool, clock: Callable[[], float], host: HostTier | None = None
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
        """`row` is the tree's from now on. The node's path has all its pages."""
        checkpoint = Checkpoint(row=row, kind=kind, node=node, last_used=0)
        node.checkpoint = checkpoint
        self._tree.ref(node, NEED)
        self.live[checkpoint] = None
        self.num_created += 1
        self.peak_live = max(self.peak_live, len(self.live))
        self.touch(checkpoint)
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        """It was used just now."""
        self._tick += 1
        checkpoint.last_used = self._tick
        checkpoint.abandoned = False
        if self._host is not None:
            self._host.used(checkpoint)
        self.order.queue(checkpoint)

    def abandon(self, checkpoint: Checkpoint) -> None:
        """Its session went on elsewhere: it goes before all that may still be used."""
        checkpoint.abandoned = True
        self.order.queue(checkpoint)

    def confirm(self, checkpoint: Checkpoint, kind: CheckpointKind) -> None:
        """Somebody published where it stands: it is wanted again, under the more protected kind."""
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
            self._let_go(checkpoint)

    def hold(self, session_id: str, checkpoint: Checkpoint, seconds: float) -> None:
        """A session holds one checkpoint at most: the last."""
        self.end_hold(session_id)
        if not checkpoint.holders:
            self.num_kept += not checkpoint.num_locks
        checkpoint.holders.add(session_id)
        self._tree.ref(checkpoint.node, HOLD)
        hold = self.holds[session_id] = Hold(checkpoint, self._clock() + seconds)
        heapq.heappush(self._expiries, (hold.until, session_id))
        self.order.queue(checkpoint)

    def end_hold(self, session_id: str) -> None:
        """No-op for a session that holds nothing."""
        hold = self.holds.get(session_id)
        if hold is not None:
            self._remove_hold(session_id, hold.checkpoint)
            self._let_go(hold.checkpoint)

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
        """A deeper one does its work: it goes as soon as nobody locks or holds it."""
        checkpoint.superseded = True
        self._let_go(checkpoint)

    def evict_for_pages(self) -> None:
        """Evict the next checkpoint that frees pages."""
        self._evict(self.order.pop_for_pages())

    def evict_for_row(self) -> None:
        """Evict the next checkpoint of all: frees a row, and pages if nothing deeper needs them."""
        self._evict(self.order.pop_for_row())

    def clear(self) -> None:
        """Drop everything that isn't locked, holds or not, and all copies on the host."""
        if self._host is not None:
            self._host.clear()
        for checkpoint in [checkpoint for checkpoint in self.live if checkpoint.is_evictable]:
            self._drop(checkpoint)

    def unref(self, node: Node, level: int) -> None:
        """PrefixTree.unref; where the walk up ends, a checkpoint may have become the deepest of its path."""
        above = self._tree.unref(node, level)
        if level == NEED and above is not None and above.checkpoint is not None:
            self.order.queue(above.checkpoint)

    def _let_go(self, checkpoint: Checkpoint) -> None:
        """A lock, a hold or the reason to stay is gone."""
        if checkpoint.superseded and not checkpoint.num_locks and not checkpoint.holders:
            self.num_superseded += 1
            if self._host is not None:
                self._host.forget(checkpoint.node)
            self._drop(checkpoint)
        else:
            self.order.queue(checkpoint)

    def _evict(self, checkpoint: Checkpoint | None) -> None:
        assert checkpoint is not None, "there was room by the accounts, but nothing to evict"
        self.num_evicted += 1
        if self._host is not None:
            self._host.evicting(checkpoint)
        self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        assert not checkpoint.num_locks
        for session_id in list(checkpoint.holders):
            self._remove_hold(session_id, checkpoint)
        if self._host is not None:
            self._host.not_ready(checkpoint)
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
        and checkpoint.is_promising
        and not checkpoint.superseded
    )
