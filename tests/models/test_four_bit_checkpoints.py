"""4-bit checkpoints in every published layout have exactly the values of a straightforward dequantisation; models on
them compute what models on those values compute; ranks hold equal parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentspec.errors import ConfigError
from agentspec.kernels import FourBit, Plain, Weight
from agentspec.models.hf_config import TextConfig
from agentspec.models.quantization import is_convertible
from agentspec.models.registry import resolved_config
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config
from agentspec.models.tensors import parameter_forms, random_parameters
from agentspec.models.weights import Checkpoint
from tests.fakes.four_bit_layouts import LAYOUTS
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver, every_output
from tests.models.test_shards import together

CPU = torch.device("cpu")
PROMPT = list(range(20))


def load(directory: Path, dtype: torch.dtype = torch.float32, rank: Rank = SINGLE_RANK) -> dict[str, Weight]:
    with Checkpoint(directory) as checkpoint:
        return checkpoint.load(config_of(directory), device=CPU, dtype=dtype, rank=rank)


def config_of(directory: Path) -> TextConfig:
    return resolved_config(directory, random_weights=False)


def outputs(directory: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = load_model(directory, device=CPU, dtype=dtype)
    return every_output(model, PROMPT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_outputs_are_those_of_the_dequantised_checkpoint(layout: str, tmp_path: Path) -> None:
    seed = sorted(LAYOUTS).index(layout)
    print(f"seed {seed}")
    stored, expanded = LAYOUTS[layout].write(tmp_path, seed=seed)
    got, wanted = load(stored), load(expanded)
    assert got.keys() == wanted.keys()
    for name, weight in got.items():
        assert torch.equal(weight.dequantize(), wanted[name].dequantize()), name
        in_4_bits = re.fullmatch(LAYOUTS[layout].four_bit, name.removesuffix(".weight"))
        assert isinstance(weight, FourBit if in_4_bits else Plain), name
        assert weight.is_quantized <= is_convertible(name), name
    for mine, theirs in zip(outputs(stored), outputs(expanded), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.float().nan_to_num(neginf=0).isfinite().all()


@pytest.mark.parametrize("layout", ["awq", "compressed-tensors, nvfp4", "modelopt, mixed, both files"])
def test_bfloat16_activations_round_the_same_values(layout: str, tmp_path: Path) -> None:
    stored, expanded = LAYOUTS[layout].write(tmp_path, seed=7)
    exact, got = load(expanded), load(stored, torch.bfloat16)
    for name in filter(is_convertible, got):
        want = exact[name].dequantize().bfloat16()
        assert torch.equal(got[name].dequantize(torch.bfloat16), want), name
    for mine, theirs in zip(outputs(stored, torch.bfloat16), outputs(expanded, torch.bfloat16), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_their_parts(layout: str, tmp_path: Path) -> None:
    """Of 2 and 4 ranks: their rows begin inside packed words, and columns at groups; narrow experts are held whole."""
    heads = {
        "num_attention_heads": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 3,
    }
    sizes = {"head_dim": 64, "linear_value_head_dim": 32} | heads
    if LAYOUTS[layout].family == "dense":
        sizes["intermediate_size"] = 512
    stored, _ = LAYOUTS[layout].write(tmp_path, seed=3, **sizes)
    if layout.startswith(("gptq v2", "awq")) and "moe" not in layout:
        # 3 rows a head don't fill the words of these formats.
        stored, _ = LAYOUTS[layout].write(tmp_path / "again", seed=3, **sizes | {"linear_key_head_dim": 6})
    config, whole = config_of(stored), load(stored)
    for count in (2, 4):
        forms = parameter_forms(config, count)
        parts = [load(stored, rank=Rank(index, count)) for index in range(count)]
        for name, weight in whole.items():
            assert torch.equal(together(forms[name], [part[name] for part in parts], name), weight.dequantize()), name
            assert {type(part[name]) for part in parts} == {type(weight)}, name


def test_groups_that_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, official"].write(tmp_path)
    config = config_of(stored)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: num_attention_heads x head_dim = 128 .* blocks of 128"):
        rank_config(config, Rank(0, 2))
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: "), Checkpoint(stored) as checkpoint:
        checkpoint.load(config, device=CPU, dtype=torch.float32, rank=Rank(1, 2))


def test_a_rank_reads_its_part_alone(tmp_path: Path) -> None:
    layout = LAYOUTS["gptq, official"]
    sizes = {"intermediate_size": 4096, "linear_num_value_heads": 16, "num_attention_heads": 8, "head_dim": 64}
    stored, _ = layout.write(tmp_path, linear_value_head_dim=32, mtp=False, vocab_size=32, **sizes)
    config, read = config_of(stored), []
    for rank in (SINGLE_RANK, Rank(1, 2)):
        with Checkpoint(stored) as checkpoint:
            checkpoint.load(config, device=CPU, dtype=torch.float32, rank=rank)
            read.append(checkpoint.bytes_read)
    assert read[1] < 0.6 * read[0]


@pytest.mark.parametrize("layout", ["gptq, official, moe", "compressed-tensors, nvfp4", "modelopt, mixed, both files"])
def test_random_weights_follow_the_config(layout: str, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[layout].write(tmp_path)
    config = config_of(stored)
    first, again = (random_parameters(config, device=CPU, dtype=torch.float32, seed=1) for _ in range(2))
    loaded = load(stored)
    for name, weight in first.items():
        assert (type(weight), weight.shape) == (type(loaded[name]), loaded[name].shape), name
        assert torch.equal(weight.dequantize(), again[name].dequantize()), name
        if isinstance(weight, FourBit):
            assert 0.5 < weight.dequantize().std() * weight.shape[-1] ** 0.5 < 2, name
    model = load_model(stored, device=CPU, dtype=torch.float32, random_weights=True)
    hidden_NH = Driver(model).prefill(PROMPT)
    assert model.logits(hidden_NH)[..., : model.spec.num_real_tokens].isfinite().all()


def test_the_start_page_says_how_weights_are_stored(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["compressed-tensors, nvfp4 with inputs, moe"].write(tmp_path / "inputs")
    said = load_model(stored, device=CPU, dtype=torch.float32).spec.weights
    # Two layers of 4 experts with 3 matrices of 128 x 128: half a byte, a scale for 16, 4 bytes a row.
    num_bytes = 2 * 4 * 3 * 128 * (64 + 8 + 4)
    assert f"e2m1 in groups of 16: experts ({num_bytes / 1e6:.1f} MB)" in said
    assert "float32: embedding, " in said
    # Two of four experts are chosen; the MTP head makes drafts alone, and of the embedding a token reads one row.
    read = sum(
        weight.nbytes // (2 if ".experts." in name else 1)
        for name, weight in load(stored).items()
        if not name.startswith(("mtp.", "model.embed_tokens."))
    )
    assert f"; a token reads {read / 1e6:.1f} MB; " in said
    assert "made for 4-bit inputs (W4A4) and served with its weights alone" in said
    assert said.endswith("2 multipliers of keys and values are not used")
    stored, _ = LAYOUTS["gptq, official"].write(tmp_path / "gptq")
    said = load_model(stored, device=CPU, dtype=torch.float32).spec.weights
    assert re.fullmatch(
        r"float32: .*, attention, .*MTP head.* \([\d.]+ MB\); int4 in groups of 128: FFN \([\d.]+ MB\); "
        r"a token reads [\d.]+ MB",
        said,
    ), said
