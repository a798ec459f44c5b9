"""The copy rule, case by case. tests/kernels compares the tensor implementations with it."""

from __future__ import annotations

import random

import pytest

from agentspec.mtp.copies import draft_copies
from agentspec.types import MAX_COPY_MATCH


@pytest.mark.parametrize(
    ("text", "drafts", "min_match", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], [], 3, ([4, 5, 1, 2], 3), id="what followed before"),
        pytest.param([1, 2, 3, 4, 5, 1], [2, 3], 3, ([4, 5, 1, 2], 3), id="drafts are part of the match"),
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], [], 4, ([], 0), id="match too short"),
        pytest.param([9, 2, 3, 4, 5, 6, 7, 2, 3], [], 2, ([4, 5, 6, 7], 2), id="match just long enough"),
        pytest.param([1, 2, 3, 4], [], 1, ([], 0), id="no match"),
        pytest.param([1], [], 1, ([], 0), id="one token"),
        pytest.param([1], [1], 1, ([1, 1, 1, 1], 1), id="one token and a draft"),
        pytest.param([], [], 1, ([], 0), id="no text"),
        pytest.param([7, 3, 1, 1, 7, 3, 2, 2, 7, 3], [], 2, ([2, 2, 7, 3], 2), id="most recent of equally long"),
        pytest.param([8, 7, 3, 1, 1, 7, 3, 2, 8, 7, 3], [], 2, ([1, 1, 7, 3], 3), id="longer before more recent"),
        pytest.param([5, 1, 2, 3, 1, 2, 3], [], 3, ([1, 2, 3, 1], 3), id="text repeats with period 3"),
        pytest.param([5, 1, 2, 3, 1], [2, 3], 2, ([1, 2, 3, 1], 3), id="drafts end the first repetition"),
        pytest.param([5, 4, 4, 4, 4], [], 2, ([4, 4, 4, 4], 3), id="one token repeats, places overlap"),
        pytest.param([5, 6], [7, 5, 6], 2, ([7, 5, 6, 7], 2), id="copies begin in the drafts"),
        pytest.param([5], [8, 9, 8, 9], 2, ([8, 9, 8, 9], 2), id="match inside the drafts"),
    ],
)
def test_copies_are_what_followed_the_longest_latest_match(
    text: list[int], drafts: list[int], min_match: int, expected: tuple[list[int], int]
) -> None:
    assert draft_copies(text, drafts, num_copies=4, min_match=min_match) == expected


def test_matches_beyond_the_longest_that_counts_are_equally_long() -> None:
    repeated = list(range(MAX_COPY_MATCH + 9))
    text = [*repeated, 100, *repeated[8:], 200, *repeated]
    assert draft_copies(text, [], num_copies=1, min_match=8) == ([200], MAX_COPY_MATCH)
    text = [*repeated, 100, *repeated[10:], 200, *repeated]
    assert draft_copies(text, [], num_copies=1, min_match=8) == ([100], MAX_COPY_MATCH)


def test_copies_equal_a_search_for_ever_shorter_suffixes() -> None:
    num_found = 0
    for seed in range(400):
        rng = random.Random(seed)
        alphabet, num_drafts, min_match = rng.randint(1, 3), rng.randrange(4), rng.choice([1, 2, 4, 8, MAX_COPY_MATCH])
        text = [rng.randrange(alphabet) for _ in range(rng.randint(4, 90))]
        places = [
            (length, end)
            for length in range(min(len(text) - 1, MAX_COPY_MATCH), min_match - 1, -1)
            for end in range(len(text) - 2, length - 2, -1)
            if text[end - length + 1 : end + 1] == text[-length:]
        ]
        expected: tuple[list[int], int] = ([], 0)
        if places:
            num_found += 1
            length, end = places[0]
            expected = ((text[end + 1 :] * 20)[:20], length)
        first_draft = len(text) - num_drafts
        got = draft_copies(text[:first_draft], text[first_draft:], num_copies=20, min_match=min_match)
        assert got == expected, f"{seed=}"
    assert 100 < num_found < 400
