"""Windows of different widths in one forward of a real model: each slot's columns are those of its window alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec import kernels
from agentspec.kernels.slots import SharedRows, SlotState
from agentspec.runtime.decode_step import verify_batch
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.step_buffers import StepBuffers
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.step_driver import StepDriver, greedy
from tests.properties.real_model import VOCAB, load, write_agreeing_checkpoint

CPU = torch.device("cpu")
NUM_SLOTS, NUM_MTP, NUM_COPIES = 3, 2, 4
MADE = (6, 0, 3)
"""Drafts that were made for each slot."""


@pytest.fixture
@torch.inference_mode()
def driver(tmp_path: Path) -> StepDriver:
    """Slots behind prompts of different lengths, with random drafts."""
    generator = random.Random(5)
    model = load(write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2), CPU)
    driver = StepDriver(
        model, max_running=NUM_SLOTS, max_draft_tokens=NUM_MTP, max_copies=NUM_COPIES, has_ring=True, device=CPU
    )
    plan = StepPlan()
    for slot in range(NUM_SLOTS):
        prompt = [generator.randrange(VOCAB) for _ in range(20 + 15 * slot)]
        driver.plan_join(plan, slot, greedy(prompt, 200))
    driver.step(NUM_MTP, slots=[0, 1, 2], plan=plan)
    state_S = SlotState.of(driver.executor._buffers.slots_SF)
    for slot, num_drafts in enumerate(MADE):
        state_S.num_valid_drafts_B[slot] = num_drafts
        state_S.tokens_BW[slot, 1:] = torch.tensor([generator.randrange(VOCAB) for _ in range(NUM_MTP + NUM_COPIES)])
    return driver


@torch.inference_mode()
def test_each_window_is_the_same_as_alone(driver: StepDriver) -> None:
    model, buffers = driver.model, driver.executor._buffers
    alone = []
    for slot, num_drafts in enumerate(MADE):
        window = opened(buffers, [slot], num_drafts + 1)
        alone.append(model.verify(verify_batch(window))[0])
    window = opened(buffers, [0, 1, 2], buffers.width, SharedRows(15, NUM_MTP + 1))
    assert window.live is not None
    assert window.live.count_B.tolist() == [7, 1, 4]
    hidden_NH = model.verify(verify_batch(window))[0]
    for slot, hidden_TH in enumerate(alone):
        rows = window.live.row_BT[slot, : len(hidden_TH)]
        assert relative_error(hidden_NH[rows], hidden_TH) < TOLERANCE, f"slot {slot}"
    dead_DH = hidden_NH[12:]
    assert len(dead_DH) == 3
    assert (dead_DH == dead_DH[0]).all(), "dead rows are the same, so in a mixture they visit the same experts"


@torch.inference_mode()
def test_columns_without_a_row_are_not_computed(driver: StepDriver) -> None:
    model, buffers = driver.model, driver.executor._buffers
    window = opened(buffers, [0, 1, 2], buffers.width, SharedRows(9, NUM_MTP + 1))
    assert window.live is not None
    assert window.live.count_B.tolist() == [5, 1, 3], "slot 0 has the two rows that slot 1 doesn't need"
    whole = opened(buffers, [0], 5)
    expected_TH = model.verify(verify_batch(whole))[0]
    hidden_NH = model.verify(verify_batch(window))[0]
    assert relative_error(hidden_NH[:5], expected_TH) < TOLERANCE


def opened(
    buffers: StepBuffers, slots: list[int], num_columns: int, shared: SharedRows | None = None
) -> kernels.slots.Window:
    return kernels.backend(CPU).open_window(
        buffers.slots_SF, buffers.page_table_SP, torch.tensor(slots), num_columns, buffers.ring, shared
    )
