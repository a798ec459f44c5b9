"""Prompts of a small block-scaled model on these kernels: the recurrent mixers' values reach their out-projections in 8
bits, and the results have the bits of a model whose mixers write them in 16 bits."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from agentspec.kernels.triton import chunked_delta
from agentspec.models.qwen3_5 import Qwen3_5Model
from tests.fakes.ridden_pass import RiddenPass
from tests.kernels.triton.conftest import WriteScaled

# numpy's warning, in the interpreter: the gate of a large negative value is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 4,
}
PROMPT = random.Random(3).choices(range(160), k=120)


@pytest.fixture
def model(write_scaled: WriteScaled) -> Qwen3_5Model:
    return write_scaled("dense", torch.bfloat16, mtp=False, **SIZES)()


@torch.inference_mode()
def test_prompts_have_the_bits_of_values_in_16_bits(model: Qwen3_5Model) -> None:
    def apart() -> list[Tensor]:
        return RiddenPass(model, PROMPT).apart()

    with patch.object(chunked_delta, "_norm_to_fp8", wraps=chunked_delta._norm_to_fp8) as rounds:
        got = apart()
        assert rounds.call_count == 2, "of four prompts two have more than 64 tokens"
    with patch.object(chunked_delta, "takes_rounded", lambda *_: False):
        expected = apart()
    for ours, wanted in zip(got, expected, strict=True):
        assert torch.equal(ours, wanted)
        assert ours.isfinite().all()


@torch.inference_mode()
def test_prompts_with_windows_beside_them_have_values_in_16_bits(model: Qwen3_5Model) -> None:
    ridden = RiddenPass(model, PROMPT)
    with patch.object(chunked_delta, "_norm_to_fp8", wraps=chunked_delta._norm_to_fp8) as rounds:
        got = ridden.ridden()
    assert rounds.call_count == 0
    assert all(part.isfinite().all() for part in got)
