"""A custom weight form works in operations, loader and model like those of the package."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.errors import CheckpointError
from agentspec.kernels import FP8, FourBitForm, MixtureWeights, Norm, Plain, Weight, quantize_blocks, reference
from agentspec.kernels import quantize_rows as fp8_rows
from agentspec.kernels.weights import Region
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.outline import outline
from agentspec.models.quantization import canonical_name, is_convertible
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import model_spec
from agentspec.models.tensors import random_parameters
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, rewrite, write_checkpoint
from tests.fakes.int8_rows import Int8Checkpoint, Int8Rows, quantize_rows
from tests.fakes.sequence_driver import every_output

CPU = torch.device("cpu")
PROMPT = list(range(20))
FORMS: dict[str, Callable[[Tensor], Weight]] = {
    "plain": Plain,
    "block-scaled": quantize_blocks,
    "row-scaled": fp8_rows,
    "int8 rows": quantize_rows,
    "int4": FourBitForm(kind="int4", group=32).quantize,
    "int4 with zero points": FourBitForm(kind="int4", group=16, has_zeros=True, scale_dtype=torch.float16).quantize,
    "e2m1": FourBitForm(kind="e2m1", group=16, scale_dtype=FP8).quantize,
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


def load(directory: Path, config: TextConfig) -> dict[str, Weight]:
    with Checkpoint(directory) as checkpoint:
        return checkpoint.load(config, device=CPU, dtype=torch.float32)


def outputs(directory: Path, config: TextConfig, parameters: dict[str, Weight]) -> list[Tensor]:
    model = Qwen3_5Model(config, model_spec(directory, config, torch.float32), dict(parameters), fp8_drafts=True)
    return every_output(model, PROMPT)


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
