"""Radix tree over blocks of tokens: which prefixes are known, which have pages, where checkpoints stand.

A node is a run of whole blocks. A checkpoint stands at a node's end, so a node that must carry one in its middle is
split; the node that was there keeps its identity as the lower part, and whoever points at it (checkpoint, lease, hold)
needs no notice.

A node's `refs` say who wants it, on three levels, each a superset of the next, and a fourth of its own:

    NEED   a checkpoint stands, or a lease reads pages, at or below the node
    HOLD   the same for holds and leases
    LOCK   the same for leases
    HOST   a copy of a checkpoint in the host tier stands at or below the node

On each level a node counts what points at itself plus its children that are wanted, so that a change walks up only as
far as something changes. A node has pages exactly while it is NEEDed: a hybrid model can't resume from pages with no
state behind them; and host pages exactly while it is wanted on HOST. What is left without either is a *ghost*: its
token ids stay, within a bound, so that the next prompt that branches off there is noticed.

Owns structure, pages of nodes and ghosts. Knows nothing about rows in use, budgets, eviction order or sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentspec.cache.id_pool import IdPool
from agentspec.types import CheckpointKind

NEED, HOLD, LOCK, HOST = range(4)

TOKEN_BYTES = 4
"""Token ids are array('i')."""


class Node:
    """A run of blocks. `run` is the bytes of its token ids; `depth` counts tokens from the root to the node's end."""

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
        """One per block; None where the device has none: for a ghost, for a root, and for what only the host tier
        has."""
        self.host_page_ids: list[int] | None = None
        """Pages of the host tier, one per block; None where it has none."""
        self.children: dict[bytes, Node] = {}
        """By the bytes of the child's first block."""
        self.checkpoint: Checkpoint | None = None
        self.host_copy: HostCopy | None = None
        self.refs = [0, 0, 0, 0]

    @property
    def is_ghost(self) -> bool:
        return not self.refs[NEED] and not self.refs[HOST]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A row that the tree owns: the state after the `node.depth` tokens on the way to `node`."""

    row: int
    kind: CheckpointKind
    node: Node
    last_used: int
    """Tick of the cache's LRU clock; no two uses share a tick."""
    num_locks: int = 0
    """Leases that may still read the row."""
    holders: set[str] = field(default_factory=set)
    """Sessions that hold it while their tool runs."""
    abandoned: bool = False
    """Its session went on elsewhere; nobody is expected to come back."""
    superseded: bool = False
    """To be freed when the last lease and the last hold let go."""
    ready_blocks: int | None = None
    """Not None: the host tier has done what it can for it since its last use, and its eviction frees about so many
    pages without a loss."""
    alive: bool = True

    @property
    def is_evictable(self) -> bool:
        return self.alive and not self.num_locks

    @property
    def is_tip(self) -> bool:
        """True when nothing else needs the node's pages, so that dropping the checkpoint frees some."""
        return self.node.refs[NEED] == 1

    @property
    def is_promising(self) -> bool:
        """Somebody may well come back for it."""
        return self.kind != CheckpointKind.GRID and not self.abandoned

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        return bool(self.holders), self.is_promising, self.last_used


@dataclass(slots=True, eq=False)
class HostCopy:
    """A checkpoint's state in a row of the host tier; the pages of its path are in host pages of the nodes."""

    row: int
    kind: CheckpointKind
    node: Node
    number: int
    """Of the copy order that completes it."""
    last_used: int = 0
    """Tick of the host tier's LRU clock."""
    alive: bool = True

    @property
    def is_evictable(self) -> bool:
        return self.alive

    @property
    def is_tip(self) -> bool:
        return self.node.refs[HOST] == 1

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        return False, True, self.last_used


def path_of(node: Node) -> list[Node]:
    """Nodes from below the root down to `node`."""
    path: list[Node] = []
    step: Node | None = node
    while step is not None and step.parent is not None:
        path.append(step)
        step = step.parent
    return path[::-1]


class PrefixTree:
    """Prefixes of all namespaces. Token ids come as the bytes of whole blocks."""

    def __init__(
        self, pages: IdPool, *, block_tokens: int, max_ghost_blocks: int, host_pages: IdPool | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.num_blocks = [0, 0, 0, 0]
        """Blocks of all nodes that are wanted on each level; on level NEED these are the pages that the tree owns, on
        HOST its host pages."""
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        """Oldest first. A node becomes a ghost after everything below it did, so the first one has no children."""
        self.num_ghost_blocks = 0
        self.max_ghost_blocks = max_ghost_blocks
        self._pages = pages
        self._host_pages = host_pages

    def walk(self, namespace: str, data: bytes) -> tuple[list[Node], Node | None, int]:
        """Follow `data` down from the root.

        Returns the nodes that match over their whole run, then the node that matches only in part (or None) and how
        many of its blocks do.
        """
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
        """Make the path of `data` end at a node's end: split the node that it leaves, add the rest as a ghost. Returns
        the path."""
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
        """A node without pages gets some. The caller refers to it, or to a node below it, before anything else
        happens."""
        assert node.page_ids is None
        assert len(page_ids) == node.num_blocks
        if node.is_ghost:
            self._leave_ghosts(node)
        node.page_ids = list(page_ids)

    def give_host_pages(self, node: Node, page_ids: Sequence[int]) -> None:
        """A node that is wanted on HOST, and has pages, gets its host pages."""
        assert node.refs[HOST]
        assert node.page_ids is not None
        assert node.host_page_ids is None
        assert len(page_ids) == node.num_blocks
        node.host_page_ids = list(page_ids)

    def replace_pages(self, node: Node, page_ids: Sequence[int]) -> None:
        """Put other pages of the same content in the place of a node's own, which nobody may be reading."""
        assert node.page_ids is not None
        assert len(page_ids) == node.num_blocks
        self._pages.free(node.page_ids)
        node.page_ids = list(page_ids)

    def ref(self, node: Node, level: int) -> None:
        """One more wants the path to `node`."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.refs[level] += 1
            if step.refs[level] > 1:
                return
            self.num_blocks[level] += step.num_blocks
            step = step.parent

    def unref(self, node: Node, level: int) -> Node | None:
        """One less wants the path to `node`. Without NEED left, nodes lose their pages, without HOST their host pages,
        and without both they become ghosts.

        Returns the deepest node of the path that is still wanted, or the root. May trim ghosts."""
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
        runs = []
        for step in path_of(node):
            assert step.page_ids is not None, "a path that is wanted has all its pages"
            runs.append(step.page_ids)
        return [page for run in runs for page in run]

    def host_page_ids(self, node: Node) -> list[int]:
        """Host pages of the whole path to `node`, which is wanted on HOST, in block order."""
        runs = []
        for step in path_of(node):
            assert step.host_page_ids is not None, "a path that is wanted has all its pages"
            runs.append(step.host_page_ids)
        return [page for run in runs for page in run]

    def trim_ghosts(self, max_blocks: int | None = None) -> None:
        """Forget the token ids of the oldest ghosts, from their ends, down to the bound (or to `max_blocks`)."""
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
        """Every node but the roots, parents first: for audits."""
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
        """Cut a node after `num_blocks` blocks. Returns the new upper part."""
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
        """Blocks that `run` and data[offset:] have in common; the caller knows that the first is one and that not all
        are."""
        low, high = 1, len(run) // self.block_bytes
        while high - low > 1:
            middle = (low + high) // 2
            if data.startswith(run[: middle * self.block_bytes], offset):
                low = middle
            else:
                high = middle
        return low
