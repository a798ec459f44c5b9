"""Number of drafts per step: fixed, or chosen from measured acceptance and measured step times.

Owns the choice of k and its statistics. Knows nothing about tokens, models or tensors: no torch, no clock, no
randomness.
"""

from __future__ import annotations

import statistics
from collections import deque

_PRIOR_RATE = 0.7
"""Assumed acceptance of a position that was never offered. MTP heads reach 0.6 to 0.9."""
_PRIOR_WEIGHT = 2.0
"""Number of offers that the prior counts as."""
_MEMORY = 128.0
"""Number of offers after which old ones have weight 1/e."""
_TIMINGS = 5
"""Step times stored per (batch, k). Their median is used, so one slow step changes nothing."""
_BURST = 2
"""Consecutive steps of an exploration: the first one drafts with the new k, the second one verifies those drafts."""
_EXPLORE_EVERY = 64
"""Minimum number of steps between explorations, for each bucket of batch sizes."""
_EXPLORE_SHARE = 0.05
"""Maximum share of the time for explorations: after an expensive one the pause is longer."""


class FixedDepth:
    """Always the same k. Implements runtime.step_loop.DepthPolicy, like AdaptiveDepth."""

    def __init__(self, num_drafted: int) -> None:
        self._num_drafted = num_drafted

    def choose(self, batch_size: int) -> int:
        return self._num_drafted

    def observe(self, *, num_drafted: int, slots: list[tuple[int, int]], seconds: float) -> None:
        """Do nothing: a fixed depth learns nothing."""


class _Acceptance:
    """Decayed acceptance rate of one draft position, given that all earlier ones were accepted."""

    def __init__(self) -> None:
        self._offered = _PRIOR_WEIGHT
        self._accepted = _PRIOR_WEIGHT * _PRIOR_RATE

    def record(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._offered = self._offered * keep + 1.0
        self._accepted = self._accepted * keep + accepted

    @property
    def rate(self) -> float:
        return self._accepted / self._offered


class _Bucket:
    """Step times by k for one range of batch sizes, and the planned steps of an exploration."""

    def __init__(self, max_drafted: int) -> None:
        self.seconds: list[deque[float]] = [deque(maxlen=_TIMINGS) for _ in range(max_drafted + 1)]
        self.planned = [k for k in range(max_drafted + 1) for _ in range(_BURST)]
        self.steps_until_exploration = _EXPLORE_EVERY
        self.next_explored = max_drafted


class AdaptiveDepth:
    """Maximises expected emitted tokens per second: (1 + the sum over i <= k of the probability that drafts 1..i are
    all accepted) / median step time.

    Batch sizes up to the next power of two share a bucket. In a new bucket every k runs for two steps, starting with
    the largest. After that, every k is tried again for two steps from time to time, one after the other. So a better k
    is found when acceptance or costs change, and explorations take at most a twentieth of the time."""

    def __init__(self, max_drafted: int) -> None:
        self._max_drafted = max_drafted
        self._acceptance = [_Acceptance() for _ in range(max_drafted)]
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, batch_size: int) -> int:
        bucket = self._bucket(batch_size)
        if bucket.planned:
            return bucket.planned.pop()
        best = self._best(bucket)
        bucket.steps_until_exploration -= 1
        if bucket.steps_until_exploration >= 0:
            return best
        explored = self._next_explored(bucket, best)
        bucket.steps_until_exploration = self._pause(bucket, best, explored)
        bucket.planned = [explored] * (_BURST - 1)
        return explored

    def observe(self, *, num_drafted: int, slots: list[tuple[int, int]], seconds: float) -> None:
        """Learn from a decode step: (drafts offered, drafts accepted) of each slot, and the step's time. seconds=0: the
        time was not measured."""
        for offered, accepted in slots:
            for position in range(min(offered, accepted + 1)):
                self._acceptance[position].record(position < accepted)
        if seconds > 0.0:
            self._bucket(len(slots)).seconds[num_drafted].append(seconds)

    def expected_emitted(self, num_drafted: int) -> float:
        """Expected tokens per slot in a step with this many drafts, by the acceptance measured so far."""
        emitted, survives = 1.0, 1.0
        for position in range(num_drafted):
            survives *= self._acceptance[position].rate
            emitted += survives
        return emitted

    def _bucket(self, batch_size: int) -> _Bucket:
        key = (batch_size - 1).bit_length()
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self._max_drafted)
        return self._buckets[key]

    def _best(self, bucket: _Bucket) -> int:
        """The best k among those with a step time, the smaller one on ties; the largest k while no step was timed."""
        timed = [k for k, seconds in enumerate(bucket.seconds) if seconds]
        return max(
            timed,
            key=lambda k: self.expected_emitted(k) / statistics.median(bucket.seconds[k]),
            default=self._max_drafted,
        )

    def _pause(self, bucket: _Bucket, best: int, explored: int) -> int:
        """Number of steps until the next exploration that keeps explorations within their share of the time."""
        if not (bucket.seconds[best] and bucket.seconds[explored]):
            return _EXPLORE_EVERY
        times_dearer = statistics.median(bucket.seconds[explored]) / statistics.median(bucket.seconds[best])
        return max(_EXPLORE_EVERY, round(_BURST * times_dearer / _EXPLORE_SHARE))

    def _next_explored(self, bucket: _Bucket, best: int) -> int:
        num_depths = self._max_drafted + 1
        explored = bucket.next_explored if bucket.next_explored != best else (best - 1) % num_depths
        bucket.next_explored = (explored - 1) % num_depths
        return explored
