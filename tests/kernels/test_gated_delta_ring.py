"""Slots with rings against slots with a row after every column: the same bits, over many steps of random sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from agentspec.kernels import DeltaRing, DeltaWeights, reference
from agentspec.kernels.slots import SlotLimits, SlotState
from agentspec.types import BLOCK_TOKENS, SCRATCH_ROW, ZERO_ROW, RingShape, rows_of_request

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
NUM_SLOTS = 3
DRAFT, OTHER = 7, 8


def delta_weights(seed: int) -> DeltaWeights:
    rng = torch.Generator().manual_seed(seed)
    return DeltaWeights(
        conv_C4=torch.randn(CHANNELS, 4, generator=rng),
        a_log_V=torch.empty(VALUE_HEADS).uniform_(0.05, 4.0, generator=rng).log(),
        dt_bias_V=torch.randn(VALUE_HEADS, generator=rng),
        norm_D=torch.randn(VALUE_DIM, generator=rng),
        eps=1e-6,
        gate="silu",
    )


@dataclass
class Slots:
    """Running requests of one state form: their slots, and the pools of one layer."""

    width: int
    ring: RingShape | None
    lengths: list[int]
    """Of the prompts."""
    slots_SF: Tensor = field(init=False)
    limits_SF: Tensor = field(init=False)
    ssm: Tensor = field(init=False)
    conv: Tensor = field(init=False)
    entries: DeltaRing = field(init=False)

    def __post_init__(self) -> None:
        rows_each = rows_of_request(self.width - 1, has_ring=self.ring is not None)
        num_rows = 2 + NUM_SLOTS * rows_each
        self.slots_SF = torch.zeros(NUM_SLOTS + 1, SlotState.num_fields(self.width), dtype=torch.int64)
        slot = SlotState.of(self.slots_SF)
        slot.write_rows_BW.fill_(SCRATCH_ROW)
        own = torch.arange(2, num_rows).view(NUM_SLOTS, rows_each)
        length = torch.tensor(self.lengths)
        slot.active_B[:NUM_SLOTS] = 1
        slot.length_B[:NUM_SLOTS] = length
        slot.read_length_B[:NUM_SLOTS] = length
        slot.read_row_B[:NUM_SLOTS] = own[:, 0]
        slot.checkpoint_rows_B2[:NUM_SLOTS] = own[:, -2:]
        slot.write_rows_BW[:NUM_SLOTS, : rows_each - 2] = own[:, :-2]
        slot.tokens_BW[:, 1:] = DRAFT
        self.limits_SF = torch.full((NUM_SLOTS + 1, SlotLimits.num_fields(1)), -1)
        SlotLimits.of(self.limits_SF).length_limit_B.fill_(2**40)
        rng = torch.Generator().manual_seed(1)
        self.ssm = torch.full((num_rows, VALUE_HEADS, VALUE_DIM, KEY_DIM), torch.nan)
        self.conv = torch.full((num_rows, 3, CHANNELS), torch.nan)
        for pool in (self.ssm, self.conv):
            pool[ZERO_ROW] = 0
            pool[own[:, 0]] = torch.randn(NUM_SLOTS, *pool.shape[1:], generator=rng)
        num_entries = 1 if self.ring is None else self.ring.capacity
        self.entries = DeltaRing(
            *(
                torch.full((NUM_SLOTS + 1, num_entries, *shape), torch.nan)
                for shape in ((KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM), (VALUE_HEADS,), (CHANNELS,))
            )
        )

    def verify(self, projected_NP: Tensor, weights: DeltaWeights, slot_ids_B: Tensor, num_columns: int) -> Tensor:
        pages = torch.zeros(NUM_SLOTS + 1, 1, dtype=torch.int32)
        window = reference.open_window(self.slots_SF, pages, slot_ids_B, num_columns, self.ring)
        if window.ring is None:
            return reference.gated_delta_step(
                projected_NP, weights, self.ssm, self.conv, window.read_row_B, window.write_rows_BT
            )
        return reference.gated_delta_ring_step(
            projected_NP, weights, self.ssm, self.conv, self.entries, window.read_row_B, window.ring
        )

    def commit(self, chosen_BT: Tensor, slot_ids_B: Tensor) -> None:
        slot = SlotState.of(self.slots_SF)
        slot.num_valid_drafts_B.fill_(chosen_BT.shape[1] - 1)
        reference.commit_window(
            self.slots_SF, self.limits_SF, slot_ids_B, chosen_BT, block_tokens=BLOCK_TOKENS, ring=self.ring
        )
        slot.tokens_BW[:, 1:] = DRAFT


@pytest.mark.parametrize("width", [1, 4, 8])
def test_rings_give_the_bits_of_rows(width: int) -> None:
    seed = width
    print(f"seed {seed}")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = delta_weights(seed)
    lengths = [rng.choice([1, 2, 15, 16, 17, 63, 64, 65, rng.randint(1, 200)]) for _ in range(NUM_SLOTS)]
    ring = RingShape.of(16)
    rows, rings = Slots(width, None, lengths), Slots(width, ring, lengths)
    states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    num_folds = num_checkpoints = 0
    for _ in range(150):
        num_columns = rng.randint(1, width)
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        slot_ids_B = torch.tensor([*slots, NUM_SLOTS])
        projected = torch.randn(
            len(slot_ids_B) * num_columns, CHANNELS + VALUE_HEADS * (VALUE_DIM + 2), generator=generator
        )
        starts = SlotState.of(rows.slots_SF).length_B.tolist()
        written = SlotState.of(rows.slots_SF).write_rows_BW.tolist()
        num_real = len(slots) * num_columns
        expected = rows.verify(projected, weights, slot_ids_B, num_columns)[:num_real]
        got = rings.verify(projected, weights, slot_ids_B, num_columns)[:num_real]
        assert torch.equal(got, expected)
        for slot in slots:
            for column in range(num_columns):
                row = written[slot][column]
                states[slot, starts[slot] + column + 1] = rows.ssm[row].clone(), rows.conv[row].clone()
        chosen = torch.full((len(slot_ids_B), num_columns), OTHER)
        for place in range(len(slots)):
            chosen[place, : rng.randrange(num_columns)] = DRAFT
        before = SlotState.of(rings.slots_SF).read_length_B.clone()
        for form in (rows, rings):
            form.commit(chosen, slot_ids_B)
        of_rows, of_rings = SlotState.of(rows.slots_SF), SlotState.of(rings.slots_SF)
        assert torch.equal(of_rings.length_B, of_rows.length_B)
        for slot in slots:
            if of_rings.read_length_B[slot] > before[slot]:
                num_folds += 1
                length, row = int(of_rings.read_length_B[slot]), int(of_rings.read_row_B[slot])
                assert length % ring.fold_tokens == 0
                assert torch.equal(rings.ssm[row], states[slot, length][0])
                assert torch.equal(rings.conv[row], states[slot, length][1])
            for row, length in zip(
                of_rings.checkpoint_rows_B2[slot].tolist(), of_rings.checkpoint_lens_B2[slot].tolist(), strict=True
            ):
                if length > lengths[slot]:
                    num_checkpoints += 1
                    assert length % BLOCK_TOKENS == 0
                    assert torch.equal(rings.ssm[row], states[slot, length][0])
    assert num_folds > 5
    assert num_checkpoints > 5


def test_wide_windows_need_few_entries() -> None:
    """A ring holds what the widest window of the next step can read and write."""
    for width in range(1, 17):
        shape = RingShape.of(width)
        longest = 0
        for length in range(1, 200):
            read, start = length, length
            while start < length + 300:
                fold = max(read, start // shape.fold_tokens * shape.fold_tokens)
                longest = max(longest, start + width - read)
                read, start = fold, start + width
        assert longest <= shape.capacity
    assert RingShape.of(16).capacity == 47


def test_window_wider_than_the_distance_of_folds_is_refused() -> None:
    with pytest.raises(AssertionError, match="may cross two multiples"):
        RingShape.of(9, block_tokens=16)
