"""What is remembered within a bound of bytes: the values that were used last, each with what it really holds in memory.

A value's size is taken once, when it comes: a text may grow afterwards, by the UTF-8 copy that Python keeps beside it,
so that is counted at once.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def held_bytes(value: Any) -> int:
    """Bytes of memory that plain data holds: texts, numbers, and lists, tuples and dicts of such."""
    if type(value) is str:
        return sys.getsizeof(value) + (0 if value.isascii() else len(value.encode(errors="surrogatepass")))
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(held_bytes(key) + held_bytes(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(map(held_bytes, value))
    return sys.getsizeof(value)


class SizedCache(Generic[_K, _V]):
    """Values by key, the least recently used of which go first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self.num_bytes = 0
        """Of all values; never above max_bytes."""

    def __contains__(self, key: _K) -> bool:
        return key in self._entries

    def get(self, key: _K) -> _V | None:
        """The value, which counts as used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _K, value: _V, num_bytes: int) -> None:
        """Keep a value, in the place of the key's last one. num_bytes: what it holds, its key included; more than the
        bound is not kept."""
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
