"""Positions past 4,096, where a small error in the rotary embedding becomes visible."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models import layers
from agentspec.models.hf_config import TextConfig
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.hf_reference import Reference, compute_reference
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

PREFILLED, TOTAL = 4200, 4240
CPU = torch.device("cpu")
FAMILIES: tuple[Family, ...] = ("dense", "moe", "next")


@pytest.fixture(scope="module")
def long_prompt() -> list[int]:
    return random.Random(11).choices(range(160), k=TOTAL)


@pytest.fixture(scope="module")
def long_cases(tmp_path_factory: pytest.TempPathFactory, long_prompt: list[int]) -> dict[str, tuple[Path, Reference]]:
    """A checkpoint and transformers' outputs, by family. Four layers are enough: three linear, one full attention."""
    root = tmp_path_factory.mktemp("long")
    cases: dict[str, tuple[Path, Reference]] = {}
    for family in FAMILIES:
        directory = write_checkpoint(root / family, family, mtp_experts="fused", num_hidden_layers=4)
        cases[family] = directory, compute_reference(directory, long_prompt)
    return cases


def _late_logits(directory: Path, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """(logits, MTP logits) past PREFILLED, from windows of four after a chunked prefill."""
    model = load_model(directory, device=CPU, dtype=torch.float32)
    driver = Driver(model, max_tokens=TOTAL)
    kept = [driver.prefill(prompt[:PREFILLED], (2000, 1111))]
    for start in range(PREFILLED, TOTAL, 4):
        kept.append(driver.verify([prompt[start : start + 4]], [3])[0])
    hidden = torch.cat(kept)
    driver.mtp_prefill(prompt[:PREFILLED], hidden, (4095,))
    m = driver.mtp(prompt[PREFILLED : PREFILLED + 8], hidden[PREFILLED - 1 : PREFILLED + 7], PREFILLED)
    return model.logits(hidden[PREFILLED:]), model.logits(m)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_logits_past_4096_match_transformers(
    family_name: Family, long_cases: dict[str, tuple[Path, Reference]], long_prompt: list[int]
) -> None:
    long_checkpoint, long_reference = long_cases[family_name]
    logits, mtp_logits = _late_logits(long_checkpoint, long_prompt)
    assert relative_error(logits, long_reference.logits[PREFILLED:]) < TOLERANCE
    assert relative_error(mtp_logits, long_reference.mtp_logits[PREFILLED - 1 : PREFILLED + 7]) < TOLERANCE


def _theta(config: TextConfig) -> tuple[Tensor, float]:
    return 1.0 / 10_000.0 ** (torch.arange(0, config.rotary_dim, 2) / config.rotary_dim), 1.0


def _exponent(config: TextConfig) -> tuple[Tensor, float]:
    return 1.0 / config.rope_theta ** (torch.arange(0, config.rotary_dim, 2) / config.head_dim), 1.0


def _wrapped(positions: Tensor) -> Tensor:
    return positions % 4096


def _coarse(positions: Tensor) -> Tensor:
    return positions.bfloat16().float()


@pytest.mark.parametrize("wrong", [_theta, _exponent])
def test_wrong_rope_frequencies_are_detected(
    wrong: Callable[[TextConfig], tuple[Tensor, float]],
    monkeypatch: pytest.MonkeyPatch,
    long_cases: dict[str, tuple[Path, Reference]],
    long_prompt: list[int],
) -> None:
    long_checkpoint, long_reference = long_cases["dense"]
    monkeypatch.setattr(layers, "rope_frequencies", wrong)
    logits, mtp_logits = _late_logits(long_checkpoint, long_prompt)
    assert relative_error(logits, long_reference.logits[PREFILLED:]) > 50 * TOLERANCE
    assert relative_error(mtp_logits, long_reference.mtp_logits[PREFILLED - 1 : PREFILLED + 7]) > 50 * TOLERANCE


@pytest.mark.parametrize("wrong", [_wrapped, _coarse])
def test_wrong_rope_positions_are_detected(
    wrong: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    long_cases: dict[str, tuple[Path, Reference]],
    long_prompt: list[int],
) -> None:
    long_checkpoint, long_reference = long_cases["dense"]
    right = kernels.rope_cos_sin
    monkeypatch.setattr(
        kernels, "rope_cos_sin", lambda positions, inv_freq, scale: right(wrong(positions), inv_freq, scale)
    )
    logits, _ = _late_logits(long_checkpoint, long_prompt)
    assert relative_error(logits, long_reference.logits[PREFILLED:]) > 50 * TOLERANCE
