"""Which checkpoint goes next: least recently used first, GRID and abandoned ones before all others, held ones last, locked ones never.

Two questions, two queues: "who frees a row" (any checkpoint) and "who frees pages" (one that nothing deeper needs). Entries are lazy: a
checkpoint is queued again whenever its place changes, and an entry that no longer tells the truth is dropped when it comes up.

Knows nothing about rows, pages, bytes or leases: the facade evicts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from agentspec.cache.prefix_tree import Checkpoint
from agentspec.types import CheckpointKind

_Entry = tuple[bool, bool, int, Checkpoint]

_SLACK = 1024
"""Entries that a queue may hold beyond a small multiple of the live checkpoints before it is rebuilt."""


def _entry(checkpoint: Checkpoint) -> _Entry:
    is_promising = checkpoint.kind != CheckpointKind.GRID and not checkpoint.abandoned
    return bool(checkpoint.holders), is_promising, checkpoint.last_used, checkpoint


def _frees_row(checkpoint: Checkpoint) -> bool:
    return checkpoint.is_evictable


def _frees_pages(checkpoint: Checkpoint) -> bool:
    return checkpoint.is_evictable and checkpoint.is_tip


class _LazyQueue:
    """A heap of checkpoints that `wanted` accepts, and of entries that were true once."""

    def __init__(self, wanted: Callable[[Checkpoint], bool]) -> None:
        self._wanted = wanted
        self._heap: list[_Entry] = []

    def push(self, checkpoint: Checkpoint, live: Collection[Checkpoint]) -> None:
        if not self._wanted(checkpoint):
            return
        heapq.heappush(self._heap, _entry(checkpoint))
        if len(self._heap) > 4 * len(live) + _SLACK:
            self._heap = [_entry(other) for other in live if self._wanted(other)]
            heapq.heapify(self._heap)

    def pop(self) -> Checkpoint | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            checkpoint = entry[3]
            if self._wanted(checkpoint) and entry == _entry(checkpoint):
                return checkpoint
        return None

    def contains(self, checkpoint: Checkpoint) -> bool:
        return _entry(checkpoint) in self._heap


class EvictionOrder:
    """`live` is the facade's own collection of live checkpoints, read when a queue is rebuilt."""

    def __init__(self, live: Collection[Checkpoint]) -> None:
        self._live = live
        self._rows = _LazyQueue(_frees_row)
        self._tips = _LazyQueue(_frees_pages)

    def queue(self, checkpoint: Checkpoint) -> None:
        """Call when a checkpoint was used, became evictable, changed its kind or its holds, or became a tip."""
        self._rows.push(checkpoint, self._live)
        self._tips.push(checkpoint, self._live)

    def pop_for_row(self) -> Checkpoint | None:
        """The next checkpoint to evict where a row, or any bytes, are wanted."""
        return self._rows.pop()

    def pop_for_pages(self) -> Checkpoint | None:
        """The next checkpoint whose eviction frees pages."""
        return self._tips.pop()

    def knows(self, checkpoint: Checkpoint) -> bool:
        """True when the checkpoint would come up in every queue that it belongs to: for audits; slow."""
        in_rows = not _frees_row(checkpoint) or self._rows.contains(checkpoint)
        return in_rows and (not _frees_pages(checkpoint) or self._tips.contains(checkpoint))
