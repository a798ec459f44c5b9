"""The window kernels and the RMS norms, compiled: the interpreter's checks at served sizes, and a window in a CUDA
graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import window as reference
from agentspec.kernels.slots import SlotState
from agentspec.kernels.triton import window as triton_window
from tests.kernels.triton import test_norms as norm_checks
from tests.kernels.triton import test_window as window_checks
from tests.kernels.triton.poison import poison_new_memory

pytestmark = pytest.mark.gpu
SERVED = [(torch.bfloat16, 1024), (torch.bfloat16, 2560), (torch.bfloat16, 5120), (torch.float32, 256)]


@pytest.mark.parametrize(("dtype", "width"), SERVED, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 256])
def test_norms_match_reference_at_served_sizes(
    dtype: torch.dtype, width: int, num_tokens: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_memory(monkeypatch)
    norm_checks.check_rms_norm((num_tokens, width), dtype, cuda)
    norm_checks.check_rms_norm((num_tokens, 24, 256), dtype, cuda)
    norm_checks.check_norm_to_rows(num_tokens, width, dtype, cuda)
    norm_checks.check_pair_norms(num_tokens, width, 5000, dtype, cuda)


def test_window_kernels_match_reference(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
    for seed in range(30):
        window_checks.check_open_window(seed, cuda)
        window_checks.check_commit_window(seed, False, cuda)
        window_checks.check_commit_window(seed, True, cuda)
        window_checks.check_open_window(seed, cuda, has_ring=True)
        window_checks.check_commit_window(seed, False, cuda, has_ring=True)


def test_captured_window_advances_with_every_replay(cuda: torch.device) -> None:
    case = window_checks.Slots.random(3, cuda)
    num_slots, num_columns = len(case.slot_ids_B), case.num_columns
    chosen_BT = torch.zeros(num_slots, num_columns, dtype=torch.int64, device=cuda)
    drafts_Bk = torch.zeros(num_slots, num_columns - 1, dtype=torch.int64, device=cuda)
    slots_SF, limits_SF = case.slots_SF.clone(), case.limits_SF.clone()

    def step(backend: Any, slots_SF: Tensor) -> Tensor:
        window = backend.open_window(slots_SF, case.page_table_SP, case.slot_ids_B, num_columns)
        commit = backend.commit_window(slots_SF, limits_SF, case.slot_ids_B, chosen_BT, block_tokens=case.block_tokens)
        backend.publish_drafts(slots_SF, case.slot_ids_B, commit.outcome_BF, drafts_Bk)
        return window.start_B

    step(triton_window, slots_SF.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start_B = step(triton_window, slots_SF)
    expected_SF = case.slots_SF.clone()
    assert torch.equal(slots_SF, expected_SF), "a capture runs nothing"
    for replay in range(5):
        chosen_BT.random_(window_checks.VOCAB_SIZE)
        drafts_Bk.copy_(SlotState.of(expected_SF[case.slot_ids_B]).tokens_BW[:, 1:num_columns])
        graph.replay()
        expected_start_B = step(reference, expected_SF)
        assert torch.equal(start_B, expected_start_B), f"{replay=}"
        assert torch.equal(slots_SF, expected_SF), f"{replay=}"
