"""The best hit share that any prefix cache could reach on a list of requests: nothing is ever evicted, and every token
can be resumed from.

Knows token sequences only. An engine's cache is judged against this number for the same tokens (agentspec's own
--dry-run prints both).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from agentspec.types import BLOCK_TOKENS

_BLOCK_BYTES = BLOCK_TOKENS * array("i").itemsize


class _Node:
    """What followed one run of whole blocks. Keys are the bytes of a block's tokens."""

    __slots__ = ("children", "ordered")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.ordered: list[bytes] = []
        """The children's keys and the partial blocks that ended here, sorted: the longest common prefix of a new key is
        with a neighbour."""


class IdealPrefix:
    """Longest common prefixes with everything seen before, at token granularity."""

    def __init__(self) -> None:
        self._root = _Node()

    def request(self, prompt: array[int], output: array[int]) -> int:
        """Tokens of `prompt` that an ideal cache holds: its longest common prefix with any earlier prompt + output, at
        most len(prompt) - 1.

        Prompt and output are then remembered."""
        data = prompt.tobytes()
        node, offset = self._descend(data)
        hit = offset + _longest_common(node.ordered, data[offset : offset + _BLOCK_BYTES])
        self._insert(node, data + output.tobytes(), offset)
        return min(hit // prompt.itemsize, len(prompt) - 1)

    def _descend(self, data: bytes) -> tuple[_Node, int]:
        """The deepest node on the path of `data`, and the bytes of whole blocks that lead to it."""
        node, offset = self._root, 0
        while offset + _BLOCK_BYTES <= len(data):
            child = node.children.get(data[offset : offset + _BLOCK_BYTES])
            if child is None:
                break
            node, offset = child, offset + _BLOCK_BYTES
        return node, offset

    def _insert(self, node: _Node, data: bytes, offset: int) -> None:
        """Remember `data`, of which the first `offset` bytes lead to `node`."""
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
    """Bytes that `key` shares with the entry of a sorted list that shares most."""
    place = bisect_left(ordered, key)
    return max((_common(entry, key) for entry in ordered[max(0, place - 1) : place + 1]), default=0)


def _common(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return size if not difference else ((difference & -difference).bit_length() - 1) // 8
