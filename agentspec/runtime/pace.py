"""How many prompt tokens a step may compute: a fixed budget, or what fits under the longest gap that streams may have,
by measured times.

An agent waits for whole turns, so prompts go first and in pieces as large as the gap allows: every piece reads all
weights again, and every stream that joins sooner shares its steps with the others sooner. The gap is a ceiling, never a
target: what is short goes whole and takes what it takes.

Owns the estimate of what a pass takes. Knows nothing of requests, models or tensors: no torch, no clock, no randomness.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from agentspec.runtime.plan import StepOutcome, StepPlan

LARGEST_PASS = 8192
"""Tokens of a pass at most: more at once make no product faster, and a pass's activations are as long."""
CPU_BUDGET = 512
"""Prompt tokens a step on a CPU, whoever decodes: there a decode step waits for arithmetic too, and small pieces make
every answer later."""
DEFAULT_MAX_GAP = 0.1
"""Seconds. A person who reads along needs ten tokens a second; an agent needs its turn."""

_MARGIN = 0.88
"""Share of the gap that is given out: first steps, tables and what an estimate is wrong by take the rest."""
_DECODE_SHARE = 0.2
"""Share of the gap that a decode step is taken for, while none was measured."""
_FIRST_TOKENS = 256
"""Of a pass beside running streams, while nothing was measured."""
_ATTENTION_TOKENS = 65_536
"""Context at which attention over it costs a token as much as everything else: about what the family's layers come to.
Only the way from one measurement to the next context depends on it."""
_FIXED_TOKENS = 192
"""A pass's fixed cost, in tokens: weights are read once, however few tokens there are. Only the way from a pass to a
smaller one depends on it; a larger one is reckoned without."""
_TIMINGS = 3
"""Times kept per size; the median stands for them, so one slow step changes nothing."""
_DECODE_TIMINGS = 8
"""The same for decode steps, of which the longest counts: batches grow while prompts come in."""
_RIDES = 4
"""So many passes in a row with which the windows rode, and the next is taken to be another one."""
_FORGET_AFTER = 256
"""Measured passes after which a size that wasn't used is as good as never tried."""


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
    rode: bool = False
    """The windows' forward ran with the chunks: its time is theirs, and `decode_seconds` is of the rest."""

    @classmethod
    def of(cls, plan: StepPlan, outcome: StepOutcome) -> Self:
        verified = set(plan.decode_slots)
        return cls(
            chunks=[(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks],
            contexts=[slot.length for slot in outcome.slots if slot.slot in verified],
            prefill_seconds=outcome.prefill_seconds,
            decode_seconds=outcome.decode_seconds,
            rode=outcome.rode,
        )


class Room:
    """What the prompt pass of one step may still take. Costs are tokens or seconds, as the pace counts."""

    def __init__(self, cost: Callable[[int, float], float], capacity: float, *, most_tokens: int, tile: int) -> None:
        """cost: of a pass of so many tokens with so many pairs of a token and one that it attends to. tile: tokens that
        a chunk which doesn't end its prompt is a multiple of, where there is room for more than one block."""
        self._cost = cost
        self._capacity = capacity
        self._most_tokens = most_tokens
        self._tile = tile
        self._tokens = 0
        self._pairs = 0.0

    def fit(self, start: int, wanted: int, *, share: float = 1.0) -> int:
        """Of the next `wanted` tokens behind `start`, those that fit into `share` of what is left."""
        used = self._cost(self._tokens, self._pairs) if self._tokens else 0.0
        limit = used + max(self._capacity - used, 0.0) * share
        most = min(wanted, int((self._most_tokens - self._tokens) * share))
        if most <= 0:
            return 0
        if most == wanted and self._with(start, most) <= limit:
            return most
        low, high = 0, most // self._tile
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._with(start, middle * self._tile) <= limit else (low, middle - 1)
        return low * self._tile

    def part(self, chunks: Iterable[tuple[int, int]]) -> float:
        """The share of what is left that all of these would take; 1 if that is more than there is."""
        tokens, pairs = self._tokens, self._pairs
        for start, count in chunks:
            tokens, pairs = tokens + count, pairs + num_pairs(start, count)
        used = self._cost(self._tokens, self._pairs) if self._tokens else 0.0
        left = self._capacity - used
        by_tokens = (tokens - self._tokens) / max(self._most_tokens - self._tokens, 1)
        by_cost = (self._cost(tokens, pairs) - used) / left if left > 0 else 1.0
        return min(max(by_tokens, by_cost), 1.0)

    def take(self, start: int, count: int) -> None:
        self._tokens += count
        self._pairs += num_pairs(start, count)

    @property
    def is_untouched(self) -> bool:
        return not self._tokens

    def _with(self, start: int, count: int) -> float:
        return self._cost(self._tokens + count, self._pairs + num_pairs(start, count))


def _room_of_tokens(budget: int, block_tokens: int) -> Room:
    """Room for so many tokens, whatever they attend to."""
    return Room(lambda tokens, pairs: tokens, budget, most_tokens=budget, tile=block_tokens)


def num_pairs(start: int, count: int) -> float:
    """Pairs of a token and one that it attends to, of `count` tokens behind `start`."""
    return count * (start + (count + 1) / 2)


class Pace(Protocol):
    """What the scheduler asks for the room of each step's prompt pass."""

    def open(self, *, streams_run: bool) -> Room:
        """streams_run: somebody decodes already, and waits for this step."""
        ...

    def observe(self, times: StepTimes) -> None:
        """Learn from a step that is done."""
        ...


class FixedPace:
    """Always the same number of tokens."""

    def __init__(self, budget: int, *, block_tokens: int) -> None:
        self._budget = budget
        self._block = block_tokens

    def open(self, *, streams_run: bool) -> Room:
        return _room_of_tokens(self._budget, self._block)

    def observe(self, times: StepTimes) -> None:
        """There is nothing to learn."""


@dataclass(slots=True)
class _Size:
    """Measured passes of about one size."""

    timings: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TIMINGS))
    """(seconds for each token of the work, the work in tokens that attend to nothing)."""
    last_measured: int = 0

    def seconds(self, work: float) -> float:
        rate, measured = statistics.median_high(self.timings)
        if work >= measured:
            return rate * work
        return rate * measured * (_FIXED_TOKENS + work) / (_FIXED_TOKENS + measured)


