"""A model without memory has one layer of each kind, and its own vocabulary and head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentspec import kernels
from agentspec.engine.bundled import checkpoint_of
from agentspec.models.attention import GatedAttention
from agentspec.models.outline import META, outline, weight_bytes
from agentspec.models.quantization import Fp8Blocks
from agentspec.models.registry import resolved_config
from agentspec.models.tensors import random_parameters
from benchmarks.published import CONFIGS, spec_of


@pytest.fixture(autouse=True)
def any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed, so any backend will do; Triton may be missing."""
    monkeypatch.setattr(kernels, "backend", lambda device: kernels.reference)


@pytest.mark.parametrize("name", ["4B", "27B-FP8", "35B-A3B-FP8"])
def test_outline_has_one_layer_of_each_kind(name: str) -> None:
    config = CONFIGS[name]
    model = outline(config, spec_of(name, config, torch.bfloat16), dtype=torch.bfloat16, fp8_drafts=True)
    assert [isinstance(layer.mixer, GatedAttention) for layer in model._layers] == [False, True]
    assert model.device == META
    assert model.spec.has_mtp
    model.allocate(num_rows=1 << 20, num_pages=1 << 20)
    assert all(tensor.is_meta for tensor in model.row_tensors())


def test_full_precision_layer_is_separate_kind() -> None:
    config = CONFIGS["27B-FP8"]
    assert isinstance(config.quantization, Fp8Blocks)
    kept = {f"model.layers.5.mlp.{part}_proj" for part in ("gate", "up", "down")}
    config = replace(config, quantization=Fp8Blocks(excluded=config.quantization.excluded | kept))
    model = outline(config, spec_of("27B", config, torch.bfloat16), dtype=torch.bfloat16, fp8_drafts=True)
    assert len(model._layers) == 3


def test_weight_bytes_are_those_of_the_parameters_in_memory() -> None:
    config = resolved_config(Path(checkpoint_of(None)), random_weights=True)
    parameters = random_parameters(config, device=torch.device("cpu"), dtype=torch.bfloat16, seed=0)

    assert weight_bytes(config, dtype=torch.bfloat16) == sum(weight.nbytes for weight in parameters.values())


@pytest.mark.parametrize(("name", "gigabytes"), [("27B", 54.6), ("27B-FP8", 29.9), ("35B-A3B-FP8", 36.6)])
def test_weight_bytes_of_published_sizes(name: str, gigabytes: float) -> None:
    assert weight_bytes(CONFIGS[name], dtype=torch.bfloat16) / 1e9 == pytest.approx(gigabytes, abs=0.05)
