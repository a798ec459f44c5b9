"""The Triton linear layers against the reference: ragged sizes, every split-K, strided tokens, ties, padding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.launch import NUM_COUNTERS
from agentspec.kernels.triton.linear_plans import MEASURED, NO_TORCH_PRODUCT, Kind, Plan, plan_for
from agentspec.kernels.weights import Plain, Weight
from tests.fakes.compare import relative_error

TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest difference over largest value. 16 bits: the normed input and the result are rounded, in another order than
in the reference."""
PLAN = Plan(block_o=32, block_m=8, block_k=32, stages=2, warps=4)
SIZES = [(1, 64, 64), (3, 48, 200), (8, 33, 32), (11, 100, 72)]
"""Tokens, outputs, depth."""


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


class Operands:
    """Random operands of one size, for a weight of any form."""

    weight: Weight
    extra: Tensor | None = None
    """Rows of a plain weight beside `weight`."""

    def __init__(self, num_tokens: int, num_outputs: int, depth: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed = seed = 1000 * num_tokens + num_outputs + depth
        self.text = f"seed {seed}: {num_tokens} tokens, {num_outputs} x {depth}, {dtype}"
        self.tolerance = TOLERANCES[dtype]
        self.x = randn(num_tokens, depth, seed=seed, device=device, dtype=dtype)
        self.full_weight = randn(num_outputs, depth, seed=seed + 1, device=device, dtype=torch.float32) * depth**-0.5
        """float32, scaled so that results are about 1."""
        self.norm = Norm(weight=randn(depth, seed=seed + 2, device=device, dtype=dtype) * 0.1, eps=1e-3)
        self.residual = randn(num_tokens, num_outputs, seed=seed + 3, device=device, dtype=dtype)

    def check(self, got: Tensor, expected: Tensor) -> None:
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), self.text
        error = relative_error(got, expected)
        assert error < self.tolerance, f"{self.text}: {error}"


