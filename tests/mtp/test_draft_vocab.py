"""The draft vocabulary: its size, its tokens, and refused settings."""

from __future__ import annotations

import random

import pytest

from agentspec.errors import ConfigError
from agentspec.mtp.draft_vocab import choose_draft_ids, draft_vocab_size


@pytest.mark.parametrize(
    ("asked", "num_real_tokens", "size"),
    [
        (None, 248_077, 32_768),
        (None, 65_537, 32_768),
        (None, 65_536, 65_536),
        (None, 4096, 4096),
        (0, 248_077, 248_077),
        (0, 4096, 4096),
        (64, 248_077, 64),
        (4096, 4096, 4096),
    ],
)
def test_draft_vocab_size_default_and_override(asked: int | None, num_real_tokens: int, size: int) -> None:
    assert draft_vocab_size(asked, num_real_tokens=num_real_tokens) == size


def test_size_larger_than_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab=4097: the model has 4096 tokens"):
        draft_vocab_size(4097, num_real_tokens=4096)


def test_without_counts_lowest_ids_are_chosen() -> None:
    assert choose_draft_ids({}, size=6, num_real_tokens=100, always=()) == [0, 1, 2, 3, 4, 5]
    assert choose_draft_ids({}, size=6, num_real_tokens=100, always=(99, 2, 98)) == [0, 1, 2, 3, 98, 99]


def test_highest_counts_first_then_lowest_id() -> None:
    counts = {50: 7, 40: 7, 60: 8, 3: 1, 30: 7}
    assert choose_draft_ids(counts, size=1, num_real_tokens=100, always=()) == [60]
    assert choose_draft_ids(counts, size=3, num_real_tokens=100, always=()) == [30, 40, 60]
    assert choose_draft_ids(counts, size=8, num_real_tokens=100, always=(97,)) == [0, 1, 3, 30, 40, 50, 60, 97]


def test_required_ids_count_towards_size() -> None:
    """Padding ids in `always` are ignored: they are no real tokens."""
    assert choose_draft_ids({5: 1, 9: 3}, size=2, num_real_tokens=10, always=(9, 5, 10, 11)) == [5, 9]
    with pytest.raises(ConfigError, match=r"draft_vocab=2: must be at least 3"):
        choose_draft_ids({}, size=2, num_real_tokens=10, always=(7, 8, 9))


def test_random_counts_choose_optimal_ids() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        num_real_tokens = rng.randint(1, 200)
        counts = {rng.randrange(num_real_tokens): rng.randrange(4) for _ in range(rng.randint(0, 150))}
        always = rng.sample(range(num_real_tokens), rng.randint(0, min(5, num_real_tokens)))
        size = rng.randint(max(1, len(always)), num_real_tokens)
        chosen = choose_draft_ids(counts, size=size, num_real_tokens=num_real_tokens, always=always)
        assert chosen == sorted(set(chosen)), seed
        assert len(chosen) == size, seed
        assert set(always) <= set(chosen) <= set(range(num_real_tokens)), seed
        free, left = set(chosen) - set(always), set(range(num_real_tokens)) - set(chosen)
        if free and left:
            assert max((-counts.get(token, 0), token) for token in free) < min(
                (-counts.get(token, 0), token) for token in left
            ), seed
