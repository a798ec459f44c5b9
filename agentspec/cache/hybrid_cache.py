"""The hybrid prefix cache: the only interface to state rows, KV pages and the tree of checkpoints.

    match -> acquire -> grow_pages, take_rows -> [start_fetch -> finish_fetch] -> publish (any number of times) ->
    release

A request can resume only where a recurrent state is stored. So a hit is the deepest boundary on its path that has a
checkpoint. Every row and page belongs to the free list, to the tree, or to one lease. The tree keeps what a later
prompt may use: one LRU order over checkpoints, and one bound in bytes besides the sizes of the pools. Evicted states
may be kept in host memory (host_tier.py) and fetched from there.

Publishing never changes the page ids of a running request. A node without pages takes the lease's pages, and the lease
goes on reading them. If the node has other pages with the same content and no other lease reads them, they are
replaced; else the lease keeps its duplicates.

Knows nothing about models, tensors, requests or text; works on ids.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable

from agentspec.cache.checkpoints import CheckpointSet
from agentspec.cache.host_tier import CopyOrders, HostMemory, HostTier
from agentspec.cache.id_pool import IdPool
from agentspec.cache.leases import Fetch, Lease, Match
from agentspec.cache.prefix_tree import HOLD, LOCK, NEED, Checkpoint, Node, PrefixTree, path_up
from agentspec.errors import ConfigError
from agentspec.types import BLOCK_TOKENS, SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW, CheckpointKind

__all__ = ["GHOST_BLOCKS", "HybridCache", "Lease", "Match"]

GHOST_BLOCKS = 1 << 17
"""Blocks whose token ids are kept without pages: 8.4 million tokens, 32 MiB."""

_NEVER_SUPERSEDED = (CheckpointKind.SYSTEM, CheckpointKind.BRANCH, CheckpointKind.GRID)
"""SYSTEM and BRANCH checkpoints serve other sessions. GRID checkpoints are many on a path, and each serves prompts that
branch off at another place."""


class HybridCache:
    """Not thread-safe: only one loop uses it. Attributes without underscore are for `invariants.check`, and read-only
    for other modules."""

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
        """`num_rows` and `num_pages` include the reserved ones. `budget_bytes` bounds the bytes of the tree and the
        leases together; None: bounded by the pools only. `enabled=False`: nothing is ever found or published.
        `host_memory=None`: evicted states are lost. Raises ConfigError."""
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
        self.rows = IdPool(num_rows, num_reserved=max(ZERO_ROW, SCRATCH_ROW) + 1, noun="row")
        self.pages = IdPool(num_pages, num_reserved=SCRATCH_PAGE + 1, noun="page")
        self.row_bytes = row_bytes
        self.page_bytes = page_bytes
        self.block_tokens = block_tokens
        pool_bytes = self.rows.capacity * row_bytes + self.pages.capacity * page_bytes
        self.budget_bytes = pool_bytes if budget_bytes is None else min(budget_bytes, pool_bytes)
        host_pages = IdPool(0 if host_memory is None else host_memory.num_pages, num_reserved=0, noun="host page")
        self.tree = PrefixTree(
            self.pages, block_tokens=block_tokens, max_ghost_blocks=ghost_blocks, host_pages=host_pages
        )
        self.host: HostTier | None = None
        if enabled and host_memory is not None:
            self.host = HostTier(
                host_memory, self.tree, host_pages, device_rows=self.rows.capacity, device_pages=self.pages.capacity
            )
        self.checkpoints = CheckpointSet(self.tree, self.rows, clock, self.host)
        self.leases: set[Lease] = set()
        self.enabled = enabled
        self._bytes_to_host = 0
        self._bytes_to_device = 0

    def match(self, namespace: str, tokens: array[int], *, limit: int | None = None) -> Match:
        """Find the deepest state to resume from within `limit` tokens (None: all but the last token, which is always
        computed). Changes nothing."""
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
        """Start a lease that resumes from a match. Locks the row, the pages of its path, and the device pages on the
        way to a copy in the host tier, until the lease is released. Ends the session's hold."""
        lease = Lease(num_cached=match.num_tokens, read_row=match.row, page_ids=[], session_id=session_id)
        found = match.checkpoint
        if found is not None:
            assert found.alive, "the cache changed between match and acquire"
            self.checkpoints.touch(found)
            lease.page_ids = self.tree.page_ids(found.node)
            lease.used_checkpoints.append(found)
            self._advance(lease, found)
        if match.host_copy is not None:
            deepest = next((node for node in path_up(match.host_copy.node) if node.page_ids is not None), None)
            if deepest is not None and deepest is not lease.anchor:
                self._move_anchor(lease, deepest)
                lease.page_ids = self.tree.page_ids(deepest)
        if session_id is not None:
            self._end_session_hold(
                session_id,
                None if found is None else found.node,
                None if match.host_copy is None else match.host_copy.node,
            )
        self.leases.add(lease)
        return lease

    def start_fetch(self, lease: Lease, match: Match) -> Fetch | None:
        """Order the fetch of the host copy in `match`, which must be the match of this lease. Returns None, and changes
        nothing, when there is no free row.

        The lease must already have pages for the whole state. It resumes from its old position until `finish_fetch` is
        called."""
        copy = match.host_copy
        assert copy is not None
        assert self.host is not None
        rows = self.take_rows(lease, 1)
        if rows is None:
            return None
        first = (0 if lease.anchor is None else lease.anchor.depth) // self.block_tokens
        end = copy.node.depth // self.block_tokens
        number = self.host.fetch(copy, rows[0], lease.page_ids[first:end])
        lease.fetch = Fetch(number=number, num_tokens=copy.node.depth, row=rows[0], kind=copy.kind)
        return lease.fetch

    def finish_fetch(self, lease: Lease, namespace: str, tokens: array[int]) -> None:
        """Finish a fetch: insert the checkpoint, and let the lease resume from it. If the prefix was published in the
        meantime, use the tree's pages and checkpoint and free the fetched ones; nothing has read those yet."""
        fetch, lease.fetch = lease.fetch, None
        assert fetch is not None, "no fetch is running"
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
        lease.used_checkpoints.append(resumed)
        self._advance(lease, resumed)

    def complete_copies_to_host(self, number: int) -> None:
        """Record that all copy orders to the host up to this number have been carried out."""
        assert self.host is not None
        self.host.complete_copies(number)

    def copy_ahead(self) -> None:
        """Order copies of the next checkpoints to evict, until enough rows and pages can be freed without losing a
        state. Call between two steps."""
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
        """The orders since the last call. The caller must carry them out as host_tier.py says."""
        orders = CopyOrders() if self.host is None else self.host.take_orders()
        self._bytes_to_host += sum(
            len(order.rows) * self.row_bytes + len(order.pages) * self.page_bytes for order in orders.to_host
        )
        self._bytes_to_device += sum(
            len(order.rows) * self.row_bytes + len(order.pages) * self.page_bytes for order in orders.to_device
        )
        return orders

    def release(self, lease: Lease, *, hold_seconds: float = 0.0) -> None:
        """End a lease: free what it owns, and unlock what it locked.

        With a session and hold_seconds > 0, the deepest checkpoint that the lease used or published is held: it is
        evicted last until the time has passed."""
        assert lease in self.leases, "the lease was released before"
        assert lease.fetch is None, "a running fetch would write to freed ids"
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
        """Grow the lease to `num_pages` pages, and evict as needed. Returns False, and changes nothing, when that is
        impossible."""
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
        """Take `count` more rows for the lease, and evict as needed. Returns None, and changes nothing, when that is
        impossible."""
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
        """Publish the state after tokens[:length], which is in `row`, with its K/V in the lease's pages.

        Returns True if the tree now owns the row; False if there already is a checkpoint or caching is off: the lease
        keeps the row. In both cases the lease's shallower checkpoints of the same kind are superseded."""
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
            self.checkpoints.republish(standing, kind)
            if lease.deepest is None or lease.deepest.node.depth < length:
                lease.deepest = standing
        else:
            self._fill_ghosts(lease, path)
            lease.own_rows.remove(row)
            created = self.checkpoints.create(node, row, kind)
            lease.used_checkpoints.append(created)
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
        """Rows that take_rows could return now if nothing else is taken: free ones, and those that eviction would
        free."""
        rows, _ = self._evictable(including_held)
        return min(self.rows.num_free + rows, self.available_bytes(including_held=including_held) // self.row_bytes)

    def available_pages(self, *, including_held: bool = False) -> int:
        """Pages that grow_pages could return now if nothing else is taken: free ones, and those that eviction would
        free."""
        _, pages = self._evictable(including_held)
        return min(self.pages.num_free + pages, self.available_bytes(including_held=including_held) // self.page_bytes)

    def available_bytes(self, *, including_held: bool = False) -> int:
        """Bytes of the budget that are free, or that eviction would free."""
        rows, pages = self._evictable(including_held)
        return self.budget_bytes - self.used_bytes + rows * self.row_bytes + pages * self.page_bytes

    def private_bytes(self, lease: Lease) -> tuple[int, int]:
        """Bytes of rows and of pages that only this lease's session uses: those the lease owns, and its path in the
        tree up to the node that others use too."""
        assert lease in self.leases
        num_rows, num_pages = len(lease.own_rows), len(lease.own_pages)
        for node in path_up(lease.anchor):
            num_others = node.refs[NEED] - (node.checkpoint is not None) - 1
            if num_others or node.refs[HOLD] > 1:
                break
            num_rows += node.checkpoint is not None
            num_pages += node.num_blocks
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
        """Remove everything that no lease locks: checkpoints, held ones too, and ghosts."""
        self.checkpoints.clear()
        self.tree.trim_ghosts(0)

    def _supersede(self, lease: Lease, kind: CheckpointKind, length: int) -> None:
        """Supersede the lease's checkpoints of this kind that are shallower than `length`: the session won't resume
        from them again."""
        for checkpoint in lease.used_checkpoints.copy():
            if checkpoint.alive and checkpoint.kind == kind and checkpoint.node.depth < length:
                lease.used_checkpoints.remove(checkpoint)
                self.checkpoints.supersede(checkpoint)
                if lease.locked is checkpoint:
                    self._unlock_row(lease)

    def _advance(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Lock this checkpoint's row and path for the lease, instead of those it locked before."""
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
        """Give the lease's pages to the nodes of a published path that have none. The lease goes on using them."""
        for node in path:
            if node.page_ids is None:
                ids = self._lease_pages(lease, node)
                assert lease.own_pages.issuperset(ids)
                self.tree.give_pages(node, ids)
                lease.own_pages.difference_update(ids)

    def _adopt_duplicates(self, lease: Lease) -> None:
        """Replace the tree's pages by the lease's duplicates on the part of the path that only this lease locks.

        Duplicates arise when two requests compute the same prefix at once. Without this, a request that runs alone
        could run out of pages because of pages that it locks but doesn't read."""
        anchor = lease.anchor
        if anchor is None or len(lease.own_pages) == len(lease.page_ids) - anchor.depth // self.block_tokens:
            return
        for node in itertools.takewhile(lambda node: node.refs[LOCK] == 1, path_up(anchor)):
            ids = self._lease_pages(lease, node)
            if ids[0] in lease.own_pages:
                self.tree.replace_pages(node, ids)
                lease.own_pages.difference_update(ids)
                if self.host is not None:
                    self.host.recopy_pages(node)

    def _lease_pages(self, lease: Lease, node: Node) -> list[int]:
        end = node.depth // self.block_tokens
        return lease.page_ids[end - node.num_blocks : end]

    def _evictable(self, including_held: bool) -> tuple[int, int]:
        """Rows and pages that eviction would free."""
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

    def _end_session_hold(self, session_id: str, *resumed: Node | None) -> None:
        """End the session's hold. If the new prompt doesn't continue the held turn, the prompt was rendered differently
        this time, and that checkpoint is abandoned."""
        hold = self.checkpoints.holds.get(session_id)
        if hold is None:
            return
        held = hold.checkpoint
        self.checkpoints.end_hold(session_id)
        if (
            held.alive
            and held.kind is CheckpointKind.TURN
            and not any(_is_on_path(held.node, node) for node in resumed)
        ):
            self.checkpoints.abandon(held)

    def _make_room(self, lease: Lease, *, num_rows: int, num_pages: int) -> bool:
        """Evict until this many rows and pages are free within the budget. Returns False, and evicts nothing, when that
        is impossible."""
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


def _is_on_path(node: Node, lower: Node | None) -> bool:
    """True when `node` is on the path to `lower`."""
    step = lower
    while step is not None and step.depth > node.depth:
        step = step.parent
    return step is node


def _assert_same_path(node: Node, anchor: Node | None) -> None:
    """Check that a lease publishes only on the path that it resumed from or published on before."""
    assert anchor is None or _is_on_path(node, anchor) or _is_on_path(anchor, node), (
        f"the path to depth {node.depth} leaves the path that the lease locks to depth {anchor.depth}"
    )
