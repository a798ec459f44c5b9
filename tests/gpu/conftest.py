"""Tests that need a CUDA device. Elsewhere each one is skipped, and says why."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Other processes may test on the same device."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
