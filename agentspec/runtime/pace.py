"""How many prompt tokens a step may compute: a fixed budget, or as many as running streams can bear by measured times.

Owns the budget and its statistics. Knows nothing of requests, models or tensors: no torch, no clock, no randomness.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

AUTO_BUDGET_GPU = 8192
"""Budget of `auto` while nobody decodes, on a GPU: more tokens at once make no product faster."""
AUTO_BUDGET_CPU = 512
"""Budget of `auto` on a CPU, whoever decodes."""

STEP_SHARE = 0.85
"""Time that chunks may take beside a decode step, as a share of it: with joins and gaps, a step with chunks takes about 1.9 times a plain one."""

_FIRST_TOKENS = 128
"""Budget beside running streams while nothing was measured."""
_ATTENTION_TOKENS = 65_536
"""Context at which attention over it costs a token as much as everything else: about what the family's layers come to. Only the way from one
measurement to the next context depends on it."""
_FIXED_TOKENS = 192
"""A chunk's fixed cost, in tokens: weights are read once, however few tokens there are. Only guesses at a size never tried depend on it."""
_TIMINGS = 3
"""Times kept per size; the median stands for them, so one slow step changes nothing."""
_DECODE_TIMINGS = 8
"""The same for decode steps."""
_FORGET_AFTER = 256
"""Measured steps after which a size that wasn't used is as good as never tried. So a size that was too dear is tried again now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What one step took."""

    chunks: Sequence[tuple[int, int]] = ()
    """(start, tokens) of each prompt chunk."""
    contexts: Sequence[int] = ()
    """Tokens in the state of each slot that verified a window."""
    prefill_seconds: float = 0.0
    """Of all chunks. 0: there were none, or they were not measured."""
    decode_seconds: float = 0.0
    """Of the windows. 0: there were none, or they were not measured."""


class Pace(Protocol):
    """What the scheduler asks for each step's prefill budget."""

    def choose(self, *, streams_run: bool, context: int) -> int:
        """Prompt tokens that the next step may compute, one block at least.

        streams_run: somebody decodes already, and waits for this step. context: tokens before the deepest of the chunks to come."""
        ...

    def observe(self, times: StepTimes) -> None:
        """Learn from a step that is done."""
        ...


class FixedPace:
    """Always the same budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def choose(self, *, streams_run: bool, context: int) -> int:
        return self._budget

    def observe(self, times: StepTimes) -> None:
        """There is nothing to learn."""


@dataclass(slots=True)
class _Size:
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMINGS))
    """Seconds per token of `_weight`."""
    last_measured: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class AdaptivePace:
    """As much as a step can hold while nobody decodes; else the largest size whose chunks take at most STEP_SHARE of a decode step.

    Sizes are one block and the multiples of two: a matrix product works on tiles of two blocks, so what lies between costs as much as the next size.
    A size that was never tried is reckoned from the next smaller one that was, and only one such step up is taken at a time. Context makes
    chunks dearer, and a time counts for the context that it was measured at. Only steps that fill a size are measured."""

    def __init__(self, *, block_tokens: int, largest: int) -> None:
        """largest: the budget while nobody decodes."""
        self._block = block_tokens
        self._largest = max(largest // block_tokens, 1) * block_tokens
        self._sizes: dict[int, _Size] = {}
        self._decode_seconds: deque[float] = deque(maxlen=_DECODE_TIMINGS)
        self._num_measured = 0

    def choose(self, *, streams_run: bool, context: int) -> int:
        if not streams_run:
            return self._largest
        if not (self._sizes and self._decode_seconds):
            return min(self._size_of(_FIRST_TOKENS), self._largest)
        allowed = STEP_SHARE * statistics.median(self._decode_seconds)
        affordable = size = self._block
        known = min(self._sizes)
        while size <= self._largest:
            known = size if size in self._sizes else known
            if self._sizes[known].rate * _weight(size, context) > allowed:
                break
            affordable = size
            if size > known:
                break
            size = self._size_of(size + 1)
        return affordable

    def observe(self, times: StepTimes) -> None:
        if times.decode_seconds > 0.0:
            self._decode_seconds.append(times.decode_seconds)
        chunks, prefill_seconds = times.chunks, times.prefill_seconds
        num_tokens = sum(count for _, count in chunks)
        if prefill_seconds <= 0.0 or num_tokens != self._size_of(num_tokens):
            return
        self._num_measured += 1
        context = sum(start * count for start, count in chunks) // num_tokens
        size = self._sizes.setdefault(num_tokens, _Size())
        size.rates.append(prefill_seconds / _weight(num_tokens, context))
        size.last_measured = self._num_measured
        self._sizes = {count: kept for count, kept in self._sizes.items() if self._num_measured - kept.last_measured < _FORGET_AFTER}

    def _size_of(self, num_tokens: int) -> int:
        """The smallest size that holds so many tokens."""
        if num_tokens <= self._block:
            return self._block
        tile = 2 * self._block
        return -(-num_tokens // tile) * tile


def _weight(num_tokens: int, context: int) -> float:
    """What a chunk behind `context` tokens costs, in tokens without any."""
    return _FIXED_TOKENS + num_tokens * (1.0 + (context + num_tokens / 2) / _ATTENTION_TOKENS)


def make_pace(budget: int | Literal["auto"], *, block_tokens: int, largest: int) -> Pace:
    """The pace that `prefill_budget` asks for. largest: the budget of `auto` while nobody decodes."""
    return AdaptivePace(block_tokens=block_tokens, largest=largest) if budget == "auto" else FixedPace(budget)
