"""Eviction order of checkpoints: least recently used first. GRID and abandoned ones go before all others, held ones
last, locked ones never.

There is one queue for each question: which checkpoint to evict for a row (any), and which to evict for pages (one that
nothing deeper needs). With a host tier, a third queue has the checkpoints that need a copy there before they are
evicted. Entries are lazy: a checkpoint is queued again whenever its key changes, and outdated entries are dropped when
they are popped.

Knows nothing about rows, pages, bytes or leases; the caller evicts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """The properties of a checkpoint, on the device or in the host tier, that the queues need."""

    @property
    def is_evictable(self) -> bool: ...

    @property
    def frees_pages(self) -> bool:
        """True when evicting it frees pages."""

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        """Smaller keys are evicted earlier. No two live checkpoints have the same key."""


C = TypeVar("C", bound=Evictable)

_SLACK = 1024
"""A queue is rebuilt when it has more entries than four times the live checkpoints plus this number."""


class _LazyQueue(Generic[C]):
    """A heap of the checkpoints for which `wanted` is true. May also contain outdated entries."""

    def __init__(self, wanted: Callable[[C], bool]) -> None:
        self._wanted = wanted
        self._heap: list[tuple[bool, bool, int, C]] = []

    def push(self, checkpoint: C, live: Collection[C]) -> None:
        if not self._wanted(checkpoint):
            return
        heapq.heappush(self._heap, (*checkpoint.eviction_key, checkpoint))
        if len(self._heap) > 4 * len(live) + _SLACK:
            self._heap = [(*other.eviction_key, other) for other in live if self._wanted(other)]
            heapq.heapify(self._heap)

    def pop(self) -> C | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            checkpoint = entry[3]
            if self._wanted(checkpoint) and entry[:3] == checkpoint.eviction_key:
                return checkpoint
        return None

    def contains(self, checkpoint: C) -> bool:
        """True unless a wanted checkpoint is missing from the queue. For audits; slow."""
        return not self._wanted(checkpoint) or (*checkpoint.eviction_key, checkpoint) in self._heap


class EvictionOrder(Generic[C]):
    """The queues over `live`, the owner's collection of live checkpoints, which is read when a queue is rebuilt."""

    def __init__(self, live: Collection[C], needs_copy: Callable[[C], bool] | None = None) -> None:
        """needs_copy: true for a checkpoint that should be copied to the host before it is evicted; None: there is no
        host tier."""
        self._live = live
        self._rows = _LazyQueue[C](lambda checkpoint: checkpoint.is_evictable)
        self._for_pages = _LazyQueue[C](lambda checkpoint: checkpoint.is_evictable and checkpoint.frees_pages)
        self._uncopied = None if needs_copy is None else _LazyQueue[C](needs_copy)

    def queue(self, checkpoint: C) -> None:
        """Call when a checkpoint was used, became evictable, changed its kind or holds, became the deepest of its path,
        or needs a copy again."""
        self._rows.push(checkpoint, self._live)
        self._for_pages.push(checkpoint, self._live)
        if self._uncopied is not None:
            self._uncopied.push(checkpoint, self._live)

    def pop_for_row(self) -> C | None:
        """The next checkpoint to evict for a row or for bytes."""
        return self._rows.pop()

    def pop_for_pages(self) -> C | None:
        """The next checkpoint whose eviction frees pages."""
        return self._for_pages.pop()

    def pop_uncopied(self) -> C | None:
        """The next checkpoint to evict that has no copy in the host tier. The caller must then change it so that it
        doesn't need one any more."""
        return None if self._uncopied is None else self._uncopied.pop()

    def contains(self, checkpoint: C) -> bool:
        """True when every queue that the checkpoint belongs to contains it. For audits; slow."""
        queues = (self._rows, self._for_pages, self._uncopied)
        return all(queue is None or queue.contains(checkpoint) for queue in queues)
