"""Simulated time of runs without a model: tables that interpolate measurements, and a device that runs steps in
order."""

from __future__ import annotations

import dataclasses
import json
from array import array
from pathlib import Path

import pytest
import torch

from agentspec.runtime.plan import ChunkPlan, OwnRows, SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.simulate.closed_loop import TimedExecutor, VirtualClock
from agentspec.simulate.model_costs import MODEL_COSTS, ModelCosts, model_costs
from agentspec.types import SamplingParams
from benchmarks import agents, fit_costs, step_costs
from benchmarks.published import CONFIGS
from tests.test_decode_benchmark import TOY

COSTS = ModelCosts(
    name="c",
    row_bytes=1,
    kv_bytes_per_token=1,
    passes=((64, 0.005), (1024, 0.015), (8192, 0.112)),
    pair_seconds=2e-10,
    chunk_sizes=(64, 1024),
    steps=((1, 0.004), (4, 0.005), (8, 0.006)),
    context_seconds=1e-8,
    join_seconds=0.001,
)


def test_a_prefill_pass_costs_its_tokens_and_their_contexts() -> None:
    assert COSTS.pass_seconds([]) == 0
    alone = COSTS.pass_seconds([(0, 1024)])
    assert alone == pytest.approx(0.015 + 1024 * 1025 / 2 * 2e-10)
    assert COSTS.pass_seconds([(10_000, 1024)]) - alone == pytest.approx(1024 * 10_000 * 2e-10)
    assert COSTS.pass_seconds([(0, 10)]) == pytest.approx(0.005 + 55 * 2e-10), "a few tokens also read all weights"
    padded, whole = COSTS.pass_seconds([(0, 65)]), COSTS.pass_seconds([(0, 65)] * 5)
    assert padded == pytest.approx(0.015 + 65 * 33 * 2e-10), "a graph takes the time of its full size"
    assert whole < padded, "five sequences run without a graph"
    assert COSTS.pass_seconds([(0, 16_384)]) > 2 * COSTS.pass_seconds([(0, 8192)])


def test_a_decode_step_costs_its_graph_and_its_contexts() -> None:
    assert COSTS.step_seconds([]) == 0
    assert COSTS.step_seconds([1000]) == pytest.approx(0.004 + 1e-5)
    assert COSTS.step_seconds([0, 0]) == COSTS.step_seconds([0] * 4) == pytest.approx(0.005)
    assert COSTS.step_seconds([0] * 16) == pytest.approx(0.008)


@pytest.mark.parametrize("name", MODEL_COSTS)
def test_named_costs_are_plausible(name: str) -> None:
    costs = model_costs(name)
    sizes = [costs.pass_seconds([(0, count)]) for count in (64, 800, 2048, 8192)]
    assert sizes == sorted(sizes)
    assert costs.step_seconds([2048]) < costs.step_seconds([2048] * 8) < 8 * costs.step_seconds([2048])


class Recorder:
    """An executor that does nothing."""

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, ticket: StepPlan) -> StepOutcome:
        slots = [
            SlotOutcome(
                slot=slot, emitted=[1], num_drafted=3, num_accepted=0, stop=0, length=500, checkpoints=((0, 0), (0, 0))
            )
            for slot in ticket.decode_slots
        ]
        return StepOutcome(slots=slots)


def join(slot: int) -> SlotJoin:
    return SlotJoin(
        request_id=str(slot),
        slot=slot,
        length=400,
        last_token=1,
        rows=OwnRows(write=[], newer=0, older=0),
        page_ids=[],
        length_limit=1000,
        stop_ids=(),
        seed=0,
        sampling=SamplingParams(),
        prompt_ids=array("i"),
        output_ids=array("i"),
    )


