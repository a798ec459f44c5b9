"""What the simulator says of fair admission on a recorded set: with `--fair-cost 1` the bound on waits holds."""

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


def test_equal_sharing_is_that_of_owners_then_of_flows() -> None:
    asked = [
        Asked(0.0, ("a", "x"), first=1.0, rest=0.0),
        Asked(0.0, ("b", "x"), first=1.0, rest=1.0),
        Asked(0.0, ("b", "y"), first=1.0, rest=0.0),
        Asked(0.0, ("b", "x"), first=0.5, rest=0.0),
    ]
    # a has half of the device until 2 s, then b's two flows half each, until y is through at 3 s; x goes on alone.
    assert fluid_waits(asked) == pytest.approx([2.0, 3.0, 3.0, 4.5])


@pytest.mark.parametrize("num_fitting", [4, 8])
def test_nobody_waits_beyond_the_bound_where_that_comes_first(agents: RecordedFile, num_fitting: int) -> None:
    """Finding 5 of issue 18: 2 F and B, for 32 agents of 16k tokens and more. docs/design.md says what is left with
    less memory."""
    found = run(agents, model_costs("27b-fp8"), LANES, num_fitting, fair_cost=1.0)
    assert found.num_late == 0, found


def test_what_late_requests_cost_follows_the_share(agents: RecordedFile) -> None:
    runs = [run(agents, model_costs("27b-fp8"), LANES, 4, fair_cost=share) for share in (0.05, 0.2, 1.0)]
    assert [found.excess for found in runs] == sorted((found.excess for found in runs), reverse=True)
    assert [found.wall for found in runs] == sorted(found.wall for found in runs)
