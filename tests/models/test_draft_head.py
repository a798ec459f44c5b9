"""The draft head returns the most likely of all real tokens, or of those that it is limited to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.loaded import load_model


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_limited_draft_head_returns_best_allowed_token(tmp_path: Path, family: Family, tied: bool) -> None:
    write_checkpoint(tmp_path, family, tied=tied)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    num_real_tokens, hidden_size = model.spec.num_real_tokens, model._embedding_VH.shape[1]
    hidden = torch.randn(4, 3, hidden_size, generator=torch.Generator().manual_seed(0))
    scores = model.logits(hidden)
    everything = scores.argmax(-1)
    assert torch.equal(model.draft_head(hidden), everything)
    for seed in range(10):
        rng = random.Random(seed)
        ids = sorted(rng.sample(range(num_real_tokens), rng.randint(1, num_real_tokens - 1)))
        assert model.limit_drafts(ids) == len(ids) * (hidden_size * 4 + 8), seed
        best = torch.tensor(ids)[scores[..., ids].argmax(-1)]
        assert torch.equal(model.draft_head(hidden), best), seed
        assert torch.equal(model.logits(hidden), scores), f"{seed}: verification still scores every token"
    assert model.limit_drafts(range(num_real_tokens)) == 0
    assert torch.equal(model.draft_head(hidden), everything)