def test_steps_run_in_order_and_the_clock_follows_the_host() -> None:
    clock = VirtualClock()
    device = TimedExecutor(Recorder(), costs=dataclasses.replace(COSTS, context_seconds=0.0), clock=clock)
    first, second = (
        device.launch(StepPlan(joins=[join(0), join(1)], decode_slots=[0])),
        device.launch(StepPlan(decode_slots=[0, 1])),
    )
    assert clock.now == 0.0, "launching takes no time"
    outcome = device.collect(first)
    assert (clock.now, outcome.decode_seconds, outcome.prefill_seconds) == (0.004, 0.004, 0.0)
    third = device.launch(StepPlan(decode_slots=[0], first_slots=[1]))
    device.collect(second)
    assert clock.now == pytest.approx(0.009)
    clock.now = 1.0  # no step was launched meanwhile
    device.collect(third)
    assert clock.now == 1.0
    device.collect(device.launch(StepPlan(decode_slots=[0])))
    assert clock.now == pytest.approx(1.004)


def test_riding_windows_save_reading_the_weights() -> None:
    costs = dataclasses.replace(COSTS, ride_seconds=0.002)
    seconds = []
    for num_slots in (8, 64):
        clock = VirtualClock()
        device = TimedExecutor(Recorder(), costs=costs, clock=clock)
        chunk = ChunkPlan(
            request_id="p",
            token_ids=array("i", range(800)),
            start=0,
            read_row=0,
            state_writes=(),
            page_ids=[],
            next_token=None,
        )
        slots = list(range(num_slots))
        plan = StepPlan(joins=[join(slot) for slot in slots], chunks=[chunk], decode_slots=slots, num_drafted=3)
        outcome = device.collect(device.launch(plan))
        apart = costs.pass_seconds([(0, 800)]) + costs.step_seconds([400] * num_slots)
        assert outcome.prefill_seconds + outcome.decode_seconds == pytest.approx(clock.now)
        seconds.append((outcome.rode, apart - clock.now))
    assert [rode for rode, _ in seconds] == [True, False], "too many windows run in a step of their own"
    assert [saved for _, saved in seconds] == pytest.approx([0.002, 0.0])


