"""What the scheduler remembers of a step until its outcome comes. A plain record; knows no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentspec.cache.host_tier import CopyOrders
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.request import Request
from agentspec.types import CheckpointKind


@dataclass(slots=True)
class Flight:
    """A launched step: who was in it, so that its outcome finds them."""

    plan: StepPlan
    occupants: dict[int, Request] = field(default_factory=dict)
    chunks: list[tuple[Request, list[tuple[int, int, CheckpointKind]]]] = field(default_factory=list)
    """Each chunk's request, and the checkpoints it leaves: (length, row, kind)."""
    requests: dict[Request, None] = field(default_factory=dict)
    """Everyone who takes part, each once; the order is that in which they are let go. A set's would be that of
    addresses, another one in each run."""
    copies: CopyOrders = field(default_factory=CopyOrders)
    """To be started before the plan. Nothing in the plan waits for them."""
