"""The Triton linear layers over block-scaled weights: exact factors, every way that rows share scales, extra rows,
many tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.launch import INTERPRETED, NUM_COUNTERS
from agentspec.kernels.triton.linear_plans import MEASURED_FP8, NO_TORCH_PRODUCT, Kind, Plan, plan_for
from agentspec.kernels.weights import FP8, BlockScaled, Plain, quantize_blocks
from tests.kernels.triton.test_linear import (
    LARGEST_SHARED_MEMORY,
    TOKEN_COUNTS,
    Operands,
    check_norm_apart,
    check_products,
    randn,
)

PLAN = Plan(block_o=32, block_m=8, block_k=128, stages=2, warps=2)
PAIRED = Plan(block_o=64, block_m=16, block_k=128, stages=2, warps=4)
"""Reads weights in pairs."""
NUM_CODES = 256


class Layer(Operands):
    """A layer with a block-scaled weight, and rows of a plain one beside it."""

    weight: BlockScaled
    extra: Tensor

    def __init__(
        self,
        num_tokens: int,
        num_outputs: int,
        depth: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_rows: int = 128,
    ) -> None:
        super().__init__(num_tokens, num_outputs, depth, device, dtype)
        self.text += f", blocks of {block_rows} rows"
        weight = quantize_blocks(self.full_weight).with_block_rows(block_rows)
        # Smaller blocks cut from one block have equal scales, so that taking a wrong one would not show.
        factors = (
            torch.rand(weight.scales.shape, generator=torch.Generator(device).manual_seed(self.seed + 5), device=device)
            + 0.5
        )
        self.weight = replace(weight, scales=weight.scales * factors.bfloat16().float())
        self.extra = randn(21, depth, seed=self.seed + 4, device=device, dtype=dtype) * depth**-0.5


def all_codes(device: torch.device) -> BlockScaled:
    """A weight with every 8-bit float but NaN (0 instead), at every position modulo 4 along K."""
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device=device)
    codes[codes & 0x7F == 0x7F] = 0
    rows = torch.stack([codes.roll(shift) for shift in range(4)])
    scales = torch.tensor([[0.75, 2.0**-20]], device=device)
    return BlockScaled(values=rows.view(FP8), scales=scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_8_bit_float_decodes_exactly(dtype: torch.dtype, device: torch.device) -> None:
    """Products with unit vectors return the weights. On the device also in bfloat16, which has its own decoder."""
    weight = all_codes(device)
    for activation in (dtype,) if INTERPRETED else (dtype, torch.bfloat16):
        for plan in (PLAN, PAIRED):
            x = torch.eye(NUM_CODES, device=device, dtype=activation)
            assert torch.equal(
                ours.launch_linear(plan, x, weight, None, None), weight.dequantize().to(activation).t()
            ), f"{activation} {plan}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "block_rows", "plan"),
    [
        ((3, 200, 256), 128, replace(PLAN, split=2)),
        ((5, 96, 300), 32, replace(PLAN, split=3)),
        ((1, 40, 64), 8, PLAN),
        ((9, 70, 136), 2, PLAN),
        ((17, 200, 300), 128, replace(PAIRED, split=2)),
        ((2, 70, 135), 2, PAIRED),
    ],
    ids=str,
)
def test_products_match_reference(
    size: tuple[int, int, int], block_rows: int, plan: Plan, dtype: torch.dtype, device: torch.device
) -> None:
    check_products(plan, Layer(*size, device, dtype, block_rows=block_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "block_rows", "plan"),
    [
        ((3, 200, 256), 128, replace(PLAN, split=2)),
        ((9, 96, 300), 32, replace(PLAN, split=2)),
        ((5, 96, 300), 32, PLAN),
        ((17, 70, 300), 2, replace(PAIRED, split=3)),
    ],
    ids=str,
)
def test_separate_norm_matches_reference(
    size: tuple[int, int, int], block_rows: int, plan: Plan, dtype: torch.dtype, device: torch.device
) -> None:
    check_norm_apart(plan, Layer(*size, device, dtype, block_rows=block_rows))


@pytest.mark.parametrize("block_k", [32, 256])
def test_steps_smaller_or_larger_than_scale_block_match_reference(block_k: int, device: torch.device) -> None:
    check_products(replace(PLAN, block_k=block_k, split=2), Layer(2, 64, 520, device, torch.float32))


def test_gate_and_up_use_their_own_scales(device: torch.device) -> None:
    """Tiles inside blocks, and tiles across block boundaries because the width is not a multiple of a tile."""
    for width in (128, 160, 72):
        layer = Layer(2, 2 * width, 128, device, torch.float32)
        layer.check(
            ours.launch_swiglu(PLAN, layer.x, layer.norm, layer.weight),
            reference.norm_swiglu(layer.x, layer.norm, layer.weight),
        )


@pytest.mark.parametrize("block_o", [16, 32, 64])
def test_extra_rows_follow_other_outputs(block_o: int, device: torch.device) -> None:
    layer = Layer(3, 72, 160, device, torch.float32)
    x, weight, norm, extra = layer.x, layer.weight, layer.norm, layer.extra
    expected = reference.norm_linear(x, norm, weight, extra)
    got = ours.launch_linear(replace(PLAN, block_o=block_o), x, weight, norm, None, extra)
    layer.check(got, expected)
    layer.check(got[:, 72:], expected[:, 72:])


def test_extra_rows_of_plain_weight_match_reference(device: torch.device) -> None:
    layer = Layer(3, 72, 160, device, torch.float32)
    x, weight, norm, extra = layer.x, Plain(layer.weight.dequantize()), layer.norm, layer.extra
    layer.check(ours.norm_linear(x, norm, weight, extra), reference.norm_linear(x, norm, weight, extra))


def test_bits_are_run_and_batch_invariant(device: torch.device) -> None:
    layer = Layer(5, 48, 256, device, torch.float32)
    plan = replace(PLAN, split=2)
    together = ours.launch_linear(plan, layer.x, layer.weight, None, None)
    assert torch.equal(ours.launch_linear(plan, layer.x, layer.weight, None, None), together)
    for n in range(5):
        assert torch.equal(ours.launch_linear(plan, layer.x[n : n + 1], layer.weight, None, None)[0], together[n])


def test_draft_argmax_returns_lowest_row_on_ties(device: torch.device) -> None:
    """Small integers with scales that are powers of two: scores are exact, so that ties are ties in any order of
    summation."""
    layer = Layer(3, 140, 256, device, torch.float32)
    x = (10 * layer.x).round().clamp(-3, 3)
    values = (20 * layer.weight.dequantize()).round().clamp(-3, 3)
    values[139] = values[130]
    head = BlockScaled(values=values.to(FP8), scales=torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device))
    ids = torch.randperm(140, generator=torch.Generator().manual_seed(5)).to(device)
    expected = torch.nn.functional.linear(x.double(), head.dequantize().double()).argmax(-1)
    for got, wanted in (
        (ours.launch_draft_argmax(PLAN, x, head, None), expected),
        (ours.launch_draft_argmax(PLAN, x, head, ids), ids[expected]),
    ):
        assert torch.equal(got, wanted), layer.text


def test_best_draft_is_packed_as_in_the_reference(device: torch.device) -> None:
    layer = Layer(3, 140, 256, device, torch.float32)
    x, values = (10 * layer.x).round().clamp(-3, 3), (20 * layer.weight.dequantize()).round().clamp(-3, 3)
    values[139] = values[130]
    head = BlockScaled(values=values.to(FP8), scales=torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device))
    ids = torch.arange(7, 147, device=device)
    assert torch.equal(ours.draft_best(x, head, ids), reference.draft_best(x, head, ids)), layer.text
    assert ours.draft_best(x[:0], head, ids).shape == (0, 1)


def test_unmeasured_shapes_match_reference(device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        layer = Layer(3, 96, 128, device, dtype)
        x, weight, norm, residual = layer.x, layer.weight, layer.norm, layer.residual
        layer.check(ours.linear(x, weight), reference.linear(x, weight))
        layer.check(ours.norm_linear(x, norm, weight, layer.extra), reference.norm_linear(x, norm, weight, layer.extra))
        layer.check(ours.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, weight))
        layer.check(ours.add_linear(residual.clone(), x, weight), reference.add_linear(residual, x, weight))
        scores = reference.linear(x.float(), weight)
        nearest = scores.gather(1, ours.draft_argmax(x, weight, None)[:, None])[:, 0]
        layer.check(nearest.to(dtype), scores.amax(-1).to(dtype))


def test_batch_above_plan_limit_matches_reference(device: torch.device) -> None:
    """More tokens than these products support: the prompt products compute them, except the argmax, which is computed
    a block of tokens at a time."""
    layer = Layer(70, 34, 32, device, torch.float32)
    x, weight, norm, residual = layer.x, layer.weight, layer.norm, layer.residual
    assert plan_for("linear", 34, 32, 70, 4, "fp8") is None
    layer.check(ours.linear(x, weight), reference.linear(x, weight))
    layer.check(ours.norm_linear(x, norm, weight, layer.extra), reference.norm_linear(x, norm, weight, layer.extra))
    layer.check(ours.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, weight))
    given_away = residual.clone()
    layer.check(ours.add_linear(given_away, x, weight), reference.add_linear(residual, x, weight))
    assert torch.equal(ours.draft_argmax(x, weight, None), reference.draft_argmax(x, weight, None)), layer.text


def test_zero_tokens_return_empty_results(device: torch.device) -> None:
    layer = Layer(1, 32, 32, device, torch.float32)
    none = layer.x[:0]
    assert ours.linear(none, layer.weight).shape == (0, 32)
    assert ours.norm_linear(none, layer.norm, layer.weight, layer.extra).shape == (0, 32 + 21)
    assert ours.norm_swiglu(none, layer.norm, layer.weight).shape == (0, 16)
    assert ours.draft_argmax(none, layer.weight, None).shape == (0,)


def check_plan(kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int) -> None:
    plan = plan_for(kind, num_outputs, depth, num_tokens, element_bytes, "fp8")
    text = f"{kind} {num_outputs} x {depth}, {num_tokens} tokens of {element_bytes} bytes: {plan}"
    if plan is None:
        assert kind not in NO_TORCH_PRODUCT, text
        return
    assert plan.split == 1 or kind in ("linear", "add_linear") or (kind == "norm_linear" and plan.norm_apart), text
    assert -(-depth // plan.block_k) >= plan.split, text
    assert 128 % plan.block_k == 0 or plan.block_k % 128 == 0, text
    assert plan.stages * plan.block_k * (plan.block_o + element_bytes * plan.block_m) <= LARGEST_SHARED_MEMORY, text
    assert -(-num_outputs // plan.block_o) * -(-num_tokens // plan.block_m) <= NUM_COUNTERS or plan.split == 1, text


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_measured_plans_fit_their_shapes(num_tokens: int) -> None:
    for kind, num_outputs, depth in MEASURED_FP8:
        check_plan(kind, num_outputs, depth, num_tokens, 2)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("hidden", [64, 96, 256, 640, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192])
def test_rule_plans_fit_any_shape(hidden: int, element_bytes: int) -> None:
    for num_tokens, kind in itertools.product(TOKEN_COUNTS, get_args(Kind)):
        for num_outputs, depth in ((hidden, hidden), (hidden, 4 * hidden), (6 * hidden, hidden), (50_000, hidden)):
            check_plan(kind, num_outputs, depth, num_tokens, element_bytes)


def test_accumulation_order_is_same_with_and_without_drafts() -> None:
    for kind, num_outputs, depth in MEASURED_FP8:
        for num_tokens in (2, 3, 4):
            assert plan_for(kind, num_outputs, depth, num_tokens, 2, "fp8") == plan_for(
                kind, num_outputs, depth, 1, 2, "fp8"
            ), f"{kind} {num_outputs}"
