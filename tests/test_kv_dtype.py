"""Keys and values in FP8: pages of half the size, nearly the same text and drafts, the same streams however they are
computed, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.settings import pages_in_fp8
from agentspec.errors import ConfigError
from agentspec.models.registry import model_spec, resolved_config
from agentspec.runtime.host_copies import HostCopies
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.loaded import load_model
from tests.test_draft_vocabulary import QUESTIONS, SAMPLINGS, Heard, ask, tiny_agent

CPU = torch.device("cpu")


def test_drafts_cache_and_rings_do_not_change_streams() -> None:
    """And the drafts' acceptance stays nearly what it is in full precision, with and without copies."""
    settings: list[dict[str, Any]] = [
        {},
        {"state_form": "ring"},
        {"state_form": "ring", "copy_drafts": 0},
        {"prefill_budget": 64},
    ]

    def heard(**settings: Any) -> Heard:
        return ask(tiny_agent(**settings), QUESTIONS, SAMPLINGS[:2])

    plain = heard(kv_dtype="fp8", draft_tokens=0, prefix_cache=False)
    without_copies, with_copies = heard(), heard(state_form="ring")
    for some in settings:
        found = heard(kv_dtype="fp8", **some)
        full = with_copies if some == {"state_form": "ring"} else without_copies
        assert found.streams == plain.streams, some
        assert found.acceptance > 0.9 * full.acceptance > 0.3, some


def test_pages_take_half_of_bfloat16_and_a_byte_a_head() -> None:
    config = resolved_config(bundled.DIRECTORY, random_weights=False)
    plain, fp8 = (
        model_spec(bundled.DIRECTORY, config, torch.bfloat16, fp8_pages=is_fp8).page_bytes for is_fp8 in (False, True)
    )
    assert fp8 == plain // 2 * (config.head_dim + 1) // config.head_dim
    assert tiny_agent(kv_dtype="fp8").spec.page_bytes == fp8


def test_pages_and_exponents_come_back_from_the_host(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, "dense"), device=CPU, dtype=torch.float32, fp8_pages=True)
    model.allocate(num_rows=4, num_pages=6)
    rng = torch.Generator().manual_seed(1)
    for tensor in model.page_tensors():
        tensor.view(torch.uint8).random_(0, 256, generator=rng)
    assert sum(tensor[0].nbytes for tensor in model.page_tensors()) == model.spec.page_bytes
    before = [tensor.view(torch.uint8).clone() for tensor in model.page_tensors()]
    copies = HostCopies(model, HostMemory(num_rows=2, num_pages=3), CPU)
    _move(copies, to_host=[(2, 0), (5, 2)])
    _move(copies, to_device=[(0, 4), (2, 3)])
    for tensor, was in zip(model.page_tensors(), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[[4, 3]], was[[2, 5]])


def _move(copies: HostCopies, **pages: list[tuple[int, int]]) -> None:
    copies.launch(CopyOrders(**{direction: [CopyOrder(1, [], moved)] for direction, moved in pages.items()}))
    while 0 in [getattr(copies.poll(), direction) for direction in pages]:
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype='int8': must be one of auto, bf16, fp8"),
        (
            {"kv_dtype": "bf16", "dtype": "float32"},
            "kv_dtype='bf16': activations are in float32, and keys and values too; use auto",
        ),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_agent(**settings)
    assert str(refused.value) == words


def test_bf16_is_what_bfloat16_activations_have_anyway() -> None:
    assert not pages_in_fp8(EngineConfig(kv_dtype="bf16"), torch.bfloat16)
    assert not pages_in_fp8(EngineConfig(), torch.bfloat16)
    assert pages_in_fp8(EngineConfig(kv_dtype="fp8"), torch.float32)
