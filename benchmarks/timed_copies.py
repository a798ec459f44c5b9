"""A host tier's copies on a virtual clock, as step_loop.Copier of a dry run.

Each direction executes orders in sequence at a fixed rate, in parallel to steps. Orders to the host wait for those to
the device (cache/host_tier.py). Nothing is copied.
"""

from __future__ import annotations

from collections import deque

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.simulate.closed_loop import VirtualClock
from agentspec.simulate.model_costs import ModelCosts
from agentspec.types import BLOCK_TOKENS

_TOKENS_PER_ROW = 8192


def host_memory(gib: float, costs: ModelCosts) -> HostMemory:
    """Memory of the given GiB, with one row for every 8,192 tokens."""
    num_rows = int(gib * 2**30 / (_TOKENS_PER_ROW * costs.kv_bytes_per_token + costs.row_bytes))
    return HostMemory(num_rows=num_rows, num_pages=num_rows * _TOKENS_PER_ROW // BLOCK_TOKENS)


class TimedCopies:
    """Simulated copies whose time is proportional to their bytes."""

    def __init__(self, clock: VirtualClock, costs: ModelCosts, bytes_per_second: float) -> None:
        self._clock = clock
        self._row_bytes = costs.row_bytes
        self._page_bytes = costs.kv_bytes_per_token * BLOCK_TOKENS
        self._rate = bytes_per_second
        self._polled_at = -1.0
        self._to_host, self._to_device = _Lane(), _Lane()

    def launch(self, orders: CopyOrders) -> None:
        for order in orders.to_device:
            self._to_device.add(order, self._clock.now, self._seconds(order))
        for order in orders.to_host:
            self._to_host.add(order, max(self._clock.now, self._to_device.free_at), self._seconds(order))

    def poll(self) -> tuple[int, int]:
        """Numbers of the last finished orders to the host and to the device. If the clock hasn't moved since the last
        poll, it advances to the end of the next order."""
        ends = [lane.orders[0][0] for lane in (self._to_host, self._to_device) if lane.orders]
        if ends and self._clock.now == self._polled_at:
            self._clock.now = max(self._clock.now, min(ends))
        self._polled_at = self._clock.now
        return self._to_host.done_by(self._clock.now), self._to_device.done_by(self._clock.now)

    def _seconds(self, order: CopyOrder) -> float:
        return (len(order.rows) * self._row_bytes + len(order.pages) * self._page_bytes) / self._rate


class _Lane:
    def __init__(self) -> None:
        self.orders: deque[tuple[float, int]] = deque()
        """End time and number of each order."""
        self.free_at = 0.0
        self._num_done = 0

    def add(self, order: CopyOrder, not_before: float, seconds: float) -> None:
        self.free_at = max(self.free_at, not_before) + seconds
        self.orders.append((self.free_at, order.number))

    def done_by(self, now: float) -> int:
        while self.orders and self.orders[0][0] <= now:
            _, self._num_done = self.orders.popleft()
        return self._num_done
