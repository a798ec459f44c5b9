"""Riding windows: which plans ride, by which graph, and that results equal those of chunks and windows run one after
the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.ride import RIDE_SIZES, even_batch, ride_graph_bytes, ride_keys, rows_beyond
from agentspec.types import MOST_RIDERS, tokens
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.replayer import Replayer
from tests.fakes.step_driver import StepDriver, greedy
from tests.fakes.twins import run_twins

DRAFTS = 3


def never(executor: ModelExecutor) -> None:
    executor.most_riders = 0


class Watch:
    """Prepares an executor, and counts plans with chunks and windows by whether they rode."""

    def __init__(self, recorder: Replayer | None = None) -> None:
        self.recorder = recorder
        self.ways: Counter[str] = Counter()

    def __call__(self, executor: Any) -> None:
        if self.recorder is not None:
            executor.capture(range(DRAFTS + 1), self.recorder)
        launch = executor.launch

        def watched(plan: StepPlan) -> Any:
            before = 0 if self.recorder is None else self.recorder.num_write_replays
            ticket = launch(plan)
            replayed = self.recorder is not None and self.recorder.num_write_replays > before
            if plan.chunks and plan.decode_slots:
                self.ways[f"{'rode' if ticket.rode else 'apart'}, {'graph' if replayed else 'eager'}"] += 1
            return ticket

        executor.launch = watched


@pytest.mark.parametrize("seed", range(4))
def test_riding_windows_change_no_result(seed: int) -> None:
    """Greedy, sampled, constrained and scored slots, windows of every width, in any batch, to the last bit."""
    watch = Watch()
    run_twins(
        lambda: HashChainModel(seed=5), never, watch, seed=seed, max_running=5, max_draft_tokens=DRAFTS, num_steps=80
    )
    assert watch.ways["rode, eager"] > 8


@pytest.mark.parametrize("seed", range(3))
def test_ride_graphs_equal_eager_steps(seed: int) -> None:
    watch = Watch(Replayer())
    run_twins(
        lambda: HashChainModel(seed=5), never, watch, seed=seed, max_running=5, max_draft_tokens=DRAFTS, num_steps=240
    )
    assert watch.ways["rode, graph"] > 3, "windows of the largest k have graphs"
    assert watch.ways["apart, graph"] > 5, "others don't ride where the pass alone has one"


class House:
    """Three running slots, and a pass for a fourth."""

    def __init__(self, *, capture: bool, most_riders: int = MOST_RIDERS, prompt_length: int = 100) -> None:
        self.driver = StepDriver(
            HashChainModel(seed=2, max_context=4000),
            max_running=4,
            max_draft_tokens=DRAFTS,
            max_length=3000,
            most_riders=most_riders,
        )
        self.recorder = Replayer()
        if capture:
            self.driver.executor.capture([1, DRAFTS], self.recorder)
        plan = StepPlan()
        for slot in range(3):
            self.driver.plan_join(plan, slot, greedy([slot + 1, 5, 6], 2000))
        self.driver.step(DRAFTS, plan=plan)
        self.plan = StepPlan(decode_slots=[0, 1, 2], num_drafted=DRAFTS)
        self.driver.plan_join(self.plan, 3, greedy([7] * prompt_length, 2990))
        self.plan.joins.clear()

    def rides(self) -> bool:
        return bool(self.driver.executor.collect(self.driver.executor.launch(self.plan)).rode)


@pytest.mark.parametrize("capture", [True, False])
def test_which_plans_ride(capture: bool) -> None:
    assert House(capture=capture).rides()
    assert not House(capture=capture, most_riders=0).rides(), "it is switched off"
    alone, windows, scored, other_depth = (House(capture=capture) for _ in range(4))
    alone.plan.decode_slots = []
    windows.plan.chunks = []
    (chunk,) = scored.plan.chunks
    scored.plan.chunks = [type(chunk)(**{name: getattr(chunk, name) for name in chunk.__slots__} | {"score_top": 1})]
    other_depth.plan.num_drafted = 1
    assert (alone.rides(), windows.rides(), scored.rides(), other_depth.rides()) == (False, False, False, not capture)


@pytest.mark.parametrize(
    ("prompt_length", "most_riders", "rides"),
    [
        (100, 1, True),
        (240, 1, True),
        (241, 127, False),
        (241, 128, True),
        (368, 1, True),
        (2544, 1, True),
        (2545, 255, False),
        (2545, 256, True),
    ],
    ids=[
        "below the weights",
        "fills the free rows",
        "a size too far",
        "a size further",
        "instead of padding",
        "fills a large one",
        "a large size too far",
        "a large size further",
    ],
)
def test_graph_pass_rides_if_the_ride_graph_is_little_larger(prompt_length: int, most_riders: int, rides: bool) -> None:
    """Four windows of four columns: 16 rows. A pass alone has 256, 288, 384, ... rows; one with windows 256, 384 up to
    2,048, then 2,304, 2,560."""
    house = House(capture=True, most_riders=max(most_riders, 16), prompt_length=prompt_length)
    house.driver.executor.most_riders = most_riders
    before = house.recorder.num_write_replays
    assert house.rides() == rides
    assert house.recorder.num_write_replays == before + 1


def test_eager_pass_is_padded_together_with_its_windows() -> None:
    house = House(capture=True)
    batches: list[tuple[int, int]] = []
    model: Any = house.driver.model
    ride = model.ride

    def watched(prompts: Any, windows: Any) -> Any:
        batches.append((len(prompts.token_ids_N), windows.tokens_BT.numel()))
        return ride(prompts, windows)

    model.ride = watched
    (chunk,) = house.plan.chunks
    house.plan.chunks = [
        type(chunk)(
            **{name: getattr(chunk, name) for name in chunk.__slots__}
            | {"request_id": str(place), "token_ids": tokens([3]), "state_writes": ((1, 1),)}
        )
        for place in range(5)
    ]
    assert house.rides()
    assert batches == [(128 - 16, 16)], "five sequences have no graph; three windows become four"


def test_numbers_of_riders() -> None:
    assert [even_batch(slots, 4) for slots in (1, 4, 5, 9, 16)] == [4, 4, 8, 16, 16]
    assert [even_batch(slots, 3) for slots in (1, 16, 17)] == [16, 16, 32]
    assert (rows_beyond(256, 64), rows_beyond(384, 64), rows_beyond(896, 800)) == (0, 128, 96)


@pytest.mark.parametrize(
    ("max_running", "most_riders", "batches"),
    [
        (1, MOST_RIDERS, {4}),
        (16, MOST_RIDERS, {4, 8, 16}),
        (64, MOST_RIDERS, {4, 8, 16, 32}),
        (64, 32, {4, 8}),
        (8, 0, set()),
    ],
)
def test_ride_graphs_exist_for_few_batch_and_token_pairs(max_running: int, most_riders: int, batches: set[int]) -> None:
    keys = ride_keys(1024, max_running=max_running, num_columns=4, most_riders=most_riders)
    sizes = {size for size in RIDE_SIZES if size <= 1024}
    assert {(key.batch_size, key.num_tokens) for key in keys} == {
        (batch, size - 4 * batch) for batch in batches for size in sizes
    }
    assert len(keys) == len(batches) * len(sizes)


def test_ride_graph_memory_is_estimated_per_graph() -> None:
    slots = {"max_running": 8, "max_draft_tokens": 3}
    assert (
        ride_graph_bytes(5120, **slots, most_riders=0) == 0 < ride_graph_bytes(5120, **slots, most_riders=MOST_RIDERS)
    )
