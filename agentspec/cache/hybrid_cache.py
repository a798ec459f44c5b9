"""The hybrid prefix cache: the only door to state rows, KV pages and the tree of checkpoints.

    match -> acquire -> grow_pages, take_rows -> [fetch -> land] -> publish (any number of times) -> release

A request may resume only where its recurrent state stands, so a hit is the deepest boundary on its path that has a
checkpoint. Every row and page belongs to the free list, to the tree, or to one lease. What the tree owns is kept while
it can serve a later prompt: one LRU over checkpoints, one bound in bytes beside the sizes of the pools. What goes may
live on in the host's memory (host_tier.py), and is fetched from there.

Publishing never changes a running request's pages. Where the tree has no pages, it takes the lease's and the lease goes
on reading them; where it has others of the same content, those go if nobody reads them, and else the lease keeps its
duplicates.

Knows nothing about models, tensors, requests or text: it deals in ids.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable

from agentspec.cache.checkpoints import CheckpointSet
from agentspec.cache.host_tier import CopyOrders, HostMemory, HostPagePool, HostTier
from agentspec.cache.leases import Fetch, Lease, Match
from agentspec.cache.page_pool import PagePool
from agentspec.cache.prefix_tree import HOLD, LOCK, NEED, Checkpoint, Node, PrefixTree, path_of
from agentspec.cache.row_pool import RowPool
from agentspec.errors import ConfigError
from agentspec.types import BLOCK_TOKENS, ZERO_ROW, CheckpointKind

__all__ = ["GHOST_BLOCKS", "HybridCache", "Lease", "Match"]

GHOST_BLOCKS = 1 << 17
"""Blocks whose token ids are kept without pages: 8.4 million tokens, 32 MiB."""

_NEVER_SUPERSEDED = (CheckpointKind.SYSTEM, CheckpointKind.BRANCH, CheckpointKind.GRID)
"""SYSTEM and BRANCH serve other sessions; a GRID checkpoint is one of many on its path, each for a prompt that parts
elsewhere."""


class HybridCache:
    """Not thread-safe: one loop owns it. Attributes without underscore are for `invariants.check` and read-only to
    everybody else."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_pages: int,
        row_bytes: int,
        page_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
        budget_bytes: int | None = None,
        enabled: bool = True,
        ghost_blocks: int = GHOST_BLOCKS,
        host_memory: HostMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_rows` and `num_pages` count the reserved ones too. `budget_bytes` bounds everything in use, the tree's
        and the leases' together; None: only the pools bound it. `enabled=False`: nothing is ever found or published.
        `host_memory=None`: what is evicted is gone. Raises ConfigError."""
        for name, value, least in (
            ("num_rows", num_rows, 3),
            ("num_pages", num_pages, 2),
            ("row_bytes", row_bytes, 1),
            ("page_bytes", page_bytes, 1),
            ("block_tokens", block_tokens, 1),
            ("budget_bytes", 0 if budget_bytes is None else budget_bytes, 0),
            ("ghost_blocks", ghost_blocks, 0),
        ):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        self.rows = RowPool(num_rows)
        self.pages = PagePool(num_pages)
        self.row_bytes = row_bytes
        self.page_bytes = page_bytes
        self.block_tokens = block_tokens
        pool_bytes = self.rows.capacity * row_bytes + self.pages.capacity * page_bytes
        self.budget_bytes = pool_bytes if budget_bytes is None else min(budget_bytes, pool_bytes)
        on_host = HostPagePool(0 if host_memory is None else host_memory.num_pages, num_reserved=0)
        self.tree = PrefixTree(self.pages, block_tokens=block_tokens, max_ghost_blocks=ghost_blocks, host_pages=on_host)
        self.host: HostTier | None = None
        if enabled and host_memory is not None:
            self.host = HostTier(
                host_memory, self.tree, on_host, device_rows=self.rows.capacity, device_pages=self.pages.capacity
            )
        self.checkpoints = CheckpointSet(self.tree, self.rows, clock, self.host)
        self.leases: set[Lease] = set()
        self.enabled = enabled
        self._bytes_to_host = 0
        self._bytes_to_device = 0

    def match(self, namespace: str, tokens: array[int], *, limit: int | None = None) -> Match:
        """The deepest state to resume from within `limit` tokens (None: all but the last, which is always computed).
        Changes nothing."""
        limit = len(tokens) - 1 if limit is None else min(limit, len(tokens))
        data = tokens[: max(limit, 0) // self.block_tokens * self.block_tokens].tobytes()
        path, partial, num_common = self.tree.walk(namespace, data)
        branch_tokens = (path[-1].depth if path else 0) + (num_common * self.block_tokens if partial is not None else 0)
        found = next((node.checkpoint for node in reversed(path) if node.checkpoint is not None), None)
        num_tokens = 0 if found is None else found.node.depth
        return Match(
            num_tokens=num_tokens,
            row=ZERO_ROW if found is None else found.row,
            kind=None if found is None else found.kind,
            branch_tokens=branch_tokens,
            checkpoint=found,
            host_copy=None if self.host is None else self.host.find(path, num_tokens),
        )

    def acquire(self, match: Match, *, session_id: str | None = None) -> Lease:
        """Resume from a match: its row and the pages of its path are locked while the lease lives, and so are pages
        that lead on to a state on the host. Ends the session's hold."""
        lease = Lease(num_cached=match.num_tokens, read_row=match.row, page_ids=[], session_id=session_id)
        found = match.checkpoint
        if found is not None:
            assert found.alive, "the cache changed between match and acquire"
            self.checkpoints.touch(found)
            lease.page_ids = self.tree.page_ids(found.node)
            lease.mine.append(found)
            self._advance(lease, found)
        if match.host_copy is not None:
            standing = [node for node in path_of(match.host_copy.node) if node.page_ids is not None]
            if standing and standing[-1] is not lease.anchor:
                self._move_anchor(lease, standing[-1])
                lease.page_ids = self.tree.page_ids(standing[-1])
        if session_id is not None:
            self._come_back(
                session_id,
                None if found is None else found.node,
                None if match.host_copy is None else match.host_copy.node,
            )
        self.leases.add(lease)
        return lease

    def fetch(self, lease: Lease, match: Match) -> Fetch | None:
        """Order the state that `match`, of which the lease came, found on the host. None, and nothing has changed, when
        there is no row for it.

        The lease has pages for all of it. It stands where it stood until `land` is called."""
        copy = match.host_copy
        assert copy is not None
        assert self.host is not None
        rows = self.take_rows(lease, 1)
        if rows is None:
            return None
        first, end = (
            (0 if lease.anchor is None else lease.anchor.depth) // self.block_tokens,
            copy.node.depth // self.block_tokens,
        )
        number = self.host.fetch(copy, rows[0], lease.page_ids[first:end])
        lease.fetch = Fetch(number=number, num_tokens=copy.node.depth, row=rows[0], kind=copy.kind)
        return lease.fetch

    def land(self, lease: Lease, namespace: str, tokens: array[int]) -> None:
        """The ordered state has come: it stands on the device again, and the lease resumes from it as if it had been
        there. Nothing of the lease's is in use yet, so what others have published in the meantime takes the place of
        what came."""
        fetch, lease.fetch = lease.fetch, None
        assert fetch is not None, "nothing was ordered"
        path = self.tree.insert(namespace, tokens[: fetch.num_tokens].tobytes())
        node = path[-1]
        _assert_same_path(node, lease.anchor)
        for step in path:
            ids = self._lease_pages(lease, step)
            if ids[0] not in lease.own_pages:
                continue
            lease.own_pages.difference_update(ids)
            if step.page_ids is None:
                self.tree.give_pages(step, ids)
            else:
                self.pages.free(ids)
                end = step.depth // self.block_tokens
                lease.page_ids[end - step.num_blocks : end] = step.page_ids
        resumed = node.checkpoint
        if resumed is None:
            lease.own_rows.remove(fetch.row)
            resumed = self.checkpoints.create(node, fetch.row, fetch.kind)
        else:
            self.give_rows(lease, [fetch.row])
            self.checkpoints.touch(resumed)
        lease.num_cached, lease.read_row = fetch.num_tokens, resumed.row
        lease.mine.append(resumed)
        self._advance(lease, resumed)

    def copied(self, number: int) -> None:
        """All copy orders to the host up to this number have been carried out."""
        assert self.host is not None
        self.host.copied(number)

    def copy_ahead(self) -> None:
        """Order copies of what eviction would come to next, where too little could go without a loss. Call between any
        two steps."""
        if self.host is None:
            return
        free_bytes = self.budget_bytes - self.used_bytes
        free_rows = min(self.rows.num_free, free_bytes // self.row_bytes)
        free_pages = min(self.pages.num_free, free_bytes // self.page_bytes)
        while self.host.is_short(free_rows, free_pages):
            checkpoint = self.checkpoints.order.pop_uncopied()
            if checkpoint is None:
                return
            self.host.make_ready(checkpoint)

    def take_copy_orders(self) -> CopyOrders:
        """The orders since the last call; they must be carried out, as host_tier.py says."""
        orders = CopyOrders() if self.host is None else self.host.take_orders()
        self._bytes_to_host += sum(
            len(order.rows) * self.row_bytes + len(order.pages) * self.page_bytes for order in orders.to_host
        )
        self._bytes_to_device += sum(
            len(order.rows) * self.row_bytes + len(order.pages) * self.page_bytes for order in orders.to_device
        )
        return orders

    def release(self, lease: Lease, *, hold_seconds: float = 0.0) -> None:
        """End a lease: what it owns is free, what it locked isn't locked any more.

        With a session and hold_seconds > 0, the deepest checkpoint that it used or published goes last in eviction
        until the clock passes."""
        assert lease in self.leases, "the lease was released before"
        assert lease.fetch is None, "a copy would write into ids that the lease doesn't own any more"
        self.leases.remove(lease)
        self.pages.free(lease.own_pages)
        self.rows.free(lease.own_rows)
        lease.own_pages.clear()
        lease.own_rows.clear()
        kept = next(
            (checkpoint for checkpoint in (lease.deepest, lease.locked) if checkpoint is not None and checkpoint.alive),
            None,
        )
        if lease.session_id is not None and hold_seconds > 0 and kept is not None and not kept.superseded:
            self.checkpoints.hold(lease.session_id, kept, hold_seconds)
        self._unlock_row(lease)
        self._move_anchor(lease, None)

    def grow_pages(self, lease: Lease, num_pages: int) -> bool:
        """Make len(lease.page_ids) >= num_pages, evicting as needed. False, and nothing has changed, when that can't
        be."""
        assert lease in self.leases
        missing = num_pages - len(lease.page_ids)
        if missing <= 0:
            return True
        if not self._make_room(lease, num_rows=0, num_pages=missing):
            return False
        ids = self.pages.take(missing)
        lease.page_ids.extend(ids)
        lease.own_pages.update(ids)
        return True

    def take_rows(self, lease: Lease, count: int) -> list[int] | None:
        """`count` more rows of the lease's own, evicting as needed. None, and nothing has changed, when that can't
        be."""
        assert lease in self.leases
        if not self._make_room(lease, num_rows=count, num_pages=0):
            return None
        ids = self.rows.take(count)
        lease.own_rows.update(ids)
        return ids

    def give_rows(self, lease: Lease, rows: Iterable[int]) -> None:
        """Take back rows that the lease owns."""
        for row in rows:
            assert row in lease.own_rows, f"row {row} is not the lease's to give back"
            lease.own_rows.remove(row)
            self.rows.free((row,))

    def publish(
        self, lease: Lease, namespace: str, tokens: array[int], length: int, row: int, kind: CheckpointKind
    ) -> bool:
        """Offer the state after tokens[:length], which `row` holds and whose K/V lies in the lease's pages.

        True: the tree owns the row now. False: a checkpoint stands there already, or caching is off; the row stays the
        lease's. In both cases the lease's older checkpoint of the same kind is redundant and goes (_supersede)."""
        num_blocks, rest = divmod(length, self.block_tokens)
        assert lease in self.leases
        assert not rest, f"length {length} is not a multiple of {self.block_tokens}"
        assert 0 < length <= len(tokens), f"length {length} of {len(tokens)} tokens"
        assert row in lease.own_rows, f"row {row} is not the lease's to publish"
        assert num_blocks <= len(lease.page_ids), f"{num_blocks} blocks in {len(lease.page_ids)} pages"
        if not self.enabled:
            return False
        path = self.tree.insert(namespace, tokens[:length].tobytes())
        node = path[-1]
        _assert_same_path(node, lease.anchor)
        standing = node.checkpoint
        if standing is not None:
            self.checkpoints.confirm(standing, kind)
            if lease.deepest is None or lease.deepest.node.depth < length:
                lease.deepest = standing
        else:
            self._fill_ghosts(lease, path)
            lease.own_rows.remove(row)
            created = self.checkpoints.create(node, row, kind)
            lease.mine.append(created)
            if lease.anchor is None or lease.anchor.depth <= length:
                self._advance(lease, created)
                self._adopt_duplicates(lease)
        if kind not in _NEVER_SUPERSEDED:
            self._supersede(lease, kind, length)
        return standing is None

    @property
    def used_bytes(self) -> int:
        """Bytes of all rows and pages that the tree and the leases own."""
        return self.rows.num_used * self.row_bytes + self.pages.num_used * self.page_bytes

    def available_rows(self, *, including_held: bool = False) -> int:
        """Rows that take_rows could hand out now if nothing else were taken: free ones and what eviction would
        yield."""
        rows, _ = self._evictable(including_held)
        return min(self.rows.num_free + rows, self.available_bytes(including_held=including_held) // self.row_bytes)

    def available_pages(self, *, including_held: bool = False) -> int:
        """Pages that grow_pages could hand out now if nothing else were taken."""
        _, pages = self._evictable(including_held)
        return min(self.pages.num_free + pages, self.available_bytes(including_held=including_held) // self.page_bytes)

    def available_bytes(self, *, including_held: bool = False) -> int:
        """Bytes of the budget that are free, or would be after evicting all that can go."""
        rows, pages = self._evictable(including_held)
        return self.budget_bytes - self.used_bytes + rows * self.row_bytes + pages * self.page_bytes

    def private_bytes(self, lease: Lease) -> tuple[int, int]:
        """Bytes of rows and of pages that only this lease's session uses: its own, and its path in the tree up to where
        others use it too."""
        assert lease in self.leases
        num_rows, num_pages = len(lease.own_rows), len(lease.own_pages)
        node = lease.anchor
        while node is not None and node.parent is not None:
            num_others = node.refs[NEED] - (node.checkpoint is not None) - 1
            if num_others or node.refs[HOLD] > 1:
                break
            num_rows += node.checkpoint is not None
            num_pages += node.num_blocks
            node = node.parent
        return num_rows * self.row_bytes, num_pages * self.page_bytes

    def stats(self) -> dict[str, int]:
        """Counters and gauges, by name. Walks the live checkpoints once."""
        self.checkpoints.expire_holds()
        by_kind = dict.fromkeys(CheckpointKind, 0)
        for checkpoint in self.checkpoints.live:
            by_kind[checkpoint.kind] += 1
        return {
            "rows_used": self.rows.num_used,
            "rows_free": self.rows.num_free,
            "rows_peak": self.rows.peak_used,
            "pages_used": self.pages.num_used,
            "pages_free": self.pages.num_free,
            "pages_peak": self.pages.peak_used,
            "used_bytes": self.used_bytes,
            "budget_bytes": self.budget_bytes,
            "tree_pages": self.tree.num_blocks[NEED],
            "tree_pages_locked": self.tree.num_blocks[LOCK],
            "ghost_blocks": self.tree.num_ghost_blocks,
            "checkpoints_live": len(self.checkpoints.live),
            "checkpoints_peak": self.checkpoints.peak_live,
            "checkpoints_locked": self.checkpoints.num_locked,
            "checkpoints_created": self.checkpoints.num_created,
            "checkpoints_superseded": self.checkpoints.num_superseded,
            "checkpoints_evicted": self.checkpoints.num_evicted,
            **{f"checkpoints_live_{kind.name.lower()}": count for kind, count in by_kind.items()},
            "sessions_held": len(self.checkpoints.holds),
            "leases": len(self.leases),
            "bytes_to_host": self._bytes_to_host,
            "bytes_to_device": self._bytes_to_device,
            **({} if self.host is None else self.host.stats()),
        }

    def clear(self) -> None:
        """Forget everything that no lease locks: checkpoints, held ones too, and ghosts."""
        self.checkpoints.clear()
        self.tree.trim_ghosts(0)

    def _supersede(self, lease: Lease, kind: CheckpointKind, length: int) -> None:
        """A checkpoint stands at `length`: the lease's older ones of its kind won't be resumed from by this session
        again."""
        for checkpoint in lease.mine.copy():
            if checkpoint.alive and checkpoint.kind == kind and checkpoint.node.depth < length:
                lease.mine.remove(checkpoint)
                self.checkpoints.supersede(checkpoint)
                if lease.locked is checkpoint:
                    self._unlock_row(lease)

    def _advance(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """The lease uses this checkpoint from now on: lock its row and its path in the place of what was locked
        before."""
        self.checkpoints.lock(checkpoint)
        self._move_anchor(lease, checkpoint.node)
        self._unlock_row(lease)
        lease.locked = lease.deepest = checkpoint

    def _unlock_row(self, lease: Lease) -> None:
        checkpoint, lease.locked = lease.locked, None
        if checkpoint is not None:
            self.checkpoints.unlock(checkpoint)

    def _move_anchor(self, lease: Lease, node: Node | None) -> None:
        before, lease.anchor = lease.anchor, node
        for level in (NEED, HOLD, LOCK):
            if node is not None:
                self.tree.ref(node, level)
        for level in (LOCK, HOLD, NEED):
            if before is not None:
                self.checkpoints.unref(before, level)

    def _fill_ghosts(self, lease: Lease, path: list[Node]) -> None:
        """Nodes of a published path that have no pages take the lease's, which goes on using them."""
        for node in path:
            if node.page_ids is None:
                ids = self._lease_pages(lease, node)
                assert lease.own_pages.issuperset(ids)
                self.tree.give_pages(node, ids)
                lease.own_pages.difference_update(ids)

    def _adopt_duplicates(self, lease: Lease) -> None:
        """Where only this lease locks the tree's pages but reads duplicates of its own, the tree takes those and frees
        what it had.

        Happens after two requests computed the same prefix at once. Without it a request alone could be short of pages
        that it locks and doesn't read."""
        node = lease.anchor
        if node is None or len(lease.own_pages) == len(lease.page_ids) - node.depth // self.block_tokens:
            return
        while node is not None and node.parent is not None and node.refs[LOCK] == 1:
            ids = self._lease_pages(lease, node)
            if ids[0] in lease.own_pages:
                self.tree.replace_pages(node, ids)
                lease.own_pages.difference_update(ids)
                if self.host is not None:
                    self.host.moved(node)
            node = node.parent

    def _lease_pages(self, lease: Lease, node: Node) -> list[int]:
        end = node.depth // self.block_tokens
        return lease.page_ids[end - node.num_blocks : end]

    def _evictable(self, including_held: bool) -> tuple[int, int]:
        """Rows and pages that eviction would yield."""
        self.checkpoints.expire_holds()
        blocks = self.tree.num_blocks
        return self.checkpoints.count_evictable(including_held=including_held), blocks[NEED] - blocks[
            LOCK if including_held else HOLD
        ]

    def _can_fit(self, num_rows: int, num_pages: int) -> bool:
        rows, pages = self._evictable(including_held=True)
        return (
            num_rows <= self.rows.num_free + rows
            and num_pages <= self.pages.num_free + pages
            and num_rows * self.row_bytes + num_pages * self.page_bytes <= self.available_bytes(including_held=True)
        )

    def _come_back(self, session_id: str, *resumed: Node | None) -> None:
        """End the session's hold. A turn that its next prompt doesn't continue was rendered anew: that checkpoint has
        no future."""
        hold = self.checkpoints.holds.get(session_id)
        if hold is None:
            return
        held = hold.checkpoint
        self.checkpoints.end_hold(session_id)
        if held.alive and held.kind is CheckpointKind.TURN and not any(_leads_to(held.node, node) for node in resumed):
            self.checkpoints.abandon(held)

    def _make_room(self, lease: Lease, *, num_rows: int, num_pages: int) -> bool:
        """Evict until so many rows and pages are free, within the budget. False, without having evicted, when that
        can't be."""
        if not self._can_fit(num_rows, num_pages):
            self._adopt_duplicates(lease)
            if not self._can_fit(num_rows, num_pages):
                return False
        room = self.budget_bytes - num_rows * self.row_bytes - num_pages * self.page_bytes
        while True:
            if num_pages > self.pages.num_free:
                self.checkpoints.evict_for_pages()
            elif num_rows > self.rows.num_free or self.used_bytes > room:
                self.checkpoints.evict_for_row()
            else:
                return True


def _leads_to(node: Node, lower: Node | None) -> bool:
    """True when `node` lies on the path to `lower`."""
    step = lower
    while step is not None and step.depth > node.depth:
        step = step.parent
    return step is node


def _assert_same_path(node: Node, anchor: Node | None) -> None:
    """A lease publishes only on the path that it resumed from and published on before."""
    if anchor is None:
        return
    upper, lower = (node, anchor) if node.depth <= anchor.depth else (anchor, node)
    step: Node | None = lower
    while step is not None and step.depth > upper.depth:
        step = step.parent
    assert step is upper, f"tokens of {node.depth} leave the path that the lease locks to {anchor.depth}"
