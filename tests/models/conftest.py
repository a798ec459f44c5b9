"""Tiny checkpoints and transformers' outputs for them, computed once per test run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec.models.qwen3_5 import Qwen3_5Model
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.hf_reference import Reference, compute_reference
from tests.fakes.loaded import load_model

FAMILIES: tuple[Family, ...] = ("dense", "moe", "next")
CPU = torch.device("cpu")


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in FAMILIES:
        write_checkpoint(root / name, name, mtp_experts="fused")
    return root


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return random.Random(3).choices(range(160), k=150)


@pytest.fixture(scope="session")
def checkpoint(checkpoint_root: Path, family: str) -> Path:
    return checkpoint_root / family


@pytest.fixture(scope="session")
def references(checkpoint_root: Path, prompt: list[int]) -> dict[str, Reference]:
    return {name: compute_reference(checkpoint_root / name, prompt) for name in FAMILIES}


@pytest.fixture(scope="session")
def reference(references: dict[str, Reference], family: str) -> Reference:
    return references[family]


@pytest.fixture
def model(checkpoint: Path) -> Qwen3_5Model:
    return load_model(checkpoint, device=CPU, dtype=torch.float32)
