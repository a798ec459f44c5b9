"""The acceptance rule, case by case. tests/kernels compares the tensor implementations with it."""

from __future__ import annotations

import random

import pytest

from agentspec.mtp.acceptance import accept
from agentspec.types import STOP_ID, STOP_LENGTH, STOP_RUNNING


@pytest.mark.parametrize(
    ("chosen", "drafts", "num_valid", "stop_ids", "room", "expected"),
    [
        ([7], [], 0, [], 9, (0, STOP_RUNNING)),
        ([7, 8, 9], [7, 8], 2, [], 9, (2, STOP_RUNNING)),
        ([7, 8, 9], [7, 5], 2, [], 9, (1, STOP_RUNNING)),
        ([7, 8, 9], [5, 8], 2, [], 9, (0, STOP_RUNNING)),
        ([7, 8, 9], [7, 8], 1, [], 9, (1, STOP_RUNNING)),
        ([7, 8], [7], 7, [], 9, (1, STOP_RUNNING)),
        ([7, 8, 9], [7, 8], 2, [8], 9, (1, STOP_ID)),
        ([7, 8, 9], [5, 8], 2, [8], 9, (0, STOP_RUNNING)),
        ([7, 8, 9], [7, 8], 2, [], 2, (1, STOP_LENGTH)),
        ([7, 8, 9], [7, 8], 2, [8], 2, (1, STOP_ID)),
        ([7, 8, 9], [7, 8], 2, [9], 3, (2, STOP_ID)),
        ([7, 8, 9], [7, 8], 2, [], 1, (0, STOP_LENGTH)),
    ],
)
def test_accept_stops_at_first_mismatch_stop_id_or_limit(
    chosen: list[int], drafts: list[int], num_valid: int, stop_ids: list[int], room: int, expected: tuple[int, int]
) -> None:
    assert accept(chosen, drafts, num_valid=num_valid, stop_ids=stop_ids, room=room) == expected


def test_drafts_never_change_emitted_tokens() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        target, stop_ids, limit = [rng.randrange(4) for _ in range(60)], rng.choice([[], [3]]), rng.randint(1, 40)
        plain = target[: next((place + 1 for place, token in enumerate(target[:limit]) if token in stop_ids), limit)]
        emitted: list[int] = []
        stop = STOP_RUNNING
        while stop == STOP_RUNNING:
            k = rng.randrange(8)
            chosen = target[len(emitted) : len(emitted) + k + 1]
            drafts = [token if rng.random() < 0.8 else rng.randrange(4) for token in chosen[:k]]
            accepted, stop = accept(
                chosen, drafts, num_valid=rng.randint(0, k), stop_ids=stop_ids, room=limit - len(emitted)
            )
            emitted += chosen[: accepted + 1]
        assert emitted == plain, f"{seed=}"
        assert (stop == STOP_ID) == (plain[-1] in stop_ids), f"{seed=}"
