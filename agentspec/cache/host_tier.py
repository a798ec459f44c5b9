"""The second tier: copies of checkpoints, and of the pages of their paths, in the host's memory.

The device stays the place where checkpoints stand; the host keeps what the device lets go. A checkpoint is copied
*before* it goes: while it is among the next that eviction would come to. So eviction never waits for a copy, and host
memory isn't spent on what the device still uses. One that goes before its copy is complete is lost, as without a host
tier.

Copies are orders that somebody else carries out: those to the host in the order of their numbers, those to the device
likewise. Three rules make that safe without any lock:

- A copy counts as complete when its order has been carried out. As long as it isn't, its checkpoint still stands on the
  device, and if that goes, the copy goes with it: an order may read ids that have a new owner by then, but nobody will
  ever look at what it wrote.
- Ids of the host tier that are given up have a new owner at once: orders to the host are carried out one after the
  other, and after all orders to the device that were given before.
- Ids of the device that an order fills belong to a lease, which uses them only when the order has been carried out.

Owns host rows, host pages, who goes next there, and the orders. Knows nothing of tensors, streams or requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentspec.cache.eviction import EvictionOrder
from agentspec.cache.id_pool import IdPool
from agentspec.cache.prefix_tree import HOST, NEED, Checkpoint, HostCopy, Node, PrefixTree, path_of
from agentspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """What the host tier may use, and when it is worth using."""

    num_rows: int
    num_pages: int
    ready_share: float = 1 / 8
    """Share of the device's rows and of its pages that is to be free, or could be evicted without a loss. It takes half
    of the host's at most."""
    min_fetch_blocks: int = 4
    """A copy is worth fetching if it saves at least this many blocks (256 tokens) over what stands on the device."""

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


class HostRowPool(IdPool):
    noun = "host row"


