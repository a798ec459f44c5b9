"""Runs the kernels of this directory on the CUDA device if there is one, else in Triton's interpreter on CPU
tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec import kernels
from agentspec.kernels import triton as triton_backend
from agentspec.kernels.triton import (
    attention_fp8,
    four_bit_experts,
    four_bit_layers,
    gated_delta_columns,
    gated_delta_ring,
    grouped_four_bit_hopper,
)
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.models import quantization
from agentspec.models.qwen3_5 import Qwen3_5Model
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.loaded import load_model
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


WriteScaled = Callable[..., Callable[[], Qwen3_5Model]]


@pytest.fixture
def write_scaled(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteScaled:
    """Writes a block-scaled checkpoint of some sizes. Returns what loads it, in a dtype, on these kernels, with blocks
    kept."""
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)
    monkeypatch.setattr(kernels, "backend", lambda device: triton_backend)

    def write(family: Family, dtype: torch.dtype, **sizes: Any) -> Callable[[], Qwen3_5Model]:
        checkpoint = write_checkpoint(tmp_path, family, fp8="stored", vision=False, **sizes)
        return partial(load_model, checkpoint, device=device, dtype=dtype)

    return write
