"""The engine on a CUDA device in float32: streams and states match the CPU, and every result has its own memory.

Decode steps run as CUDA graphs, the default.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.runtime.executor import ModelExecutor, StepTicket
from agentspec.runtime.plan import StepOutcome
from tests.fakes.automaton import Rules
from tests.fakes.checkpoints import Family
from tests.properties.real_model import (
    STOP_ID,
    VOCAB,
    EngineSetup,
    Scratch,
    Simulation,
    StateSpy,
    alone,
    assemble_engine,
    load,
    load_with_fp8_pages,
    write_agreeing_checkpoint,
)
from tests.properties.test_constrained_streams import real_submits, run_submits

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}


@pytest.mark.parametrize("family", ["dense", "moe", "next"])
@pytest.mark.parametrize("overlap", [True, False])
def test_streams_and_states_match_cpu(family: Family, overlap: bool, cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, family, **SMALL)
    setup = EngineSetup(seed=3, max_draft_tokens=4, random_depth=True, overlap=overlap, prefill_budget=99)
    simulation = Simulation(setup, checkpoint, num_agents=5, device=cuda)
    assert not simulation.assembly.graphs.startswith("none")
    spy = StateSpy(simulation, Scratch(checkpoint))
    simulation.run()
    assert spy.num_resumed > 3
    assert simulation.metrics.accepted_tokens > 20
    reference = alone(checkpoint)
    for turn in simulation.turns:
        expected, finish = reference.generate(turn.submit)
        assert turn.emitted == expected, f"{setup}: {turn.submit}"
        assert turn.ended.reason is finish.reason


def test_sampled_streams_match_cpu(cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, **SMALL)
    simulation = Simulation(EngineSetup(seed=4), checkpoint, num_agents=5, sampled=True, device=cuda)
    simulation.run()
    reference = alone(checkpoint)
    for turn in simulation.turns:
        assert turn.emitted == reference.generate(turn.submit)[0], turn.submit


def test_streams_over_fp8_pages_match_cpu(cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, **SMALL)
    setup = EngineSetup(seed=6, max_draft_tokens=3, prefill_budget=99)
    simulation = Simulation(setup, checkpoint, num_agents=5, device=cuda, loader=load_with_fp8_pages)
    simulation.run()
    reference = alone(checkpoint, loader=load_with_fp8_pages)
    for turn in simulation.turns:
        assert turn.emitted == reference.generate(turn.submit)[0], turn.submit


def test_constrained_streams_and_scores_match_cpu(cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, **SMALL)
    submits = real_submits(random.Random(9))
    on_cpu, on_cuda = (
        assemble_engine(EngineSetup(max_draft_tokens=3, num_pages=60), load(checkpoint, device))
        for device in (torch.device("cpu"), cuda)
    )
    rules = Rules(
        3, vocab_size=on_cuda.spec.vocab_size, num_real_tokens=VOCAB, stop_id=STOP_ID, share=0.6, num_dead_ends=3
    )
    streams, scores, refused = run_submits(on_cuda, submits, rules)
    expected_streams, expected_scores, expected_refused = run_submits(on_cpu, submits, rules)
    assert (streams, refused) == (expected_streams, expected_refused)
    for request_id, values in scores.items():
        assert values == pytest.approx(expected_scores[request_id], abs=1e-3), request_id


def test_results_arrive_in_own_pinned_memory(
    cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[torch.Tensor] = []
    collect = ModelExecutor.collect

    def spy_collect(executor: ModelExecutor, ticket: StepTicket) -> StepOutcome:
        results.extend(some.outcome_BF for some in ticket.results)
        return collect(executor, ticket)

    monkeypatch.setattr(ModelExecutor, "collect", spy_collect)
    simulation = Simulation(
        EngineSetup(seed=5), write_agreeing_checkpoint(tmp_path, **SMALL), num_agents=2, device=cuda
    )
    simulation.run()
    assert len(results) > 10
    assert all(result.is_pinned() for result in results)
    assert len({result.data_ptr() for result in results}) == len(results)
