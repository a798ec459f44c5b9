"""Prefill budgets from measured times: synthetic devices whose costs are known, and no clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from agentspec.runtime.pace import AUTO_BUDGET_GPU, STEP_SHARE, AdaptivePace, FixedPace, make_pace
from tests.fakes.scripted_device import BLOCK as SMALL_BLOCK
from tests.fakes.scripted_device import House, letters

BLOCK = 64
DECODE_SECONDS = 0.004
ALLOWED = STEP_SHARE * DECODE_SECONDS

Cost = Callable[[int, int], float]
"""(start, tokens) -> seconds."""


def gpu(start: int, count: int) -> float:
    """A 4B model on a large GPU: reading weights bounds small chunks, arithmetic large ones, in tiles of 128 tokens."""
    rows = math.ceil(count / 128) * 128
    return max(0.0022, rows * 11e-6) + rows * (start + rows / 2) * 1.6e-10


def cpu(start: int, count: int) -> float:
    """Every token costs the same, and context little."""
    return count * (1e-5 + start * 1e-11)


def run_prompt(pace: AdaptivePace, cost: Cost, length: int, decode_seconds: float = DECODE_SECONDS) -> list[tuple[int, float]]:
    """Chunks of a prompt that comes in beside running streams: (tokens, seconds) of each. As with overlap, a step is observed one step late."""
    chunks: list[tuple[int, float]] = []
    late: tuple[int, int, float] | None = None
    start = 0
    while start < length:
        budget = pace.choose(streams_run=True, context=start)
        assert budget % BLOCK == 0
        assert budget >= BLOCK, "a prompt never starves"
        count = min(budget, length - start)
        if late is not None:
            pace.observe([late[:2]], prefill_seconds=late[2], decode_seconds=decode_seconds)
        late = start, count, cost(start, count)
        chunks.append((count, late[2]))
        start += count
    return chunks


def running_pace() -> AdaptivePace:
    pace = AdaptivePace(block_tokens=BLOCK, largest=AUTO_BUDGET_GPU)
    for _ in range(8):
        pace.observe([], prefill_seconds=0.0, decode_seconds=DECODE_SECONDS)
    return pace


def test_a_fixed_budget_is_always_the_same() -> None:
    pace = make_pace(512, block_tokens=BLOCK, largest=8192)
    assert isinstance(pace, FixedPace)
    pace.observe([(0, 512)], prefill_seconds=9.0, decode_seconds=0.001)
    assert {pace.choose(streams_run=streams_run, context=context) for streams_run in (False, True) for context in (0, 10**6)} == {512}


@pytest.mark.parametrize(("largest", "budget"), [(8192, 8192), (512, 512), (500, 448), (10, 64)])
def test_nobody_waits_while_nobody_decodes(largest: int, budget: int) -> None:
    pace = make_pace("auto", block_tokens=BLOCK, largest=largest)
    pace.observe([(0, 64)], prefill_seconds=9.0, decode_seconds=0.001)
    assert pace.choose(streams_run=False, context=50_000) == budget


def test_before_anything_is_measured_there_is_a_guess() -> None:
    pace = AdaptivePace(block_tokens=BLOCK, largest=AUTO_BUDGET_GPU)
    assert pace.choose(streams_run=True, context=0) == 128
    pace.observe([(0, 128)], prefill_seconds=0.001, decode_seconds=0.0)
    assert pace.choose(streams_run=True, context=128) == 128, "no decode step was measured"
    assert AdaptivePace(block_tokens=BLOCK, largest=64).choose(streams_run=True, context=0) == 64


@pytest.mark.parametrize("cost", [gpu, cpu])
def test_steps_keep_the_pace_and_use_what_there_is(cost: Cost) -> None:
    chunks = run_prompt(running_pace(), cost, 50_000)
    late = [seconds for _, seconds in chunks if seconds > ALLOWED * 1.01]
    assert len(late) <= max(3, len(chunks) // 50), f"{len(late)} of {len(chunks)} steps are late"
    assert max(late, default=0.0) < 1.5 * ALLOWED
    best = sum(
        max(count for count in range(BLOCK, 1025, BLOCK) if count == BLOCK or cost(start, count) <= ALLOWED) for start in range(0, 50_000, 500)
    )
    mean = sum(count * count for count, _ in chunks) / 50_000
    assert mean > 0.6 * best / 100, f"{mean:.0f} tokens a step, {best / 100:.0f} would keep the pace"


def test_a_growing_context_shrinks_the_chunks() -> None:
    def steep(start: int, count: int) -> float:
        return count * (5e-6 + start * 6e-10)

    chunks = run_prompt(running_pace(), steep, 50_000)
    assert max(count for count, _ in chunks[:40]) >= 384
    assert {count for count, _ in chunks[-40:-1]} <= {64, 128}
    assert all(seconds < 1.6 * ALLOWED for _, seconds in chunks)


def test_what_is_too_dear_even_for_a_block_goes_on_block_by_block() -> None:
    chunks = run_prompt(running_pace(), lambda start, count: 0.1, 2000)
    assert {count for count, _ in chunks[4:-1]} == {BLOCK}


def test_slower_decode_steps_leave_room_for_more() -> None:
    pace = running_pace()
    before = run_prompt(pace, gpu, 10_000)[-2][0]
    after = run_prompt(pace, gpu, 10_000, decode_seconds=4 * DECODE_SECONDS)[-2][0]
    assert after >= 3 * before
    again = run_prompt(pace, gpu, 10_000)[-2][0]
    assert again == before


def test_one_slow_chunk_among_others_changes_nothing() -> None:
    pace = running_pace()
    run_prompt(pace, gpu, 10_000)
    steady = pace.choose(streams_run=True, context=5000)
    pace.observe([(5000, steady)], prefill_seconds=3.0, decode_seconds=DECODE_SECONDS)
    assert pace.choose(streams_run=True, context=5000) == steady


def test_a_size_that_was_too_dear_is_tried_again_after_a_while() -> None:
    """The first chunk of a size may be slow for reasons of its own: a kernel that is compiled."""
    slow = {256}

    def once_slow(start: int, count: int) -> float:
        seconds = 1.0 if count in slow else gpu(start, count)
        slow.discard(count)
        return seconds

    pace = running_pace()
    sizes = [count for _ in range(12) for count, _ in run_prompt(pace, once_slow, 5000)]
    large = [place for place, count in enumerate(sizes) if count >= 256]
    pause = max(later - earlier for earlier, later in itertools.pairwise(large))
    assert pause > 200, "not at once"
    assert len(large) > 40, "but for good then"


def test_chunks_of_several_prompts_count_together() -> None:
    alone, together = running_pace(), running_pace()
    for _ in range(3):
        alone.observe([(1000, 256)], prefill_seconds=0.0032, decode_seconds=0.0)
        together.observe([(0, 128), (2000, 128)], prefill_seconds=0.0032, decode_seconds=0.0)
    assert alone.choose(streams_run=True, context=1000) == together.choose(streams_run=True, context=1000)


def test_chunks_that_fill_no_size_teach_nothing() -> None:
    pace = running_pace()
    for count in (10, 65, 130, 1000):
        pace.observe([(0, count)], prefill_seconds=1.0, decode_seconds=0.0)
    assert pace.choose(streams_run=True, context=0) == 128


def test_a_long_prompt_comes_in_beside_streams_and_ends() -> None:
    """In the scheduler: streams get their tokens in every step, and no step is much longer than two."""
    pace = AdaptivePace(block_tokens=SMALL_BLOCK, largest=512)
    house = House(pace=pace, max_running=3, accept=0, drafts=1)
    house.device.decode_seconds = DECODE_SECONDS
    house.device.prefill_cost = lambda start, count: count * 2.5e-5
    house.submit("talks", letters(20), "y" * 300)
    house.run_until(lambda: len(house.said("talks")) > 4)
    before = len(house.device.plans)
    house.submit("long", letters(3000, seed=1), "x")
    house.submit("short", letters(40, seed=2), "x")
    house.run()
    busy = [plan for plan in house.device.plans[before:] if plan.chunks]
    assert all(plan.decode_slots for plan in busy)
    sizes = [sum(len(chunk.token_ids) for chunk in plan.chunks) for plan in busy]
    assert all(size * 2.5e-5 <= ALLOWED for size in sizes)
    assert sizes.count(128) > 15, "128 tokens fit beside a decode step"
    assert house.step_of_join("short") < house.step_of_join("long")
