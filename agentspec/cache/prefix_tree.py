"""Radix tree over blocks of tokens: known prefixes, their pages, and their checkpoints.

A node is a run of whole blocks. A checkpoint belongs to the end of a node, so a node is split when a checkpoint falls
into its middle. The existing node object becomes the lower part, so references to it (checkpoint, lease, hold) stay
valid.

A node's `refs` count its references on four levels. Each of the first three is a superset of the next:

    NEED   a checkpoint, or a lease that reads pages, at or below the node
    HOLD   a hold or a lease at or below the node
    LOCK   a lease at or below the node
    HOST   a copy in the host tier of a checkpoint at or below the node

On each level a node counts the references to itself plus its referenced children. So a change walks up only until the
first node that stays referenced. A node has pages exactly while it is referenced on NEED, because a hybrid model can't
resume from pages without a state. It has host pages exactly while it is referenced on HOST. A node with neither is a
*ghost*: its token ids are kept, within a bound, so that the next prompt that branches off there is detected.

Owns the structure, the pages of nodes, and ghosts. Knows nothing about used rows, budgets, eviction order or
sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentspec.cache.id_pool import IdPool
from agentspec.types import CheckpointKind

NEED, HOLD, LOCK, HOST = range(4)

TOKEN_BYTES = 4
"""Token ids are array('i')."""


class Node:
    """A run of blocks. `run` is the bytes of its token ids; `depth` counts tokens from the root to the end of the
    node."""

    __slots__ = (
        "checkpoint",
        "children",
        "depth",
        "host_copy",
        "host_page_ids",
        "namespace",
        "num_blocks",
        "page_ids",
        "parent",
        "refs",
        "run",
    )

    def __init__(self, parent: Node | None, run: bytes, num_blocks: int, depth: int, namespace: str) -> None:
        self.parent = parent
        self.run = run
        self.num_blocks = num_blocks
        self.depth = depth
        self.namespace = namespace
        self.page_ids: list[int] | None = None
        """One per block; None where the device has no pages: for ghosts, roots, and nodes that only the host tier
        has."""
        self.host_page_ids: list[int] | None = None
        """Pages of the host tier, one per block, or None."""
        self.children: dict[bytes, Node] = {}
        """Keyed by the bytes of the child's first block."""
        self.checkpoint: Checkpoint | None = None
        self.host_copy: HostCopy | None = None
        self.refs = [0, 0, 0, 0]

    @property
    def is_ghost(self) -> bool:
        return not self.refs[NEED] and not self.refs[HOST]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A row that the tree owns: the state after the first `node.depth` tokens of the path to `node`."""

    row: int
    kind: CheckpointKind
    node: Node
    last_used: int
    """Tick of the cache's LRU clock; no two uses have the same tick."""
    num_locks: int = 0
    """Number of leases that may still read the row."""
    holders: set[str] = field(default_factory=set)
    """Sessions that hold it while their tool runs."""
    abandoned: bool = False
    """Its session continued elsewhere, so it is unlikely to be reused."""
    superseded: bool = False
    """To be removed with its last lock and hold."""
    ready_blocks: int | None = None
    """Not None: the host tier has handled it since its last use, and evicting it frees about this many pages without
    losing a state."""
    alive: bool = True

    @property
    def is_evictable(self) -> bool:
        return self.alive and not self.num_locks

    @property
    def frees_pages(self) -> bool:
        """True when nothing else needs the node's pages, so that removing the checkpoint frees some."""
        return self.node.refs[NEED] == 1

    @property
    def likely_reused(self) -> bool:
        """True unless it is a GRID checkpoint or abandoned."""
        return self.kind != CheckpointKind.GRID and not self.abandoned

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        return bool(self.holders), self.likely_reused, self.last_used


