"""A custom weight form works in operations, loader and model like those of the package; ranks hold equal parts of each
form."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.errors import CheckpointError, ConfigError
from agentspec.kernels import BlockScaled, MixtureWeights, Norm, Plain, Weight, quantize_blocks, reference
from agentspec.kernels.weights import Region
from agentspec.models import quantization
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.outline import outline
from agentspec.models.quantization import canonical_name, is_convertible
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import model_spec
from agentspec.models.shards import SINGLE_RANK, Rank
from agentspec.models.tensors import parameter_forms, random_parameters
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, rewrite, write_checkpoint
from tests.fakes.int8_rows import Int8Checkpoint, Int8Rows, quantize_rows
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
PROMPT = list(range(20))
FORMS: dict[str, Callable[[Tensor], Weight]] = {
    "plain": Plain,
    "block-scaled": quantize_blocks,
    "int8 rows": quantize_rows,
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(weight: Weight) -> Plain:
    return Plain(weight.dequantize())


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Tensor], Weight]:
    return FORMS[request.param]


def test_cut_take_stack_and_fill_preserve_values(form: Callable[[Tensor], Weight]) -> None:
    matrix, stack = form(randn(384, 256, seed=1)), form(randn(3, 256, 256, seed=2))
    regions: list[Region] = [(), (slice(128, 256),), (slice(128, None),), (slice(0, 256), slice(128, 256))]
    for region in regions:
        assert torch.equal(matrix.cut(region).dequantize(), matrix.dequantize()[region]), region
        assert matrix.cut(region).values.untyped_storage().data_ptr() == matrix.values.untyped_storage().data_ptr()
    regions = [(2,), (slice(1, 3),), (1, slice(128, 256)), (slice(0, 2), slice(0, 128), slice(128, 256))]
    for region in regions:
        assert torch.equal(stack.cut(region).dequantize(), stack.dequantize()[region]), region
    assert torch.equal(stack.matrix(1).dequantize(), stack.dequantize()[1])
    ids = torch.tensor([5, 383, 0, 200, 200])
    assert torch.equal(matrix.select_rows(ids).dequantize(), matrix.dequantize()[ids])
    stacked = matrix.stack([stack.matrix(0), stack.matrix(2)])
    assert torch.equal(stacked.dequantize(), torch.cat([matrix.dequantize(), *stack.dequantize()[[0, 2]]]))
    target = form(randn(3, 256, 128, seed=3))
    expected = target.dequantize().clone()
    for region, part, taken in (
        ((1, slice(128, 256)), matrix, (slice(256, 384), slice(0, 128))),
        ((slice(0, 2),), stack, (slice(1, 3), slice(None), slice(128, 256))),
        ((2,), form(randn(256, 128, seed=4)), ()),
    ):
        target.fill(region, part, taken)
        expected[region] = part.dequantize()[taken]
        assert torch.equal(target.dequantize(), expected), region


def test_plain_rows_are_stacked_or_kept_separate(form: Callable[[Tensor], Weight]) -> None:
    """Full-precision rows are appended to a plain weight, but stay separate from a quantised one."""
    weight, rows = form(randn(128, 128, seed=1)), randn(3, 128, seed=2)
    stacked, apart = weight.append_full_precision(rows)
    assert weight.is_quantized == (form is not Plain)
    if weight.is_quantized:
        assert stacked is weight
        assert apart is rows
        with pytest.raises(AssertionError, match="where only plain weights may be"):
            _ = weight.tensor
    else:
        assert apart is None
        assert torch.equal(stacked.tensor, torch.cat([weight.tensor, rows]))


def test_stack_and_fill_refuse_mixed_forms() -> None:
    for first, second in itertools.permutations(FORMS.values(), 2):
        one, other = first(randn(128, 128, seed=1)), second(randn(128, 128, seed=2))
        with pytest.raises(AssertionError):
            one.stack([other])
        if one.is_quantized:
            with pytest.raises(AssertionError):
                one.fill((), other)


def test_products_equal_those_of_dequantised_values(form: Callable[[Tensor], Weight]) -> None:
    x, norm, weight, residual = (
        randn(5, 256, seed=1),
        Norm(weight=randn(256, seed=2), eps=1e-6),
        form(randn(128, 256, seed=3)),
        randn(5, 128, seed=4),
    )
    extra, ids = randn(3, 256, seed=5), torch.arange(128).flip(0)
    assert torch.equal(reference.linear(x, weight), reference.linear(x, plain(weight)))
    assert torch.equal(
        reference.norm_linear(x, norm, weight, extra), reference.norm_linear(x, norm, plain(weight), extra)
    )
    assert torch.equal(reference.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, plain(weight)))
    assert torch.equal(reference.add_linear(residual, x, weight), reference.add_linear(residual, x, plain(weight)))
    assert torch.equal(reference.draft_argmax(x, weight, ids), reference.draft_argmax(x, plain(weight), ids))


def test_experts_equal_those_of_dequantised_values(form: Callable[[Tensor], Weight]) -> None:
    weights = MixtureWeights(
        router_XH=randn(4, 128, seed=1),
        top_k=2,
        normalize=True,
        gate_up_X2IH=form(randn(4, 64, 128, seed=2)),
        down_XHI=form(randn(4, 128, 32, seed=3)),
        shared_gate_1H=randn(1, 128, seed=4),
        shared_gate_up_2IH=form(randn(64, 128, seed=5)),
        shared_down_HI=form(randn(128, 32, seed=6)),
    )
    names = ("gate_up_X2IH", "down_XHI", "shared_gate_up_2IH", "shared_down_HI")
    plain_ones: dict[str, Any] = {name: plain(getattr(weights, name)) for name in names}
    exact = dataclasses.replace(weights, **plain_ones)
    x, norm = randn(7, 128, seed=7), Norm(weight=randn(128, seed=8), eps=1e-6)
    assert torch.equal(reference.add_experts(x, norm, weights), reference.add_experts(x, norm, exact))


def int8_checkpoint(directory: Path, family: Family, **options: Any) -> TextConfig:
    """Write a checkpoint in the test's own form; returns the config that reads it."""

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if is_convertible(canonical_name(name))]:
            rows = quantize_rows(tensors[name])
            tensors |= {name: rows.values, name + Int8Checkpoint.SUFFIX: rows.scales}

    rewrite(write_checkpoint(directory, family, num_hidden_layers=4, **options), quantize)
    return dataclasses.replace(load_text_config(directory).with_mtp_layers(1), quantization=Int8Checkpoint())


