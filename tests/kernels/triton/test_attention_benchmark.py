"""The checks and bytes of `python -m benchmarks.attention`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentspec.kernels.triton.attention import attention_step
from agentspec.kernels.triton.launch import INTERPRETED
from benchmarks import attention as benchmark
from benchmarks.attention import TOLERANCE, error_of, random_window
from benchmarks.published import CONFIGS, KV_DTYPES

SMALL = replace(CONFIGS["4B"], num_heads=4, num_kv_heads=1)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kernels_equal_the_reference_and_wrong_outputs_are_found(
    kv_dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of(SMALL, 3, kv_dtype, device, DTYPE) < TOLERANCE
    monkeypatch.setattr(benchmark, "attention_step", lambda *inputs, **more: 1.1 * attention_step(*inputs, **more))
    assert error_of(SMALL, 3, kv_dtype, device, DTYPE) > TOLERANCE


def test_bytes_of_pages() -> None:
    sizes = {}
    for kv_dtype in KV_DTYPES:
        window = random_window(SMALL, 2, 640, 4, kv_dtype, torch.device("cpu"), torch.bfloat16)
        sizes[kv_dtype] = window.bytes_read
    assert sizes == {"bf16": 2 * 640 * 2 * 256 * 2, "fp8": 2 * 640 * 2 * (256 + 1)}
