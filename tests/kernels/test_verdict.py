"""Acceptance and truncation of a batch of windows, compared with the rule for a single one."""

from __future__ import annotations

import random

import torch

from agentspec.kernels.reference.verdict import count_matches, truncate
from agentspec.mtp.acceptance import accept
from agentspec.types import STOP_ID, STOP_LENGTH, STOP_RUNNING


def test_batched_acceptance_matches_single_window_rule() -> None:
    generator = random.Random(21)
    for case in range(3000):
        k = generator.randrange(8)
        chosen = [generator.randrange(4) for _ in range(k + 1)]
        drafts = [token if generator.random() < 0.8 else generator.randrange(4) for token in chosen[:k]]
        num_valid, room = generator.choice([k, k, generator.randrange(k + 1)]), generator.randint(1, 10)
        stop_ids = generator.choice([[], [3], [2, 3]])
        chosen_BT, drafts_Bk = torch.tensor([chosen]), torch.tensor([drafts], dtype=torch.int64).view(1, k)
        matched = count_matches(chosen_BT, drafts_Bk, torch.tensor([num_valid]))
        verdict = truncate(
            chosen_BT, matched, torch.tensor([stop_ids + [-1] * (3 - len(stop_ids))]), torch.tensor([room])
        )
        stop = STOP_ID if verdict.hit_stop_id_B.item() else STOP_LENGTH if verdict.hit_limit_B.item() else STOP_RUNNING
        assert not (verdict.hit_stop_id_B & verdict.hit_limit_B).any()
        expected = accept(chosen, drafts, num_valid=num_valid, stop_ids=stop_ids, room=room)
        assert (verdict.num_accepted_B.item(), stop) == expected, (
            f"case {case}: {chosen=} {drafts=} {num_valid=} {stop_ids=} {room=}"
        )


def test_stop_id_at_length_limit_counts_as_stop_id() -> None:
    verdict = truncate(torch.tensor([[5, 9]]), torch.tensor([1]), torch.tensor([[9]]), torch.tensor([2]))
    assert verdict.num_accepted_B.item() == 1
    assert verdict.hit_stop_id_B.item()
    assert not verdict.hit_limit_B.item()
