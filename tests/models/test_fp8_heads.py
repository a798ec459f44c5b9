"""Heads in 8 bits that stay so, as on a GPU: with a scale for each row, exactly the values of the files, for the scores
and the drafts, on every rank. Computed by the CPU's operations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec.kernels import Plain, RowScaled, Weight
from agentspec.models import quantization, tensors
from agentspec.models.hf_config import TextConfig
from agentspec.models.outline import META, parameters_of
from agentspec.models.quantised.schemes import Fp8Head
from agentspec.models.registry import resolved_config
from agentspec.models.shards import SINGLE_RANK, Rank
from agentspec.models.stored import describe
from agentspec.models.tensors import HEAD, quantized_schemes, random_parameters
from agentspec.models.weights import Checkpoint
from benchmarks.published import CONFIGS
from tests.fakes.four_bit import fp8
from tests.fakes.four_bit_layouts import FP8_INPUTS, LAYOUTS, TRUNK_MLP, Layout, compressed, weights
from tests.fakes.loaded import load_model

CPU = torch.device("cpu")
BY_ROW = "compressed-tensors, int4, 8-bit blocks and a head in 8 bits by row"
BY_TENSOR = "modelopt, 8 bits by tensor, the head too"
SHARED = {
    "num_attention_heads": 8,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 32,
    "intermediate_size": 512,
}
"""Sizes that four ranks can share."""
IN_BLOCKS = Layout(
    writers={f"{TRUNK_MLP}|lm_head": fp8("block")},
    config=compressed(
        [
            {
                "targets": ["lm_head", "re:.*mlp.*"],
                "weights": weights(8, "float", "block", block_structure=[128, 128]),
                "input_activations": FP8_INPUTS,
            }
        ],
        "float-quantized",
        ignore=["re:mtp.*"],
    ),
    four_bit="nothing",
)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device keeps heads and blocks as they are."""
    monkeypatch.setattr(tensors, "holds_head", lambda scheme, shape, device: True)
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)


def load(directory: Path, rank: Rank = SINGLE_RANK, dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    with Checkpoint(directory) as checkpoint:
        return checkpoint.load(config_of(directory), device=CPU, dtype=dtype, rank=rank)


def config_of(directory: Path) -> TextConfig:
    return resolved_config(directory, random_weights=False)


@pytest.mark.parametrize("layout", [BY_ROW, BY_TENSOR])
def test_a_kept_head_has_the_values_of_the_files(layout: str, tmp_path: Path, kept: None) -> None:
    stored, expanded = LAYOUTS[layout].write(tmp_path, seed=5, **SHARED)
    head = load(stored)[HEAD]
    assert isinstance(head, RowScaled)
    assert torch.equal(head.dequantize(), load(expanded)[HEAD].dequantize())
    assert (head.scales == head.scales[0]).all() == (layout == BY_TENSOR)
    for count in (2, 4):
        parts = [load(stored, Rank(index, count))[HEAD] for index in range(count)]
        assert all(isinstance(part, RowScaled) and part.shape[0] == 160 // count for part in parts)
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), head.dequantize())


def test_a_rank_reads_its_rows_alone(tmp_path: Path, kept: None) -> None:
    stored, _ = LAYOUTS[BY_ROW].write(tmp_path, vocab_size=16_384)
    read = []
    for rank in (SINGLE_RANK, Rank(1, 2)):
        with Checkpoint(stored) as checkpoint:
            scheme, num_rows = quantized_schemes(config_of(stored))[HEAD], 16_384 // rank.count
            part = scheme.read(HEAD, checkpoint.tensor, (slice(16_384 - num_rows, 16_384),))
            assert part.shape == (num_rows, 128)
            read.append(checkpoint.bytes_read)
    assert read == [16_384 * (128 + 2), 8_192 * (128 + 2)], "scales are in bfloat16"


