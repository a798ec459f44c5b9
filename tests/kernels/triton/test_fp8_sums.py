"""Prompts' sums that leave the normed tokens in 8 bits: the bits of separate launches, of a sum and of prompts; and
never tokens of another norm or of an older sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton import expert_prefill, fp8_sums
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.fp8_activations import ScaledTokens
from agentspec.kernels.triton.fp8_ffn import norm_tokens
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.norm_ahead import TokensAhead, attach, take_tokens
from agentspec.kernels.weights import Plain, Weight
from tests.fakes.checkpoints import Family
from tests.fakes.sequence_driver import Driver
from tests.kernels.triton.conftest import WriteScaled
from tests.kernels.triton.test_fp8_prefill import block_scaled, randn

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
WIDTH = 512
SIZES = [(1, WIDTH), (33, 3 * WIDTH), (48, WIDTH)]

Sum = Callable[[Norm | None], Tensor]
"""A sum into a fresh residual, before a norm."""


def norm_before(product: Weight, *, in_full: bool = False, seed: int = 4) -> Norm:
    device, width = product.device, product.shape[1]
    weight = randn(width, seed=seed, device=device, dtype=DTYPE) * 0.1
    extra = randn(24, width, seed=seed + 1, device=device, dtype=DTYPE) * width**-0.5
    return Norm(weight=weight, eps=1e-6, product_OH=product, extra_EH=extra if in_full else None)


def product_sum(num_tokens: int, width: int, device: torch.device, bad_row: int | None = None) -> Sum:
    residual = randn(num_tokens, width, seed=1, device=device, dtype=DTYPE)
    product = randn(num_tokens, width, seed=2, device=device, dtype=DTYPE) * 3
    product[0, :128] = -residual[0, :128]
    if bad_row is not None:
        product[bad_row, 5] = torch.nan
    return lambda norm: fp8_sums.add_product(residual.clone(), product, norm)


def parts_sum(num_tokens: int, width: int, device: torch.device, bad_row: int | None = None) -> Sum:
    residual = randn(num_tokens, width, seed=1, device=device, dtype=DTYPE)
    parts = randn(num_tokens, 3, width, seed=2, device=device, dtype=DTYPE)
    shared, gate = (
        randn(num_tokens, width, seed=3, device=device, dtype=DTYPE),
        randn(num_tokens, seed=5, device=device),
    )
    if bad_row is not None:
        parts[bad_row, 1, 5] = torch.nan
    return lambda norm: expert_prefill.add_parts(residual.clone(), parts, gate, shared, norm)


SUMS = pytest.mark.parametrize("make_sum", [product_sum, parts_sum])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def same_tokens(a: ScaledTokens, b: ScaledTokens) -> bool:
    return same(a.values_RK, b.values_RK) and same(a.scales_GR, b.scales_GR)


def left_of(x: Tensor, norm: Norm) -> TokensAhead:
    ahead = take_tokens(x, norm)
    assert ahead is not None
    return ahead


@SUMS
@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_sum_has_the_bits_of_separate_launches(
    size: tuple[int, int], in_full: bool, make_sum: Any, device: torch.device
) -> None:
    num_tokens, width = size
    norm, add = norm_before(block_scaled(128, width, 8, device), in_full=in_full), make_sum(num_tokens, width, device)
    apart = add(None)
    normed = torch.empty_like(apart)
    scaled = norm_tokens(apart, norm, normed)
    x = add(norm)
    assert same(x, apart)
    ahead = left_of(x, norm)
    assert same_tokens(ahead.scaled, scaled)
    assert (ahead.scaled.values_RK[num_tokens:].float() == 0).all()
    assert (ahead.scaled.scales_GR[:, num_tokens:] == 1).all()
    assert (ahead.normed_NH is not None) == in_full
    assert ahead.normed_NH is None or same(ahead.normed_NH, normed)


@SUMS
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, of the interpreter
def test_a_bad_token_stays_alone(make_sum: Any, device: torch.device) -> None:
    norm = norm_before(block_scaled(128, WIDTH, 8, device), in_full=True)
    good, bad = make_sum(20, WIDTH, device)(norm), make_sum(20, WIDTH, device, bad_row=7)(norm)
    others = [n for n in range(32) if n != 7]
    expected, got = left_of(good, norm), left_of(bad, norm)
    assert bad[7].isnan().any()
    assert same(good[others[:19]], bad[others[:19]])
    assert same(bits(expected.scaled.values_RK)[others], bits(got.scaled.values_RK)[others])
    assert same(expected.scaled.scales_GR[:, others], got.scaled.scales_GR[:, others])
    assert expected.normed_NH is not None
    assert got.normed_NH is not None
    assert same(expected.normed_NH[others[:19]], got.normed_NH[others[:19]])


@SUMS
def test_only_a_norm_before_a_product_in_8_bits_is_left(make_sum: Any, device: torch.device) -> None:
    scaled = block_scaled(128, WIDTH, 8, device)
    # Of 64 rows: such a product is in 16 bits.
    for product in (None, Plain(scaled.dequantize(DTYPE)), scaled.cut((slice(0, 64),))):
        norm = replace(norm_before(scaled), product_OH=product)
        assert take_tokens(make_sum(20, WIDTH, device)(norm), norm) is None
    norm = norm_before(scaled)
    x = randn(20, WIDTH, seed=1, device=device)
    assert take_tokens(fp8_sums.add_product(x, x.clone(), norm), norm) is None, "float32"


@SUMS
def test_tokens_are_taken_once_and_only_for_their_norm(
    make_sum: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = block_scaled(256, WIDTH, 8, device)
    norm, other, add = norm_before(product), norm_before(product, seed=14), make_sum(70, WIDTH, device)
    x = add(norm)
    assert take_tokens(x.clone(), norm) is None
    assert same(ours.norm_linear(x, other, product), ours.norm_linear(add(None), other, product))
    expected = ours.norm_linear(add(None), norm, product)
    extra = randn(24, WIDTH, seed=3, device=device, dtype=DTYPE)
    assert same(ours.norm_linear(add(norm), norm, product, extra)[:, :256], expected), "a product with unplanned rows"
    with monkeypatch.context() as patch:
        patch.setattr(fp8_sums, "norm_tokens", no_launch)
        assert same(ours.norm_linear(x, norm, product), expected)
    assert same(ours.norm_linear(x, norm, product), expected)


def no_launch(*_: Any) -> ScaledTokens:
    raise AssertionError("a norm of its own")


def test_no_sum_keeps_what_an_older_one_left(device: torch.device) -> None:
    product = block_scaled(WIDTH, WIDTH, 8, device)
    norm, x = norm_before(product), randn(300, WIDTH, seed=2, device=device, dtype=DTYPE)
    for weight in (product, Plain(product.dequantize(DTYPE))):
        for next_norm in (None, replace(norm, product_OH=None)):
            residual = product_sum(300, WIDTH, device)(norm)
            assert take_tokens(ours.add_linear(residual, x, weight, next_norm), norm) is None
    ahead = left_of(product_sum(300, WIDTH, device)(norm), norm)
    for add in (
        fp8_sums.add_product,
        lambda y, z, norm: expert_prefill.add_parts(y, z[:, None], z[:, 0].float(), z, norm),
    ):
        residual = attach(x.clone(), ahead)
        assert take_tokens(add(residual, x, None), norm) is None


SMALL: dict[Family, dict[str, Any]] = {
    "dense": {"intermediate_size": 512},
    "moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}
"""Besides sizes with which all in-projections are W8A8."""


@torch.inference_mode()
@pytest.mark.parametrize(("family", "num_tokens"), [("dense", 71), ("moe", 259)])
def test_a_prompt_has_the_bits_of_separate_launches(
    family: Family, num_tokens: int, write_scaled: WriteScaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only the first layer's norm has a launch."""
    load = write_scaled(
        family,
        DTYPE,
        mtp=False,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        full_attention_interval=2,
        head_dim=64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_value_heads=4,
        **SMALL[family],
    )
    norms: list[Tensor] = []

    def counted(x_NH: Tensor, *args: Any) -> ScaledTokens:
        norms.append(x_NH)
        return norm_tokens(x_NH, *args)

    monkeypatch.setattr(fp8_sums, "norm_tokens", counted)

    def prefill() -> list[Tensor]:
        norms.clear()
        model = load()
        hidden = Driver(model, max_tokens=512).prefill([(7 * i) % 160 for i in range(num_tokens)])
        return [hidden, *model.row_tensors(), *model.page_tensors()]

    fused = prefill()
    assert len(norms) == 1
    for module in (fp8_sums, expert_prefill):
        monkeypatch.setattr(module, "room_for_tokens", lambda *_: None)
    apart = prefill()
    assert len(norms) == (6 if family == "dense" else 3)
    assert apart[0].isfinite().all()
    assert all(same(a, b) for a, b in zip(fused, apart, strict=True))
