"""The room of prompt passes: fixed, or under the longest gap by measured times. Simulated devices with known costs, and
no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from agentspec.runtime.pace import FixedPace, GapPace, Pace, Room, StepTimes, num_pairs
from tests.fakes.scripted_device import BLOCK as SMALL_BLOCK
from tests.fakes.scripted_device import House, letters

BLOCK = 64
MAX_GAP = 0.1
DECODE_SECONDS = 0.011

Chunk = tuple[int, int]
"""(start, tokens)."""
Cost = Callable[[Sequence[Chunk]], float]


def small_model(chunks: Sequence[Chunk]) -> float:
    """A 4B model on a large GPU: small passes are bound by reading weights, large ones by arithmetic, in tiles of 128
    tokens."""
    rows = math.ceil(sum(count for _, count in chunks) / 128) * 128
    return max(0.0048, rows * 13.8e-6) + sum(num_pairs(*chunk) for chunk in chunks) * 2.3e-10


def large_model(chunks: Sequence[Chunk]) -> float:
    """A 27B model."""
    rows = math.ceil(sum(count for _, count in chunks) / 128) * 128
    return max(0.0165, rows * 57e-6) + sum(num_pairs(*chunk) for chunk in chunks) * 6.9e-10


def mixture(chunks: Sequence[Chunk]) -> float:
    """A mixture of experts: every expert is read for few tokens, so a pass has a large fixed part."""
    return 0.014 + sum(count for _, count in chunks) * 11e-6 + sum(num_pairs(*chunk) for chunk in chunks) * 2.7e-10


def run_prompt(
    pace: Pace, cost: Cost, length: int, *, start: int = 0, decode_seconds: float = DECODE_SECONDS
) -> list[tuple[int, float]]:
    """Chunks of a prompt that is computed beside running streams: (tokens, seconds) of each. As with overlap, each step
    is observed one step late."""
    chunks: list[tuple[int, float]] = []
    late: StepTimes | None = None
    end = start + length
    while start < end:
        room = pace.open(streams_run=True)
        count = max(room.fit(start, end - start), min(BLOCK, end - start))
        assert count % BLOCK == 0 or start + count == end
        if late is not None:
            pace.observe(late)
        seconds = cost([(start, count)])
        late = StepTimes(
            chunks=[(start, count)], contexts=[5000] * 4, prefill_seconds=seconds, decode_seconds=decode_seconds
        )
        chunks.append((count, seconds))
        start += count
    assert late is not None
    pace.observe(late)
    return chunks


def running_pace(cost: Cost = small_model, decode_seconds: float = DECODE_SECONDS) -> GapPace:
    """A pace that has observed a first prompt, alone, and some decode steps."""
    pace = GapPace(MAX_GAP, block_tokens=BLOCK)
    pace.observe(StepTimes(chunks=[(0, 8192)], prefill_seconds=cost([(0, 8192)])))
    for _ in range(8):
        pace.observe(StepTimes(contexts=[5000] * 4, decode_seconds=decode_seconds))
    return pace


def test_fixed_budget_is_constant() -> None:
    pace = FixedPace(512, block_tokens=BLOCK)
    pace.observe(StepTimes(chunks=[(0, 512)], prefill_seconds=9.0, decode_seconds=0.001))
    assert {pace.open(streams_run=run).fit(context, 10**5) for run in (False, True) for context in (0, 10**6)} == {512}


@pytest.mark.parametrize(("largest", "budget"), [(8192, 8192), (512, 512), (500, 448), (10, 64)])
def test_largest_pass_is_used_while_no_slot_decodes(largest: int, budget: int) -> None:
    pace = GapPace(MAX_GAP, block_tokens=BLOCK, largest=largest)
    pace.observe(StepTimes(chunks=[(0, 64)], prefill_seconds=9.0, decode_seconds=0.001))
    assert pace.open(streams_run=False).fit(50_000, 10**5) == budget


def test_first_pass_beside_streams_has_a_default_size() -> None:
    pace = GapPace(MAX_GAP, block_tokens=BLOCK)
    assert pace.open(streams_run=True).fit(0, 10**5) == 256
    assert GapPace(MAX_GAP, block_tokens=BLOCK, largest=64).open(streams_run=True).fit(0, 10**5) == 64


@pytest.mark.parametrize("cost", [small_model, large_model, mixture])
@pytest.mark.parametrize("decode_seconds", [0.004, 0.02, 0.04])
def test_gaps_stay_under_the_limit_and_chunks_are_large(cost: Cost, decode_seconds: float) -> None:
    chunks = run_prompt(running_pace(cost, decode_seconds), cost, 60_000, decode_seconds=decode_seconds)
    assert max(seconds for _, seconds in chunks) + decode_seconds <= MAX_GAP
    filled = [seconds for _, seconds in chunks[2:-1]]
    assert sum(filled) / len(filled) > 0.7 * (MAX_GAP - decode_seconds), "what the gap allows is used"


@pytest.mark.parametrize("cost", [small_model, large_model, mixture])
def test_pass_size_grows_from_below_without_measurements(cost: Cost) -> None:
    chunks = run_prompt(GapPace(MAX_GAP, block_tokens=BLOCK), cost, 60_000)
    assert max(seconds for _, seconds in chunks) + DECODE_SECONDS <= MAX_GAP
    best = max(count for count in range(BLOCK, 8193, BLOCK) if cost([(10_000, count)]) <= MAX_GAP - DECODE_SECONDS)
    assert max(count for count, _ in chunks) > 0.7 * best


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1, 0.2])
def test_the_largest_error_of_the_estimate_is_left_free(spread: float) -> None:
    """The estimate of the next step is wrong by no more than it was before; only then the gap is filled."""
    rng = random.Random(11)

    def uncertain(chunks: Sequence[Chunk]) -> float:
        return small_model(chunks) * (1.0 + spread * rng.random())

    pace = running_pace(uncertain)
    for _ in range(40):  # prompts, so that every size has been measured at every error
        run_prompt(pace, uncertain, 60_000)
    steps = [seconds + DECODE_SECONDS for _ in range(10) for _, seconds in run_prompt(pace, uncertain, 60_000)]
    assert max(steps) <= MAX_GAP
    filled = sorted(steps)[len(steps) // 2]
    assert filled > (0.92 - 0.7 * spread) * MAX_GAP, "a pace that is never wrong leaves little free"


def test_short_append_is_one_chunk() -> None:
    pace = running_pace(large_model, 0.018)
    assert [count for count, _ in run_prompt(pace, large_model, 832, start=16_384, decode_seconds=0.018)] == [832]


def test_chunks_shrink_with_growing_context() -> None:
    chunks = run_prompt(running_pace(large_model), large_model, 120_000)
    assert chunks[1][0] >= 1024
    assert chunks[-2][0] <= 640


def test_prompt_advances_by_one_block_when_even_that_exceeds_the_gap() -> None:
    chunks = run_prompt(running_pace(), lambda chunks: 0.3, 20_000)
    assert {count for count, _ in chunks[12:-1]} == {BLOCK}


def test_longer_decode_steps_leave_less_room() -> None:
    pace = running_pace()
    before = run_prompt(pace, small_model, 30_000)[-2][0]
    after = run_prompt(pace, small_model, 30_000, decode_seconds=0.06)[-2][0]
    assert after < before / 2


def test_single_slow_pass_has_no_effect() -> None:
    pace = running_pace()
    run_prompt(pace, small_model, 30_000)
    steady = pace.open(streams_run=True).fit(5000, 10**5)
    pace.observe(StepTimes(chunks=[(5000, steady)], prefill_seconds=3.0, decode_seconds=DECODE_SECONDS))
    assert pace.open(streams_run=True).fit(5000, 10**5) == steady


def test_slow_size_is_tried_again_later() -> None:
    """The first pass of a size may be slow for other reasons, such as a kernel being compiled."""
    pace = running_pace()
    pace.observe(StepTimes(chunks=[(0, 4096)], prefill_seconds=2.0, decode_seconds=DECODE_SECONDS))
    sizes = [count for _ in range(30) for count, _ in run_prompt(pace, small_model, 60_000)]
    large = [place for place, count in enumerate(sizes) if count > 4096]
    assert large, "but not for good"
    assert large[0] > 100, "not at once"


def test_chunks_of_several_prompts_share_a_pass() -> None:
    rng = random.Random(7)
    for _ in range(200):
        pace = running_pace(large_model, 0.018)
        room, chunks = pace.open(streams_run=True), []
        for _ in range(rng.randrange(1, 9)):
            start, wanted = rng.randrange(0, 500) * BLOCK, rng.randrange(1, 1500)
            count = room.fit(start, wanted)
            if count:
                room.take_chunk(start, count)
                chunks.append((start, count))
        assert large_model(chunks) + 0.018 <= MAX_GAP if chunks else True, chunks


def test_share_of_room_is_a_share_of_its_time() -> None:
    room = Room(lambda tokens, pairs: tokens, 1024, most_tokens=1024, tile=BLOCK)
    assert (room.fit(0, 5000, share=0.5), room.fit(0, 5000), room.fit(0, 100, share=0.5)) == (512, 1024, 100)
    assert (room.part([(0, 256)]), room.part([(0, 256), (0, 4000)]), room.part([])) == (0.25, 1.0, 0.0)
    room.take_chunk(0, 512)
    assert (room.fit(0, 5000, share=0.5), room.part([(0, 256)])) == (256, 0.5)
    room.take_chunk(0, 512)
    assert (room.fit(0, 5000), room.part([(0, 1)])) == (0, 1.0)


def test_long_prompt_is_computed_beside_running_streams() -> None:
    """In the scheduler: streams get tokens in every step, no step is longer than the gap, and short prompts pass the
    long one."""
    pace = GapPace(0.01, block_tokens=SMALL_BLOCK, largest=512)
    house = House(pace=pace, max_running=3, accept=0, drafts=1)
    house.device.decode_seconds = 0.004
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
    assert all(size * 2.5e-5 + 0.004 <= 0.01 for size in sizes)
    assert sum(sizes[2:-1]) / len(sizes[2:-1]) > 128
    assert house.step_of_join("short") < house.step_of_join("long")


def test_pass_gets_the_time_of_riding_windows() -> None:
    """After several passes in a row with riding windows, and until a pass without."""
    pace = running_pace(large_model, 0.03)
    alone = pace.open(streams_run=True).fit(0, 10**5)
    ridden = StepTimes(
        chunks=[(0, 1024)],
        contexts=[9] * 8,
        prefill_seconds=large_model([(0, 1024)]) + 0.002,
        decode_seconds=0.002,
        rode=True,
    )
    for _ in range(3):
        pace.observe(ridden)
    assert pace.open(streams_run=True).fit(0, 10**5) < 1.2 * alone, "one pass may be chance"
    pace.observe(ridden)
    assert pace.open(streams_run=True).fit(0, 10**5) > 1.3 * alone
    pace.observe(StepTimes(contexts=[9] * 8, decode_seconds=0.03))
    assert pace.open(streams_run=True).fit(0, 10**5) > 1.3 * alone, "a step without prompts is no evidence"
    pace.observe(
        StepTimes(chunks=[(0, 1024)], contexts=[9] * 8, prefill_seconds=large_model([(0, 1024)]), decode_seconds=0.03)
    )
    assert pace.open(streams_run=True).fit(0, 10**5) < 1.2 * alone
