"""Runs the kernels of this directory on the CUDA device if there is one, else in Triton's interpreter on CPU
tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agentspec.kernels.triton import (
    attention_fp8,
    four_bit_experts,
    four_bit_layers,
    gated_delta_columns,
    gated_delta_ring,
    grouped_four_bit_hopper,
)
from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.triton.gluon_in_interpreter import (
    interpreted_four_bit,
    interpreted_four_bit_experts,
    interpreted_four_bit_prompt,
    interpreted_fp8_attention,
    interpreted_ring_step,
)
from tests.kernels.triton.poison import poison_new_memory
from tests.kernels.triton.quick_interpreter import make_quick


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="package", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            make_quick(patch)
            prepare_columns, ring_step = interpreted_ring_step()
            patch.setattr(gated_delta_columns, "_prepare_columns", prepare_columns)
            patch.setattr(gated_delta_ring, "_gated_delta_ring_step", ring_step)
            patch.setattr(attention_fp8, "attend_fp8", interpreted_fp8_attention())
            patch.setattr(four_bit_layers, "four_bit_kernel", interpreted_four_bit())
            gate_up, down = interpreted_four_bit_experts()
            patch.setattr(four_bit_experts, "four_bit_gate_up_kernel", gate_up)
            patch.setattr(four_bit_experts, "four_bit_down_kernel", down)
            patch.setattr(grouped_four_bit_hopper, "four_bit_prompt_kernel", interpreted_four_bit_prompt())
        yield


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
