"""Which checkpoint goes next: least recently used first, GRID and abandoned ones before all others, held ones last,
locked ones never.

Two questions, two queues: "who frees a row" (any checkpoint) and "who frees pages" (one that nothing deeper needs). A
third one, where there is a host tier, holds those that need a copy there before they go. Entries are lazy: a checkpoint
is queued again whenever its place changes, and an entry that no longer tells the truth is dropped when it comes up.

Knows nothing about rows, pages, bytes or leases: the facade evicts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What the queues must know of a checkpoint, on the device or in the host tier."""

    @property
    def is_evictable(self) -> bool: ...

    @property
    def is_tip(self) -> bool:
        """Its eviction frees pages."""
        ...

    @property
    def eviction_key(self) -> tuple[bool, bool, int]:
        """Smaller goes earlier; no two live ones share it."""
        ...


C = TypeVar("C", bound=Evictable)

_SLACK = 1024
"""Entries that a queue may hold beyond a small multiple of the live checkpoints before it is rebuilt."""


class _LazyQueue(Generic[C]):
    """A heap of checkpoints that `wanted` accepts, and of entries that were true once."""

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

    def knows(self, checkpoint: C) -> bool:
        """True when a wanted checkpoint would come up: for audits; slow."""
        return not self._wanted(checkpoint) or (*checkpoint.eviction_key, checkpoint) in self._heap


class EvictionOrder(Generic[C]):
    """`live` is the owner's collection of live checkpoints, read when a queue is rebuilt."""

    def __init__(self, live: Collection[C], needs_copy: Callable[[C], bool] | None = None) -> None:
        """needs_copy: a checkpoint that should be copied to the host before it goes; None: there is no host tier."""
        self._live = live
        self._rows = _LazyQueue[C](lambda checkpoint: checkpoint.is_evictable)
        self._tips = _LazyQueue[C](lambda checkpoint: checkpoint.is_evictable and checkpoint.is_tip)
        self._uncopied = None if needs_copy is None else _LazyQueue[C](needs_copy)

    def queue(self, checkpoint: C) -> None:
        """Call when a checkpoint was used, became evictable, changed its kind or its holds, became a tip, or needs a
        copy again."""
        self._rows.push(checkpoint, self._live)
        self._tips.push(checkpoint, self._live)
        if self._uncopied is not None:
            self._uncopied.push(checkpoint, self._live)

    def pop_for_row(self) -> C | None:
        """The next checkpoint to evict where a row, or any bytes, are wanted."""
        return self._rows.pop()

    def pop_for_pages(self) -> C | None:
        """The next checkpoint whose eviction frees pages."""
        return self._tips.pop()

    def pop_uncopied(self) -> C | None:
        """The next checkpoint that would go without a copy in the host tier. The caller sees to it that it doesn't need
        one any more."""
        return None if self._uncopied is None else self._uncopied.pop()

    def knows(self, checkpoint: C) -> bool:
        """True when the checkpoint would come up in every queue that it belongs to: for audits; slow."""
        queues = (self._rows, self._tips, self._uncopied)
        return all(queue is None or queue.knows(checkpoint) for queue in queues)
