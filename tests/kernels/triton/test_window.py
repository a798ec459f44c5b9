"""The Triton kernels that open and commit a window, against the reference, over random slots."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels import triton as triton_backend
from agentspec.kernels.slots import LiveColumns, OutcomeRows, RingWindow, SharedRows, SlotLimits, SlotState, Window
from agentspec.mtp.acceptance import accept
from agentspec.mtp.shared_rows import share_rows
from agentspec.types import STOP_ID, STOP_LENGTH, RingShape

VOCAB_SIZE = 5
"""A small vocabulary, so that drafts often match and stop ids often occur."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots in random reachable states, and the step's choice among them. The last slot is the padding slot."""

    slots_SF: Tensor
    limits_SF: Tensor
    page_table_SP: Tensor
    slot_ids_B: Tensor
    num_columns: int
    block_tokens: int
    ring: RingShape

    @classmethod
    def random(cls, seed: int, device: torch.device) -> Slots:
        generator = random.Random(seed)
        width, num_stop_ids, num_pages = (
            generator.randint(1, 8),
            generator.choice([0, 1, 3, 18]),
            generator.choice([1, 5, 1030]),
        )
        num_slots, block_tokens = generator.randint(2, 6), generator.choice([16, 64])
        fold_tokens = RingShape.of(width, block_tokens).fold_tokens
        slots_SF = torch.zeros(num_slots, SlotState.num_fields(width), dtype=torch.int64)
        limits_SF = torch.full((num_slots, SlotLimits.num_fields(num_stop_ids)), -1, dtype=torch.int64)
        slot, limits = SlotState.of(slots_SF), SlotLimits.of(limits_SF)
        for s in range(num_slots):
            length = block_tokens * generator.randrange(1, 2**25) + generator.choice([0, 1, -1, -2, -5, -9, 7])
            rows = generator.sample(range(2, 200), width + 3)
            slot.active_B[s] = generator.random() < 0.8 and s < num_slots - 1
            slot.length_B[s] = length
            slot.read_row_B[s] = generator.choice(rows)
            fold_length = length // fold_tokens * fold_tokens
            slot.read_length_B[s] = generator.choice([length, length - 1, fold_length, fold_length - fold_tokens])
            slot.num_valid_drafts_B[s] = generator.randint(0, 7)
            slot.checkpoint_rows_B2[s] = torch.tensor(rows[width : width + 2])
            slot.checkpoint_lens_B2[s] = torch.tensor(
                generator.choice([[0, 0], [length // 64 * 64, 0], [fold_length, 64], [640, 64]])
            )
            slot.tokens_BW[s] = torch.tensor([generator.randrange(VOCAB_SIZE) for _ in range(width)])
            slot.write_rows_BW[s] = torch.tensor(rows[:width])
            limits.length_limit_B[s] = length + generator.choice([2, 3, 5, 9, 10**9])
            limits.seed_B[s] = generator.randrange(2**63)
            for place in range(generator.randint(0, min(num_stop_ids, 2))):
                limits.stop_ids_BE[s, place] = generator.randrange(VOCAB_SIZE)
        ids = [
            *generator.sample(range(num_slots - 1), generator.randint(1, num_slots - 1)),
            *[num_slots - 1] * generator.randrange(3),
        ]
        return cls(
            slots_SF=slots_SF.to(device),
            limits_SF=limits_SF.to(device),
            page_table_SP=torch.arange(num_slots * num_pages, dtype=torch.int32).view(num_slots, num_pages).to(device),
            slot_ids_B=torch.tensor(ids, device=device),
            num_columns=generator.randint(1, width),
            block_tokens=block_tokens,
            ring=RingShape.of(width, block_tokens),
        )

    @property
    def width(self) -> int:
        return SlotState.of(self.slots_SF).tokens_BW.shape[1]

    def shared(self, seed: int) -> SharedRows:
        """Rows for a part of the windows' columns, chosen at random."""
        generator = random.Random(f"rows {seed}")
        own_columns = generator.randint(1, self.width)
        return SharedRows(len(self.slot_ids_B) * generator.randint(own_columns, self.width), own_columns)

    def live_columns(self, shared: SharedRows) -> list[int]:
        """By the rule."""
        slot = SlotState.of(self.slots_SF[self.slot_ids_B])
        wanted = (1 + slot.num_valid_drafts_B.clamp(max=self.width - 1)) * (slot.active_B > 0)
        return share_rows(wanted.tolist(), num_rows=shared.num_rows, own_columns=shared.own_columns)


def check_open_window(seed: int, device: torch.device, *, has_ring: bool = False) -> None:
    case = Slots.random(seed, device)
    ring = case.ring if has_ring else None
    check_window(case, seed, case.num_columns, ring, None)


def check_shared_rows(seed: int, device: torch.device) -> tuple[bool, bool]:
    """Return whether there were too few rows for all columns, and whether there were dead ones."""
    case = Slots.random(seed, device)
    shared = case.shared(seed)
    got = check_window(case, seed, case.width, case.ring, shared)
    assert got.live is not None
    counts = case.live_columns(shared)
    assert got.live.count_B.tolist() == counts, f"{seed=}"
    cells = [(place, t) for place, count in enumerate(counts) for t in range(count)]
    for row, (place, t) in enumerate(cells):
        assert got.live.cell_N[row] == place * case.width + t, f"{seed=}"
        assert got.live.row_BT[place, t] == row, f"{seed=}"
        assert got.live.token_N[row] == got.tokens_BT[place, t], f"{seed=}"
        assert got.ring is not None
        assert got.live.entry_N[row] == got.ring.entries_BT[place, t], f"{seed=}"
    assert got.live.row_BT.min() >= 0
    assert got.live.row_BT.max() < shared.num_rows
    padding = (got.live.entry_N[len(cells) :] // case.ring.capacity).tolist()
    assert padding == [len(case.slots_SF) - 1] * len(padding), f"{seed=}: a dead row has an entry of a slot"
    rows_suffice = counts == case.live_columns(SharedRows(10**6, 0))
    return not rows_suffice, bool(padding)


def check_window(case: Slots, seed: int, num_columns: int, ring: RingShape | None, shared: SharedRows | None) -> Window:
    arguments = (case.slots_SF, case.page_table_SP, case.slot_ids_B, num_columns, ring, shared)
    got, expected = triton_backend.open_window(*arguments), reference.open_window(*arguments)
    has_ring = ring is not None
    assert (got.live is not None) == (shared is not None)
    assert (got.ring is not None) == has_ring
    tensors = {
        field: (getattr(got, field), getattr(expected, field))
        for field in ("tokens_BT", "start_B", "read_row_B", "write_rows_BT", "page_table_BP")
    }
    if has_ring:
        tensors |= {field: (getattr(got.ring, field), getattr(expected.ring, field)) for field in RingWindow.__slots__}
    if shared is not None:
        tensors |= {field: (getattr(got.live, field), getattr(expected.live, field)) for field in LiveColumns.__slots__}
    for field, (tensor, wanted) in tensors.items():
        assert tensor.dtype == wanted.dtype, f"{seed=} {field}"
        assert torch.equal(tensor, wanted), f"{seed=} {field}"
    return got


def check_commit_window(
    seed: int, forced: bool, device: torch.device, *, has_ring: bool = False, is_shared: bool = False
) -> set[int]:
    """Commit, then publish drafts. Return the stop reasons of the step's slots, and -1 if a slot took a checkpoint."""
    case, generator = Slots.random(seed, device), torch.Generator().manual_seed(seed)
    live = None
    if is_shared:
        case = replace(case, num_columns=case.width)
        opened = (case.slots_SF, case.page_table_SP, case.slot_ids_B, case.width, case.ring, case.shared(seed))
        live = reference.open_window(*opened).live
    num_slots, num_drafts = len(case.slot_ids_B), case.num_columns - 1
    chosen_BT = torch.randint(VOCAB_SIZE, (num_slots, case.num_columns), generator=generator)
    drafts = SlotState.of(case.slots_SF[case.slot_ids_B]).tokens_BW.cpu()[:, 1 : case.num_columns]
    chosen_BT[:, :-1] = torch.where(torch.rand(drafts.shape, generator=generator) < 0.8, drafts, chosen_BT[:, :-1])
    chosen_BT = chosen_BT.to(device)
    rate_K = torch.rand(7, generator=generator).mul(1.5).clamp(max=1).to(device)
    num_made = min(num_drafts + seed % 3, SlotState.of(case.slots_SF).tokens_BW.shape[1] - 1)
    drafts_Bk = torch.randint(VOCAB_SIZE, (num_slots, num_made), generator=generator).to(device)
    num_valid_B = torch.randint(num_made + 1, (num_slots,), generator=generator).to(device) if seed % 2 else None
    was_active_B = SlotState.of(case.slots_SF[case.slot_ids_B]).active_B > 0

    after = {}
    for name, backend in (("triton", triton_backend), ("reference", reference)):
        slots_SF, tokens_BT = case.slots_SF.clone(), chosen_BT
        if forced:
            tokens_BT = backend.force_acceptance(slots_SF, case.limits_SF, case.slot_ids_B, chosen_BT, rate_K, live)
        forced_SF = slots_SF.clone()
        commit = backend.commit_window(
            slots_SF,
            case.limits_SF,
            case.slot_ids_B,
            tokens_BT,
            block_tokens=case.block_tokens,
            ring=case.ring if has_ring else None,
            live=live,
        )
        backend.publish_drafts(slots_SF, case.slot_ids_B, commit.outcome_BF, drafts_Bk, num_valid_B)
        OutcomeRows.of(commit.outcome_BF).tokens_BT.masked_fill_(~was_active_B[:, None], 0)
        after[name] = (
            slots_SF,
            commit.outcome_BF,
            commit.draft_start_B,
            commit.num_accepted_B * was_active_B,
            commit.later_TB * was_active_B,
            forced_SF,
            tokens_BT,
        )
    for got, expected in zip(after["triton"], after["reference"], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda text: f"{seed=} {forced=}: {text}")
    slots_SF, outcome_BF, *_ = after["triton"]
    if not forced:
        counts = None if live is None else live.count_B.tolist()
        check_acceptance_rule(case, chosen_BT, OutcomeRows.of(outcome_BF), f"{seed=}", counts)
    took_checkpoint = not torch.equal(
        SlotState.of(slots_SF).checkpoint_rows_B2, SlotState.of(case.slots_SF).checkpoint_rows_B2
    )
    return set(OutcomeRows.of(outcome_BF).stop_B[was_active_B].tolist()) | ({-1} if took_checkpoint else set())


def check_acceptance_rule(
    case: Slots, chosen_BT: Tensor, outcome: OutcomeRows[Tensor], what: str, counts: list[int] | None = None
) -> None:
    """Check each active slot's accepted count and stop reason against mtp/acceptance.py. counts: live columns of each
    slot; None: all are."""
    for place, slot_id in enumerate(case.slot_ids_B.tolist()):
        slot, limits = SlotState.of(case.slots_SF[slot_id, None]), SlotLimits.of(case.limits_SF[slot_id, None])
        if slot.active_B.item():
            num_valid = int(slot.num_valid_drafts_B.item())
            if counts is not None:
                num_valid = min(num_valid, counts[place] - 1)
            expected = accept(
                chosen_BT[place].tolist(),
                slot.tokens_BW[0, 1 : case.num_columns].tolist(),
                num_valid=num_valid,
                stop_ids=limits.stop_ids_BE[0].tolist(),
                room=int((limits.length_limit_B - slot.length_B - 1).item()),
            )
            assert (outcome.num_accepted_B[place].item(), outcome.stop_B[place].item()) == expected, what


@pytest.mark.parametrize("has_ring", [False, True], ids=["rows", "ring"])
def test_open_window_matches_reference(has_ring: bool, device: torch.device) -> None:
    for seed in range(20):
        check_open_window(seed, device, has_ring=has_ring)


def test_live_columns_follow_the_rule(device: torch.device) -> None:
    met = {check_shared_rows(seed, device) for seed in range(20)}
    assert {True, False} == {are_few for are_few, _ in met} == {has_dead for _, has_dead in met}


@pytest.mark.parametrize(
    ("forced", "num_cases", "has_ring", "is_shared"),
    [
        pytest.param(False, 40, False, False, id="chosen"),
        pytest.param(True, 20, False, False, id="forced"),
        pytest.param(False, 60, True, False, id="ring"),
        pytest.param(False, 60, True, True, id="live columns"),
        pytest.param(True, 40, True, True, id="live columns, forced"),
    ],
)
def test_commit_window_matches_reference(
    forced: bool, num_cases: int, has_ring: bool, is_shared: bool, device: torch.device
) -> None:
    met: set[int] = set()
    for seed in range(num_cases):
        met |= check_commit_window(seed, forced, device, has_ring=has_ring, is_shared=is_shared)
    assert met == {-1, 0, STOP_ID, STOP_LENGTH}
