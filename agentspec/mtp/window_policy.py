"""Shape of each step's windows: fixed, or chosen from measured acceptance, measured matches and measured step times.

Owns the choice of a WindowShape and its statistics. Knows nothing about tokens, models or tensors: no torch, no clock,
no randomness.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from agentspec.types import SlotResult, WindowShape, has_copies, widest_window

_MTP_PRIOR = 0.7
"""Assumed acceptance of an MTP position that was never offered. MTP heads reach 0.6 to 0.9."""
_COPY_PRIOR = 0.85
"""The same for a copy. Behind a match of eight tokens 75 to 97 % are right."""
_NEW_MATCH_PRIOR = 0.02
"""Assumed probability of a match where the slot's last known window had none."""
_NEXT_MATCH_PRIOR = 0.7
"""The same where it had one."""
_PRIOR_WEIGHT = 2.0
"""Number of offers that a prior counts as."""
_SUBSET_WEIGHT = 8.0
"""Number of offers that the rate in all windows counts as, where it is the prior for some of them."""
_MEMORY = 128.0
"""Number of steps after which old offers have weight 1/e, if every slot makes one."""
_TIMINGS = 16
"""Step times stored per (batch, shape). A slot folds its ring every four or five steps, so their mean counts folds."""
_OUTLIER = 3.0
"""Step times above this multiple of the median are left out of the mean: the device was busy with something else."""
_EXPLORE_EVERY = 64
"""Minimum number of steps between explorations, for each bucket of batch sizes."""
_EXPLORE_SHARE = 0.05
"""Maximum share of the time for explorations."""
_EXPLORE_LOSS = 0.002
"""Maximum share of the tokens that they cost: of those without copies, and again of those with copies."""
_LONGEST_PAUSE = 2048
"""Steps after which an exploration is repeated even if it costs more: its step time may be out of date."""


class FixedWindow:
    """Always the same shape. Implements runtime.step_loop.WindowPolicy, like AdaptiveWindow."""

    def __init__(self, shape: WindowShape) -> None:
        self._shape = shape

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        return self._shape

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        """Do nothing: a fixed shape learns nothing."""


class _Rate:
    """Decayed share of the offers that were taken."""

    def __init__(self, prior: float | _Rate, weight: float = _PRIOR_WEIGHT) -> None:
        self._prior, self._weight = prior, weight
        self._offered = self._taken = 0.0

    def record(self, taken: bool, batch_size: int) -> None:
        keep = 1.0 - 1.0 / (_MEMORY * batch_size)
        self._offered = self._offered * keep + 1.0
        self._taken = self._taken * keep + taken

    @property
    def value(self) -> float:
        prior = self._prior.value if isinstance(self._prior, _Rate) else self._prior
        return (self._taken + self._weight * prior) / (self._offered + self._weight)


def _record(rates: Sequence[_Rate], accepted: int, batch_size: int) -> None:
    """Record drafts at these positions: up to the first one rejected, each was offered behind accepted ones."""
    for position, rate in enumerate(rates[: accepted + 1]):
        rate.record(position < accepted, batch_size)


class _Times:
    """The latest step times of one shape."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_TIMINGS)
        self.mean = 0.0
        """In seconds, without outliers; 0 while there are no times."""

    def record(self, seconds: float) -> None:
        self._seconds.append(seconds)
        limit = _OUTLIER * statistics.median_low(self._seconds)
        self.mean = statistics.fmean([time for time in self._seconds if time <= limit])


class _Rotation:
    """Shapes that are explored in turn."""

    def __init__(self, shapes: Sequence[WindowShape]) -> None:
        self._shapes = deque(shapes)
        self.steps_left = _EXPLORE_EVERY

    def next(self, best: WindowShape) -> WindowShape | None:
        """The next one that isn't the best anyway; None: there is no other."""
        for _ in range(len(self._shapes)):
            self._shapes.rotate(-1)
            if self._shapes[-1] != best:
                return self._shapes[-1]
        return None