class GapPace:
    """As much as a pass can hold while nobody decodes; else what fits, beside a decode step, under the longest gap that
    a stream may have.

    Passes are known by size, in powers of two. One that was never tried is reckoned from the next smaller one that was,
    and only the next size up is tried at a time; context makes a pass dearer, and a time counts for the context that it
    was measured at."""

    def __init__(self, max_gap: float, *, block_tokens: int, largest: int = LARGEST_PASS) -> None:
        """max_gap: seconds between two steps of a running stream. largest: tokens of any pass."""
        self._max_gap = max_gap
        self._block = block_tokens
        self._largest = max(largest // block_tokens, 1) * block_tokens
        self._sizes: dict[int, _Size] = {}
        """By the bit length of the number of tokens."""
        self._decode_seconds: deque[float] = deque(maxlen=_DECODE_TIMINGS)
        """Of whole steps."""
        self._rest_seconds: deque[float] = deque(maxlen=_RIDES)
        """Of steps whose windows rode, since the last pass without those of its step."""
        self._num_measured = 0

    def open(self, *, streams_run: bool) -> Room:
        if not streams_run:
            return _room_of_tokens(self._largest, self._block)
        if not self._sizes:
            return _room_of_tokens(min(_FIRST_TOKENS, self._largest), self._block)
        # A matrix product works on tiles of two blocks: what lies between costs as much as the next tile.
        tile = 2 * self._block
        capacity = _MARGIN * self._max_gap - self._seconds_beside()
        most = min(self._largest, 1 << (max(self._sizes) + 1))
        return Room(self._seconds, max(capacity, 0.0), most_tokens=most, tile=tile)

    def observe(self, times: StepTimes) -> None:
        if times.decode_seconds > 0.0 and times.rode:
            self._rest_seconds.append(times.decode_seconds)
        elif times.decode_seconds > 0.0:
            self._decode_seconds.append(times.decode_seconds)
            if times.chunks:
                self._rest_seconds.clear()
        num_tokens = sum(count for _, count in times.chunks)
        if times.prefill_seconds <= 0.0 or not num_tokens:
            return
        self._num_measured += 1
        work = _work(num_tokens, sum(num_pairs(start, count) for start, count in times.chunks))
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        size.timings.append((times.prefill_seconds / work, work))
        size.last_measured = self._num_measured
        self._sizes = {
            bits: kept for bits, kept in self._sizes.items() if self._num_measured - kept.last_measured < _FORGET_AFTER
        }

    def _seconds_beside(self) -> float:
        """What a step with a pass takes beside it. Where windows ride, most of it is part of the pass."""
        if len(self._rest_seconds) == _RIDES:
            return max(self._rest_seconds)
        return max(self._decode_seconds, default=_DECODE_SHARE * self._max_gap)

    def _seconds(self, num_tokens: int, pairs: float) -> float:
        """What a pass would take."""
        bits = num_tokens.bit_length()
        known = max((size for size in self._sizes if size <= bits), default=min(self._sizes))
        return self._sizes[known].seconds(_work(num_tokens, pairs))


def _work(num_tokens: int, pairs: float) -> float:
    """What a pass computes, in tokens that attend to nothing."""
    return num_tokens + pairs / _ATTENTION_TOKENS
