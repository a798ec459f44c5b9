"""The proof detects bugs of copies: each bug that is planted here must make it fail, in the named check.

A wrong copy never changes a stream, because the target verifies it. So the proof compares each copy with the rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.reference import verdict, window
from agentspec.kernels.slots import OutcomeRows
from agentspec.runtime import decode_step
from agentspec.runtime.step_buffers import StepBuffers
from tests.properties.test_proof_detects_bugs import MAX_SETUPS, ROOMY, Bug, Patch, first_failure

COPYING: dict[str, Any] = {**ROOMY, "max_draft_tokens": 3, "max_copies": 4, "min_match": 1}
FEW_WIDE_ROWS = {**COPYING, "max_wide_rows": 16}
"""Three slots and more have no copies."""


def forgets_emitted_tokens(patch: Patch) -> None:
    patch.setattr(reference, "append_text", lambda *arguments: None)


def stores_emitted_tokens_one_position_late(patch: Patch) -> None:
    original = reference.append_text

    def append(text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
        late_BF = outcome_BF.clone()
        OutcomeRows.of(late_BF).length_B.add_(1)
        original(text_SL, slot_ids_B, late_BF)

    patch.setattr(reference, "append_text", append)


def keeps_the_text_of_the_slots_last_request(patch: Patch) -> None:
    original = StepBuffers.join

    def join(self: Any, joins: Any) -> None:
        before = self.copies.text_SL.clone()
        original(self, joins)
        self.copies.text_SL.copy_(before)

    patch.setattr(StepBuffers, "join", join)


def looks_behind_the_end_of_the_text(patch: Patch) -> None:
    """Tokens of an earlier, longer request in the slot count as text."""
    original = reference.draft_copies

    def draft(text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor, *rest: Any, **keywords: Any) -> Any:
        longer_BF = outcome_BF.clone()
        OutcomeRows.of(longer_BF).length_B.add_(1)
        return original(text_SL, slot_ids_B, longer_BF, *rest, **keywords)

    patch.setattr(reference, "draft_copies", draft)


def leaves_out_the_mtp_drafts(patch: Patch) -> None:
    """Copies follow the last emitted token instead of the drafts before them."""
    original = reference.draft_copies

    def draft(text: Tensor, slots: Tensor, outcome: Tensor, drafts_Bk: Tensor, **keywords: Any) -> Any:
        return original(text, slots, outcome, drafts_Bk[:, :0], **keywords)

    patch.setattr(reference, "draft_copies", draft)


def offers_copies_that_were_not_made(patch: Patch) -> None:
    original = reference.publish_drafts

    def publish(slots: Tensor, ids: Tensor, outcome: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor | None) -> None:
        all_B = None if num_valid_B is None else torch.full_like(num_valid_B, drafts_Bk.shape[1])
        original(slots, ids, outcome, drafts_Bk, all_B)

    patch.setattr(reference, "publish_drafts", publish)


def accepts_copies_unseen(patch: Patch) -> None:
    """A copy counts as right if the drafts before it are."""

    def count(chosen_BT: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor) -> Tensor:
        num_matched_B = verdict.count_matches(chosen_BT, drafts_Bk, num_valid_B)
        return torch.where(num_matched_B >= 3, num_valid_B, num_matched_B)

    patch.setattr(window, "count_matches", count)


def looks_for_copies_that_have_no_columns(patch: Patch) -> None:
    patch.setattr(decode_step, "has_copies", lambda *arguments: True)


def looks_for_copies_of_one_slot_alone(patch: Patch) -> None:
    patch.setattr(decode_step, "has_copies", lambda num_slots, num_mtp: num_slots == 1)


BUGS: dict[Callable[[Patch], None], Bug] = {
    forgets_emitted_tokens: Bug("by the rule|copies were made", {**COPYING, "min_match": 2}),
    stores_emitted_tokens_one_position_late: Bug("by the rule", COPYING),
    keeps_the_text_of_the_slots_last_request: Bug("by the rule|copies were made", COPYING),
    looks_behind_the_end_of_the_text: Bug("by the rule|copies were made", COPYING),
    leaves_out_the_mtp_drafts: Bug("by the rule|copies were made", COPYING),
    offers_copies_that_were_not_made: Bug("copies were made", {**COPYING, "min_match": 2}),
    accepts_copies_unseen: Bug("stream|published", COPYING),
    looks_for_copies_that_have_no_columns: Bug("by the rule|copies were made", FEW_WIDE_ROWS),
    looks_for_copies_of_one_slot_alone: Bug("by the rule|copies were made", FEW_WIDE_ROWS),
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_proof_detects_planted_copy_bug(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug = BUGS[plant]
    plant(monkeypatch)
    failure = first_failure(bug.settings)
    assert failure is not None, f"{MAX_SETUPS} setups noticed nothing"
    assert re.search(bug.noticed_by, str(failure)), f"noticed by something else: {failure}"


@pytest.mark.parametrize("settings", [COPYING, FEW_WIDE_ROWS])
def test_setups_with_copies_are_right(settings: dict[str, Any]) -> None:
    """Without a planted bug the same setups hold."""
    assert first_failure(settings) is None