class HostPagePool(IdPool):
    noun = "host page"


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy whole rows and pages in one direction: (source id, target id) each."""

    number: int
    """Counts from 1 in its direction."""
    rows: list[tuple[int, int]]
    pages: list[tuple[int, int]]


@dataclass(slots=True)
class CopyOrders:
    to_host: list[CopyOrder] = field(default_factory=list)
    to_device: list[CopyOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.to_host or self.to_device)


class HostTier:
    """Attributes without underscore are read-only to everybody else."""

    def __init__(
        self, memory: HostMemory, tree: PrefixTree, pages: HostPagePool, *, device_rows: int, device_pages: int
    ) -> None:
        """`pages` is the tree's pool of host pages. device_rows, device_pages: usable ones."""
        self.memory = memory
        self.rows = HostRowPool(memory.num_rows, num_reserved=0)
        self.pages = pages
        self.live: dict[HostCopy, None] = {}
        """In order of creation."""
        self.order = EvictionOrder(self.live)
        self.num_ready_rows = 0
        """Checkpoints on the device with `ready_blocks`, and the sum of those."""
        self.num_ready_blocks = 0
        self.num_copied = 0
        """Orders to the host that have been carried out: all up to this number."""
        self.num_created = 0
        self.num_evicted = 0
        self.num_lost = 0
        """Promising checkpoints that the device evicted and of which no copy was complete."""
        self.num_fetched = 0
        self._wanted_rows = min(math.ceil(memory.ready_share * device_rows), (self.rows.capacity + 1) // 2)
        self._wanted_blocks = min(math.ceil(memory.ready_share * device_pages), (pages.capacity + 1) // 2)
        self._tree = tree
        self._tick = 0
        self._num_to_host = 0
        self._num_to_device = 0
        self._orders = CopyOrders()

    def find(self, path: list[Node], num_tokens: int) -> HostCopy | None:
        """The deepest copy on a path, if fetching it is better than to resume from `num_tokens`."""
        copy = next((node.host_copy for node in reversed(path) if node.host_copy is not None), None)
        least = num_tokens + self.memory.min_fetch_blocks * self._tree.block_tokens
        return copy if copy is not None and copy.node.depth >= least else None

    def is_short(self, free_rows: int, free_pages: int) -> bool:
        """True when the device should have more that it can let go without a loss."""
        return (
            free_rows + self.num_ready_rows < self._wanted_rows
            or free_pages + self.num_ready_blocks < self._wanted_blocks
        )

    def make_ready(self, checkpoint: Checkpoint) -> None:
        """See to it that a checkpoint has a copy, if the host has room for its path at all."""
        assert checkpoint.ready_blocks is None
        has_copy = checkpoint.node.host_copy is not None or self._copy(checkpoint)
        checkpoint.ready_blocks = _blocks_freed(checkpoint.node) if has_copy else 0
        self.num_ready_rows += 1
        self.num_ready_blocks += checkpoint.ready_blocks

    def used(self, checkpoint: Checkpoint) -> None:
        """Somebody uses the checkpoint on the device: its copy is as recent, and eviction won't come to it soon."""
        self.not_ready(checkpoint)
        if checkpoint.node.host_copy is not None:
            self._touch(checkpoint.node.host_copy)

    def not_ready(self, checkpoint: Checkpoint) -> None:
        if checkpoint.ready_blocks is not None:
            self.num_ready_rows -= 1
            self.num_ready_blocks -= checkpoint.ready_blocks
            checkpoint.ready_blocks = None

    def evicting(self, checkpoint: Checkpoint) -> None:
        """The device is about to evict it: from now on its copy stands for it, if it is complete."""
        copy = checkpoint.node.host_copy
        if copy is not None and not self.is_complete(copy):
            self._drop(copy)
            copy = None
        self.num_lost += copy is None and checkpoint.is_promising

    def forget(self, node: Node) -> None:
        """Nobody needs the state at `node` any more."""
        if node.host_copy is not None:
            self._drop(node.host_copy)

    def moved(self, node: Node) -> None:
        """The node's content is in other pages of the device now: what has not been copied yet is copied from there.

        What has been copied stays: a further order could be carried out when its pages of the device belong to somebody
        else, and nobody would wait for it, since the copies that have the node on their path count as complete. One of
        those says that the node's pages are there."""
        late = [copy for copy in self.live if not self.is_complete(copy)]
        is_copied = any(self.is_complete(copy) and node in path_of(copy.node) for copy in self.live)
        if node.host_page_ids is not None and late and not is_copied:
            assert node.page_ids is not None
            number = self._order_to_host([], list(zip(node.page_ids, node.host_page_ids, strict=True)))
            for copy in late:
                copy.number = number

    def fetch(self, copy: HostCopy, row: int, page_ids: list[int]) -> int:
        """Order a copy's row and the last len(page_ids) pages of its path into these of the device. Returns the order's
        number."""
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
        """The orders since the last call; they must be carried out."""
        orders, self._orders = self._orders, CopyOrders()
        return orders

    def copied(self, number: int) -> None:
        """All orders to the host up to this number have been carried out."""
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
        """Order a copy, evicting others as needed; False, and nothing has changed, when the path is longer than all
        host memory."""
        node = checkpoint.node
        if node.depth // self._tree.block_tokens > self.pages.capacity:
            return False
        self._tree.ref(node, HOST)  # what it shares with others must not go with them
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
        assert copy is not None, "all of the host's memory would have held the path"
        self.num_evicted += 1
        checkpoint = copy.node.checkpoint
        if checkpoint is not None and checkpoint.ready_blocks is not None:
            # It would be lost now. It isn't copied again before it was used: two that don't fit beside each other would
            # take turns for ever.
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
    """Pages that go with the checkpoint of a node, as things stand."""
    num_blocks = 0
    step: Node | None = node
    while step is not None and step.parent is not None and step.refs[NEED] == 1:
        num_blocks += step.num_blocks
        step = step.parent
    return num_blocks
