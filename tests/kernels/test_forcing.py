"""Forced acceptance of a batch of windows: rates, drafts that are never accepted, and the commit that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.reference import commit_window, force_acceptance
from agentspec.kernels.slots import OutcomeRows, SlotLimits, SlotState

CHOSEN, DRAFTS = [1, 2, 3, 4], [10, 20, 30]


def forced(
    num_slots: int, rates: list[float], *, drafts: list[int] = DRAFTS, num_valid: int = 3, active: int = 1
) -> tuple[Tensor, Tensor, OutcomeRows[Tensor]]:
    """Force and commit windows of slots that differ in their seeds only. Return (slots_SF after forcing, forced
    tokens, the commit's outcome)."""
    slots_SF, limits_SF = (
        torch.zeros(num_slots, SlotState.num_fields(4), dtype=torch.int64),
        torch.full((num_slots, SlotLimits.num_fields(1)), -1),
    )
    slot, limits = SlotState.of(slots_SF), SlotLimits.of(limits_SF)
    slot.active_B.fill_(active)
    slot.length_B.fill_(5)
    slot.num_valid_drafts_B.fill_(num_valid)
    slot.tokens_BW[:, 1:] = torch.tensor(drafts)
    slot.write_rows_BW[:] = torch.arange(2, 6)
    limits.seed_B.copy_(torch.arange(num_slots) * 7919)
    limits.length_limit_B.fill_(10**6)
    ids_B, chosen_BT = torch.arange(num_slots), torch.tensor(CHOSEN).repeat(num_slots, 1)
    forced_BT = force_acceptance(slots_SF, limits_SF, ids_B, chosen_BT, torch.tensor(rates))
    after_SF = slots_SF.clone()
    commit = commit_window(slots_SF, limits_SF, ids_B, forced_BT, block_tokens=64)
    return after_SF, forced_BT, OutcomeRows.of(commit.outcome_BF)


def test_forced_drafts_replace_chosen_tokens_and_next_token_is_target() -> None:
    _, forced_BT, outcome = forced(200, [0.7, 0.7, 0.7])
    num_accepted = outcome.num_accepted_B.tolist()
    assert set(num_accepted) == {0, 1, 2, 3}
    assert forced_BT.tolist() == [[*DRAFTS[:count], *CHOSEN[count:]] for count in num_accepted]
    assert torch.equal(outcome.tokens_BT, forced_BT)
    assert set(outcome.num_offered_B.tolist()) == {3}


def test_forced_rates_are_conditional_on_earlier_drafts() -> None:
    _, _, outcome = forced(4000, [0.8, 0.5, 0.5])
    counts = torch.bincount(outcome.num_accepted_B, minlength=4)
    # Six standard deviations of 4,000 windows.
    assert all(
        abs(count - 4000 * share) < 6 * 4000**0.5 / 2
        for count, share in zip(counts.tolist(), (0.2, 0.4, 0.2, 0.2), strict=True)
    )


def test_forced_rates_0_and_1_are_exact() -> None:
    _, _, outcome = forced(3000, [1.0, 0.0, 1.0])
    assert set(outcome.num_accepted_B.tolist()) == {1}


def test_forced_rate_0_rejects_matching_draft() -> None:
    _, _, outcome = forced(50, [0.0, 1.0, 1.0], drafts=CHOSEN[:3])
    assert set(outcome.num_accepted_B.tolist()) == {0}


def test_stale_drafts_are_never_accepted() -> None:
    _, _, outcome = forced(50, [1.0, 1.0, 1.0], num_valid=2)
    assert set(outcome.num_accepted_B.tolist()) == {2}
    assert set(outcome.num_offered_B.tolist()) == {2}


def test_forcing_leaves_inert_slot_unchanged() -> None:
    slots_SF, forced_BT, outcome = forced(3, [1.0, 0.0, 1.0], active=0)
    assert SlotState.of(slots_SF).tokens_BW[:, 1:].tolist() == [DRAFTS] * 3
    assert forced_BT.tolist() == [CHOSEN] * 3
    assert set(outcome.num_emitted_B.tolist()) == {0}
