"""Decode windows that ride in a prompt's pass, on CUDA: the forward compared with a separate prefill and verify, and
the output of an engine with graphs of rides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.ride import check_rides
from tests.fakes.checkpoints import Family
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.loaded import load_model
from tests.fakes.ridden_pass import PADDED, RiddenPass
from tests.properties.real_model import write_agreeing_checkpoint

pytestmark = pytest.mark.gpu
PROMPT = random.Random(3).choices(range(48), k=150)


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_ridden_forward_matches_separate_prefill_and_verify(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, family, num_hidden_layers=2, full_attention_interval=2)
    model = load_model(checkpoint, device=cuda, dtype=torch.float32)
    with torch.inference_mode():
        expected, got = RiddenPass(model, PROMPT, PADDED).apart(), RiddenPass(model, PROMPT, PADDED).ridden()
    for ours, wanted in zip(got, expected, strict=True):
        assert relative_error(ours, wanted) < TOLERANCE


def test_engine_output_is_same_with_and_without_rides(cuda: torch.device) -> None:
    print(check_rides(cuda))
