"""What the scheduler keeps of a launched step until its outcome comes. A plain record; makes no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentspec.cache.host_tier import CopyOrders
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.request import Request
from agentspec.types import CheckpointKind, WindowShape

NO_DRAFTS = WindowShape(0)


@dataclass(slots=True)
class Flight:
    """A launched step and the requests in it."""

    plan: StepPlan
    occupants: dict[int, Request] = field(default_factory=dict)
    chunks: list[tuple[Request, list[tuple[int, int, CheckpointKind]]]] = field(default_factory=list)
    """Each chunk's request, and the checkpoints that it leaves: (length, row, kind)."""
    requests: dict[Request, None] = field(default_factory=dict)
    """All requests in the step, each once, in the order in which they are released. Not a set: a set's order would
    differ between runs."""
    shape: WindowShape = NO_DRAFTS
    """Of its windows."""
    matched: frozenset[int | None] = frozenset()
    """Slots that counted as matched when the shape was chosen."""
    copies: CopyOrders = field(default_factory=CopyOrders)
    """Started before the plan. Nothing in the plan waits for them."""
