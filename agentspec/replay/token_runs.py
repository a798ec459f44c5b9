"""Tokens for prompts that a trace describes only by block hashes: a pure function, so equal hashes give equal prefixes.

Token j of block h is `low + mix(seed, h, j) mod (high - low)`, whatever the block size. `mix` is SplitMix64's finaliser
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) over a sum of the three numbers,
each times its own odd constant.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from agentspec.replay.schema import Turn

_ODD_SEED = 0xD6E8FEB86659FD93
_ODD_BLOCK = 0x9E3779B97F4A7C15
_ODD_TOKEN = 0xC2B2AE3D27D4EB4F


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Generates the prompts of token-run turns, with ids low..high-1. This range should contain no special token of the
    server's vocabulary."""

    seed: int
    low: int
    high: int

    def block(self, block_id: int, num_tokens: int) -> array[int]:
        """Return the first `num_tokens` tokens of a block."""
        return self._blocks([block_id], num_tokens, num_tokens)

    def prompt(self, turn: Turn) -> array[int]:
        """Return the whole prompt of a token-run turn."""
        assert turn.input_length is not None
        assert turn.block_size is not None
        assert turn.hash_ids is not None
        return self._blocks(turn.hash_ids, turn.block_size, turn.input_length)

    def answer(self, turn: Turn) -> array[int]:
        """Return the recorded answer of a token-run turn with answer blocks."""
        assert turn.block_size is not None
        assert turn.expect is not None
        assert turn.expect.hash_ids is not None
        assert turn.expect.output_tokens is not None
        return self._blocks(turn.expect.hash_ids, turn.block_size, turn.expect.output_tokens)

    def _blocks(self, block_ids: list[int], block_size: int, length: int) -> array[int]:
        """Generate all blocks in one numpy operation: a long prompt has hundreds, and generation blocks all other
        streams."""
        starts = [(self.seed * _ODD_SEED + block_id * _ODD_BLOCK) % 2**64 for block_id in block_ids]
        x = np.array(starts, dtype=np.uint64)[:, None] + np.arange(
            min(block_size, length), dtype=np.uint64
        ) * np.uint64(_ODD_TOKEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        ids = np.uint64(self.low) + x % np.uint64(self.high - self.low)
        return array("i", ids.astype(np.int32).tobytes())[:length]
