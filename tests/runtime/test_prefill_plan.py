"""Where prompts are cut and where checkpoints go."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from agentspec.cache.hybrid_cache import Lease
from agentspec.runtime.plan import OwnRows
from agentspec.runtime.prefill_plan import (
    BRANCH_GAP_BLOCKS,
    GRID_BLOCKS,
    SYSTEM_GRID_BLOCKS,
    plan_chunk,
    wanted_checkpoints,
)
from agentspec.runtime.request import PendingCheckpoint, Request, new_request
from agentspec.types import Breakpoint, CheckpointKind, ModelSpec, SamplingParams
from agentspec.wire import Submit

BLOCK = 16
SYSTEM, USER, TURN, BRANCH, GRID = (
    CheckpointKind.SYSTEM,
    CheckpointKind.USER,
    CheckpointKind.TURN,
    CheckpointKind.BRANCH,
    CheckpointKind.GRID,
)
SPEC = ModelSpec(
    name="m",
    vocab_size=1000,
    num_real_tokens=1000,
    max_context=10**6,
    hidden_size=1,
    has_mtp=True,
    stop_token_ids=(),
    row_bytes=1,
    page_bytes=1,
    block_tokens=BLOCK,
)


def request(
    length: int, points: Sequence[tuple[int, CheckpointKind]] = (), *, computed: int = 0, max_tokens: int = 8
) -> Request:
    submit = Submit(
        request_id="r",
        prompt_ids=[place % 1000 for place in range(length)],
        sampling=SamplingParams(max_tokens=max_tokens),
        breakpoints=[Breakpoint(offset, kind) for offset, kind in points],
    )
    made = new_request(submit, number=0, spec=SPEC, max_length=10**6, engine_seed=0, token_bytes=None)
    made.computed = computed
    made.lease = Lease(num_cached=computed, read_row=0, page_ids=list(range(1, length // BLOCK + 3)))
    made.rows = OwnRows(write=[50, 51, 52, 53], newer=60, older=61)
    return made


def wanted(made: Request, branch_tokens: int = 0) -> list[tuple[int, CheckpointKind]]:
    return [(point.length, point.kind) for point in wanted_checkpoints(made, branch_tokens, BLOCK)]


@pytest.mark.parametrize(("offset", "length"), [(16, 16), (17, 16), (31, 16), (32, 32), (15, None), (0, None)])
def test_breakpoints_are_rounded_down_to_a_block(offset: int, length: int | None) -> None:
    assert wanted(request(100, [(offset, USER)])) == ([(length, USER)] if length else [])


def test_breakpoint_in_the_hit_is_skipped_and_one_at_the_end_kept() -> None:
    assert wanted(request(65, [(32, SYSTEM), (64, USER)], computed=32)) == [(64, USER)]
    assert wanted(request(64, [(64, USER)])) == [(64, USER)]


def test_the_most_protected_kind_names_a_shared_boundary() -> None:
    assert wanted(request(100, [(40, SYSTEM), (45, USER)])) == [(32, SYSTEM)]
    assert wanted(request(100, [(68, USER)]), branch_tokens=64) == [(64, BRANCH)]


def test_prompt_without_breakpoints_keeps_its_last_boundary() -> None:
    assert wanted(request(100)) == [(96, USER)]
    assert wanted(request(97)) == [(96, USER)]
    assert wanted(request(96)) == [(80, USER)], "where the same prompt can resume: its last token is always computed"
    assert wanted(request(16)) == []


@pytest.mark.parametrize("gap", [BRANCH_GAP_BLOCKS - 1, BRANCH_GAP_BLOCKS, BRANCH_GAP_BLOCKS + 5])
def test_a_branching_point_must_save_enough(gap: int) -> None:
    found = wanted(request(400, [(399, USER)], computed=32), branch_tokens=32 + gap * BLOCK)
    assert ((32 + gap * BLOCK, BRANCH) in found) == (gap >= BRANCH_GAP_BLOCKS)


def test_long_stretches_get_a_grid() -> None:
    span = GRID_BLOCKS * BLOCK
    assert wanted(request(2 * span, [(2 * span - 1, USER)])) == [(2 * span - BLOCK, USER)], (
        "a stretch of less than two spans needs no grid"
    )
    end = 3 * span + BLOCK
    assert wanted(request(end + 5, [(end, USER)])) == [(span, GRID), (2 * span, GRID), (end, USER)]
    assert wanted(request(end + 5, [(end, USER)], computed=2 * span)) == [(end, USER)]


def test_grid_continues_after_the_last_breakpoint() -> None:
    span = GRID_BLOCKS * BLOCK
    found = wanted(request(4 * span, [(BLOCK, USER)]))
    assert found == [(BLOCK, USER), (span + BLOCK, GRID), (2 * span + BLOCK, GRID)]


def test_a_new_system_prompt_has_a_grid_of_its_own() -> None:
    step = SYSTEM_GRID_BLOCKS * BLOCK
    points = [(4 * step, SYSTEM), (8 * step, USER)]
    grid = [(step, GRID), (2 * step, GRID), (3 * step, GRID), (4 * step, SYSTEM)]
    assert wanted(request(8 * step + 1, points)) == [*grid, (8 * step, USER)]
    assert wanted(request(8 * step + 1, points, computed=4 * step)) == [(8 * step, USER)], (
        "a system prompt that is cached needs none"
    )


def test_session_with_rewritten_turns_keeps_its_prompts_end() -> None:
    made = request(101, [(40, USER)])
    made.turn_trusted = False
    assert wanted(made) == [(32, USER), (96, TURN)]


class Rows:
    """A source of checkpoint rows 100, 101, ...; None when `count` are taken."""

    def __init__(self, count: int = 1000) -> None:
        self.left = count
        self.taken: list[int] = []

    def __call__(self, made: Request) -> int | None:
        if not self.left:
            return None
        self.left -= 1
        self.taken.append(100 + len(self.taken))
        return self.taken[-1]


def test_a_chunk_that_does_not_end_the_prompt_ends_on_a_block() -> None:
    made = request(100)
    for budget, expected in ((40, 32), (16, 16)):
        chunk, _ = plan_chunk(made, budget, BLOCK, Rows())
        assert chunk is not None
        assert len(chunk.token_ids) == expected
        assert chunk.next_token == made.sequence[expected]
        assert list(chunk.scored_ids) == list(made.sequence[1 : expected + 1])
    assert plan_chunk(made, BLOCK - 1, BLOCK, Rows()) == (None, [])
    made.computed = 96
    chunk, _ = plan_chunk(made, 4, BLOCK, Rows())
    assert chunk is not None
    assert (list(chunk.token_ids), chunk.next_token) == (list(made.sequence[96:100]), None)
    assert list(chunk.scored_ids) == list(made.sequence[97:100])
    assert plan_chunk(made, 3, BLOCK, Rows()) == (None, [])
    made.computed = 80
    assert plan_chunk(made, 15, BLOCK, Rows()) == (None, []), "less than a block, before the prompt's end"


def test_the_last_boundary_becomes_the_first_rolling_checkpoint() -> None:
    made = request(100)
    chunk, checkpoints = plan_chunk(made, 512, BLOCK, Rows())
    assert chunk is not None
    assert checkpoints == []
    assert chunk.state_writes == ((96, 60), (100, 50))
    assert made.prompt_checkpoint == 96


def test_boundary_at_the_prompts_end_is_left_to_the_first_step() -> None:
    for points, ends in (((), ((80, 60), (96, 50))), (((96, USER),), ((96, 100), (96, 50)))):
        made = request(96, points)
        if points:
            made.pending = wanted_checkpoints(made, 0, BLOCK)
            made.promised = {96}
        chunk, checkpoints = plan_chunk(made, 512, BLOCK, Rows())
        assert chunk is not None
        assert sorted(chunk.state_writes) == sorted(ends)
        assert checkpoints == ([(96, 100, USER)] if points else [])
        assert made.prompt_checkpoint == (0 if points else 80)


def test_a_published_checkpoint_at_the_last_boundary_is_not_kept_twice() -> None:
    made = request(100)
    made.pending, made.promised = [PendingCheckpoint(96, USER)], {96}
    chunk, checkpoints = plan_chunk(made, 512, BLOCK, Rows())
    assert chunk is not None
    assert checkpoints == [(96, 100, USER)]
    assert chunk.state_writes == ((96, 100), (100, 50))
    assert made.prompt_checkpoint == 0


def test_rolling_checkpoint_is_used_when_no_row_is_free() -> None:
    made = request(100)
    made.pending, made.promised = [PendingCheckpoint(32, SYSTEM), PendingCheckpoint(96, USER)], {32, 96}
    chunk, checkpoints = plan_chunk(made, 512, BLOCK, Rows(0))
    assert chunk is not None
    assert checkpoints == []
    assert chunk.state_writes == ((96, 60), (100, 50))
    assert made.promised == set(), "no promise remains for a checkpoint that won't come"


def test_a_request_that_does_not_decode_keeps_no_rolling_checkpoint() -> None:
    made = request(100, max_tokens=0)
    chunk, _ = plan_chunk(made, 512, BLOCK, Rows())
    assert chunk is not None
    assert chunk.state_writes == ((100, 50),)
    assert made.prompt_checkpoint == 0


def test_chunks_tile_the_prompt_and_leave_every_wanted_state() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        length = rng.randrange(2, 600)
        start = rng.randrange(0, length) // BLOCK * BLOCK
        offsets = sorted(rng.randrange(length + 1) for _ in range(rng.randrange(4)))
        made = request(length, [(offset, rng.choice([SYSTEM, USER])) for offset in offsets], computed=start)
        made.pending = wanted_checkpoints(made, rng.randrange(length) // BLOCK * BLOCK, BLOCK)
        made.promised = {point.length for point in made.pending}
        expected = [(point.length, point.kind) for point in made.pending]
        assert [length for length, _ in expected] == sorted({length for length, _ in expected}), f"seed {seed}"
        rows, covered = Rows(), start
        states: dict[int, int] = {}
        left: list[tuple[int, CheckpointKind]] = []
        while covered < made.prefill_end:
            budget = rng.randrange(1, 100)
            chunk, checkpoints = plan_chunk(made, budget, BLOCK, rows)
            if chunk is None:
                assert budget < BLOCK, f"seed {seed}: a budget of {budget} reaches the next boundary"
                continue
            assert chunk.start == covered, f"seed {seed}"
            assert chunk.start % BLOCK == 0, f"seed {seed}"
            assert len(chunk.token_ids) <= budget, f"seed {seed}"
            states |= {row: covered + count for count, row in chunk.state_writes}
            left += [(length, kind) for length, _, kind in checkpoints]
            assert all(states[row] == length for length, row, _ in checkpoints), f"seed {seed}"
            covered += len(chunk.token_ids)
            made.computed = covered
            assert states[50] == covered, f"seed {seed}: the running state stays in the request's first row"
        assert covered == made.prefill_end, f"seed {seed}"
        assert left == expected, f"seed {seed}"
        last = (made.prefill_end - 1) // BLOCK * BLOCK
        if last > start and last not in {length for length, _ in expected}:
            assert (made.prompt_checkpoint, states[60]) == (last, last), f"seed {seed}"
