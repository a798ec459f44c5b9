"""How many prompt tokens a step may compute: a fixed budget, or as many as measured times say fit under the longest
allowed gap between a stream's tokens.

An agent waits for whole turns, so prompts go first, in chunks as large as the gap allows: every chunk reads all weights
again, and a stream that joins sooner shares more steps with the others. The gap is a limit, not a target: a short
prompt runs whole and takes only the time it needs.

Owns the estimate of a pass's time. Knows nothing of requests, models or tensors: no torch, no clock, no randomness.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from agentspec.runtime.plan import StepOutcome, StepPlan

LARGEST_PASS = 8192
"""Most tokens of a pass: matrix products get no faster beyond it, while the pass's activations keep growing."""
CPU_BUDGET = 512
"""Prompt tokens per step on a CPU, whether or not slots decode. A decode step on a CPU is bound by arithmetic too, so
small chunks would only delay every answer."""
DEFAULT_MAX_GAP = 0.1
"""Seconds. A person reading along needs ten tokens per second; an agent only needs its turn to end soon."""

_UNSEEN = 0.03
"""Share of the gap for what step times don't include: first steps, and building tables."""
_FIRST_ERROR = 0.1
"""Assumed relative error of the estimate, until so many passes are measured that the largest error seen stands for all:
_ERRORS."""
_ERRORS = 256
"""Errors kept. Their maximum is expected again."""
_STALL = 0.3
"""A larger error is no error of the estimate: a kernel was compiled, or the device was busy with something else."""
_DECODE_SHARE = 0.2
"""Assumed share of the gap that a decode step takes, until one is measured."""
_FIRST_TOKENS = 256
"""Tokens of a pass beside running streams, until a pass is measured."""
_ATTENTION_TOKENS = 65_536
"""Context length at which attention costs a token as much as everything else: a rough value for the family's layers. It
only affects extrapolation from a measured context to the next."""
_FIXED_TOKENS = 192
"""A pass's fixed cost in tokens: the weights are read once, however few tokens there are. It only affects extrapolation
from a pass to a smaller one; extrapolation to a larger one ignores it."""
_TIMINGS = 3
"""Times kept per size. Their median is used, so one slow step has no effect."""
_DECODE_TIMINGS = 8
"""Decode times kept. Their maximum is used, since batches grow while prompts are computed."""
_RIDES = 4
"""After this many passes in a row with riding windows, the next pass is expected to have them too."""
_FORGET_AFTER = 256
"""A size is forgotten after this many measured passes without it."""
_DRIFT_SHARE = 0.5
"""Share of an estimate's error that is taken for a change of the riding windows' time: streams join while none of their
steps is measured alone."""
_UNTRIED = 0.08
"""Share that is added to the estimate of a size that was not measured: tiles that a device fills partly make some sizes
slower than their neighbours say."""
_LEAST_SHARE = 0.25
"""Least share of a pass with riding windows that is the prompt's."""
_SIZE_TOKENS = 128
"""Passes are grouped by this many tokens: matrix products work on tiles of as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What a step did, and how long it took."""

    chunks: Sequence[tuple[int, int]] = ()
    """(start, tokens) of each prompt chunk."""
    contexts: Sequence[int] = ()
    """Tokens in the state of each slot that verified a window."""
    prefill_seconds: float = 0.0
    """Time of all chunks. 0: there were none, or they were not measured."""
    decode_seconds: float = 0.0
    """Time of the windows. 0: there were none, or they were not measured."""
    rode: bool = False
    """The windows' forward ran with the chunks: `prefill_seconds` includes it, and `decode_seconds` is the rest of the
    step."""

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
    """What is left of one step's prompt pass. Costs are in tokens or seconds, depending on the pace."""

    def __init__(self, cost: Callable[[int, float], float], capacity: float, *, most_tokens: int, tile: int) -> None:
        """cost: of a pass, given its tokens and its pairs of a token and one it attends to. tile: a chunk that doesn't
        end its prompt is a multiple of this many tokens, where more than one block fits."""
        self._cost = cost
        self._capacity = capacity
        self._most_tokens = most_tokens
        self._tile = tile
        self._tokens = 0
        self._pairs = 0.0

    def fit(self, start: int, wanted: int, *, share: float = 1.0) -> int:
        """How many of the next `wanted` tokens after `start` fit into `share` of what is left."""
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
        """The share of what is left that all of these chunks (start, tokens) would take; at most 1."""
        tokens, pairs = self._tokens, self._pairs
        for start, count in chunks:
            tokens, pairs = tokens + count, pairs + num_pairs(start, count)
        used = self._cost(self._tokens, self._pairs) if self._tokens else 0.0
        left = self._capacity - used
        by_tokens = (tokens - self._tokens) / max(self._most_tokens - self._tokens, 1)
        by_cost = (self._cost(tokens, pairs) - used) / left if left > 0 else 1.0
        return min(max(by_tokens, by_cost), 1.0)

    def take_chunk(self, start: int, count: int) -> None:
        self._tokens += count
        self._pairs += num_pairs(start, count)

    @property
    def is_untouched(self) -> bool:
        return not self._tokens

    def _with(self, start: int, count: int) -> float:
        return self._cost(self._tokens + count, self._pairs + num_pairs(start, count))


