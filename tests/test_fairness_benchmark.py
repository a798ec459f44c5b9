"""Simulated fair admission on a recorded set: with `--fair-cost 1` the bound on waits holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.replay.options import ReplayOptions
from agentspec.simulate.model_costs import model_costs
from benchmarks.fairness import Asked, fluid_waits, run
from benchmarks.policy import RecordedFile, read

LANES = 32


@pytest.fixture(scope="module")
def agents() -> RecordedFile:
    return read(Path("workloads/profile_agents.jsonl"), ReplayOptions(output="forced"))


def test_equal_sharing_is_by_owner_then_by_flow() -> None:
    asked = [
        Asked(0.0, ("a", "x"), first=1.0, rest=0.0),
        Asked(0.0, ("b", "x"), first=1.0, rest=1.0),
        Asked(0.0, ("b", "y"), first=1.0, rest=0.0),
        Asked(0.0, ("b", "x"), first=0.5, rest=0.0),
    ]
    # a gets half of the device until 2 s. Then b's two flows get half each, until y ends at 3 s; x continues alone.
    assert fluid_waits(asked) == pytest.approx([2.0, 3.0, 3.0, 4.5])


@pytest.mark.parametrize("num_fitting", [4, 8])
def test_no_request_waits_beyond_the_bound_with_fair_cost_1(agents: RecordedFile, num_fitting: int) -> None:
    """Issue 18, finding 5: the bound is 2 F and B, for 32 agents of 16k tokens and more. docs/design.md describes less
    memory."""
    found = run(agents, model_costs("27b-fp8"), LANES, num_fitting, fair_cost=1.0)
    assert found.num_late == 0, found


def test_recomputed_share_follows_the_fair_cost(agents: RecordedFile) -> None:
    runs = [run(agents, model_costs("27b-fp8"), LANES, 4, fair_cost=share) for share in (0.05, 0.2, 1.0)]
    assert [found.hit_share for found in runs] == sorted((found.hit_share for found in runs), reverse=True)
    assert [found.wall for found in runs] == sorted(found.wall for found in runs)
    assert [found.num_late for found in runs] == sorted((found.num_late for found in runs), reverse=True)
    # The longest of all waits is one request's: it follows the share over its whole range only.
    assert runs[-1].excess < min(found.excess for found in runs[:-1])
