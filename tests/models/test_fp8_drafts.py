"""8-bit drafts: the MTP layer and the draft head are quantised to the nearest values, and nothing that affects the
output."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models import fp8_drafts, quantization
from agentspec.models.hf_config import load_text_config
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
PROMPT = random.Random(3).choices(range(160), k=100)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def rounded(weight: Tensor) -> Tensor:
    return kernels.quantize_blocks(weight).dequantize(weight.dtype)


def parameters_of(directory: Path, dtype: torch.dtype) -> dict[str, kernels.Weight]:
    with Checkpoint(directory) as checkpoint:
        return checkpoint.load(load_text_config(directory).with_mtp_layers(1), device=CPU, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_mtp_linears_and_experts_are_quantised(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    parameters = parameters_of(tmp_path, dtype)
    before = dict(parameters)
    fp8_drafts.quantize_mtp_layer(parameters)
    assert list(parameters) == list(before)
    changed = {name for name, parameter in parameters.items() if parameter is not before[name]}
    assert changed == {
        name for name in before if name.startswith("mtp.layers.0.") and name.removesuffix(".weight").endswith(LINEARS)
    }
    for name in changed:
        weight, quantized = before[name].tensor, parameters[name].tensor
        assert quantized.dtype == dtype
        assert torch.equal(quantized, rounded(weight)), name
        assert not torch.equal(quantized, weight), name


def test_fp8_checkpoint_weight_is_not_requantised() -> None:
    quantized = kernels.quantize_blocks(torch.randn(130, 70, generator=torch.Generator().manual_seed(1)))
    parameters: dict[str, kernels.Weight] = {"mtp.layers.0.self_attn.q_proj.weight": quantized}
    fp8_drafts.quantize_mtp_layer(parameters)
    assert parameters["mtp.layers.0.self_attn.q_proj.weight"] is quantized


@pytest.mark.parametrize("shape", [(700, 130), (64, 40), (257, 128), (5, 130, 70), (3, 64, 200)], ids=str)
@pytest.mark.parametrize("piece", [1, 20_000, 2**26])
def test_quantising_in_pieces_equals_quantising_whole(
    shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_drafts, "_PIECE", piece)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(piece))
    quantized = fp8_drafts.in_fp8(kernels.Plain(weight))
    assert torch.equal(quantized.tensor, rounded(weight))


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_block_scaled_drafts_equal_dequantised_drafts(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have their GPU form, and run through the CPU's operations."""
    write_checkpoint(tmp_path, family)
    expanded = load_model(tmp_path, device=CPU, dtype=torch.float32, fp8_drafts=True)
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)
    scaled = load_model(tmp_path, device=CPU, dtype=torch.float32, fp8_drafts=True)
    found = []
    for model in (expanded, scaled):
        model.limit_drafts(range(0, 160, 2))
        driver = Driver(model)
        driver.mtp_prefill(PROMPT[:80], driver.prefill(PROMPT[:80]))
        hidden_NH = torch.randn(4, model._head_VH.shape[1], generator=torch.Generator().manual_seed(2))
        m_TH = driver.mtp(PROMPT[80:84], hidden_NH, 80)
        keys_values = model.pools["kv_AP2SGD"][-1, driver.sequences[0].pages].transpose(0, 1).flatten(1, 2)[:, 1:84]
        found.append((m_TH, model.draft_head(m_TH), keys_values))
    assert isinstance(scaled._draft_head_OH, kernels.BlockScaled)
    assert isinstance(scaled._mtp_head().attention.qkv_proj, kernels.BlockScaled)
    for expected, got in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_draft_head_is_quantised_and_target_head_is_not(tied: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dense", tied=tied)
    plain, model = (load_model(tmp_path, device=CPU, dtype=torch.float32, fp8_drafts=fp8) for fp8 in (False, True))
    assert (plain.fp8_drafts, model.fp8_drafts) == (False, True)
    num_tokens, width = model.spec.num_real_tokens, model._head_VH.shape[1]
    hidden = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    for ids in ([*range(num_tokens)], sorted(random.Random(1).sample(range(num_tokens), 70))):
        plain.limit_drafts(ids)
        taken = model.limit_drafts(ids)
        assert taken == len(ids) * (width * 4 + (8 if len(ids) < num_tokens else 0))
        best = torch.tensor(ids)[(hidden @ rounded(plain._head_VH.tensor[ids]).T).argmax(-1)]
        assert torch.equal(model.draft_head(hidden), best)
        assert torch.equal(model.logits(hidden), plain.logits(hidden))
