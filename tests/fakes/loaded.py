"""Loads a checkpoint's model for tests, typed with its layers and pools, which the runtime doesn't know."""

from __future__ import annotations

from pathlib import Path

import torch

from agentspec.models import registry
from agentspec.models.qwen3_5 import Qwen3_5Model


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    random_weights: bool = False,
    seed: int = 0,
    fp8_drafts: bool = False,
    fp8_pages: bool = False,
) -> Qwen3_5Model:
    """As `registry.load_model`."""
    model = registry.load_model(
        path,
        device=device,
        dtype=dtype,
        random_weights=random_weights,
        seed=seed,
        fp8_drafts=fp8_drafts,
        fp8_pages=fp8_pages,
    )
    assert isinstance(model, Qwen3_5Model)
    return model
