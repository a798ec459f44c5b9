"""The Triton kernels of the copy drafter against the reference, over random slots and texts."""

from __future__ import annotations

import random

import pytest
import torch

from agentspec.kernels import reference
from agentspec.kernels import triton as triton_backend
from agentspec.kernels.slots import OutcomeRows
from agentspec.kernels.triton import copies
from agentspec.kernels.triton.launch import arrival_counters
from tests.kernels.test_copies import Texts


def check_copies(case: Texts, device: torch.device, what: str) -> None:
    """Append and draft with both backends; all counters must be zero again."""
    after = []
    for backend in (triton_backend, reference):
        text_SL = case.text_SL.clone()
        backend.append_text(text_SL, case.slot_ids_B, case.outcome_BF)
        drafted = backend.draft_copies(
            text_SL,
            case.slot_ids_B,
            case.outcome_BF,
            case.drafts_Bk,
            num_copies=case.num_copies,
            min_match=case.min_match,
        )
        after.append((text_SL, *drafted))
    for got, expected in zip(*after, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")
    assert not arrival_counters(device).any(), what


def check_random_copies(seed: int, device: torch.device, *, max_length: int) -> None:
    check_copies(Texts.random(seed, device, max_length=max_length), device, f"{seed=} {max_length=}")


@pytest.mark.parametrize(("max_length", "num_cases"), [(1, 10), (12, 40), (70, 60)])
def test_copies_match_reference(max_length: int, num_cases: int, device: torch.device) -> None:
    for seed in range(num_cases):
        check_random_copies(seed, device, max_length=max_length)


@pytest.mark.parametrize("most_programs", [1, 8, 2048])
def test_blocks_of_a_text_share_few_or_many_programs(
    most_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_MOST_PROGRAMS", most_programs)
    monkeypatch.setattr(copies, "_BLOCK", 32)
    for seed in range(40):
        check_random_copies(100 + seed, device, max_length=random.Random(seed).choice([63, 64, 65, 400]))


def test_texts_of_several_full_blocks_match_reference(device: torch.device) -> None:
    for seed in range(12):
        check_random_copies(200 + seed, device, max_length=3 * copies._BLOCK + seed)


@pytest.mark.parametrize("most_programs", [1, 2])
def test_only_match_is_found_wherever_it_ends(
    most_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_MOST_PROGRAMS", most_programs)
    monkeypatch.setattr(copies, "_BLOCK", 16)
    for end in [*range(2, 6), *range(14, 18), *range(30, 34), *range(46, 50)]:
        for distance in (1, 2, 20):
            text = list(range(100, 100 + end + distance + 1))
            for place in range(len(text) - 3, len(text)):
                text[place] = text[place - distance]
            outcome_BF = torch.zeros(1, OutcomeRows.num_fields(1), dtype=torch.int64)
            outcome = OutcomeRows.of(outcome_BF)
            outcome.num_emitted_B[0], outcome.length_B[0], outcome.tokens_BT[0, 0] = 1, len(text) - 1, text[-1]
            case = Texts(
                text_SL=torch.tensor([text], dtype=torch.int32).to(device),
                slot_ids_B=torch.zeros(1, dtype=torch.int64, device=device),
                outcome_BF=outcome_BF.to(device),
                drafts_Bk=torch.zeros(1, 0, dtype=torch.int64, device=device),
                num_copies=5,
                min_match=3,
            )
            check_copies(case, device, f"{end=} {distance=}")
            assert text[end - 2 : end + 1] == text[-3:], "the match is not where the test says"