def test_a_cpu_expands_heads_and_every_device_those_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, expanded = LAYOUTS[BY_ROW].write(tmp_path / "row")
    for dtype in (torch.float32, torch.bfloat16):
        head = load(stored, dtype=dtype)[HEAD]
        assert isinstance(head, Plain)
        assert torch.equal(head.values, load(expanded)[HEAD].dequantize(dtype))
    monkeypatch.setattr(tensors, "holds_head", lambda scheme, shape, device: True)
    stored, expanded = IN_BLOCKS.write(tmp_path / "blocks")
    head = load(stored)[HEAD]
    assert isinstance(head, Plain)
    assert torch.equal(head.values, load(expanded)[HEAD].dequantize())
    assert HEAD not in quantized_schemes(config_of(stored))


@pytest.mark.parametrize("fp8_drafts", [False, True])
@pytest.mark.parametrize("layout", [BY_ROW, BY_TENSOR])
def test_scores_and_drafts_are_those_of_the_values(layout: str, fp8_drafts: bool, tmp_path: Path, kept: None) -> None:
    """The draft head's rows stay as they are whatever drafts are computed in, and are a view if there are all."""
    stored, expanded = LAYOUTS[layout].write(tmp_path, seed=6)
    model = load_model(stored, device=CPU, dtype=torch.float32, fp8_drafts=fp8_drafts)
    exact = load_model(expanded, device=CPU, dtype=torch.float32)
    assert isinstance(model._head_VH, RowScaled)
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    assert torch.equal(model.logits(hidden), exact.logits(hidden))
    num_real = model.spec.num_real_tokens
    ids = sorted(random.Random(3).sample(range(num_real), 31))
    for asked in (None, ids, range(num_real)):
        taken = [0 if asked is None else one.limit_drafts(asked) for one in (model, exact)]
        assert torch.equal(model.draft_head(hidden), exact.draft_head(hidden)), asked
        assert isinstance(model._draft_head_OH, RowScaled)
        assert taken[0] == (len(ids) * (128 + 4 + 8) if asked is ids else 0)
        assert torch.equal(model.logits(hidden), exact.logits(hidden)), "verification still scores every token"


def test_random_heads_are_the_nearest_by_row(tmp_path: Path, kept: None) -> None:
    stored, _ = LAYOUTS[BY_TENSOR].write(tmp_path)
    whole, *parts = (
        random_parameters(config_of(stored), device=CPU, dtype=torch.float32, seed=1, rank=rank)[HEAD]
        for rank in (SINGLE_RANK, Rank(0, 2), Rank(1, 2))
    )
    assert isinstance(whole, RowScaled)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())
    assert 0.9 < whole.dequantize().std() * 128**0.5 < 1.1


def test_a_head_that_the_files_have_in_full_precision_is_plain(tmp_path: Path, kept: None) -> None:
    layout = LAYOUTS[BY_ROW]
    writers = {name: writer for name, writer in layout.writers.items() if name != "lm_head"}
    plain = Layout(writers=writers, config=layout.config, four_bit=layout.four_bit)
    stored, expanded = plain.write(tmp_path)
    head = load(stored)[HEAD]
    assert isinstance(head, Plain)
    assert torch.equal(head.values, load(expanded)[HEAD].dequantize())


@pytest.mark.parametrize("name", ["4B-mixed4", "27B-mixed4", "35B-A3B-mixed4"])
def test_mixed4_has_its_head_in_8_bits_by_row_on_a_gpu(name: str) -> None:
    """Its config is what `agentspec quantize --to mixed4` writes. A rank's part has its rows."""
    config = CONFIGS[name]
    assert quantized_schemes(config)[HEAD] == Fp8Head(strategy="channel")
    for rank in (SINGLE_RANK, Rank(3, 4)):
        parameters = parameters_of(config, dtype=torch.bfloat16, rank=rank)
        head = parameters[HEAD]
        assert isinstance(head, RowScaled)
        assert head.device == META
        assert head.nbytes == 248_320 // rank.count * (config.hidden_size + 4)
    assert "float8_e4m3fn by row: head (" in describe(config, parameters)


def test_published_heads_in_4_bits_are_in_groups_of_128() -> None:
    for name in ("27B", "35B-A3B"):
        scheme = quantized_schemes(CONFIGS[f"{name}-mixed4-head4"])[HEAD]
        head = parameters_of(CONFIGS[f"{name}-mixed4-head4"], dtype=torch.bfloat16)[HEAD]
        assert (scheme.bits, scheme.column_block) == (4, 128)
        assert head.form_name == "int4 in groups of 128"