@dataclass(slots=True, eq=False)
class HostCopy:
    """A checkpoint's state in a row of the host tier. The pages of its path are in the nodes' host pages."""

    row: int
    kind: CheckpointKind
    node: Node
    number: int
    """Number of the copy order that completes it."""
    last_used: int = 0
    """Tick of the host tier's LRU clock."""
    alive: bool = True

    @property
    def is_evictable(self) -> bool:
        return self.alive

    @property
    def frees_pages(self) -> bool:
        return self.node.refs[HOST] == 1

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        return False, True, self.last_used


def path_of(node: Node) -> list[Node]:
    """Nodes from below the root down to `node`."""
    return list(path_up(node))[::-1]


def path_up(node: Node | None) -> Iterator[Node]:
    """Nodes from `node` up to below the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _join(runs: Iterable[list[int] | None]) -> list[int]:
    page_ids: list[int] = []
    for run in runs:
        assert run is not None, "a referenced path has all its pages"
        page_ids += run
    return page_ids


class PrefixTree:
    """Prefixes of all namespaces. Token ids are passed as the bytes of whole blocks."""

    def __init__(
        self, pages: IdPool, *, block_tokens: int, max_ghost_blocks: int, host_pages: IdPool | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.num_blocks = [0, 0, 0, 0]
        """Blocks of all referenced nodes, by level: on NEED the number of pages that the tree owns, on HOST of its host
        pages."""
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        """Oldest first. A node becomes a ghost after all nodes below it, so the first ghost has no children."""
        self.num_ghost_blocks = 0
        self.max_ghost_blocks = max_ghost_blocks
        self._pages = pages
        self._host_pages = host_pages

    def walk(self, namespace: str, data: bytes) -> tuple[list[Node], Node | None, int]:
        """Follow `data` down from the root.

        Returns the nodes that match completely, then the node that matches in part (or None) and how many of its blocks
        match."""
        path: list[Node] = []
        node = self.roots.get(namespace)
        if node is None:
            return path, None, 0
        offset, block_bytes = 0, self.block_bytes
        while offset < len(data):
            child = node.children.get(data[offset : offset + block_bytes])
            if child is None:
                break
            if not data.startswith(child.run, offset):
                return path, child, self._common_blocks(child.run, data, offset)
            path.append(child)
            offset += len(child.run)
            node = child
        return path, None, 0

    def insert(self, namespace: str, data: bytes) -> list[Node]:
        """Make the path of `data` end at the end of a node: split the node that it leaves, and add the rest as a ghost.
        Returns the path."""
        path, partial, num_common = self.walk(namespace, data)
        if partial is not None:
            path.append(self._split(partial, num_common))
        depth = path[-1].depth if path else 0
        offset = depth * TOKEN_BYTES
        if offset < len(data):
            parent = path[-1] if path else self.roots.setdefault(namespace, Node(None, b"", 0, 0, namespace))
            run = data[offset:]
            num_blocks = len(run) // self.block_bytes
            node = Node(parent, run, num_blocks, depth + num_blocks * self.block_tokens, namespace)
            parent.children[run[: self.block_bytes]] = node
            self.ghosts[node] = None
            self.num_ghost_blocks += num_blocks
            path.append(node)
        return path

    def give_pages(self, node: Node, page_ids: Sequence[int]) -> None:
        """Give pages to a node that has none. The caller must then reference the node, or one below it, before any
        other call."""
        assert node.page_ids is None
        assert len(page_ids) == node.num_blocks
        if node.is_ghost:
            self._leave_ghosts(node)
        node.page_ids = list(page_ids)

    def give_host_pages(self, node: Node, page_ids: Sequence[int]) -> None:
        """Give host pages to a node that is referenced on HOST and has device pages."""
        assert node.refs[HOST]
        assert node.page_ids is not None
        assert node.host_page_ids is None
        assert len(page_ids) == node.num_blocks
        node.host_page_ids = list(page_ids)

    def replace_pages(self, node: Node, page_ids: Sequence[int]) -> None:
        """Replace a node's pages by others with the same content. No running request may be reading the old ones."""
        assert node.page_ids is not None
        assert len(page_ids) == node.num_blocks
        self._pages.free(node.page_ids)
        node.page_ids = list(page_ids)

    def ref(self, node: Node, level: int) -> None:
        """Add a reference to the path to `node`."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.refs[level] += 1
            if step.refs[level] > 1:
                return
            self.num_blocks[level] += step.num_blocks
            step = step.parent

    def unref(self, node: Node, level: int) -> Node | None:
        """Remove a reference to the path to `node`. Nodes without NEED lose their pages, without HOST their host pages,
        and without both they become ghosts.

        Returns the deepest node of the path that is still referenced, or the root. May trim ghosts."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            assert step.refs[level] > 0
            step.refs[level] -= 1
            if step.refs[level]:
                break
            self.num_blocks[level] -= step.num_blocks
            if level in (NEED, HOST):
                self._lose_pages(step, level)
            step = step.parent
        self.trim_ghosts()
        return step

    def page_ids(self, node: Node) -> list[int]:
        """Pages of the whole path to `node`, in block order."""
        return _join(step.page_ids for step in path_of(node))

    def host_page_ids(self, node: Node) -> list[int]:
        """Host pages of the whole path to `node`, which is referenced on HOST, in block order."""
        return _join(step.host_page_ids for step in path_of(node))

    def trim_ghosts(self, max_blocks: int | None = None) -> None:
        """Drop the token ids of the oldest ghosts, from their ends, until the bound (or `max_blocks`) is met."""
        bound = self.max_ghost_blocks if max_blocks is None else max_blocks
        while self.num_ghost_blocks > bound:
            node = next(iter(self.ghosts))
            assert not node.children
            excess = self.num_ghost_blocks - bound
            if excess < node.num_blocks:
                node.num_blocks -= excess
                node.run = node.run[: node.num_blocks * self.block_bytes]
                node.depth -= excess * self.block_tokens
                self.num_ghost_blocks -= excess
            else:
                self._remove(node)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first. For audits."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _lose_pages(self, node: Node, level: int) -> None:
        if level == NEED:
            assert node.page_ids is not None
            assert node.checkpoint is None
            self._pages.free(node.page_ids)
            node.page_ids = None
        else:
            assert self._host_pages is not None
            assert node.host_page_ids is not None
            assert node.host_copy is None
            self._host_pages.free(node.host_page_ids)
            node.host_page_ids = None
        if node.is_ghost:
            self.ghosts[node] = None
            self.num_ghost_blocks += node.num_blocks

    def _leave_ghosts(self, node: Node) -> None:
        del self.ghosts[node]
        self.num_ghost_blocks -= node.num_blocks

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.run[: self.block_bytes]]
        self._leave_ghosts(node)
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Split a node after `num_blocks` blocks. Returns the new upper part."""
        assert 0 < num_blocks < node.num_blocks
        parent = node.parent
        assert parent is not None
        cut = num_blocks * self.block_bytes
        upper = Node(parent, node.run[:cut], num_blocks, parent.depth + num_blocks * self.block_tokens, node.namespace)
        upper.refs = [int(count > 0) for count in node.refs]
        node.run, node.num_blocks, node.parent = node.run[cut:], node.num_blocks - num_blocks, upper
        upper.children[node.run[: self.block_bytes]] = node
        parent.children[upper.run[: self.block_bytes]] = upper
        if node.page_ids is not None:
            upper.page_ids, node.page_ids = node.page_ids[:num_blocks], node.page_ids[num_blocks:]
        if node.host_page_ids is not None:
            upper.host_page_ids, node.host_page_ids = node.host_page_ids[:num_blocks], node.host_page_ids[num_blocks:]
        if node.is_ghost:
            self.ghosts[upper] = None
        return upper

    def _common_blocks(self, run: bytes, data: bytes, offset: int) -> int:
        """Number of blocks that `run` and data[offset:] have in common; at least one, and not all, as the caller
        knows."""
        low, high = 1, len(run) // self.block_bytes
        while high - low > 1:
            middle = (low + high) // 2
            if data.startswith(run[: middle * self.block_bytes], offset):
                low = middle
            else:
                high = middle
        return low
