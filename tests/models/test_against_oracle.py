"""Logits, states and MTP logits equal a plain-torch forward over the raw tensors, also for variants that transformers
doesn't have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.loaded import load_model
from tests.fakes.oracle import Oracle
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
LENGTH = 75

VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "moe": ("moe", {}),
    "next": ("next", {}),
    "tied": ("dense", {"tied": True}),
    "flat": ("moe", {"namespace": "flat"}),
    "key and value dims differ": ("dense", {"linear_key_head_dim": 24, "linear_value_head_dim": 8}),
    "next, key and value dims differ": ("next", {"linear_key_head_dim": 8, "linear_value_head_dim": 24}),
    "one value head per key head": ("dense", {"linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    "sigmoid output gate": ("dense", {"output_gate_type": "sigmoid"}),
    "swish output gate": ("dense", {"output_gate_type": "swish"}),
    "no renormalisation": ("next", {"norm_topk_prob": False}),
    "attention first": (
        "dense",
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    "interval of two": ("dense", {"num_hidden_layers": 4, "full_attention_interval": 2}),
    "only linear layers": ("dense", {"num_hidden_layers": 2, "mtp": False}),
    "every dimension rotated": ("dense", {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 1.0}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_equals_oracle(variant: str, tmp_path: Path, prompt: list[int]) -> None:
    family, options = VARIANTS[variant]
    directory = write_checkpoint(tmp_path, family, **options)
    oracle, model = Oracle(directory), load_model(directory, device=CPU, dtype=torch.float32)
    expected = oracle.hidden(prompt[:LENGTH])
    driver = Driver(model)
    hidden = driver.prefill(prompt[: LENGTH - 4], (50,))
    hidden = torch.cat([hidden, driver.verify([prompt[LENGTH - 4 : LENGTH]], [3])[0]])
    assert relative_error(model.logits(hidden), oracle.logits(expected)) < TOLERANCE
    row = driver.sequences[0].read_row
    for index, layer in enumerate(i for i, full in enumerate(oracle.full) if not full):
        assert relative_error(model.pools["ssm_LRVDK"][index, row], oracle.states[layer]) < TOLERANCE, layer
    assert torch.equal(model.pools.hidden_RH[row], hidden[-1])
    assert model.spec.has_mtp == options.get("mtp", True)
    if model.spec.has_mtp:
        driver.mtp_prefill(prompt[:10], hidden)
        m = driver.mtp(prompt[10:14], hidden[9:13], 10)
        assert relative_error(model.logits(m), oracle.logits(oracle.mtp(prompt[:14], expected))[9:13]) < TOLERANCE