def _room_of_tokens(budget: int, block_tokens: int) -> Room:
    """Room for a number of tokens, whatever they attend to."""
    return Room(lambda tokens, pairs: tokens, budget, most_tokens=budget, tile=block_tokens)


def num_pairs(start: int, count: int) -> float:
    """Pairs of a token and one it attends to, for `count` tokens after `start`."""
    return count * (start + (count + 1) / 2)


class Pace(Protocol):
    """How the scheduler gets the room of each step's prompt pass."""

    def open(self, *, streams_run: bool) -> Room:
        """The room of the next pass. streams_run: some slot decodes already, and waits for this step."""

    def observe(self, times: StepTimes) -> None:
        """Learn from a completed step."""


class FixedPace:
    """Always the same number of tokens."""

    def __init__(self, budget: int, *, block_tokens: int) -> None:
        self._budget = budget
        self._block = block_tokens

    def open(self, *, streams_run: bool) -> Room:
        return _room_of_tokens(self._budget, self._block)

    def observe(self, times: StepTimes) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class _Size:
    """Measured passes of about the same size."""

    timings: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TIMINGS))
    """(seconds per token of work, tokens of work), see `_work`."""
    last_measured: int = 0

    def seconds(self, work: float) -> float:
        rate, measured = statistics.median_low(self.timings)
        if work >= measured:
            return rate * work
        return rate * measured * (_FIXED_TOKENS + work) / (_FIXED_TOKENS + measured)


