"""On real kernels, drafts, cache, batching and overlap change nothing that is heard: every stream equals the same turn
run alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import Family
from tests.fakes.scalar_decay import load_decay_model
from tests.properties.real_model import House, Loader, Play, alone, explain, load, write_agreeing_checkpoint


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A run of several houses."""

    seed: int
    num_houses: int
    agents_each: int = 9
    family: Family = "dense"
    tight: bool = False
    sampled: bool = False
    overrides: dict[str, Any]
    loader: Loader = load


SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
CASTS = {
    "dense": Cast(seed=1, num_houses=4, overrides={"num_hidden_layers": 4}),
    "dense, attention in every second layer": Cast(
        seed=2, num_houses=2, overrides={"num_hidden_layers": 4, "full_attention_interval": 2}
    ),
    "dense, preempted": Cast(seed=3, num_houses=2, tight=True, overrides=SMALL),
    "moe": Cast(seed=4, num_houses=2, family="moe", overrides=SMALL),
    "next": Cast(seed=5, num_houses=2, family="next", overrides=SMALL),
    "sampled": Cast(seed=7, num_houses=4, sampled=True, overrides=SMALL),
    "scalar decay": Cast(seed=8, num_houses=2, overrides={"num_hidden_layers": 4}, loader=load_decay_model),
    "scalar decay, preempted": Cast(seed=3, num_houses=2, tight=True, overrides=SMALL, loader=load_decay_model),
    "scalar decay, sampled": Cast(seed=10, num_houses=2, sampled=True, overrides=SMALL, loader=load_decay_model),
}
"""144 greedy sessions and 54 sampled ones."""


@pytest.mark.parametrize("name", CASTS)
def test_every_stream_equals_the_turn_run_alone(name: str, tmp_path: Path) -> None:
    cast = CASTS[name]
    checkpoint = write_agreeing_checkpoint(tmp_path / "checkpoint", cast.family, **cast.overrides)
    rng, reference = random.Random(cast.seed), alone(checkpoint, loader=cast.loader)
    num_drafted = num_accepted = num_steps_with_three = num_resumed = num_stops_inside = num_preempted = 0
    for _ in range(cast.num_houses):
        house = House.random(rng, tight=cast.tight)
        play = Play(house, checkpoint, num_agents=cast.agents_each, sampled=cast.sampled, loader=cast.loader)
        play.run()
        for turn in play.turns:
            expected, finish = reference.generate(turn.submit)
            where = f"{name}: {house}: {turn.submit}"
            assert turn.emitted == expected, f"{explain(checkpoint, turn, expected, loader=cast.loader)}: {where}"
            assert (turn.ended.reason, turn.ended.stop_match) == (finish.reason, finish.stop_match), where
            assert turn.ended.usage.completion_tokens == len(expected), where
            spec = turn.ended.usage.spec
            num_drafted += spec.num_drafted
            num_accepted += spec.num_accepted
            num_steps_with_three += sum(spec.histogram[3:])
            num_resumed += turn.ended.usage.cached_tokens > 0
            num_stops_inside += turn.stopped_inside_a_window
        num_preempted += play.metrics.preemptions
    print(name, num_accepted, num_drafted, num_steps_with_three, num_resumed, num_stops_inside, num_preempted)
    # The proof is empty unless the machinery ran.
    assert num_accepted > (0.05 if cast.sampled else 0.15) * num_drafted, (num_accepted, num_drafted)
    assert num_steps_with_three > 8, num_steps_with_three
    assert num_resumed > cast.num_houses * cast.agents_each, num_resumed
    assert num_stops_inside > 1, num_stops_inside
    assert bool(num_preempted) == cast.tight, num_preempted
