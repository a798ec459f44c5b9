"""Heads in 8 bits with a scale for each row on a CUDA device: the kernels at served shapes in bfloat16, and models that
keep such a head."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec.kernels import RowScaled
from agentspec.kernels.triton import linear_layers
from tests.fakes.four_bit_layouts import LAYOUTS
from tests.fakes.loaded import load_model
from tests.kernels.triton.poison import poison_new_memory
from tests.kernels.triton.test_linear import randn
from tests.kernels.triton.test_linear_fp8_rows import check_logits, exact_scores, random_head
from tests.models.test_fp8_heads import BY_ROW, BY_TENSOR

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
NUM_REAL, VOCABULARY, DRAFT_VOCABULARY = 248_077, 248_320, 32_768
AT_ONCE = 16_384
"""Rows of a head that are compared at a time: in float64 a whole one takes gigabytes."""


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 9, 32, 33, 64, 130])
@pytest.mark.parametrize("shape", [(VOCABULARY, 5120), (VOCABULARY, 2048), (VOCABULARY // 2, 5120)], ids=str)
def test_logits_match_float64(shape: tuple[int, int], num_tokens: int, cuda: torch.device) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    head = random_head(*shape, seed, cuda)
    x = randn(num_tokens, shape[1], seed=seed + 1, device=cuda, dtype=BF16)
    num_real = min(NUM_REAL, shape[0])
    got = linear_layers.logits(x, head, num_real)
    for first in range(0, shape[0], AT_ONCE):
        rows = slice(first, min(first + AT_ONCE, shape[0]))
        real = min(max(num_real - first, 0), rows.stop - first)
        check_logits(got[:, rows], x, head.cut((rows,)), real, f"seed {seed}, rows from {first}")
    for _ in range(3):
        assert torch.equal(linear_layers.logits(x, head, num_real), got), f"seed {seed}"


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 32, 33, 64, 130])
@pytest.mark.parametrize("depth", [5120, 2048])
def test_drafts_have_the_best_score(depth: int, num_tokens: int, cuda: torch.device) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    head = random_head(DRAFT_VOCABULARY, depth, seed, cuda)
    x = randn(num_tokens, depth, seed=seed + 1, device=cuda, dtype=BF16)
    exact = exact_scores(x, head)
    chosen = exact.gather(1, linear_layers.draft_argmax(x, head, None)[:, None])[:, 0]
    assert ((exact.amax(-1) - chosen) <= 1e-5 * exact.abs().amax(-1)).all(), f"seed {seed}: two rows may tie"


@pytest.mark.parametrize("layout", [BY_ROW, BY_TENSOR])
def test_a_model_keeps_its_head(layout: str, cuda: torch.device, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[layout].write(tmp_path, seed=6)
    model = load_model(stored, device=cuda, dtype=BF16, fp8_drafts=True)
    head, num_real = model._head_VH, model.spec.num_real_tokens
    assert isinstance(head, RowScaled)
    assert "float8_e4m3fn by row: head (" in model.spec.weights
    hidden = randn(7, 128, seed=2, device=cuda, dtype=BF16)
    with torch.inference_mode():
        check_logits(model.logits(hidden), hidden, head, num_real, layout)
        exact = exact_scores(hidden, head)
        ids = sorted(random.Random(3).sample(range(num_real), 31))
        for asked in (ids, range(num_real)):
            assert model.limit_drafts(asked) == (len(ids) * (128 + 4 + 8) if asked is ids else 0)
            assert isinstance(model._draft_head_OH, RowScaled)
            best = exact[:, torch.tensor([*asked], device=cuda)].amax(-1)
            chosen = exact.gather(1, model.draft_head(hidden)[:, None])[:, 0]
            assert ((best - chosen) <= 1e-5 * exact.abs().amax(-1)).all(), "two rows may tie"
