"""Drafts with FP8 weights: the same streams, nearly the same acceptance, and a note on the start page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.settings import drafts_in_fp8
from agentspec.errors import ConfigError
from agentspec.types import SamplingParams
from tests.fakes.upcycled import write_upcycled
from tests.test_draft_vocabulary import QUESTIONS, SAMPLINGS, SIZE, ask, tiny_agent


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [("tiny-agent", SAMPLINGS[1]), ("with experts", SAMPLINGS[0])],
    ids=["tiny-agent", "with experts"],
)
def test_fp8_drafts_keep_streams_and_nearly_all_acceptance(kind: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """tests/properties/draft_precision.py measures more prompts."""
    model = str(bundled.DIRECTORY if kind == "tiny-agent" else write_upcycled(tmp_path))
    exact, rounded = (
        ask(tiny_agent(model=model, draft_precision=precision), QUESTIONS, [sampling])
        for precision in ("checkpoint", "fp8")
    )
    print(f"{kind}: {exact.acceptance:.1%} of the drafts by the checkpoint's weights, {rounded.acceptance:.1%} in FP8")
    assert rounded.streams == exact.streams
    assert rounded.acceptance > 0.95 * exact.acceptance > 0.3


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "expected"),
    [
        ({}, "cuda", torch.bfloat16, True),
        ({}, "cuda", torch.float32, False),
        ({}, "cpu", torch.bfloat16, False),
        ({"draft_tokens": 0}, "cuda", torch.bfloat16, False),
        ({"draft_precision": "checkpoint"}, "cuda", torch.bfloat16, False),
        ({"draft_precision": "fp8"}, "cpu", torch.float32, True),
    ],
    ids=str,
)
def test_auto_is_fp8_on_a_gpu_in_bfloat16(
    settings: dict[str, Any], device: str, dtype: torch.dtype, expected: bool
) -> None:
    assert drafts_in_fp8(EngineConfig(**settings), torch.device(device), dtype) == expected


def test_the_start_page_shows_the_draft_precision() -> None:
    everything, some = (tiny_agent(draft_precision="fp8", draft_vocab_size=size) for size in (0, SIZE))
    assert everything.draft_vocabulary == "all 4,096 tokens (FP8; 4.0 MiB)"
    assert some.draft_vocabulary == f"64 of 4,096 tokens (the lowest ids; FP8; {SIZE * (256 * 4 + 8) / 2**20:.1f} MiB)"
    assert not tiny_agent().model.fp8_drafts, "it has no benefit on a CPU"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_precision": "int4"}, "draft_precision='int4': must be one of auto, checkpoint, fp8"),
        ({"draft_precision": "fp8", "draft_tokens": 0}, "draft_precision='fp8': there are no drafts to make"),
        (
            {"draft_precision": "checkpoint", "draft_tokens": 0},
            "draft_precision='checkpoint': there are no drafts to make",
        ),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_agent(**settings)
