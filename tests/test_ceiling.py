"""`--max-gap` is a ceiling where times are uncertain: dry runs on measured costs whose passes and steps take up to 6 %
more or less than they should, each time and by the size of a pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import pytest

from agentspec.commands.dry_run import DEFAULT_DRAFTS
from agentspec.runtime.pace import DEFAULT_MAX_GAP
from agentspec.simulate.dry_run import DryMemory, DryRun
from agentspec.simulate.model_costs import ModelCosts, model_costs
from benchmarks.policy import storm

SPREAD = 0.06


@dataclass(frozen=True, kw_only=True)
class UncertainCosts(ModelCosts):
    """Costs that differ from the measured ones at random."""

    source: random.Random = field(default_factory=random.Random)

    def pass_seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        of_size = random.Random(sum(count for _, count in chunks) // 128)
        return super().pass_seconds(chunks) * self._error(self.source) * self._error(of_size)

    def step_seconds(self, contexts: Sequence[int]) -> float:
        return super().step_seconds(contexts) * self._error(self.source)

    @staticmethod
    def _error(source: random.Random) -> float:
        return 1.0 + SPREAD * (2.0 * source.random() - 1.0)


@pytest.mark.parametrize(("name", "num_prompts"), [("4b", 64), ("27b-fp8", 24)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_gap_exceeds_the_ceiling_when_estimates_are_wrong(name: str, num_prompts: int, seed: int) -> None:
    known = model_costs(name)
    costs = UncertainCosts(
        source=random.Random(seed), **{each.name: getattr(known, each.name) for each in fields(ModelCosts)}
    )
    dry = DryRun(
        costs=costs,
        memory=DryMemory.bounded(None, costs=costs, max_running=num_prompts, num_drafted=DEFAULT_DRAFTS),
        max_running=num_prompts,
        num_drafted=DEFAULT_DRAFTS,
        prefill_budget="auto",
        hold_seconds=5.0,
        seed=seed,
        on_submit=lambda turn: None,
    )
    result = dry.run(((session, iter(turns)) for session, turns in storm(num_prompts)), num_prompts)
    gaps = [after - before for turn in result.ended for before, after in pairwise(turn.times)]
    assert len(gaps) > 1000
    assert max(gaps) <= DEFAULT_MAX_GAP, f"seed {seed}: {sum(gap > DEFAULT_MAX_GAP for gap in gaps)} of {len(gaps)}"
    assert max(gaps) > 0.85 * DEFAULT_MAX_GAP, "what the ceiling allows is used"
