"""The host tier: copies in host memory of checkpoints and of the pages of their paths.

Checkpoints are used on the device; the host keeps those that the device evicts. A checkpoint is copied *before*
eviction, while it is among the next to be evicted. So eviction never waits for a copy, and host memory isn't spent on
states that the device keeps using. A checkpoint that is evicted before its copy is complete is lost, as without a host
tier.

Copies are orders that the caller carries out: orders to the host in the order of their numbers, orders to the device
likewise. Three rules make this safe without locks:

- A copy is complete when its order has been carried out. Until then its checkpoint stays on the device, and if the
  checkpoint is evicted, the copy is dropped too. The order may then read ids that have a new owner, but its result is
  never read.
- Freed ids of the host tier may be reused at once: orders to the host are carried out one after the other, and after
  all orders to the device that were given before.
- Device ids that an order fills belong to a lease, which uses them only after the order has been carried out.

Owns host rows, host pages, their eviction order, and the copy orders. Knows nothing about tensors, streams or
requests.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from agentspec.cache.eviction import EvictionOrder
from agentspec.cache.id_pool import IdPool
from agentspec.cache.prefix_tree import HOST, NEED, Checkpoint, HostCopy, Node, PrefixTree, path_of, path_up
from agentspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Size of the host tier, and when it is worth using."""

    num_rows: int
    num_pages: int
    ready_share: float = 1 / 8
    """Share of the device's rows, and of its pages, that should be free or evictable without losing a state. Uses at
    most half of the host tier."""
    min_fetch_blocks: int = 4
    """A copy is fetched if it saves at least this many blocks (256 tokens) compared to the deepest checkpoint on the
    device."""

    def __post_init__(self) -> None:
        for name, value in (
            ("num_rows", self.num_rows),
            ("num_pages", self.num_pages),
            ("min_fetch_blocks", self.min_fetch_blocks),
        ):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if not 0 <= self.ready_share <= 1:
            raise ConfigError("ready_share", self.ready_share, "must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """An order to copy whole rows and pages in one direction, each as (source id, target id)."""

    number: int
    """Counts from 1 for each direction."""
    rows: list[tuple[int, int]]
    pages: list[tuple[int, int]]


@dataclass(slots=True)
class CopyOrders:
    to_host: list[CopyOrder] = field(default_factory=list)
    to_device: list[CopyOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.to_host or self.to_device)


class HostTier:
    """Attributes without underscore are read-only for other modules."""

    def __init__(
        self, memory: HostMemory, tree: PrefixTree, pages: IdPool, *, device_rows: int, device_pages: int
    ) -> None:
        """pages: the pool of host pages that the tree uses. device_rows, device_pages: numbers of usable ones."""
        self.memory = memory
        self.rows = IdPool(memory.num_rows, num_reserved=0, noun="host row")
        self.pages = pages
        self.live: dict[HostCopy, None] = {}
        """In order of creation."""
        self.order = EvictionOrder(self.live)
        self.num_ready_rows = 0
        """Number of checkpoints on the device with `ready_blocks`; num_ready_blocks is the sum of those."""
        self.num_ready_blocks = 0
        self.num_copied = 0
        """All orders to the host up to this number have been carried out."""
        self.num_created = 0
        self.num_evicted = 0
        self.num_lost = 0
        """Checkpoints that were likely to be reused and were evicted from the device without a complete copy."""
        self.num_fetched = 0
        self._wanted_rows = min(math.ceil(memory.ready_share * device_rows), (self.rows.capacity + 1) // 2)
        self._wanted_blocks = min(math.ceil(memory.ready_share * device_pages), (pages.capacity + 1) // 2)
        self._tree = tree
        self._tick = 0
        self._num_to_host = 0
        self._num_to_device = 0
        self._orders = CopyOrders()

    def find(self, path: list[Node], num_tokens: int) -> HostCopy | None:
        """The deepest copy on a path, if fetching it saves enough compared to resuming from `num_tokens`."""
        copy = next((node.host_copy for node in reversed(path) if node.host_copy is not None), None)
        least = num_tokens + self.memory.min_fetch_blocks * self._tree.block_tokens
        return copy if copy is not None and copy.node.depth >= least else None

    def is_short(self, free_rows: int, free_pages: int) -> bool:
        """True when too few rows or pages of the device are free or can be evicted without losing a state."""
        return (
            free_rows + self.num_ready_rows < self._wanted_rows
            or free_pages + self.num_ready_blocks < self._wanted_blocks
        )

    def make_ready(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint, unless it has a copy or its path is larger than the host tier, and mark it as
        handled."""
        assert checkpoint.ready_blocks is None
        has_copy = checkpoint.node.host_copy is not None or self._copy(checkpoint)
        checkpoint.ready_blocks = _blocks_freed(checkpoint.node) if has_copy else 0
        self.num_ready_rows += 1
        self.num_ready_blocks += checkpoint.ready_blocks

    def after_use(self, checkpoint: Checkpoint) -> None:
        """Update for a checkpoint that was just used on the device: its copy counts as used too, and it won't be
        evicted soon."""
        self.clear_ready(checkpoint)
        if checkpoint.node.host_copy is not None:
            self._touch(checkpoint.node.host_copy)

    def clear_ready(self, checkpoint: Checkpoint) -> None:
        """Undo `make_ready`, except for the copy itself."""
        if checkpoint.ready_blocks is not None:
            self.num_ready_rows -= 1
            self.num_ready_blocks -= checkpoint.ready_blocks
            checkpoint.ready_blocks = None

    def before_eviction(self, checkpoint: Checkpoint) -> None:
        """Update before a checkpoint is evicted from the device: keep its copy if it is complete, else drop it."""
        copy = checkpoint.node.host_copy
        if copy is not None and not self.is_complete(copy):
            self._drop(copy)
            copy = None
        self.num_lost += copy is None and checkpoint.likely_reused

    def drop_copy(self, node: Node) -> None:
        """Drop the copy at `node`, if there is one."""
        if node.host_copy is not None:
            self._drop(node.host_copy)

    def recopy_pages(self, node: Node) -> None:
        """Handle new device pages for a node: order a copy from them if any copy that is still incomplete may need it.

        If a complete copy has the node on its path, its host pages are already filled and stay as they are: another
        order might read device pages that have a new owner by then, and no one would wait for that order, because such
        copies already count as complete."""
        late = [copy for copy in self.live if not self.is_complete(copy)]
        is_copied = any(self.is_complete(copy) and node in path_of(copy.node) for copy in self.live)
        if node.host_page_ids is not None and late and not is_copied:
            assert node.page_ids is not None
            number = self._order_to_host([], list(zip(node.page_ids, node.host_page_ids, strict=True)))
            for copy in late:
                copy.number = number

    def fetch(self, copy: HostCopy, row: int, page_ids: list[int]) -> int:
        """Order a copy's row, and the last len(page_ids) pages of its path, into this row and these pages of the
        device. Returns the order's number."""
        assert copy.alive
        assert self.is_complete(copy)
        self._touch(copy)
        self.num_fetched += 1
        self._num_to_device += 1
        first = copy.node.depth // self._tree.block_tokens - len(page_ids)
        pages = list(zip(self._tree.host_page_ids(copy.node)[first:], page_ids, strict=True))
        self._orders.to_device.append(CopyOrder(self._num_to_device, [(copy.row, row)], pages))
        return self._num_to_device

    def take_orders(self) -> CopyOrders:
        """The orders since the last call. The caller must carry them out."""
        orders, self._orders = self._orders, CopyOrders()
        return orders

    def complete_copies(self, number: int) -> None:
        """Record that all orders to the host up to this number have been carried out."""
        assert self.num_copied <= number <= self._num_to_host
        self.num_copied = number

    def is_complete(self, copy: HostCopy) -> bool:
        return copy.number <= self.num_copied

    def stats(self) -> dict[str, int]:
        """Counters and gauges, by name."""
        return {
            "host_rows_used": self.rows.num_used,
            "host_rows_free": self.rows.num_free,
            "host_pages_used": self.pages.num_used,
            "host_pages_free": self.pages.num_free,
            "host_copies_live": len(self.live),
            "host_copies_created": self.num_created,
            "host_copies_evicted": self.num_evicted,
            "host_copies_fetched": self.num_fetched,
            "checkpoints_lost": self.num_lost,
        }

    def clear(self) -> None:
        for copy in list(self.live):
            self._drop(copy)

    def _copy(self, checkpoint: Checkpoint) -> bool:
        """Order a copy, and evict other copies as needed. Returns False, and changes nothing, when the path is larger
        than the host tier."""
        node = checkpoint.node
        if node.depth // self._tree.block_tokens > self.pages.capacity:
            return False
        self._tree.ref(node, HOST)  # keeps the host pages that it shares with the copies evicted below
        missing = [step for step in path_of(node) if step.host_page_ids is None]
        num_pages = sum(step.num_blocks for step in missing)
        while num_pages > self.pages.num_free or not self.rows.num_free:
            self._evict(self.order.pop_for_pages() if num_pages > self.pages.num_free else self.order.pop_for_row())
        pages: list[tuple[int, int]] = []
        for step in missing:
            ids = self.pages.take(step.num_blocks)
            assert step.page_ids is not None
            pages += zip(step.page_ids, ids, strict=True)
            self._tree.give_host_pages(step, ids)
        (row,) = self.rows.take(1)
        copy = HostCopy(
            row=row, kind=checkpoint.kind, node=node, number=self._order_to_host([(checkpoint.row, row)], pages)
        )
        node.host_copy = copy
        self.live[copy] = None
        self.num_created += 1
        self._touch(copy)
        return True

    def _order_to_host(self, rows: list[tuple[int, int]], pages: list[tuple[int, int]]) -> int:
        self._num_to_host += 1
        self._orders.to_host.append(CopyOrder(self._num_to_host, rows, pages))
        return self._num_to_host

    def _touch(self, copy: HostCopy) -> None:
        self._tick += 1
        copy.last_used = self._tick
        self.order.queue(copy)

    def _evict(self, copy: HostCopy | None) -> None:
        assert copy is not None, "the path fits in host memory, but there is nothing to evict"
        self.num_evicted += 1
        checkpoint = copy.node.checkpoint
        if checkpoint is not None and checkpoint.ready_blocks is not None:
            # Its eviction would lose the state now. It is copied again only after its next use: two copies that don't
            # fit together would otherwise evict each other for ever.
            self.num_ready_blocks -= checkpoint.ready_blocks
            checkpoint.ready_blocks = 0
        self._drop(copy)

    def _drop(self, copy: HostCopy) -> None:
        copy.alive = False
        copy.node.host_copy = None
        del self.live[copy]
        self.rows.free((copy.row,))
        above = self._tree.unref(copy.node, HOST)
        if above is not None and above.host_copy is not None:
            self.order.queue(above.host_copy)


def _blocks_freed(node: Node) -> int:
    """Number of pages that evicting the node's checkpoint would free now."""
    return sum(step.num_blocks for step in itertools.takewhile(lambda step: step.refs[NEED] == 1, path_up(node)))