class _Bucket:
    """Step times for one range of batch sizes, and the planned steps of an exploration."""

    def __init__(self, depths: Sequence[WindowShape], wide: Sequence[WindowShape]) -> None:
        self.times = {shape: _Times() for shape in (*depths, *wide)}
        self.planned = [*depths, depths[-1]]
        self.untried = list(wide) * 2
        self.depths = _Rotation(depths[::-1])
        self.wide = _Rotation(wide)


class AdaptiveWindow:
    """Maximises the expected tokens that a batch emits per second: by shape, (1 + the sum over its drafts of the
    probability that they and all before them are accepted) of every slot, over the mean step time.

    Shapes are k MTP drafts for every k, and the largest k with copies behind it. A slot has copies only while its text
    repeats the session (it *matches*), and the host learns of that late. So the policy counts how often a slot matches
    that matched in its last known window, and how often one that didn't; for windows with copies separately, because
    they pass a stretch that repeats in fewer steps. The best k is found by the acceptance in all windows. Shapes with
    copies are compared with the same k without them, by the acceptance in windows with and without a match: text that
    repeats is easier for MTP too. Behind fewer than max_mtp drafts, and where so many slots decode that no shape has
    copies, nothing is copied and no match is seen. Where windows share the rows of a forward, a slot that matches has
    its own copies and those of slots that don't.

    Emitted tokens per second are maximised in each step alone. That maximises them over the whole text too: stretches
    that repeat have a number of tokens, not of steps, and each is passed in the least time at its own best rate.

    Batch sizes up to the next power of two share a bucket. In a new bucket every k runs first, starting with the
    largest, which runs twice so that one slow step does no harm; each shape with copies runs twice as soon as a slot
    matches. After that, every shape is tried again from time to time, one after the other, those with copies only while
    a slot matches. So a better shape is found when acceptance or costs change. Pauses are as long as an exploration's
    loss demands: near the best shape it costs nothing and may be frequent.

    A shape with copies has one step time per bucket, whatever the number of matches was. Keeping one for each number
    that the host knew (none and some, or powers of two) was within 0.1 % in simulations, even where dead columns
    cost nothing: a shape with copies is hardly ever chosen without a known match, so its mean is already that of steps
    with matches."""

    def __init__(self, max_mtp: int, copies: Sequence[int] = (), *, min_mtp: int = 0, shares: bool = False) -> None:
        """copies: numbers of copies behind max_mtp MTP drafts, each at least 1. shares: windows share the rows of a
        forward, so these are means, and the largest is what one window may have."""
        self._max_mtp, self._shares = max_mtp, shares
        self._depths = [WindowShape(k) for k in range(min_mtp, max_mtp + 1)]
        self._wide = [WindowShape(max_mtp, count) for count in copies]
        self._mtp = [_Rate(_MTP_PRIOR) for _ in range(max_mtp)]
        self._mtp_by_match = [[_Rate(rate, _SUBSET_WEIGHT) for rate in self._mtp] for _ in range(2)]
        self._copies = [_Rate(_COPY_PRIOR) for _ in range(max(copies, default=0))]
        self._match = {False: _Rate(_NEW_MATCH_PRIOR), True: _Rate(_NEXT_MATCH_PRIOR)}
        self._wide_match = {known: _Rate(rate, _SUBSET_WEIGHT) for known, rate in self._match.items()}
        self._buckets: dict[int, _Bucket] = {}
        """By the logarithm of the largest batch size."""

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        """The shape of the next step's windows. num_matched: slots of the batch that matched in the last window that
        the host knows of."""
        bucket = self._bucket(batch_size)
        if bucket.planned:
            return bucket.planned.pop()
        if num_matched and bucket.untried:
            return bucket.untried.pop()
        rates = self._rates(bucket, batch_size, min(num_matched / batch_size, 1.0))
        best = max(rates, key=lambda shape: rates[shape], default=self._depths[-1])
        bucket.wide.steps_left -= 1
        bucket.depths.steps_left -= 1
        for rotation in (bucket.wide, bucket.depths) if num_matched else (bucket.depths,):
            if rotation.steps_left < 0 and (explored := rotation.next(best)) is not None:
                num_steps = 1 + (explored.num_mtp > best.num_mtp)  # the first only drafts more, the second verifies
                bucket.planned = [explored] * (num_steps - 1)
                rotation.steps_left = self._pause(bucket, rates, best, explored, num_steps)
                return explored
        return best

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        """Learn from a decode step: the result of each slot, and the step's time. seconds=0: the time was not
        measured. May come after the next choices."""
        looks_for_copies = has_copies(len(slots), self._max_mtp)
        for slot in slots:
            num_mtp = slot.offered - slot.offered_copies
            _record(self._mtp[:num_mtp] + self._copies[: slot.offered_copies], slot.accepted, len(slots))
            if num_mtp == self._max_mtp and looks_for_copies:
                _record(self._mtp_by_match[slot.matched], slot.accepted, len(slots))
                self._match[slot.was_matched].record(slot.matched, len(slots))
                if shape.num_copies:
                    self._wide_match[slot.was_matched].record(slot.matched, len(slots))
        if seconds > 0.0:
            self._bucket(len(slots)).times[shape].record(seconds)

    def expected_emitted(self, shape: WindowShape, matched: bool | None = None) -> float:
        """Expected tokens of a slot by the acceptance measured so far. matched: whether it has copies; None: not known,
        and copies don't count."""
        rates = (self._mtp if matched is None else self._mtp_by_match[matched])[: shape.num_mtp]
        if matched:
            rates = rates + self._copies[: shape.num_copies]
        emitted, survives = 1.0, 1.0
        for rate in rates:
            survives *= rate.value
            emitted += survives
        return emitted

    def _bucket(self, batch_size: int) -> _Bucket:
        key = (batch_size - 1).bit_length()
        if key not in self._buckets:
            wide = [shape for shape in self._wide if shape.width <= widest_window(1 << key)]
            self._buckets[key] = _Bucket(self._depths, wide)
        return self._buckets[key]

    def _rates(self, bucket: _Bucket, batch_size: int, known_share: float) -> dict[WindowShape, float]:
        """Expected tokens per second and slot, of every shape with a step time. known_share: of the slots, those that
        matched when last known."""
        seconds = {shape: times.mean for shape, times in bucket.times.items() if times.mean}
        rates = {shape: self.expected_emitted(shape) / seconds[shape] for shape in self._depths if shape in seconds}
        narrow = self._depths[-1]
        for shape in self._wide if narrow in seconds else ():
            if shape in seconds:
                gain = self._gain(shape, batch_size, known_share)
                rates[shape] = rates[narrow] * gain * seconds[narrow] / seconds[shape]
        return rates

    def _gain(self, wide: WindowShape, batch_size: int, known_share: float) -> float:
        """Expected tokens of a step with copies, relative to the same windows without them."""
        match = known_share * self._wide_match[True].value + (1.0 - known_share) * self._wide_match[False].value
        narrow = self._depths[-1]
        if self._shares:  # of the windows that share the copies, one is given: the slot's that has them
            num_sharing = 1.0 + match * (batch_size - 1)
            wide = WindowShape(wide.num_mtp, min(len(self._copies), int(wide.num_copies * batch_size / num_sharing)))
        before = match * self.expected_emitted(narrow, True) + (1.0 - match) * self.expected_emitted(narrow, False)
        return 1.0 + match * (self.expected_emitted(wide, True) - self.expected_emitted(narrow, True)) / before

    def _pause(
        self,
        bucket: _Bucket,
        rates: Mapping[WindowShape, float],
        best: WindowShape,
        explored: WindowShape,
        num_steps: int,
    ) -> int:
        """Number of steps until the next exploration that keeps explorations within their share of time and tokens."""
        if not (best in rates and explored in rates):
            return _EXPLORE_EVERY
        taken = num_steps * bucket.times[explored].mean / bucket.times[best].mean
        lost = taken * (1.0 - rates[explored] / rates[best])
        if explored.num_mtp < best.num_mtp:  # the step after it has fewer drafts than columns for them
            lost += 1.0 - self.expected_emitted(explored) / self.expected_emitted(best)
        pause = max(taken / _EXPLORE_SHARE, min(lost / _EXPLORE_LOSS, _LONGEST_PAUSE))
        return max(_EXPLORE_EVERY, round(pause))
