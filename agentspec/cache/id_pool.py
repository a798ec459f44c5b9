"""Allocator of small integers, for rows and pages on the device and on the host.

Knows which ids are free, and nothing about what an id stands for or which object owns it.
"""

from __future__ import annotations

from collections.abc import Iterable


class IdPool:
    """Allocates ids in [num_reserved, num_ids). Reserved ids are never allocated and can't be freed."""

    def __init__(self, num_ids: int, *, num_reserved: int, noun: str) -> None:
        """noun: what an id stands for, in messages."""
        self.noun = noun
        self.num_ids = num_ids
        self.num_reserved = num_reserved
        self.peak_used = 0
        """Most ids that were in use at the same time."""
        self._fresh = num_reserved
        """Ids from here on were never allocated. So a pool of millions needs no free list at the start."""
        self._returned: list[int] = []
        self._used = bytearray(num_ids)

    @property
    def capacity(self) -> int:
        """Ids that can be in use at the same time."""
        return self.num_ids - self.num_reserved

    @property
    def num_free(self) -> int:
        return self.num_ids - self._fresh + len(self._returned)

    @property
    def num_used(self) -> int:
        return self._fresh - self.num_reserved - len(self._returned)

    def take(self, count: int) -> list[int]:
        """Allocate `count` distinct ids. The caller has made sure that as many are free."""
        assert 0 <= count <= self.num_free, f"take({count}) of {self.num_free} free {self.noun}s"
        split = max(0, len(self._returned) - count)
        ids = self._returned[split:]
        del self._returned[split:]
        num_fresh = count - len(ids)
        ids.extend(range(self._fresh, self._fresh + num_fresh))
        self._fresh += num_fresh
        for taken in ids:
            self._used[taken] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Free ids; each must be in use."""
        for returned in ids:
            assert self.num_reserved <= returned < self.num_ids, f"{self.noun} {returned} is not this pool's to free"
            assert self._used[returned], f"{self.noun} {returned} is freed twice"
            self._used[returned] = 0
            self._returned.append(returned)

    def free_ids(self) -> list[int]:
        """Every free id; one that was freed twice is listed twice. For audits."""
        return [*self._returned, *range(self._fresh, self.num_ids)]
