"""On real kernels, drafts, cache, batching and overlap don't change the output: every stream equals the same turn run
alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import Family
from tests.fakes.scalar_decay import load_decay_model
from tests.properties.real_model import (
    EngineSetup,
    Loader,
    Simulation,
    alone,
    explain,
    load,
    load_with_fp8_pages,
    write_agreeing_checkpoint,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on several engines."""

    seed: int
    num_setups: int
    agents_each: int = 9
    family: Family = "dense"
    tight: bool = False
    sampled: bool = False
    overrides: dict[str, Any]
    loader: Loader = load


SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
CASES = {
    "dense": Case(seed=1, num_setups=4, overrides={"num_hidden_layers": 4}),
    "dense, attention in every second layer": Case(
        seed=2, num_setups=2, overrides={"num_hidden_layers": 4, "full_attention_interval": 2}
    ),
    "dense, preempted": Case(seed=3, num_setups=2, tight=True, overrides=SMALL),
    "moe": Case(seed=4, num_setups=2, family="moe", overrides=SMALL),
    "next": Case(seed=5, num_setups=2, family="next", overrides=SMALL),
    "sampled": Case(seed=7, num_setups=4, sampled=True, overrides=SMALL),
    "FP8 pages": Case(
        seed=11,
        num_setups=2,
        overrides={"num_hidden_layers": 4, "full_attention_interval": 2},
        loader=load_with_fp8_pages,
    ),
    "FP8 pages, sampled": Case(seed=10, num_setups=2, sampled=True, overrides=SMALL, loader=load_with_fp8_pages),
    "scalar decay": Case(seed=8, num_setups=2, overrides={"num_hidden_layers": 4}, loader=load_decay_model),
    "scalar decay, preempted": Case(seed=3, num_setups=2, tight=True, overrides=SMALL, loader=load_decay_model),
    "scalar decay, sampled": Case(seed=10, num_setups=2, sampled=True, overrides=SMALL, loader=load_decay_model),
}
"""162 greedy sessions and 72 sampled ones."""


@pytest.mark.parametrize("name", CASES)
def test_stream_equals_turn_run_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint = write_agreeing_checkpoint(tmp_path / "checkpoint", case.family, **case.overrides)
    rng, reference = random.Random(case.seed), alone(checkpoint, loader=case.loader)
    num_drafted = num_accepted = num_copied = num_steps_with_three = num_resumed = num_stops_inside = num_preempted = 0
    for number in range(case.num_setups):
        has_ring = number % 2 == 1 and case.loader is not load_decay_model
        setup = replace(EngineSetup.random(rng, tight=case.tight), has_ring=has_ring)
        if has_ring:
            setup = replace(setup, max_copies=min(12, 15 - setup.max_draft_tokens))
        simulation = Simulation(
            setup, checkpoint, num_agents=case.agents_each, sampled=case.sampled, loader=case.loader
        )
        simulation.run()
        for turn in simulation.turns:
            expected, finish = reference.generate(turn.submit)
            where = f"{name}: {setup}: {turn.submit}"
            assert turn.emitted == expected, f"{explain(checkpoint, turn, expected, loader=case.loader)}: {where}"
            assert (turn.ended.reason, turn.ended.stop_match) == (finish.reason, finish.stop_match), where
            assert turn.ended.usage.completion_tokens == len(expected), where
            spec = turn.ended.usage.spec
            num_drafted += spec.num_drafted
            num_accepted += spec.num_accepted
            num_copied += sum(spec.accepted_by_position[setup.max_draft_tokens :])
            num_steps_with_three += sum(spec.histogram[3:])
            num_resumed += turn.ended.usage.cached_tokens > 0
            num_stops_inside += turn.stopped_inside_a_window
        num_preempted += simulation.metrics.preemptions
    print(
        name, num_accepted, num_copied, num_drafted, num_steps_with_three, num_resumed, num_stops_inside, num_preempted
    )
    # The comparison means little unless all these paths were taken.
    assert num_accepted > (0.05 if case.sampled else 0.15) * num_drafted, (num_accepted, num_drafted)
    assert num_steps_with_three > 8, num_steps_with_three
    assert num_resumed > case.num_setups * case.agents_each, num_resumed
    assert num_stops_inside > 1, num_stops_inside
    assert bool(num_preempted) == case.tight, num_preempted
