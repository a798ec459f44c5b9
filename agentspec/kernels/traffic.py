"""Counts the recurrent state that kernels move, and marks when a kernel runs.

"No state tensor is ever copied" is a claim about memory traffic, so it is measured: every kernel that accesses a pool
runs under `touches_pools`, and the recurrence kernels count the rows that they load and store. Tests compare the
counts with the expected ones, and fail on any operation that accesses a pool outside a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class StateTraffic:
    """Recurrent-state tiles moved so far. A tile is one layer of one row."""

    rows_read: int = 0
    rows_written: int = 0
    kernel_depth: int = 0
    """Above 0 while a kernel runs that may access pools."""

    def reset(self) -> None:
        self.rows_read = 0
        self.rows_written = 0


state_traffic = StateTraffic()


def touches_pools(kernel: Callable[P, R]) -> Callable[P, R]:
    """Mark a kernel as one of the few functions that may read or write state rows and pages."""

    @wraps(kernel)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        state_traffic.kernel_depth += 1
        try:
            return kernel(*args, **kwargs)
        finally:
            state_traffic.kernel_depth -= 1

    return marked
