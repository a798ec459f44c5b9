"""Where the kernels of this directory run: on the CUDA device if there is one, else in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.triton.poison import poison_new_memory


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
