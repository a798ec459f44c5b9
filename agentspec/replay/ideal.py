"""An upper bound on the hit share of any prefix cache: nothing is evicted, and a prompt can be resumed at every token.

Knows token sequences only. `--dry-run` prints it next to the hit share of agentspec's own cache.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from agentspec.types import BLOCK_TOKENS

_BLOCK_BYTES = BLOCK_TOKENS * array("i").itemsize


class _Node:
    """A node of a radix tree over whole blocks. Keys are the bytes of a block's tokens."""

    __slots__ = ("children", "ordered")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.ordered: list[bytes] = []
        """Sorted keys of the children and partial blocks that end here: a new key has its longest common prefix with a
        neighbour."""


class IdealPrefix:
    """Longest common prefixes with all earlier sequences, at token granularity."""

    def __init__(self) -> None:
        self._root = _Node()

    def match_and_insert(self, prompt: array[int], output: array[int]) -> int:
        """Return the number of tokens of `prompt` that an ideal cache holds, then insert prompt + output.

        It is the longest common prefix with any earlier prompt + output, at most len(prompt) - 1."""
        data = prompt.tobytes()
        node, offset = self._descend(data)
        hit = offset + _longest_common(node.ordered, data[offset : offset + _BLOCK_BYTES])
        self._insert(node, data + output.tobytes(), offset)
        return min(hit // prompt.itemsize, len(prompt) - 1)

    def _descend(self, data: bytes) -> tuple[_Node, int]:
        """Return the deepest node on the path of `data`, and its offset in bytes."""
        node, offset = self._root, 0
        while offset + _BLOCK_BYTES <= len(data):
            child = node.children.get(data[offset : offset + _BLOCK_BYTES])
            if child is None:
                break
            node, offset = child, offset + _BLOCK_BYTES
        return node, offset

    def _insert(self, node: _Node, data: bytes, offset: int) -> None:
        """Insert `data`, whose first `offset` bytes lead to `node`."""
        while offset + _BLOCK_BYTES <= len(data):
            key = data[offset : offset + _BLOCK_BYTES]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
                insort(node.ordered, key)
            node, offset = child, offset + _BLOCK_BYTES
        if offset < len(data):
            insort(node.ordered, data[offset:])


def _longest_common(ordered: list[bytes], key: bytes) -> int:
    """Return the longest common prefix of `key` with an entry of a sorted list, in bytes."""
    place = bisect_left(ordered, key)
    return max((_common(entry, key) for entry in ordered[max(0, place - 1) : place + 1]), default=0)


def _common(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return size if not difference else ((difference & -difference).bit_length() - 1) // 8
