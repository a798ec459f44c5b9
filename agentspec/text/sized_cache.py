"""An LRU cache bounded by the memory of its values.

A value's size is measured once, on insertion. Python may later cache a UTF-8 copy inside a text, so that copy is
counted from the start.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def held_bytes(value: Any) -> int:
    """Return the memory in bytes of plain data: texts, numbers, and lists, tuples and dicts of them."""
    if type(value) is str:
        return sys.getsizeof(value) + (0 if value.isascii() else len(value.encode(errors="surrogatepass")))
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(held_bytes(key) + held_bytes(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(map(held_bytes, value))
    return sys.getsizeof(value)


class SizedCache(Generic[_K, _V]):
    """Values by key; the least recently used are evicted first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self.num_bytes = 0
        """Memory of all values; never above max_bytes."""

    def __contains__(self, key: _K) -> bool:
        return key in self._entries

    def get(self, key: _K) -> _V | None:
        """Return the value and mark it as used; None when it is not cached."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _K, value: _V, num_bytes: int) -> None:
        """Store a value, replacing the key's previous one. `num_bytes`: its memory, key included. A value beyond the
        bound is not stored."""
        self.pop(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.pop(next(iter(self._entries)))

    def pop(self, key: _K) -> None:
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes
