"""Stop ids are the union of three files; ids without a token are never sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.errors import CheckpointError
from agentspec.models.hf_config import load_text_config
from agentspec.models.vocabulary import num_real_tokens, stop_token_ids
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.loaded import load_model

TOKENIZER = {
    "added_tokens": [{"id": 151, "content": "<|im_end|>"}, {"id": 150, "content": "<|endoftext|>"}],
    "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "dense", num_hidden_layers=4, eos_token_id=150)


def put(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content))


def stops(directory: Path) -> tuple[int, ...]:
    return stop_token_ids(directory, load_text_config(directory))


def test_stop_ids_from_config_alone(directory: Path) -> None:
    assert stops(directory) == (150,)


def test_stop_ids_are_union_of_three_files(directory: Path) -> None:
    put(directory, "generation_config.json", {"eos_token_id": [151, 150]})
    put(directory, "tokenizer.json", TOKENIZER)
    put(directory, "tokenizer_config.json", {"eos_token": "a"})
    assert stops(directory) == (151, 150, 0)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_tokenizer_end_token_without_generation_config(directory: Path, eos: Any) -> None:
    """Published checkpoints without generation_config.json would otherwise never stop at the end of a turn."""
    put(directory, "tokenizer.json", TOKENIZER)
    put(directory, "tokenizer_config.json", {"eos_token": eos})
    assert stops(directory) == (150, 151)


def test_end_token_from_tokenizer_config_alone(directory: Path) -> None:
    put(
        directory,
        "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {"151": {"content": "<|im_end|>"}}},
    )
    assert stops(directory) == (150, 151)


def test_unknown_end_token_is_refused(directory: Path) -> None:
    put(directory, "tokenizer_config.json", {"eos_token": "<|nowhere|>"})
    with pytest.raises(CheckpointError, match="nowhere"):
        stops(directory)


def test_end_id_outside_vocabulary_is_refused(directory: Path) -> None:
    put(directory, "generation_config.json", {"eos_token_id": 160})
    with pytest.raises(CheckpointError, match="160"):
        stops(directory)


def test_padding_ids_score_minus_infinity(directory: Path) -> None:
    put(directory, "tokenizer.json", TOKENIZER)
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
    assert (model.spec.num_real_tokens, model.spec.vocab_size) == (152, 160)
    hidden = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    assert logits[..., 152:].eq(-torch.inf).all()
    assert logits[..., :152].isfinite().all()
    assert torch.equal(model.draft_head(hidden), logits.argmax(-1))


def test_without_tokenizer_every_id_is_real(directory: Path) -> None:
    assert num_real_tokens(directory, load_text_config(directory)) == 160


def test_tokenizer_larger_than_vocab_size_is_refused(directory: Path) -> None:
    put(directory, "tokenizer.json", {"added_tokens": [{"id": 160, "content": "x"}], "model": {"vocab": {}}})
    with pytest.raises(CheckpointError, match="vocab_size=160"):
        num_real_tokens(directory, load_text_config(directory))
