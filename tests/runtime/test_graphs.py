"""The graphs of the decode step: which exist, their inputs, and that a replaying executor gives the same results as an
eager one.

Recordings are replayed by running the step again, so this needs no GPU; tests/gpu does the same with CUDA graphs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.runtime.decode_step import StepResult
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.graphs import GraphKey, GraphReport, StepGraphs, batch_sizes, graph_bytes
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.runtime.plan import StepPlan
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.replayer import Replayer
from tests.fakes.step_driver import StepDriver, greedy
from tests.fakes.twins import run_twins
from tests.runtime.test_decode_step import MODELS, random_requests

CPU = torch.device("cpu")


class Watched:
    """A step that records its slots and its calls."""

    def __init__(self, *, max_running: int, depths: Sequence[int]) -> None:
        self.calls: list[tuple[GraphKey, list[int]]] = []
        self.recorder = Replayer()
        self.graphs = StepGraphs(
            self._step, self.recorder, max_running=max_running, depths=depths, max_mtp_drafts=3, device=CPU
        )

    def record(self, *depths: int) -> list[tuple[GraphKey, list[int]]]:
        """The calls made by recording these depths."""
        for key, record in self.graphs.recordings().items():
            if key.num_drafted in depths:
                record()
        recorded, self.calls = self.calls, []
        return recorded

    def _step(self, slot_ids_B: Tensor, key: GraphKey) -> StepResult:
        self.calls.append((key, slot_ids_B.tolist()))
        return StepResult(
            outcome_BF=slot_ids_B[:, None] + 100,
            logits_BTV=slot_ids_B[:, None, None].expand(-1, key.num_drafted + 1, 3).float(),
        )


@pytest.mark.parametrize(
    ("max_running", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9)), (32, (1, 2, 4, 8, 16, 32))],
)
def test_batch_sizes_are_powers_of_two_and_max_running(max_running: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(max_running) == sizes


def test_each_key_is_recorded_once_on_the_padding_slot_largest_first() -> None:
    watched = Watched(max_running=5, depths=[0, 2])
    recorded = watched.record(0, 2)
    keys = [key for key, _ in recorded]
    assert len(set(keys)) == len(keys)
    for is_first, sizes in ((False, (1, 2, 4, 5)), (True, (1, 2))):
        assert {(key.batch_size, key.num_drafted, key.sampled) for key in keys if key.is_first == is_first} == {
            (b, k, s) for b in sizes for k in (0, 2) for s in (False, True)
        }
    assert all(slots == [5] * key.batch_size for key, slots in recorded)
    num_tokens = [key.batch_size * (key.num_drafted + 1) for key in keys]
    assert num_tokens == sorted(num_tokens, reverse=True)
    assert watched.record(0, 2) == []


def test_step_records_its_missing_graph() -> None:
    watched = Watched(max_running=4, depths=[0, 2])
    assert {key.num_drafted for key, _ in watched.record(2)} == {2}
    key = GraphKey(batch_size=2, num_drafted=0, sampled=True)
    for _ in range(2):
        result = watched.graphs.run([1, 3], num_drafted=0, sampled=True)
        assert result.outcome_BF[:, 0].tolist() == [101, 103]
    assert watched.calls == [(key, [4, 4]), (key, [1, 3]), (key, [1, 3])], "once over padding, then a replay a step"
    watched.calls.clear()
    assert key not in [key for key, _ in watched.record(0)]


@pytest.mark.parametrize(
    ("slots", "seen"), [([3], [3]), ([4, 1], [4, 1]), ([2, 0, 4], [2, 0, 4, 6]), ([0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6])]
)
def test_step_is_padded_to_the_next_captured_size(slots: list[int], seen: list[int]) -> None:
    watched = Watched(max_running=6, depths=[1])
    watched.record(1)
    result = watched.graphs.run(slots, num_drafted=1, sampled=True)
    assert watched.calls == [(GraphKey(batch_size=len(seen), num_drafted=1, sampled=True), seen)]
    assert result.outcome_BF[:, 0].tolist() == [slot + 100 for slot in slots], "a row a slot, none for padding"
    assert result.logits_BTV.shape == (len(slots), 2, 3)


def test_each_replay_gets_its_own_slots() -> None:
    watched = Watched(max_running=4, depths=[0])
    for slots in ([1], [1], [2], [0, 1], [2], [3, 1, 0], [0, 1, 2, 3], [3, 1]):
        assert watched.graphs.run(slots, num_drafted=0, sampled=False).outcome_BF[:, 0].tolist() == [
            slot + 100 for slot in slots
        ]


@pytest.mark.parametrize(("slots", "num_drafted"), [([0], 1), ([0], 3), ([0, 1, 2, 3, 0], 2)])
def test_step_with_an_unknown_key_raises(slots: list[int], num_drafted: int) -> None:
    watched = Watched(max_running=4, depths=[0, 2])
    with pytest.raises(KeyError, match=f"num_drafted={num_drafted}"):
        watched.graphs.run(slots, num_drafted=num_drafted, sampled=False)
    assert watched.calls == [], "no other graph runs instead"


def test_report_text_lists_graphs_and_cost() -> None:
    report = GraphReport(batch_sizes=(1, 2, 3), depths=(0, 1), num_graphs=12, device_bytes=3 << 28, seconds=0.25)
    assert str(report) == "12 (batches of 1, 2, 3; 0, 1 drafts; greedy and sampled): 0.75 GiB, captured in 0.2 s"
    report = replace(report, num_first=4, chunk_sizes=(64, 128), num_rides=2, num_late=8)
    assert str(report) == (
        "12 (batches of 1, 2, 3; 0, 1 drafts; greedy and sampled) and 4 of first steps "
        "and 2 of prompts (up to 64, 128 tokens) and 2 of prompts with windows: "
        "0.75 GiB, captured in 0.2 s; 8 of them follow when nothing else is to be done"
    )


def test_memory_estimate_covers_the_largest_steps_logits() -> None:
    logits = 32 * 4 * 248_320 * 4
    assert 2 * logits < graph_bytes(vocab_size=248_320, max_running=32, max_draft_tokens=3) < 2 * 2**30


def nothing(executor: ModelExecutor) -> None:
    """Leave the executor eager."""


@pytest.mark.parametrize("seed", range(4))
def test_replaying_executor_equals_eager_executor(seed: int) -> None:
    recorder = Replayer()
    max_draft_tokens = seed % 4 + 1
    run_twins(
        lambda: HashChainModel(seed=5, draft_accuracy=0.8, stop_chance=0.01),
        nothing,
        lambda executor: executor.capture(range(max_draft_tokens + 1), recorder),
        seed=seed,
        max_running=seed % 3 + 3,
        max_draft_tokens=max_draft_tokens,
        num_steps=60,
    )
    assert recorder.num_replays > 40


def test_replayed_streams_and_states_equal_the_reference() -> None:
    for seed in range(3000, 3008):
        generator = random.Random(seed)
        model = MODELS[generator.choice(list(MODELS))]
        requests = random_requests(generator, sampled=seed % 2 == 0, model=model)
        max_k = generator.randint(1, 5)
        driver = StepDriver(model, max_running=len(requests), max_draft_tokens=max_k)
        driver.executor.capture(range(max_k + 1), Replayer())
        streams = driver.run(requests, partial(generator.randint, 0, max_k), check=True)
        assert streams == model.reference_streams(requests), f"seed {seed}"


def test_forced_acceptance_is_recorded_with_the_step() -> None:
    model = MODELS[0.0]
    driver = StepDriver(model, max_running=2, max_draft_tokens=2, force_acceptance=(1.0, 1.0))
    driver.executor.capture([2], Replayer())
    driver.run([greedy([1, 2, 3], 34), greedy([4, 5], 33)], lambda: 2)
    assert {outcome.num_accepted for outcome in driver.running[0].outcomes[1:]} == {2}


def test_every_recording_is_counted() -> None:
    told: list[tuple[str, int, int]] = []
    driver = StepDriver(MODELS[0.9], max_running=3, max_draft_tokens=2)
    report = driver.executor.capture([0, 2], Replayer(), lambda *stage: told.append(stage))
    total = report.num_graphs + report.num_first + len(report.chunk_sizes) + report.num_rides
    assert report.num_rides > 0
    assert report.num_graphs == 3 * 2 * 2
    assert report.num_first == 2 * 2 * 2
    assert told == [("capturing graphs", done, total) for done in range(total + 1)]


@pytest.mark.parametrize("seed", range(2))
def test_deferred_capture_changes_no_result(seed: int) -> None:
    """The work may run between any two launches; and a step of another depth, or a pass with windows, may come before
    its graph."""
    rng, counts = random.Random(f"left {seed}"), Counter[str]()

    def begin_early(executor: Any) -> None:
        report = executor.capture(range(4), Replayer(), early=True)
        total = report.num_graphs + report.num_first + len(report.chunk_sizes) + report.num_rides
        assert report.num_late == total - 3, "a step and a first step of one slot, and a short prompt"
        launch = executor.launch

        def launch_and_prepare(plan: StepPlan) -> Any:
            ticket = launch(plan)
            for _ in range(rng.randrange(4)):
                counts["prepared" if executor.prepare() else "nothing left"] += 1
            return ticket

        executor.launch = launch_and_prepare

    run_twins(
        lambda: HashChainModel(seed=5),
        nothing,
        begin_early,
        seed=seed,
        max_running=4,
        max_draft_tokens=3,
        num_steps=250,
    )
    assert min(counts["prepared"], counts["nothing left"]) > 20, f"seed {seed}: {counts}"


def test_full_capture_leaves_nothing_to_prepare() -> None:
    driver = StepDriver(MODELS[0.9], max_running=3, max_draft_tokens=2)
    assert driver.executor.capture([0, 2], Replayer()).num_late == 0
    assert not driver.executor.prepare()


def test_captured_executor_never_decodes_eagerly() -> None:
    driver = StepDriver(MODELS[0.9], max_running=1, max_draft_tokens=3)
    driver.executor.capture([3], Replayer())
    plan = StepPlan()
    driver.plan_join(plan, 0, greedy([1, 2], 50))
    driver.step(3, plan=plan)
    with pytest.raises(KeyError, match="num_drafted=2"):
        driver.step(2)


@pytest.mark.parametrize(("num_joining", "num_replays"), [(1, 1), (2, 1), (3, 0)])
def test_first_steps_of_few_slots_are_replayed(num_joining: int, num_replays: int) -> None:
    recorder = Replayer()
    driver = StepDriver(MODELS[0.9], max_running=3, max_draft_tokens=2)
    driver.executor.capture([2], recorder)
    plan = StepPlan()
    for slot in range(num_joining):
        driver.plan_join(plan, slot, greedy([1, 2 + slot], 50))
    before = recorder.num_replays
    driver.step(2, plan=plan)
    assert recorder.num_replays - before == num_replays


@pytest.mark.parametrize("graphs", [True, False])
def test_cpu_captures_nothing(graphs: bool) -> None:
    parts = build(
        HashChainModel(),
        config=EngineConfig(graphs=graphs),
        memory=MemoryPlan(num_rows=80, num_pages=80, max_length=256),
    )
    assert parts.graphs == "none: steps run eagerly on the CPU"
