"""The MTP chain: K/V for the whole window, drafts from the last accepted column, each computed from the head's own
output."""

from __future__ import annotations

import pytest
import torch

from agentspec.mtp.drafter import NullDrafter, VerifiedWindow
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.types import DraftSource
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.step_driver import greedy


def hidden_of(model: HashChainModel, tokens: list[int]) -> list[int]:
    return [int(value) for value in model.reference_state(tokens).row[1:]]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_drafts_continue_accepted_columns(kept: int) -> None:
    model = HashChainModel(seed=3, draft_accuracy=1.0)
    known = [5, 6, 7, 8]
    stream = model.reference_stream(greedy(known, 20))
    model.allocate(num_rows=3, num_pages=4)
    window = [*stream[: kept + 1], 1, 1][:3]
    hiddens = [hidden_of(model, known + window[:t]) for t in range(3)]
    # MTP K/V of the prompt, at positions 1 to 3.
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    model.mtp(
        torch.tensor([known[1:]]),
        torch.tensor([[hidden_of(model, known[:t]) for t in (1, 2, 3)]]),
        torch.tensor([1]),
        table,
    )
    verified = VerifiedWindow(
        tokens_BT=torch.tensor([window]),
        hidden_BTH=torch.tensor([hiddens]),
        start_B=torch.tensor([4]),
        last_B=torch.tensor([kept]),
        later_TB=torch.arange(4 + kept, 7 + kept)[:, None],
        page_table_BP=table,
    )
    drafts = MtpDrafter(model).draft(verified, 3)
    assert drafts.tolist() == [stream[kept + 1 : kept + 4]]
    expected = model.reference_state(known + window[: kept + 1]).mtp_N
    assert model.mtp_PS[1, 1 : len(expected)].tolist() == expected[1:].tolist()


def test_depth_zero_still_writes_mtp_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HashChainModel(seed=3)
    model.allocate(num_rows=3, num_pages=3)
    monkeypatch.setattr(model, "draft_head", None)
    window = VerifiedWindow(
        tokens_BT=torch.tensor([[4]]),
        hidden_BTH=torch.tensor([[hidden_of(model, [9])]]),
        start_B=torch.tensor([1]),
        last_B=torch.tensor([0]),
        later_TB=torch.tensor([[1]]),
        page_table_BP=torch.tensor([[2]], dtype=torch.int32),
    )
    drafts = MtpDrafter(model).draft(window, 0)
    assert drafts.shape == (1, 0)
    assert model.mtp_PS[2, 1].item() == model.reference_state([9, 4]).mtp_N[1]


def test_sources_has_one_entry_per_position() -> None:
    assert MtpDrafter(HashChainModel(seed=3)).sources(3) == (DraftSource.MTP,) * 3
    assert NullDrafter().sources(0) == ()


def test_null_drafter_drafts_nothing() -> None:
    tokens = torch.tensor([[1, 2], [3, 4]])
    window = VerifiedWindow(
        tokens_BT=tokens,
        hidden_BTH=torch.zeros(2, 2, 2),
        start_B=tokens[:, 0],
        last_B=tokens[:, 0],
        later_TB=tokens,
        page_table_BP=tokens,
    )
    assert NullDrafter().draft(window, 0).shape == (2, 0)