def test_fitted_constants_reproduce_their_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole fit on a toy model on the CPU; its times are meaningless."""
    monkeypatch.setitem(CONFIGS, "toy", TOY)
    monkeypatch.setattr(step_costs, "PASSES", ((64, 0, 1), (128, 0, 1), (64, 256, 1), (64, 128, 2)))
    monkeypatch.setattr(step_costs, "CONTEXTS", (64, 192))
    monkeypatch.setattr(step_costs, "BATCHES", (1, 2))
    monkeypatch.setattr(step_costs, "JOINS", (1,))
    monkeypatch.setattr(step_costs, "STEPS", 8)
    measured = dataclasses.asdict(step_costs.measure("toy", torch.device("cpu"), slots=3, longest=1200, others=1600))
    assert [sample["chunks"] for sample in measured["passes"]] == [[(0, 64)], [(0, 128)], [(256, 64)], [(128, 64)] * 2]
    assert [len(sample["contexts"]) for sample in measured["steps"]] == [1, 1, 2, 2]
    samples, target = tmp_path / "samples.json", tmp_path / "costs.json"
    for sample, seconds in zip(measured["passes"], (0.005, 0.008, 0.006, 0.009), strict=True):
        sample["prefill_seconds"] = seconds
    for sample, seconds in zip(measured["steps"], (0.004, 0.0041, 0.005, 0.0052), strict=True):
        sample["decode_seconds"] = seconds
    samples.write_text(json.dumps([measured]))
    monkeypatch.setattr(fit_costs, "TARGET", target)
    monkeypatch.setattr("sys.argv", ["fit_costs", str(samples), "--turn-ms", "5"])
    assert fit_costs.main() == 0
    (entry,) = json.loads(target.read_text())["models"]
    assert (entry["name"], entry["turn_seconds"]) == ("toy", 0.005)
    fields = entry | {name: tuple(map(tuple, entry[name])) for name in ("passes", "steps")}
    costs = ModelCosts(**fields | {"chunk_sizes": ()})
    assert costs.pass_seconds([(0, 64)]) == pytest.approx(0.005, rel=0.01)
    assert costs.pass_seconds([(256, 64)]) == pytest.approx(0.006, rel=0.01)
    for sample in measured["steps"]:
        assert costs.step_seconds(sample["contexts"]) == pytest.approx(sample["decode_seconds"], rel=0.05)


def test_samples_of_steps_alone_leave_the_rest_of_a_model_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches without a sample change as the ones around them do."""
    known = {
        "name": "toy",
        "row_bytes": 1,
        "kv_bytes_per_token": 1,
        "passes": [[64, 0.005], [128, 0.008]],
        "pair_seconds": 2e-10,
        "chunk_sizes": [],
        "steps": [[1, 0.004], [2, 0.005], [4, 0.006], [9, 0.01], [16, 0.02]],
        "context_seconds": 1e-8,
        "join_seconds": 0.001,
        "ride_seconds": 0.002,
        "turn_seconds": 0.005,
    }
    step = {"chunks": [], "prefill_seconds": 0.0, "whole_seconds": 0.0}
    measured = {
        "model": "toy",
        "machine": "none",
        "row_bytes": 7,
        "kv_bytes_per_token": 9,
        "passes": [],
        "steps": [
            step | {"contexts": [1000], "decode_seconds": 0.004 + 1e-5},
            step | {"contexts": [1000] * 9, "decode_seconds": 0.006 + 9e-5},
        ],
        "joins": [],
    }
    monkeypatch.setitem(CONFIGS, "toy", TOY)
    samples, target = tmp_path / "samples.json", tmp_path / "costs.json"
    samples.write_text(json.dumps([measured]))
    target.write_text(json.dumps({"models": [known]}))
    monkeypatch.setattr(fit_costs, "TARGET", target)
    monkeypatch.setattr("sys.argv", ["fit_costs", str(samples)])
    assert fit_costs.main() == 0
    (entry,) = json.loads(target.read_text())["models"]
    steps = {1: 0.004, 2: 0.95 * 0.005, 4: 0.85 * 0.006, 9: 0.006, 16: 0.6 * 0.02}
    assert dict(entry.pop("steps")) == pytest.approx(steps)
    changed = {"row_bytes": 7, "kv_bytes_per_token": 9}
    rest = known | changed
    del rest["steps"], rest["chunk_sizes"], entry["chunk_sizes"]
    assert entry == rest


def test_decode_steps_can_be_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "toy", TOY)
    monkeypatch.setattr(step_costs, "CONTEXTS", (64,))
    monkeypatch.setattr(step_costs, "BATCHES", (1, 2))
    monkeypatch.setattr(step_costs, "STEPS", 8)
    measured = step_costs.measure(
        "toy", torch.device("cpu"), slots=3, longest=1200, others=1600, rows_a_slot=8, only=["steps"]
    )
    assert (measured.passes, measured.joins, len(measured.steps)) == ([], [], 2)


def test_named_costs_hold_the_stored_samples() -> None:
    """model_costs.json was fitted to benchmarks/samples."""
    samples = Path(fit_costs.__file__).with_name("samples") / "ring_steps.json"
    for measured in json.loads(samples.read_text()):
        costs = model_costs(measured["model"].lower())
        for sample in measured["steps"]:
            assert costs.step_seconds(sample["contexts"]) == pytest.approx(sample["decode_seconds"], rel=0.005)


def test_the_time_of_the_agents_profile_is_the_sum_of_its_parts() -> None:
    """Its prompts in sequence, and 480 full steps."""
    flat = dataclasses.replace(
        COSTS, passes=((1, 1e-5), (2, 2e-5)), pair_seconds=0.0, chunk_sizes=(), context_seconds=0.0, join_seconds=0.0
    )
    prompts = (4096 + 4 * 12_288 + 4 * 8 * 800) * 1e-5
    assert agents.arithmetic(flat, 4) == pytest.approx(prompts + 480 * 0.005, rel=1e-6)
