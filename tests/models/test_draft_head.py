"""The draft head returns the most likely of all real tokens, or of those that it is limited to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec.kernels import FourBitForm, FourBitTiles, Plain
from agentspec.models.hf_config import load_text_config
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.tensors import HEAD, random_parameters
from benchmarks.published import spec_of
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


def test_a_head_in_4_bits_scores_and_drafts_as_its_values_do(tmp_path: Path) -> None:
    """Padding rows behind the real tokens, of which the last tile has both."""
    write_checkpoint(tmp_path, "dense", tied=False, hidden_size=128)
    config, cpu = load_text_config(tmp_path).with_mtp_layers(1), torch.device("cpu")
    spec = spec_of("m", config, torch.float32)
    parameters = random_parameters(config, device=cpu, dtype=torch.float32, seed=1)
    head = FourBitTiles.of(FourBitForm(kind="int4", group=32).quantize(parameters[HEAD].dequantize()))
    models = [
        Qwen3_5Model(config, spec, dict(parameters) | {HEAD: weight}) for weight in (head, Plain(head.dequantize()))
    ]
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    assert torch.equal(*(model.logits(hidden) for model in models))
    ids = sorted(random.Random(3).sample(range(spec.num_real_tokens), 31))
    for asked in (None, ids, range(spec.num_real_tokens)):
        taken = [0 if asked is None else model.limit_drafts(asked) for model in models]
        assert torch.equal(*(model.draft_head(hidden) for model in models)), asked
        if asked is not None:
            num_ids = 8 * len(asked) if asked is ids else 0
            assert taken[0] == len(asked) * 128 * 4 + num_ids, "its rows are a copy"
