"""Decode windows in a prompt's forward (a ride): the result equals a separate prefill and verify."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels.traffic import state_traffic
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.prefill_tables import PrefillSizes
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.copy_counter import CopyCounter
from tests.fakes.ridden_pass import COLUMNS, PADDED, RiddenPass


@pytest.mark.parametrize("sizes", [None, PADDED], ids=["exact", "padded"])
def test_ride_equals_prefill_and_verify(model: Qwen3_5Model, prompt: list[int], sizes: PrefillSizes | None) -> None:
    expected = RiddenPass(model, prompt, sizes).apart()
    ridden = RiddenPass(model, prompt, sizes)
    got = ridden.ridden()
    for ours, wanted in zip(got, expected, strict=True):
        assert relative_error(ours, wanted) < TOLERANCE
    rows = ridden.windows.write_rows_BT[:2]
    assert torch.equal(model.read_hidden(rows.flatten()).view_as(got[1]), got[1]), "each column's hidden is in its row"


def test_ride_copies_no_state(model: Qwen3_5Model, prompt: list[int]) -> None:
    ridden = RiddenPass(model, prompt)
    state_traffic.reset()
    with CopyCounter(model.pools.tensors()) as counter:
        model.ride(ridden.prompts, ridden.windows)
    assert counter.touched == []
    num_layers = model.pools["ssm_LRVDK"].shape[0]
    assert (state_traffic.rows_read, state_traffic.rows_written) == (
        (3 + 2) * num_layers,
        (3 * COLUMNS + 3) * num_layers,
    )
