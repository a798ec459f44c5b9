"""Warm-up: the first requests of each lane of a closed loop are sent before the measurement and excluded from it.

The measurement begins for all lanes at once, when the last warm-up request has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from agentspec.replay.measure import SessionRecord


class Warmup:
    """Call `new_lane()` for each lane before the first request is sent. A lane must call `admit()` before each
    request."""

    def __init__(
        self, num_requests: int, now: Callable[[], float], on_end: Callable[[float], None] = lambda time: None
    ) -> None:
        """`num_requests`: per lane; 0: the measurement begins at 0. `on_end` is called with the start of the
        measurement."""
        self.measured_from = 0.0
        """Start of the measurement on the clock of `now`."""
        self._num_requests = num_requests
        self._now = now
        self._on_end = on_end
        self._num_lanes = 0
        self._over = asyncio.Event()
        if not num_requests:
            self._over.set()

    def new_lane(self) -> Lane:
        self._num_lanes += 1
        return Lane(self, self._num_requests)

    async def wait(self) -> None:
        """Wait until the measurement begins."""
        await self._over.wait()

    def end_lane(self) -> None:
        """Called by a lane that has no warm-up request left or in flight."""
        self._num_lanes -= 1
        if not self._num_lanes and not self._over.is_set():
            self.measured_from = self._now()
            self._over.set()
            self._on_end(self.measured_from)


class Lane:
    """One lane. Its sessions may have several requests in flight."""

    def __init__(self, warmup: Warmup, num_requests: int) -> None:
        self._warmup = warmup
        self._num_left = num_requests
        self._num_running = 0
        self._has_ended = False

    async def admit(self) -> bool:
        """Admit a request. True: it is a warm-up request, and `end_request` must follow. False: the measurement has
        begun."""
        if self._num_left:
            self._num_left -= 1
            self._num_running += 1
            return True
        await self._warmup.wait()
        return False

    def due(self, time: float) -> float:
        """Return the due time of a measured request whose wait ends at `time`: not before the measurement began."""
        return max(time, self._warmup.measured_from)

    def end_request(self) -> None:
        """End a warm-up request."""
        self._num_running -= 1
        self._check()

    def close(self) -> None:
        """End the lane: it has no session left."""
        self._num_left = 0
        self._check()

    def _check(self) -> None:
        if not self._num_left and not self._num_running and not self._has_ended:
            self._has_ended = True
            self._warmup.end_lane()


def count_from(records: Iterable[SessionRecord], start: float) -> None:
    """Shift the times of all records so that `start` is 0."""
    for record in records:
        record.last_end -= start
        for turn in record.turns:
            turn.due, turn.sent, turn.end = turn.due - start, turn.sent - start, turn.end - start
            turn.tokens = [(time - start, num_tokens) for time, num_tokens in turn.tokens]
