"""Token runs: equal block ids give equal tokens."""

from __future__ import annotations

import pytest

from agentspec.replay.token_runs import TokenRuns
from tests.replay.builders import runs


def test_block_depends_on_seed_id_and_position() -> None:
    made = TokenRuns(3, 100, 2000)
    assert made.block(7, 512) == made.block(7, 512)
    assert made.block(7, 100) == made.block(7, 512)[:100]
    assert made.block(7, 64) != made.block(8, 64)
    assert made.block(7, 64) != TokenRuns(4, 100, 2000).block(7, 64)
    assert made.block(2**63 - 1, 4).typecode == "i"


def test_token_function_is_fixed() -> None:
    assert TokenRuns(0, 0, 1000).block(1, 4).tolist() == [535, 388, 524, 656]


def test_ids_cover_exactly_their_range() -> None:
    block = TokenRuns(1, 10, 20).block(5, 5000)
    assert set(block) == set(range(10, 20))
    assert all(400 < block.count(token) < 600 for token in range(10, 20))


@pytest.mark.parametrize(("length", "ids"), [(16, [1, 2]), (17, [1, 2, 3]), (1, [9])])
def test_prompt_has_its_length_and_shared_prefix(length: int, ids: list[int]) -> None:
    made = TokenRuns(0, 0, 50_000)
    prompt = made.prompt(runs(length, ids))
    assert len(prompt) == length
    for index, block_id in enumerate(ids):
        part = prompt[index * 8 : index * 8 + 8]
        assert part == made.block(block_id, len(part))


def test_huge_block_size_costs_only_the_prompt_length() -> None:
    made = TokenRuns(0, 0, 50_000)
    assert made.prompt(runs(5, [3], block_size=10**15)) == made.block(3, 5)
