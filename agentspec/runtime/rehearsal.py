"""Lists the kernels that an engine will launch: every step and prompt pass runs once on an outline of its model, whose
tensors have no memory.

A kernel that the rehearsal misses is compiled at its first launch. No result is ever computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentspec import kernels
from agentspec.models.outline import META
from agentspec.models.protocol import StepModel
from agentspec.models.state import Rings
from agentspec.runtime.executor import ModelExecutor
from agentspec.types import MOST_RIDERS, RingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Everything that decides which kernels an engine launches."""

    outline: Callable[[], StepModel]
    """Makes the model without memory, with its draft vocabulary chosen."""
    max_running: int
    max_draft_tokens: int
    max_copies: int = 0
    depths: Sequence[int]
    """Every k that a step may use."""
    max_pages_per_slot: int
    ring: RingShape | None = None
    force_acceptance: tuple[float, ...] | None = None
    allow_forced_output: bool = False

    def variants(self, compiler: kernels.KernelCompiler) -> list[kernels.Variant]:
        """The kernel variants that the engine will launch."""
        return compiler.variants_of(self._run)

    def _run(self) -> None:
        # Choosing the draft vocabulary launches kernels too, where ranks show each other rows.
        model = self.outline()
        rings = None if self.ring is None else Rings(self.max_running + 1, self.ring.capacity)
        # Any number of rows and pages will do.
        model.allocate(num_rows=self.max_running, num_pages=self.max_pages_per_slot, rings=rings)
        executor = ModelExecutor(
            model,
            max_running=self.max_running,
            max_draft_tokens=self.max_draft_tokens,
            max_copies=self.max_copies,
            max_pages_per_slot=self.max_pages_per_slot,
            force_acceptance=self.force_acceptance,
            allow_forced_output=self.allow_forced_output,
            most_riders=MOST_RIDERS,
            ring=self.ring,
            device=META,
        )
        executor.rehearse(self.depths)
