"""A constraint without a grammar: a random finite automaton over token ids, which checks its caller as strictly as a
real one.

States are small integers; the tokens allowed in a state, and the states they lead to, are drawn from a seed. The stop
id is allowed in every third state; on request, some states allow nothing. `Rules` is the automaton; `Automaton` is one
request's position in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.runtime.constraint import MaskRows

NUM_STATES = 31


class Rules:
    """The automaton. A state allows about `share` of the real tokens, at least one; padding ids never. `num_dead_ends`
    states allow nothing."""

    def __init__(
        self,
        seed: int,
        *,
        vocab_size: int,
        num_real_tokens: int,
        stop_id: int,
        share: float = 0.4,
        num_dead_ends: int = 0,
    ) -> None:
        generator = np.random.default_rng(seed)
        self.allowed_SV = generator.random((NUM_STATES, vocab_size)) < share
        self.allowed_SV[np.arange(NUM_STATES), generator.integers(0, num_real_tokens - 1, NUM_STATES)] = True
        self.allowed_SV[:, stop_id] = np.arange(NUM_STATES) % 3 == 2
        self.allowed_SV[:, num_real_tokens:] = False
        self.allowed_SV[NUM_STATES - num_dead_ends :] = False
        self.stop_id = stop_id
        self._next_SV = generator.integers(0, NUM_STATES, (NUM_STATES, vocab_size))

    def next(self, state: int, token: int) -> int:
        return int(self._next_SV[state, token])

    def allowed_after(self, emitted: Sequence[int]) -> NDArray[np.bool_]:
        """bool [V]: tokens allowed after these tokens of an output."""
        state = 0
        for token in emitted:
            assert self.allowed_SV[state, token], f"{token} is not allowed in state {state}"
            state = self.next(state, token)
        return self.allowed_SV[state]


@dataclass(slots=True)
class Automaton:
    """Satisfies constraint.Constraint. Fails if it is advanced over a token that isn't allowed, or past the stop id."""

    rules: Rules
    state: int = 0
    is_ended: bool = False
    followed: list[int] = field(default_factory=list)
    """Everything that `advance` was told."""
    windows: list[list[int]] = field(default_factory=list)
    """The drafts of every call of `masks`."""
    num_barred: int = 0
    """Drafts that may not come where they stand."""
    fails_after: int | None = None
    """`masks` raises once so many tokens were followed."""

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        assert not self.is_ended, "masks after the end"
        self.windows.append(list(drafts))
        if self.fails_after is not None and len(self.followed) >= self.fails_after:
            raise ValueError("planted")
        rows = np.full((len(drafts) + 1, -(-self.rules.allowed_SV.shape[1] // 32)), -1, dtype=np.int32)
        state = self.state
        for column, draft in enumerate([*drafts, self.rules.stop_id]):
            rows[column] = pack(self.rules.allowed_SV[state])
            if not self.rules.allowed_SV[state, draft]:
                self.num_barred += column < len(drafts)
                break
            if draft == self.rules.stop_id:
                break
            state = self.rules.next(state, draft)
        return rows

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert not self.is_ended, "a token after the end"
            assert self.rules.allowed_SV[self.state, token], f"{token} is not allowed in state {self.state}"
            self.state = self.rules.next(self.state, token)
            self.is_ended = token == self.rules.stop_id
            self.followed.append(token)


class Everything:
    """A constraint that allows everything and records its calls."""

    def __init__(self, vocab_size: int) -> None:
        self.windows: list[list[int]] = []
        self.followed: list[int] = []
        self._num_words = -(-vocab_size // 32)

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        self.windows.append(list(drafts))
        return np.full((len(drafts) + 1, self._num_words), -1, dtype=np.int32)

    def advance(self, token_ids: Sequence[int]) -> None:
        self.followed.extend(token_ids)


def pack(allowed_V: NDArray[np.bool_]) -> NDArray[np.int32]:
    """One row of MaskRows."""
    padded = np.zeros(-(-len(allowed_V) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed_V)] = allowed_V
    return np.packbits(padded, bitorder="little").view(np.int32)
