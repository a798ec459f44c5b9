"""The counters that kernels share."""

from __future__ import annotations

import torch

from agentspec.kernels.triton import launch


def test_counters_made_in_inference_mode_are_of_use_outside(device: torch.device) -> None:
    """The first call may be a model's; they then serve every later one."""
    with torch.inference_mode():
        counters = launch._counters.__wrapped__(device)
    counters.add_(1)
    assert counters.all()
