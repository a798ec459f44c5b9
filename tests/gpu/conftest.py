"""Tests that need a CUDA device. Elsewhere each one is skipped, and says why."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    return torch.device("cuda")
