"""Models with random weights: any config works, a seed is reproducible, and logits have realistic values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentspec.models.qwen3_5 import Qwen3_5Model
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")


def make(directory: Path, seed: int, dtype: torch.dtype = torch.float32) -> Qwen3_5Model:
    return load_model(directory, device=CPU, dtype=dtype, random_weights=True, seed=seed)


@pytest.fixture(params=["dense", "moe", "next"])
def config_only(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family: Family = request.param
    directory = write_checkpoint(tmp_path, family)
    (directory / "model.safetensors").unlink()
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_weights_give_finite_spread_logits(config_only: Path, prompt: list[int], dtype: torch.dtype) -> None:
    model = make(config_only, 0, dtype)
    driver = Driver(model)
    hidden = driver.prefill(prompt[:100])
    assert hidden.dtype == dtype
    for logits in (model.logits(hidden), model.logits(driver.verify([prompt[100:104]], [3]))):
        assert logits.isfinite().all()
        assert 0.1 < logits.std() < 10
    driver.mtp_prefill(prompt[:20], hidden)
    m = driver.mtp(prompt[20:24], hidden[19:23], 20)
    assert model.logits(m).isfinite().all()


def test_seed_determines_random_weights(config_only: Path, prompt: list[int]) -> None:
    first, again, other = (
        model.logits(Driver(model).prefill(prompt[:20])) for model in (make(config_only, seed) for seed in (1, 1, 2))
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_random_weights_include_mtp_head(config_only: Path) -> None:
    assert make(config_only, 0).spec.has_mtp
