"""Audit of a HybridCache: checks all invariants that hold between two calls, recomputed from scratch.

For tests and debugging: it walks the whole tree and all ids, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentspec.cache.host_tier import HostTier
from agentspec.cache.hybrid_cache import HybridCache
from agentspec.cache.id_pool import IdPool
from agentspec.cache.leases import Lease
from agentspec.cache.prefix_tree import HOLD, HOST, LOCK, NEED, Checkpoint, Node, path_of
from agentspec.types import ZERO_ROW


def check(cache: HybridCache) -> None:
    """Raise an AssertionError that names the broken invariant."""
    nodes = list(cache.tree.nodes())
    _check_ownership(cache, nodes)
    _check_structure(cache, nodes)
    _check_refs(cache, nodes)
    _check_ghosts(cache, nodes)
    _check_checkpoints(cache, nodes)
    _check_holds(cache)
    if cache.host is not None:
        _check_host(cache.host, cache, nodes)
    for lease in cache.leases:
        _check_lease(cache, lease)
    _check_accounts(cache)


def _check_ownership(cache: HybridCache, nodes: list[Node]) -> None:
    """Every page and row belongs to exactly one of: free list, tree, one lease."""
    tree_pages = [page for node in nodes for page in node.page_ids or ()]
    _check_pool(cache.pages, tree_pages, [page for lease in cache.leases for page in lease.own_pages])
    _check_pool(
        cache.rows,
        [node.checkpoint.row for node in nodes if node.checkpoint],
        [row for lease in cache.leases for row in lease.own_rows],
    )


def _check_pool(pool: IdPool, of_tree: Iterable[int], of_leases: Iterable[int]) -> None:
    owned = sorted([*pool.free_ids(), *of_tree, *of_leases])
    expected = range(pool.num_reserved, pool.num_ids)
    if owned != list(expected):
        twice = [unit for unit, count in Counter(owned).items() if count > 1]
        assert not twice, f"{pool.noun}s with more than one owner: {twice}"
        assert not set(expected) - set(owned), f"{pool.noun}s with no owner: {set(expected) - set(owned)}"
        raise AssertionError(f"reserved or unknown {pool.noun}s are owned: {set(owned) - set(expected)}")
    assert pool.num_free == len(pool.free_ids())
    assert pool.num_used == pool.capacity - pool.num_free
    assert pool.peak_used >= pool.num_used


def _check_structure(cache: HybridCache, nodes: list[Node]) -> None:
    tree = cache.tree
    for namespace, root in tree.roots.items():
        assert root.parent is None
        assert root.namespace == namespace
        assert root.children, f"namespace {namespace!r} is empty and still has a root"
        assert root.page_ids is None
        assert root.checkpoint is None
    for node in nodes:
        assert node.parent is not None
        assert node.num_blocks > 0, "a node without blocks"
        assert len(node.run) == node.num_blocks * tree.block_bytes
        assert node.depth == node.parent.depth + node.num_blocks * tree.block_tokens
        assert node.parent.children.get(node.run[: tree.block_bytes]) is node, "a node's key isn't its first block"


def _check_refs(cache: HybridCache, nodes: list[Node]) -> None:
    """`refs` count the references to a node plus its referenced children; a node has pages exactly while it is
    needed."""
    own: dict[int, Counter[Node | None]] = {level: Counter() for level in (NEED, HOLD, LOCK)}
    own[NEED].update(node for node in nodes if node.checkpoint is not None)
    for lease in cache.leases:
        if lease.anchor is not None:
            for level in (NEED, HOLD, LOCK):
                own[level][lease.anchor] += 1
    for hold in cache.checkpoints.holds.values():
        own[HOLD][hold.checkpoint.node] += 1
    own[HOST] = Counter(node for node in nodes if node.host_copy is not None)
    for level, pointers in own.items():
        wanted = [node for node in nodes if node.refs[level]]
        pointers.update(node.parent for node in wanted)
        for node in nodes:
            count = pointers.get(node, 0)
            assert node.refs[level] == count, (
                f"refs on level {level} at depth {node.depth}: {node.refs[level]}, counted {count}"
            )
        assert cache.tree.num_blocks[level] == sum(node.num_blocks for node in wanted)
    for node in nodes:
        assert (node.page_ids is not None) == (node.refs[NEED] > 0), (
            f"unreferenced or missing pages at depth {node.depth}"
        )
        assert node.page_ids is None or len(node.page_ids) == node.num_blocks
        assert (node.host_page_ids is not None) == (node.refs[HOST] > 0), (
            f"unreferenced or missing host pages at depth {node.depth}"
        )
        assert node.host_page_ids is None or len(node.host_page_ids) == node.num_blocks
        assert node.refs[NEED] or not node.refs[HOLD], "a hold on a node without checkpoint"
        assert node.refs[HOLD] or not node.refs[LOCK]
        if node.checkpoint is not None:
            assert all(step.page_ids is not None for step in path_of(node)), "a checkpoint whose path lacks pages"


def _check_ghosts(cache: HybridCache, nodes: list[Node]) -> None:
    tree = cache.tree
    ghosts = [node for node in nodes if node.page_ids is None and node.host_page_ids is None]
    assert set(ghosts) == set(tree.ghosts)
    assert tree.num_ghost_blocks == sum(node.num_blocks for node in ghosts) <= tree.max_ghost_blocks
    age = {node: index for index, node in enumerate(tree.ghosts)}
    assert all(age[child] < age[node] for node in ghosts for child in node.children.values()), (
        "a ghost would be dropped before its children"
    )


def _check_checkpoints(cache: HybridCache, nodes: list[Node]) -> None:
    checkpoints = cache.checkpoints
    assert set(checkpoints.live) == {node.checkpoint for node in nodes if node.checkpoint is not None}
    locks = Counter(lease.locked for lease in cache.leases if lease.locked is not None)
    for checkpoint in checkpoints.live:
        assert checkpoint.alive
        assert checkpoint.node.checkpoint is checkpoint
        assert checkpoint.num_locks == locks[checkpoint], (
            f"num_locks is {checkpoint.num_locks}, but {locks[checkpoint]} leases lock the checkpoint"
        )
        assert not checkpoint.superseded or _is_kept(checkpoint), "a superseded checkpoint without lock or hold"
        assert checkpoints.order.contains(checkpoint), "a checkpoint that is missing from the eviction queues"
    ticks = [checkpoint.last_used for checkpoint in checkpoints.live]
    assert len(set(ticks)) == len(ticks)
    num_locked = sum(checkpoint.num_locks > 0 for checkpoint in checkpoints.live)
    assert checkpoints.num_locked == num_locked, (
        f"num_locked is {checkpoints.num_locked}, but {num_locked} live checkpoints have locks"
    )
    assert checkpoints.num_kept == sum(_is_kept(checkpoint) for checkpoint in checkpoints.live)
    assert checkpoints.peak_live >= len(checkpoints.live)


def _check_host(host: HostTier, cache: HybridCache, nodes: list[Node]) -> None:
    _check_pool(host.pages, [page for node in nodes for page in node.host_page_ids or ()], ())
    _check_pool(host.rows, [node.host_copy.row for node in nodes if node.host_copy], ())
    assert set(host.live) == {node.host_copy for node in nodes if node.host_copy is not None}
    for copy in host.live:
        assert copy.alive
        assert copy.node.host_copy is copy
        assert host.order.contains(copy), "a copy that is missing from the eviction queues"
        on_device = copy.node.checkpoint is not None
        assert on_device or host.is_complete(copy), "an incomplete copy of an evicted checkpoint"
    assert len({copy.last_used for copy in host.live}) == len(host.live)
    ready = [checkpoint.ready_blocks for checkpoint in cache.checkpoints.live if checkpoint.ready_blocks is not None]
    assert (host.num_ready_rows, host.num_ready_blocks) == (len(ready), sum(ready))


def _is_kept(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.num_locks or checkpoint.holders)


def _check_holds(cache: HybridCache) -> None:
    held = {(session_id, checkpoint) for checkpoint in cache.checkpoints.live for session_id in checkpoint.holders}
    assert held == {(session_id, hold.checkpoint) for session_id, hold in cache.checkpoints.holds.items()}


def _check_lease(cache: HybridCache, lease: Lease) -> None:
    path = [] if lease.anchor is None else path_of(lease.anchor)
    assert lease.locked is None or lease.locked.node in path, "a lease locks a row that isn't on its path"
    assert len(set(lease.page_ids)) == len(lease.page_ids), "a page occurs twice in one sequence"
    assert lease.own_pages <= set(lease.page_ids)
    assert lease.num_cached % cache.block_tokens == 0
    assert (lease.read_row == ZERO_ROW) == (lease.num_cached == 0)
    assert lease.fetch is None or lease.fetch.row in lease.own_rows
    assert lease.own_pages.isdisjoint(lease.page_ids[: lease.num_cached // cache.block_tokens]), (
        "a cached page became the lease's own"
    )
    of_tree = [page for node in path for page in node.page_ids or ()]
    for block, page in enumerate(lease.page_ids):
        if page not in lease.own_pages:
            assert block < len(of_tree), f"block {block} of a lease is in a page that neither it nor its path owns"
            assert of_tree[block] == page, f"block {block} of a lease is in page {page}, the tree's is {of_tree[block]}"


def _check_accounts(cache: HybridCache) -> None:
    used = cache.rows.num_used * cache.row_bytes + cache.pages.num_used * cache.page_bytes
    assert cache.used_bytes == used <= cache.budget_bytes, (
        f"{used} bytes in use, {cache.used_bytes} accounted, {cache.budget_bytes} allowed"
    )
    live = cache.checkpoints.live
    evictable = sum(not checkpoint.num_locks for checkpoint in live)
    assert cache.checkpoints.count_evictable(including_held=True) == evictable
    assert cache.checkpoints.count_evictable(including_held=False) == sum(
        not _is_kept(checkpoint) for checkpoint in live
    )