class _Sizes:
    """Times of passes by size, all of one kind."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        """By the number of tiles."""
        self._num_measured = 0

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def largest(self) -> int:
        """Tokens of the largest measured size."""
        return max(self._sizes) * _SIZE_TOKENS

    def add(self, num_tokens: int, work: float, seconds: float) -> None:
        self._num_measured += 1
        size = self._sizes.setdefault(_num_tiles(num_tokens), _Size())
        size.timings.append((seconds / work, work))
        size.last_measured = self._num_measured
        self._sizes = {
            tiles: kept
            for tiles, kept in self._sizes.items()
            if self._num_measured - kept.last_measured < _FORGET_AFTER
        }

    def seconds(self, num_tokens: int, work: float) -> float:
        """The time of a measured size; of another, what the next smaller one says, and at most what the next larger one
        takes."""
        tiles = _num_tiles(num_tokens)
        below = max((size for size in self._sizes if size <= tiles), default=None)
        above = min((size for size in self._sizes if size > tiles), default=None)
        if below is None:
            assert above is not None
            return self._sizes[above].seconds(work)
        found = self._sizes[below].seconds(work)
        if below == tiles:
            return found
        if above is not None:
            more = work + (above * _SIZE_TOKENS - num_tokens)
            found = min(found, self._sizes[above].seconds(more))
        return found * (1.0 + _UNTRIED)

    def knows(self, num_tokens: int) -> bool:
        """Whether passes of this size were measured."""
        return _num_tiles(num_tokens) in self._sizes


class GapPace:
    """The largest pass while no slot decodes; otherwise as many tokens as fit, beside a decode step, under the longest
    gap that a stream may have.

    Passes are grouped by size. The time of an untried size is estimated from measured ones around it, and sizes grow
    twofold to fourfold at a time. Attention to context makes a pass slower, so each time is kept with the work it was
    measured at. Where windows ride, the part of a pass that is theirs is taken off, by the time of a step of their own.

    The estimate of each step is compared with its time, and the largest error of the last ones is left free."""

    def __init__(self, max_gap: float, *, block_tokens: int, largest: int = LARGEST_PASS) -> None:
        """max_gap: seconds between two steps of a running stream. largest: most tokens of any pass."""
        self._max_gap = max_gap
        self._block = block_tokens
        self._largest = max(largest // block_tokens, 1) * block_tokens
        self._sizes = {False: _Sizes(), True: _Sizes()}
        """By whether windows rode."""
        self._decode_seconds: deque[float] = deque(maxlen=_DECODE_TIMINGS)
        """Of whole decode steps."""
        self._num_rides = 0
        """Passes in a row whose windows rode."""
        self._drift = 0.0
        """By how many seconds riding windows take longer now than the last steps without a pass."""
        self._errors: deque[float] = deque([_FIRST_ERROR], maxlen=_ERRORS)
        """Of the estimates of steps with a pass and windows, relative."""

    def open(self, *, streams_run: bool) -> Room:
        if not streams_run:
            return _room_of_tokens(self._largest, self._block)
        rides = self._num_rides >= _RIDES
        sizes = self._sizes[rides] or self._sizes[not rides]
        if not sizes:
            return _room_of_tokens(min(_FIRST_TOKENS, self._largest), self._block)
        # Matrix products work on tiles of two blocks: a partly filled tile costs as much as a full one.
        tile = 2 * self._block
        capacity = (1.0 - _UNSEEN) * self._max_gap / (1.0 + max(self._errors)) - self._seconds_beside(rides=rides)
        most = min(self._largest, 1 << (sizes.largest.bit_length() + 1))
        return Room(
            lambda num_tokens, pairs: sizes.seconds(num_tokens, _work(num_tokens, pairs)),
            max(capacity, 0.0),
            most_tokens=most,
            tile=tile,
        )

    def observe(self, times: StepTimes) -> None:
        num_tokens = sum(count for _, count in times.chunks)
        if times.prefill_seconds > 0.0 and num_tokens:
            work = _work(num_tokens, sum(num_pairs(start, count) for start, count in times.chunks))
            self._judge(times, num_tokens, work)
            # The windows' part of a pass isn't measured.
            ridden = max(self._seconds_beside(rides=True) - times.decode_seconds, 0.0) if times.rode else 0.0
            seconds = max(times.prefill_seconds - ridden, _LEAST_SHARE * times.prefill_seconds)
            self._sizes[times.rode].add(num_tokens, work, seconds)
            if times.decode_seconds > 0.0:
                self._num_rides = self._num_rides + 1 if times.rode else 0
        if times.decode_seconds > 0.0 and not times.rode:
            self._decode_seconds.append(times.decode_seconds)
            self._drift = 0.0

    def _judge(self, times: StepTimes, num_tokens: int, work: float) -> None:
        """Compare a step's time with its estimate."""
        sizes = self._sizes[times.rode]
        if not sizes.knows(num_tokens) or times.decode_seconds <= 0.0:
            return
        estimate = sizes.seconds(num_tokens, work) + self._seconds_beside(rides=times.rode)
        error = (times.prefill_seconds + times.decode_seconds) / estimate - 1.0
        if error <= _STALL:
            self._errors.append(max(error, 0.0))
            if times.rode:
                self._drift += _DRIFT_SHARE * error * estimate

    def _seconds_beside(self, *, rides: bool) -> float:
        """Time of the windows, and of the rest of their step."""
        seconds = max(self._decode_seconds, default=_DECODE_SHARE * self._max_gap)
        return max(seconds + self._drift, 0.0) if rides else seconds


def _num_tiles(num_tokens: int) -> int:
    return -(-num_tokens // _SIZE_TOKENS)


def _work(num_tokens: int, pairs: float) -> float:
    """The arithmetic of a pass, in tokens without attention."""
    return num_tokens + pairs / _ATTENTION_TOKENS
