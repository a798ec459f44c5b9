"""The options of a training run, in a module that imports quickly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    warmup: int = 150
    decay: float = 0.4
    """Share of the plan, at its end, over which the learning rates fall to 0."""
    mtp_factor: float = 0.3
    mtp_trunk_gradient: float = 0.0
    """How much of the MTP losses' gradient reaches the trunk, the embeddings and the output head."""
    compile: bool = True
    gated_delta: str = "fla"
    """"plain" runs the slow one in PyTorch."""