def load(directory: Path, config: TextConfig, rank: Rank = SINGLE_RANK) -> dict[str, Weight]:
    with Checkpoint(directory) as checkpoint:
        return checkpoint.load(config, device=CPU, dtype=torch.float32, rank=rank)


def outputs(directory: Path, config: TextConfig, parameters: dict[str, Weight]) -> list[Tensor]:
    model = Qwen3_5Model(config, model_spec(directory, config, torch.float32), dict(parameters), fp8_drafts=True)
    driver = Driver(model)
    hidden_NH = driver.prefill(PROMPT)
    driver.mtp_prefill(PROMPT, hidden_NH)
    window_NH = driver.verify([[3, 1, 4]], [2])[0]
    m_NH = driver.mtp([3, 1, 4], window_NH, len(PROMPT))
    return [model.logits(hidden_NH), model.logits(window_NH), m_NH, model.draft_head(m_NH)]


@pytest.mark.parametrize(("family", "experts"), [("dense", None), ("moe", "split"), ("moe", "fused")])
def test_model_with_custom_weight_form(family: Family, experts: str | None, tmp_path: Path) -> None:
    config = int8_checkpoint(tmp_path, family, experts=experts)
    parameters = load(tmp_path, config)
    assert {name for name, weight in parameters.items() if isinstance(weight, Int8Rows)} == set(
        filter(is_convertible, parameters)
    )
    # The draft head is quantised at load in both: it is plain in the checkpoint. The MTP layer stays what it is.
    exact: dict[str, Weight] = {name: plain(weight) for name, weight in parameters.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentspec.models.hybrid.quantize_mtp_layer", lambda parameters: None)
        expected = outputs(tmp_path, config, exact)
    for got, wanted in zip(outputs(tmp_path, config, parameters), expected, strict=True):
        assert torch.equal(got, wanted)


def test_random_weights_and_outline_with_custom_weight_form(tmp_path: Path) -> None:
    config = int8_checkpoint(tmp_path, "moe")
    parameters = random_parameters(config, device=CPU, dtype=torch.float32, seed=1)
    assert {name for name, weight in parameters.items() if isinstance(weight, Int8Rows)} == set(
        filter(is_convertible, parameters)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentspec.models.qwen3_5.kernels.backend", lambda device: reference)
        model = outline(config, model_spec(tmp_path, config, torch.float32), dtype=torch.float32, fp8_drafts=False)
    assert isinstance(model._mtp_head().attention.qkv_proj, Int8Rows)


def test_defects_of_custom_weight_form_are_named(tmp_path: Path) -> None:
    config = int8_checkpoint(tmp_path, "dense")
    name = "model.language_model.layers.3.self_attn.o_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors[name + Int8Checkpoint.SUFFIX].fill_(torch.nan))
    with pytest.raises(
        CheckpointError, match=r"layers\.3\.self_attn\.o_proj\.weight or its multipliers hold values that aren't finite"
    ):
        load(tmp_path, config)
    rewrite(tmp_path, lambda tensors: tensors.pop(name + Int8Checkpoint.SUFFIX))
    with pytest.raises(
        CheckpointError, match=r"missing tensors: model\.layers\.3\.self_attn\.o_proj\.weight_row_scale$"
    ):
        load(tmp_path, config)


# Ranks

EVEN: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "moe, split": ("moe", {"experts": "split"}),
    "moe, fused": ("moe", {"experts": "fused"}),
    "next": ("next", {}),
    "fp8": ("dense", {"fp8": "stored"}),
    "fp8, moe": ("moe", {"fp8": "stored", "experts": "split"}),
}


def together(whole: Weight, parts: list[Weight], name: str, config: TextConfig) -> Tensor:
    """The ranks' parts, joined to the whole parameter; NaN where no rank has a value."""
    shard = parameter_forms(config)[name].shard
    joined = torch.full(tuple(whole.shape), torch.nan)
    for index, part in enumerate(parts):
        values = part.dequantize()
        if shard is None:
            joined = values
            continue
        held = shard.slices(name, Rank(index, len(parts)))
        for run, share in zip(held, values.split([run.stop - run.start for run in held], shard.dim), strict=True):
            joined[(*[slice(None)] * shard.dim, run)] = share
    return joined


@pytest.mark.parametrize("layout", EVEN)
def test_two_ranks_hold_all_parameters(layout: str, tmp_path: Path) -> None:
    family, options = EVEN[layout]
    write_checkpoint(tmp_path, family, num_hidden_layers=4, **options)
    config = load_text_config(tmp_path).with_mtp_layers(1)
    whole, parts = load(tmp_path, config), [load(tmp_path, config, Rank(index, 2)) for index in range(2)]
    halved = [name for name, weight in whole.items() if 2 * parts[0][name].values.numel() == weight.values.numel()]
    assert {name.rpartition("layers.")[2].partition(".")[2] for name in halved if "layers." in name} >= {
        *(
            "linear_attn.out_proj.weight",
            "linear_attn.in_proj_qkv.weight",
            "linear_attn.A_log",
            "linear_attn.conv1d.weight",
        ),
        *("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        *(("mlp.down_proj.weight",) if family == "dense" else ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    }
    for name, weight in whole.items():
        assert torch.equal(together(weight, [part[name] for part in parts], name, config), weight.dequantize()), name


def test_kv_heads_repeat_with_more_ranks_than_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dense", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = load_text_config(tmp_path).with_mtp_layers(1)
    name = "model.layers.3.self_attn.k_proj.weight"
    shard, dim = parameter_forms(config)[name].shard, config.head_dim
    assert shard is not None
    assert [shard.slices(name, Rank(index, 4)) for index in range(4)] == [
        [slice(first, first + dim)] for first in (0, 0, dim, dim)
    ]


def test_rank_count_that_cannot_share_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dense", num_hidden_layers=4)
    config = load_text_config(tmp_path).with_mtp_layers(1)
    with pytest.raises(ConfigError, match=r"ranks=7: \d+ units of model\.layers\.0\.\S+ can't be shared equally"):
        load(tmp_path, config, Rank(0, 7))


def test_ranks_hold_whole_scale_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of several blocks, on a device that keeps blocks: a rank's part stays block-scaled, with its values and
    multipliers."""
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)
    heads: dict[str, Any] = {"head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 2}
    write_checkpoint(tmp_path, "dense", num_hidden_layers=4, fp8="stored", intermediate_size=512, **heads)
    config = load_text_config(tmp_path).with_mtp_layers(1)
    whole, parts = load(tmp_path, config), [load(tmp_path, config, Rank(index, 2)) for index in range(2)]
    for name, weight in whole.items():
        held = [part[name] for part in parts]
        assert isinstance(weight, BlockScaled) == is_convertible(name) == isinstance(held[0], BlockScaled), name
        assert torch.equal(together(weight, held, name, config), weight.dequantize()), name
        if isinstance(held[1], BlockScaled):
            # Key heads of 16 rows begin inside a block of 128.
            assert held[1].block_rows == (16 if name.endswith("in_proj_qkv.weight") else 128), name
