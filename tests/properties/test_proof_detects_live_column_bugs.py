"""The proof detects bugs of windows that share the rows of a forward: each bug that is planted here must make it fail,
in the named check."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import window
from agentspec.kernels.slots import LiveColumns, SharedRows
from agentspec.runtime import decode_step
from tests.fakes.hash_chain import HashChainModel
from tests.properties.test_proof_detects_bugs import MAX_SETUPS, ROOMY, Bug, Patch, first_failure

SHARING: dict[str, Any] = {
    **ROOMY,
    "has_ring": True,
    "random_depth": True,
    "max_draft_tokens": 3,
    "max_copies": 4,
    "min_match": 1,
    "draft_accuracy": 0.9,
}


def _change_columns(patch: Patch, change: Callable[[LiveColumns], LiveColumns]) -> None:
    original = window.live_columns
    patch.setattr(window, "live_columns", lambda *arguments: change(original(*arguments)))


def stores_dead_rows_in_a_slots_ring(patch: Patch) -> None:
    """In entries of slot 0, where a window of its own may read them."""
    original = window.live_columns

    def live_columns(slot: Any, tokens_BT: Tensor, entries_BT: Tensor, shared: SharedRows, scratch: int) -> LiveColumns:
        return original(slot, tokens_BT, entries_BT, shared, 0)

    patch.setattr(window, "live_columns", live_columns)


def stores_dead_rows_in_pages(patch: Patch) -> None:
    """At the position of the row's cell, which is the first slot's column 0."""
    original = HashChainModel._live_rows

    def live_rows(self: Any, batch: Any, live: LiveColumns, *rest: Any) -> Tensor:
        result = original(self, batch, live, *rest)
        page_P = batch.page_table_BP[0]
        if int(live.count_B.sum()) < len(live.cell_N):
            position = int(batch.length_B[0])
            self.attention_PS[page_P[position // self._block], position % self._block] = 7
        return result

    patch.setattr(HashChainModel, "_live_rows", live_rows)


def accepts_drafts_of_dead_columns(patch: Patch) -> None:
    """Every draft that was made counts, whether it had a row or not."""
    patch.setattr(
        window,
        "_num_offered",
        lambda slot, num_columns, live: slot.num_valid_drafts_B.clamp(max=num_columns - 1),
    )


def gives_rows_to_slots_that_have_ended(patch: Patch) -> None:
    original = window.live_columns

    def live_columns(slot: Any, *rest: Any) -> LiveColumns:
        awake = type(slot)(slot.rows_BF.clone())
        awake.active_B.fill_(1)
        return original(awake, *rest)

    patch.setattr(window, "live_columns", live_columns)


def reads_the_scores_of_the_next_row(patch: Patch) -> None:
    _change_columns(patch, lambda live: replace(live, row_BT=(live.row_BT + 1).clamp(max=len(live.cell_N) - 1)))


def verifies_the_tokens_of_the_row_before(patch: Patch) -> None:
    _change_columns(patch, lambda live: replace(live, cell_N=live.cell_N.roll(1)))


def stores_entries_one_row_late(patch: Patch) -> None:
    _change_columns(patch, lambda live: replace(live, entry_N=live.entry_N.roll(1)))


def takes_the_columns_that_a_slot_has_for_itself(patch: Patch) -> None:
    """Copies of the first slots before MTP drafts of the last."""
    original = window.live_columns

    def live_columns(slot: Any, tokens_BT: Tensor, entries_BT: Tensor, shared: SharedRows, scratch: int) -> LiveColumns:
        return original(slot, tokens_BT, entries_BT, SharedRows(shared.num_rows, 1), scratch)

    patch.setattr(window, "live_columns", live_columns)


def gives_no_rows_to_copies(patch: Patch) -> None:
    original = window.live_columns

    def live_columns(slot: Any, tokens_BT: Tensor, entries_BT: Tensor, shared: SharedRows, scratch: int) -> LiveColumns:
        few = type(slot)(slot.rows_BF.clone())
        few.num_valid_drafts_B.clamp_(max=shared.own_columns - 1)
        return original(few, tokens_BT, entries_BT, shared, scratch)

    patch.setattr(window, "live_columns", live_columns)


def drafts_from_the_rows_of_another_slot(patch: Patch) -> None:
    """The hiddens of the windows' columns are taken in the order of rows, as if all had a row."""
    original = decode_step.decode_step

    def step(model: Any, drafter: Any, *arguments: Any, **keywords: Any) -> Any:
        class Shifted:
            def __getattr__(self, name: str) -> Any:
                return getattr(drafter, name)

            def draft(self, verified: Any, num_drafted: int) -> Tensor:
                moved = torch.roll(verified.hidden_BTH, 1, 0) if verified.hidden_BTH.shape[1] > 4 else None
                given = verified if moved is None else replace(verified, hidden_BTH=moved)
                drafts_Bk: Tensor = drafter.draft(given, num_drafted)
                return drafts_Bk

        return original(model, Shifted(), *arguments, **keywords)

    patch.setattr("agentspec.runtime.executor.decode_step", step)


BUGS: dict[Callable[[Patch], None], Bug] = {
    stores_dead_rows_in_a_slots_ring: Bug("stream|published", SHARING),
    stores_dead_rows_in_pages: Bug("stream|published|pages", SHARING),
    accepts_drafts_of_dead_columns: Bug("live columns", SHARING),
    gives_rows_to_slots_that_have_ended: Bug("live columns", {**SHARING, "overlap": True}),
    reads_the_scores_of_the_next_row: Bug("stream|published|a column has its row", SHARING),
    verifies_the_tokens_of_the_row_before: Bug("rows are in the order", SHARING),
    stores_entries_one_row_late: Bug("stream|published", SHARING),
    takes_the_columns_that_a_slot_has_for_itself: Bug("live columns", SHARING),
    gives_no_rows_to_copies: Bug("live columns", SHARING),
    drafts_from_the_rows_of_another_slot: Bug("MTP|pages", SHARING),
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_proof_detects_planted_live_column_bug(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug = BUGS[plant]
    plant(monkeypatch)
    failure = first_failure(bug.settings)
    assert failure is not None, f"{MAX_SETUPS} setups noticed nothing"
    assert re.search(bug.noticed_by, str(failure)), f"noticed by something else: {failure}"


def test_setups_with_shared_rows_are_right() -> None:
    """Without a planted bug the same setups hold."""
    assert first_failure(SHARING) is None
