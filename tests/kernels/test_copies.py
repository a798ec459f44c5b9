"""The copy drafter's tensor operations, over random slots and texts, compared with the rule for one slot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.slots import OutcomeRows
from agentspec.mtp import copies
from agentspec.types import MAX_COPY_MATCH


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts of slots before a step's tokens are appended, and the step's outcome and drafts. The last slot is the
    padding slot, which is inert and may occur several times."""

    text_SL: Tensor
    slot_ids_B: Tensor
    outcome_BF: Tensor
    drafts_Bk: Tensor
    num_copies: int
    min_match: int

    @classmethod
    def random(cls, seed: int, device: torch.device, *, max_length: int) -> Texts:
        rng = random.Random(seed)
        num_drafts, num_columns, num_slots = rng.randrange(5), rng.randint(1, 8), rng.randint(2, 5)
        width = max_length + rng.choice([0, 1, 5, 16, 200])
        ids = [
            *rng.sample(range(num_slots - 1), rng.randint(1, num_slots - 1)),
            *[num_slots - 1] * rng.randrange(3),
        ]
        # All that is behind the end of a text, and of other slots, is as likely to match as the text.
        text_SL = torch.tensor([repetitive(rng, width) for _ in range(num_slots)], dtype=torch.int32)
        outcome_BF = torch.randint(0, 9, (len(ids), OutcomeRows.num_fields(num_columns)))
        outcome, drafts_Bk = OutcomeRows.of(outcome_BF), torch.zeros(len(ids), num_drafts, dtype=torch.int64)
        outcome.num_emitted_B.zero_()
        for place, slot in enumerate(ids):
            text_length = rng.choice([rng.randint(1, max_length), rng.randint(1, min(9, max_length)), max_length])
            outcome.length_B[place] = text_length - 1
            # Half of the drafts repeat the last tokens, so that matches also end in the drafts.
            start = rng.choice([rng.randrange(text_length), text_length - rng.randint(1, min(3, text_length))])
            drafts = (text_SL[slot, start:text_length].tolist() * num_drafts)[:num_drafts]
            drafts_Bk[place, : len(drafts)] = torch.tensor([token if rng.random() < 0.9 else 2 for token in drafts])
            if slot < num_slots - 1 and rng.random() < 0.8:
                num_emitted = rng.randint(1, min(num_columns, text_length))
                outcome.num_emitted_B[place] = num_emitted
                not_yet_stored = text_SL[slot, text_length - num_emitted : text_length]
                outcome.tokens_BT[place, :num_emitted] = not_yet_stored
                not_yet_stored.fill_(-7)
        return cls(
            text_SL=text_SL.to(device),
            slot_ids_B=torch.tensor(ids, device=device),
            outcome_BF=outcome_BF.to(device),
            drafts_Bk=drafts_Bk.to(device).t().contiguous().t() if rng.random() < 0.5 else drafts_Bk.to(device),
            num_copies=rng.choice([1, 3, 12]),
            min_match=rng.choice([1, 2, 6, 8, 8, MAX_COPY_MATCH]),
        )

    def rows(self) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """For each place in the step: its slot, first position that is stored to, emitted tokens, drafts."""
        outcome = OutcomeRows.of(self.outcome_BF)
        for place, slot in enumerate(self.slot_ids_B.tolist()):
            num_emitted = int(outcome.num_emitted_B[place])
            yield (
                slot,
                int(outcome.length_B[place]) - num_emitted + 1,
                outcome.tokens_BT[place, :num_emitted].tolist(),
                self.drafts_Bk[place].tolist(),
            )


def repetitive(rng: random.Random, length: int) -> list[int]:
    """Random tokens, and pieces of what came before."""
    alphabet, text = rng.choice([1, 2, 4, 4, 50]), [0]
    while len(text) < length:
        if rng.random() < 0.6:
            start = rng.randrange(len(text))
            text += text[start : start + rng.choice([2, 7, 20, 60])]
        else:
            text += [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 5]))]
    return text[:length]


def test_append_text_stores_emitted_tokens_and_nothing_else() -> None:
    for seed in range(60):
        case = Texts.random(seed, torch.device("cpu"), max_length=40)
        expected_SL = case.text_SL.clone()
        for slot, first, emitted, _ in case.rows():
            expected_SL[slot, first : first + len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        reference.append_text(case.text_SL, case.slot_ids_B, case.outcome_BF)
        assert torch.equal(case.text_SL, expected_SL), f"{seed=}"


def test_draft_copies_equals_the_rule_for_one_slot() -> None:
    met: set[int] = set()
    for seed in range(400):
        case = Texts.random(seed, torch.device("cpu"), max_length=random.Random(seed).choice([1, 6, 40, 150]))
        reference.append_text(case.text_SL, case.slot_ids_B, case.outcome_BF)
        copies_Bc, num_copies_B = reference.draft_copies(
            case.text_SL,
            case.slot_ids_B,
            case.outcome_BF,
            case.drafts_Bk,
            num_copies=case.num_copies,
            min_match=case.min_match,
        )
        assert copies_Bc.dtype == num_copies_B.dtype == torch.int64
        for place, (slot, first, emitted, drafts) in enumerate(case.rows()):
            text = case.text_SL[slot, : first + len(emitted)].tolist()
            expected, length = (
                copies.draft_copies(text, drafts, num_copies=case.num_copies, min_match=case.min_match)
                if emitted
                else ([], 0)
            )
            met.add(length)
            assert num_copies_B[place] == len(expected), f"{seed=} {place=}"
            assert copies_Bc[place].tolist() == (expected or [0] * case.num_copies), f"{seed=} {place=}"
    assert met >= {0, *range(1, 13), MAX_COPY_MATCH}, f"match lengths {met}"


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_stale_tokens_behind_the_text_are_not_copied(num_drafts: int) -> None:
    text_SL = torch.tensor([[1, 2, 3, 4, 5, 6, 9, 4, 5, 6, 7, 9, 4, 5, 6, 8, 2, 3, 4, 5, 6]], dtype=torch.int32)
    drafts_Bk, outcome_BF = torch.tensor([[5, 6]])[:, :num_drafts], torch.zeros(1, OutcomeRows.num_fields(1)).long()
    OutcomeRows.of(outcome_BF).num_emitted_B.fill_(1)
    OutcomeRows.of(outcome_BF).length_B.fill_(9 - num_drafts)
    copies_Bc, num_copies_B = reference.draft_copies(
        text_SL, torch.tensor([0]), outcome_BF, drafts_Bk, num_copies=3, min_match=3
    )
    assert (copies_Bc.tolist(), num_copies_B.tolist()) == ([[9, 4, 5]], [3])