class Layer(Operands):
    """A layer with a plain weight."""

    weight: Plain

    def __init__(self, num_tokens: int, num_outputs: int, depth: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(num_tokens, num_outputs, depth, device, dtype)
        self.weight = Plain(self.full_weight.to(dtype))


def check_products(plan: Plan, layer: Operands) -> None:
    """Check every single product, by one plan."""
    x, weight, norm, residual = layer.x, layer.weight, layer.norm, layer.residual
    layer.check(ours.launch_linear(plan, x, weight, None, None), reference.linear(x, weight))
    layer.check(ours.launch_linear(plan, x, weight, None, residual), reference.add_linear(residual, x, weight))
    whole = replace(plan, split=1)
    layer.check(ours.launch_linear(whole, x, weight, norm, None), reference.norm_linear(x, norm, weight))
    if weight.shape[0] % 2 == 0:
        layer.check(ours.launch_swiglu(whole, x, norm, weight), reference.norm_swiglu(x, norm, weight))


def check_norm_apart(plan: Plan, layer: Operands) -> None:
    """Check a norm as a separate launch, which also allows split-K after it."""
    x, weight, norm, extra = layer.x, layer.weight, layer.norm, layer.extra
    apart = replace(plan, norm_apart=True)
    layer.check(ours.launch_linear(apart, x, weight, norm, None, extra), reference.norm_linear(x, norm, weight, extra))
    if weight.shape[0] % 2 == 0:
        layer.check(
            ours.launch_swiglu(replace(apart, split=1), x, norm, weight), reference.norm_swiglu(x, norm, weight)
        )


def check_logits(plan: Plan, layer: Layer, num_real: int) -> None:
    got = ours.launch_logits(plan, layer.x, layer.weight, num_real)
    expected = reference.linear(layer.x.float(), layer.weight)
    assert (got[:, num_real:] == -torch.inf).all(), layer.text
    layer.check(got[:, :num_real], expected[:, :num_real])


def check_nearest(plan: Plan, layer: Layer) -> None:
    """Small integers give exact scores, so that ties are ties in any order of summation."""
    x, head = ((10 * layer.x).round().clamp(-3, 3), (10 * layer.weight.values).round().clamp(-3, 3))
    head[-1] = head[len(head) // 2]
    ids = torch.randperm(len(head), generator=torch.Generator().manual_seed(5)).to(x.device)
    expected = torch.nn.functional.linear(x.double(), head.double()).argmax(-1)
    for got, wanted in (
        (ours.launch_draft_argmax(plan, x, Plain(head), None), expected),
        (ours.launch_draft_argmax(plan, x, Plain(head), ids), ids[expected]),
    ):
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted), layer.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_match_reference(
    size: tuple[int, int, int], split: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_products(replace(PLAN, split=split), Layer(*size, device, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(3, 48, 200), (11, 100, 72)], ids=str)
def test_separate_norm_matches_reference(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    check_norm_apart(replace(PLAN, split=2), Layer(*size, device, dtype))


def test_bits_are_run_and_batch_invariant(device: torch.device) -> None:
    layer = Layer(5, 48, 128, device, torch.float32)
    plan = replace(PLAN, split=2)
    together = ours.launch_linear(plan, layer.x, layer.weight, None, None)
    assert torch.equal(ours.launch_linear(plan, layer.x, layer.weight, None, None), together)
    for n in range(5):
        assert torch.equal(ours.launch_linear(plan, layer.x[n : n + 1], layer.weight, None, None)[0], together[n])


def test_strided_tokens_match_reference(device: torch.device) -> None:
    layer = Layer(4, 40, 64, device, torch.float32)
    wide = torch.full((4, 200), torch.nan, device=device)
    wide[:, 100:164] = layer.x
    layer.x = wide[:, 100:164]
    check_products(replace(PLAN, split=2), layer)
    check_norm_apart(PLAN, layer)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_logits_are_float32_and_padding_is_minus_infinity(size: tuple[int, int, int], device: torch.device) -> None:
    check_logits(PLAN, Layer(*size, device, torch.float32), size[1] - 5)


@pytest.mark.parametrize("num_outputs", [20, 64, 300])
def test_draft_argmax_returns_lowest_row_on_ties(num_outputs: int, device: torch.device) -> None:
    plan = PLAN if num_outputs < 100 else replace(PLAN, block_o=16, block_k=16)
    check_nearest(plan, Layer(3, num_outputs, 16, device, torch.float32))


def test_draft_argmax_handles_more_tiles_than_one_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_CHOICE_BLOCK", 2)
    check_nearest(replace(PLAN, block_o=16, block_k=16), Layer(2, 100, 16, device, torch.float32))


def test_unmeasured_shapes_match_reference(device: torch.device) -> None:
    layer = Layer(3, 96, 64, device, torch.float32)
    x, weight, norm, residual = layer.x, layer.weight, layer.norm, layer.residual
    layer.check(ours.linear(x, weight), reference.linear(x, weight))
    layer.check(ours.norm_linear(x, norm, weight), reference.norm_linear(x, norm, weight))
    layer.check(ours.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, weight))
    layer.check(ours.add_linear(residual.clone(), x, weight), reference.add_linear(residual, x, weight))
    assert torch.equal(ours.draft_argmax(x, weight, None), reference.draft_argmax(x, weight, None))
    assert torch.isneginf(ours.logits(x, weight, 90)[:, 90:]).all()


def test_batch_above_plan_limit_matches_reference(device: torch.device) -> None:
    """More tokens than our products support: torch computes them, except scores, which are computed a block of tokens
    at a time."""
    layer = Layer(256, 34, 16, device, torch.float32)
    x, weight, norm, residual = layer.x, layer.weight, layer.norm, layer.residual
    assert plan_for("linear", 34, 16, 256, 4) is None
    assert torch.equal(ours.linear(x, weight), reference.linear(x, weight))
    layer.check(ours.norm_linear(x, norm, weight), reference.norm_linear(x, norm, weight))
    layer.check(ours.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, weight))
    layer.check(ours.add_linear(residual.clone(), x, weight), reference.add_linear(residual, x, weight))
    scores = ours.logits(x, weight, 30)
    assert torch.isneginf(scores[:, 30:]).all()
    layer.check(scores[:, :30], reference.linear(x, weight)[:, :30])
    assert torch.equal(ours.draft_argmax(x, weight, None), reference.draft_argmax(x, weight, None)), layer.text


def test_zero_tokens_return_empty_results(device: torch.device) -> None:
    layer = Layer(1, 32, 32, device, torch.float32)
    none = layer.x[:0]
    assert ours.linear(none, layer.weight).shape == (0, 32)
    assert ours.norm_swiglu(none, layer.norm, layer.weight).shape == (0, 16)
    assert ours.logits(none, layer.weight, 30).shape == (0, 32)
    assert ours.draft_argmax(none, layer.weight, None).shape == (0,)


TOKEN_COUNTS = (1, 4, 8, 9, 16, 32, 33, 64, 65, 128, 129, 256)
LARGEST_SHARED_MEMORY = 227 << 10


def check_plan(kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int) -> None:
    plan = plan_for(kind, num_outputs, depth, num_tokens, element_bytes)
    text = f"{kind} {num_outputs} x {depth}, {num_tokens} tokens of {element_bytes} bytes: {plan}"
    if plan is None:
        assert kind not in NO_TORCH_PRODUCT, text
        return
    assert plan.split == 1 or kind in ("linear", "add_linear"), text
    assert -(-depth // plan.block_k) >= plan.split, text
    assert plan.stages * plan.block_k * element_bytes * (plan.block_o + plan.block_m) <= LARGEST_SHARED_MEMORY, text
    assert -(-num_outputs // plan.block_o) * -(-num_tokens // plan.block_m) <= NUM_COUNTERS or plan.split == 1, text


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_measured_plans_fit_their_shapes(num_tokens: int) -> None:
    for kind, num_outputs, depth in MEASURED:
        check_plan(kind, num_outputs, depth, num_tokens, 2)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("hidden", [64, 96, 256, 640, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192])
def test_rule_plans_fit_any_shape(hidden: int, element_bytes: int) -> None:
    for num_tokens, kind in itertools.product(TOKEN_COUNTS, get_args(Kind)):
        for num_outputs, depth in (
            (hidden, hidden),
            (hidden, 4 * hidden),
            (6 * hidden, hidden),
            (50_000, hidden),
            (248_321, hidden),
        ):
            check_plan(kind, num_outputs, depth, num_tokens, element_bytes)


def test_accumulation_order_is_same_with_and_without_drafts() -> None:
    for kind, num_outputs, depth in MEASURED:
        alone = plan_for(kind, num_outputs, depth, 1, 2)
        assert alone is not None, f"{kind} {num_outputs} x {depth}"
        for num_tokens in (2, 3, 4):
            assert plan_for(kind, num_outputs, depth, num_tokens, 2) == alone, (
                f"{kind} {num_outputs} x {depth}, {num_tokens} tokens"
            )


def test_measured_plans_are_sorted_by_tokens() -> None:
    for key, plans in MEASURED.items():
        bounds = [most for most, _ in plans]
        assert bounds, key
        assert bounds == sorted(set(bounds)), key
