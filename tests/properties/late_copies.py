"""A step_loop.Copier around the real one that delays copies to and from the host tier as much as the rules allow.

Orders to the device may overtake orders to the host. An order to the host never overtakes an order to the device that
was given before it. An order reads the contents at the time when it is carried out.
"""

from __future__ import annotations

import random
from collections import deque

from agentspec.cache.host_tier import CopyOrder, CopyOrders
from agentspec.runtime.host_copies import CopyProgress
from agentspec.runtime.step_loop import Copier


class LateCopies:
    """Delays the orders of HostCopies at random."""

    def __init__(self, copies: Copier, lateness: random.Random, *, is_slow: bool = False) -> None:
        """is_slow: most orders are carried out many steps late."""
        self._copies = copies
        self._orders_a_poll = [0] * 11 + [1] if is_slow else [0, 0, 1, 3]
        self._rng = lateness
        self._to_host: deque[CopyOrder] = deque()
        self._to_device: deque[CopyOrder] = deque()

    def launch(self, orders: CopyOrders) -> None:
        self._to_host.extend(orders.to_host)
        self._to_device.extend(orders.to_device)

    def poll(self) -> CopyProgress:
        for _ in range(self._rng.choice(self._orders_a_poll)):
            if self._to_device:
                self._carry_out(CopyOrders(to_device=[self._to_device.popleft()]))
            elif self._to_host:
                self._carry_out(CopyOrders(to_host=[self._to_host.popleft()]))
        return CopyProgress(*self._copies.poll())

    def _carry_out(self, orders: CopyOrders) -> None:
        before = sum(self._copies.poll())
        self._copies.launch(orders)
        while sum(self._copies.poll()) == before:
            pass
