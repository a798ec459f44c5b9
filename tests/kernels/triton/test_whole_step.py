"""The whole decode step on these kernels: steps of a small model have the outcomes and final states of the reference
backend.

Few steps, because the interpreter takes a second for each. tests/gpu runs whole sessions on the device.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.kernels import triton as triton_backend
from agentspec.kernels.slots import SlotState
from agentspec.models.hybrid import HybridModel
from agentspec.runtime.plan import SlotOutcome, StepPlan
from agentspec.types import SamplingParams
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.sequence_driver import poison
from tests.fakes.step_driver import StepDriver
from tests.properties.real_model import VOCAB, load, write_agreeing_checkpoint

CPU = torch.device("cpu")
STEPS = ((2, [1]), (2, [1, 0]), (0, [0]), (1, [0, 1]))
"""(k, slots) of each step. The first is greedy."""
SHARED_STEPS = ((4, [1]), (3, [1, 0]), (3, [0, 1]))
"""The same with rows that windows share: two MTP drafts, and copies for which there are two rows or one a slot."""
DRAFTED = {0: 1, 1: 6}
"""Drafts of each slot that count as made before a step with shared rows: of slot 1 more than the mean."""
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.4, repetition_penalty=1.1, logit_bias={5: 2.0}
)
WORDS = -(-VOCAB // 32)


@torch.inference_mode()
def run_steps(
    checkpoint: Path, device: torch.device, *, has_ring: bool, is_shared: bool = False
) -> tuple[list[list[SlotOutcome]], dict[str, Tensor]]:
    """Return the outcomes of every step and the final state of each slot. Slot 0 is sampled, and constrained in its
    last step; slot 1 is greedy."""
    model = load(checkpoint, device)
    driver = StepDriver(
        model, max_running=2, max_draft_tokens=2, max_copies=4 * is_shared, has_ring=has_ring, device=device
    )
    steps = SHARED_STEPS if is_shared else STEPS
    poison(model)
    plan = StepPlan()
    driver.plan_join(plan, 0, ReferenceRequest(prompt=[7, 8, 9], sampling=SAMPLED, seed=11, length_limit=90))
    driver.plan_join(
        plan,
        1,
        ReferenceRequest(
            prompt=[token % VOCAB for token in range(20, 147)],
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            length_limit=150,
        ),
    )
    outcomes = []
    for number, (num_drafted, slots) in enumerate(steps):
        if number == len(steps) - 1:
            plan.masks = {
                0: np.random.default_rng(3).integers(-(2**31), 2**31, (num_drafted + 1, WORDS), dtype=np.int32)
            }
        if is_shared and number:
            made_S = SlotState.of(driver.executor._buffers.slots_SF).num_valid_drafts_B
            for slot, num_drafts in DRAFTED.items():
                made_S[slot] = num_drafts
        outcomes.append(driver.step(num_drafted, slots=slots, plan=plan))
        plan = StepPlan()
    states: dict[str, Tensor] = {}
    state_S = SlotState.of(driver.executor._buffers.slots_SF)
    for slot, running in driver.running.items():
        length, row = running.outcomes[-1].length, state_S.read_row_B[slot]
        keys_values = model.pools["kv_AP2SGD"][:, running.pages].transpose(1, 2).flatten(2, 3)[:, :, 1:length]
        parts = {
            "ssm": model.pools["ssm_LRVDK"][:, row],
            "conv": model.pools["conv_LR3C"][:, row],
            "hidden": model.pools.hidden_RH[row],
            "K/V": keys_values,
        }
        if has_ring:
            parts |= ring_parts(model, slot, int(state_S.read_length_B[slot]), length)
        states |= {f"{name} of slot {slot}": part.cpu() for name, part in parts.items()}
    return outcomes, states


def ring_parts(model: HybridModel, slot: int, read_length: int, length: int) -> dict[str, Tensor]:
    """The read length, and the ring's entries behind it."""
    names = ("ring_key_LSCGK", "ring_delta_LSCVD", "ring_decay_LSCV", "ring_conv_LSCX", "ring_hidden_LSCH")
    capacity = model.pools[names[0]].shape[2]
    entries = [position % capacity for position in range(read_length, length)]
    return {"read length": torch.tensor(read_length)} | {name: model.pools[name][:, slot, entries] for name in names}


@pytest.mark.parametrize(
    ("has_ring", "is_shared"), [(False, False), (True, False), (True, True)], ids=["rows", "ring", "shared rows"]
)
def test_whole_steps_match_reference_backend(
    has_ring: bool, is_shared: bool, device: torch.device, tmp_path: Path
) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    expected, expected_states = run_steps(checkpoint, CPU, has_ring=has_ring, is_shared=is_shared)
    with patch.object(kernels, "backend", lambda _: triton_backend):
        outcomes, states = run_steps(checkpoint, device, has_ring=has_ring, is_shared=is_shared)
    assert sum(outcome.num_accepted for step in expected for outcome in step) > 0
    if is_shared:
        drafted = [{outcome.slot: outcome.num_drafted for outcome in step} for step in expected[1:]]
        assert drafted == [{1: 5, 0: 1}, {0: 1, 1: 5}], "two slots have 8 rows: slot 1 has what slot 0 leaves"
    assert outcomes == expected
    if has_ring:
        assert expected_states["read length of slot 1"] == 128, "slot 1 folds"
    for name, state in expected_states.items():
        assert relative_error(states[name], state) < TOLERANCE, name
