"""The proof detects bugs of slots with rings: each bug that is planted here must make it fail, in the named check."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import window
from agentspec.kernels.slots import RingWindow, SlotState, Window
from agentspec.runtime import decode_step, executor
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.types import RingShape
from tests.fakes.hash_chain import HashChainModel
from tests.properties.test_proof_detects_bugs import MAX_SETUPS, ROOMY, STOPPING, Bug, Patch, first_failure

RING: dict[str, Any] = {**ROOMY, "has_ring": True}


def _change_windows(patch: Patch, change: Callable[[RingWindow], RingWindow]) -> None:
    original = decode_step.open_windows

    def open_windows(buffers: StepBuffers, slot_ids_B: Tensor, num_drafted: int) -> Window:
        opened = original(buffers, slot_ids_B, num_drafted)
        assert opened.ring is not None
        return replace(opened, ring=change(opened.ring))

    for module in (decode_step, executor):
        patch.setattr(module, "open_windows", open_windows)


def names_a_state_that_is_not_stored_yet(patch: Patch) -> None:
    """The commit counts the tokens that it accepts itself; their state is stored by the next step."""
    original = window.folded

    def folded(slot: SlotState[Tensor], start_B: Tensor, ring: RingShape) -> tuple[Tensor, Tensor]:
        return original(slot, start_B + 1, ring)

    patch.setattr(window, "folded", folded)


def replays_folded_entries_again(patch: Patch) -> None:
    """The read row becomes the new state, but the read length stays."""
    original = window.folded

    def folded(slot: SlotState[Tensor], start_B: Tensor, ring: RingShape) -> tuple[Tensor, Tensor]:
        return original(slot, start_B, ring)[0], slot.read_length_B

    patch.setattr(window, "folded", folded)


def overwrites_the_newer_checkpoint(patch: Patch) -> None:
    """At a block boundary, the next state goes to the row that has just become a checkpoint."""
    original = window.rotate_folded

    def rotate(slot: SlotState[Tensor], block_tokens: int) -> Any:
        _, rows, lens = original(slot, block_tokens)
        return slot.write_rows_BW, rows, lens

    patch.setattr(window, "rotate_folded", rotate)


def frees_the_newer_checkpoint(patch: Patch) -> None:
    """Rotation gives the row of the former newer checkpoint, instead of the older, to the next state."""
    original = window.rotate_folded

    def rotate(slot: SlotState[Tensor], block_tokens: int) -> Any:
        write_rows, rows, lens = original(slot, block_tokens)
        freed = torch.where(write_rows[:, :1] != slot.write_rows_BW[:, :1], rows[:, 1:], write_rows[:, :1])
        return torch.cat((freed, write_rows[:, 1:]), dim=1), rows, lens

    patch.setattr(window, "rotate_folded", rotate)


def never_makes_checkpoints(patch: Patch) -> None:
    def keep(slot: SlotState[Tensor], block_tokens: int) -> Any:
        return slot.write_rows_BW, slot.checkpoint_rows_B2, slot.checkpoint_lens_B2

    patch.setattr(window, "rotate_folded", keep)


def makes_a_ring_one_entry_too_small(patch: Patch) -> None:
    """The last column of a wide window overwrites the first entry that the next step reads."""
    original = RingShape.of

    def of(width: int, block_tokens: int) -> RingShape:
        shape = original(width, block_tokens)
        return replace(shape, capacity=shape.fold_tokens + width - 1)

    patch.setattr(RingShape, "of", of)


def stores_entries_one_position_late(patch: Patch) -> None:
    _change_windows(patch, lambda ring: replace(ring, entries_BT=ring.entries_BT.roll(-1, 1)))


def reads_the_ring_of_another_slot(patch: Patch) -> None:
    _change_windows(patch, lambda ring: replace(ring, slot_B=ring.slot_B.roll(1)))


def replays_a_rejected_draft(patch: Patch) -> None:
    """A forward starts one entry behind the accepted ones, where the last window had more columns."""
    original = HashChainModel._committed_rows

    def committed(self: Any, batch: Any) -> Tensor:
        return original(self, replace(batch, ring=replace(batch.ring, start_B=batch.ring.start_B + 1)))

    patch.setattr(HashChainModel, "_committed_rows", committed)


def folds_one_token_early(patch: Patch) -> None:
    original = HashChainModel._committed_rows

    def committed(self: Any, batch: Any) -> Tensor:
        fold_length_B = (batch.ring.fold_length_B - 1).maximum(batch.ring.read_length_B)
        return original(self, replace(batch, ring=replace(batch.ring, fold_length_B=fold_length_B)))

    patch.setattr(HashChainModel, "_committed_rows", committed)


def folds_into_the_row_that_others_read(patch: Patch) -> None:
    """The state is stored to the read row, which may be a checkpoint."""
    original = window.open_window

    def open_window(*arguments: Any) -> Window:
        opened = original(*arguments)
        assert opened.ring is not None
        is_folding_B = opened.ring.fold_length_B > opened.ring.read_length_B
        fold_row_B = torch.where(is_folding_B, opened.read_row_B, opened.ring.fold_row_B)
        return replace(opened, ring=replace(opened.ring, fold_row_B=fold_row_B))

    patch.setattr("agentspec.kernels.reference.open_window", open_window)


def lets_inert_slots_fold(patch: Patch) -> None:
    """A slot that has ended goes on folding, into a row that may have another owner by then."""
    original = window._ring_window

    def ring_window(slot: SlotState[Tensor], *rest: Any) -> RingWindow:
        active = SlotState.of(slot.rows_BF.clone())
        active.active_B.fill_(1)
        return original(active, *rest)

    patch.setattr(window, "_ring_window", ring_window)


def joins_with_the_length_before_the_prompts_last_token(patch: Patch) -> None:
    """The row that prefill leaves holds one token more than the slot's length says."""
    original = StepBuffers.join

    def join(self: Any, joins: Any) -> None:
        original(self, joins)
        slots = torch.tensor([join.slot for join in joins])
        SlotState.of(self.slots_SF).read_length_B[slots] -= 1

    patch.setattr(StepBuffers, "join", join)


BUGS: dict[Callable[[Patch], None], Bug] = {
    names_a_state_that_is_not_stored_yet: Bug("", RING),
    replays_folded_entries_again: Bug("", RING),
    overwrites_the_newer_checkpoint: Bug("is not the state after|published|read|resumed", RING),
    frees_the_newer_checkpoint: Bug("", {**STOPPING, "has_ring": True}),
    never_makes_checkpoints: Bug("the deepest remaining state", RING),
    makes_a_ring_one_entry_too_small: Bug("entries in a ring", RING),
    stores_entries_one_position_late: Bug("stream|published", RING),
    reads_the_ring_of_another_slot: Bug("", RING),
    replays_a_rejected_draft: Bug("stream|published", RING),
    folds_one_token_early: Bug("stream|published", RING),
    folds_into_the_row_that_others_read: Bug("", RING),
    lets_inert_slots_fold: Bug("released|own", {**RING, "overlap": True}),
    joins_with_the_length_before_the_prompts_last_token: Bug("", RING),
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_proof_detects_planted_ring_bug(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug = BUGS[plant]
    plant(monkeypatch)
    failure = first_failure(bug.settings)
    assert failure is not None, f"{MAX_SETUPS} setups noticed nothing"
    assert re.search(bug.noticed_by, str(failure)), f"noticed by something else: {failure}"
