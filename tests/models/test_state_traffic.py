"""No state is copied: only kernels access the pools, and they move exactly the rows that a step needs."""

from __future__ import annotations

import math

import pytest
import torch

from agentspec.kernels.traffic import state_traffic
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.types import ZERO_ROW
from tests.fakes.copy_counter import CopyCounter
from tests.fakes.sequence_driver import Driver


def test_turn_accesses_pools_only_in_kernels(model: Qwen3_5Model, prompt: list[int]) -> None:
    driver = Driver(model, num_sequences=2)
    num_layers = model.pools["ssm_LRVDK"].shape[0]
    state_traffic.reset()
    with CopyCounter(model.pools.tensors()) as counter:
        hidden = driver.prefill(prompt[:100], (64,), wanted=(10, 50))
        assert (state_traffic.rows_read, state_traffic.rows_written) == (2 * num_layers, 4 * num_layers)
        driver.prefill(prompt[:40], which=1)
        state_traffic.reset()
        driver.verify([prompt[100:104], prompt[40:44]], [1, 3])
        assert (state_traffic.rows_read, state_traffic.rows_written) == (3 * num_layers, 12 * num_layers)
        driver.mtp_prefill(prompt[:100], hidden)
        driver.mtp(prompt[100:104], hidden[96:100], 100)
        model.read_hidden(torch.tensor([2, 3]))
    assert counter.touched == []


@pytest.mark.parametrize("pool", ["ssm_LRVDK", "conv_LR3C", "hidden_LRH", "kv_AP2SGD"])
def test_copy_counter_detects_copy(model: Qwen3_5Model, pool: str) -> None:
    model.allocate(num_rows=4, num_pages=4)
    tensor = model.pools[pool]
    rows = tensor if pool == "hidden_RH" else tensor.transpose(0, 1)
    with CopyCounter(model.pools.tensors()) as counter:
        assert rows[2].shape == rows[3].shape
        assert counter.touched == []
        rows[3] = rows[2]
        rows[torch.tensor([2])].sum()
    assert counter.touched == ["aten.copy_.default", "aten.index.Tensor"]


def test_row_and_page_bytes_equal_pool_sizes(model: Qwen3_5Model) -> None:
    num_rows, num_pages = 5, 7
    model.allocate(num_rows=num_rows, num_pages=num_pages)
    *row_pools, kv = (math.prod(pool.shape) * pool.element_size() for pool in model.pools.tensors())
    assert sum(row_pools) == num_rows * model.spec.row_bytes
    assert kv == num_pages * model.spec.page_bytes


def test_zero_row_stays_zero(model: Qwen3_5Model, prompt: list[int]) -> None:
    driver = Driver(model)
    driver.prefill(prompt[:20])
    driver.verify([prompt[20:24]], [0])
    for pool in (
        model.pools["ssm_LRVDK"][:, ZERO_ROW],
        model.pools["conv_LR3C"][:, ZERO_ROW],
        model.pools.hidden_RH[ZERO_ROW],
    ):
        assert not pool.any()
