"""Products with 4-bit weights in tiles: every form, tiling and way to divide K, few tokens and many."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.backend import Norm
from agentspec.kernels.four_bit import FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import four_bit_layers, linear_layers
from agentspec.kernels.triton.four_bit_layers import (
    FEW_TOKENS,
    FourBitPlan,
    expanded,
    launch_product,
    plan_for,
    takes_decoded,
)
from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.test_four_bit_tiles import FORMS, random_weight

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter has no bfloat16; its activations are those of no GPU, which takes bfloat16 alone."""
TOLERANCE = 2e-3 if INTERPRETED else 6e-3
PLANS = (
    FourBitPlan(block_o=16, block_m=8, ahead=1, warps=1, shares=1),
    FourBitPlan(block_o=16, block_m=8, ahead=2, warps=4, shares=4, far=1),
    FourBitPlan(block_o=32, block_m=8, ahead=2, warps=4, shares=2, split=2),
    FourBitPlan(block_o=64, block_m=8, ahead=4, warps=4, shares=1, split=3, far=2),
    FourBitPlan(block_o=32, block_m=8, ahead=2, warps=2, shares=1, split=3),
    FourBitPlan(block_o=32, block_m=16, ahead=1, warps=4, shares=4),
    FourBitPlan(block_o=32, block_m=32, ahead=1, warps=8, shares=4, split=2),
)


def operands(
    form: FourBitForm, num_tokens: int, shape: tuple[int, int], seed: int, device: torch.device
) -> tuple[Tensor, FourBitTiles]:
    """Inputs with a mean, which shows offsets that do not cancel, and a weight of about unit products."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(num_tokens, shape[1], generator=generator) + 0.5).to(DTYPE).to(device)
    weight = random_weight(form, shape, seed)
    if weight.multipliers is None:
        weight.scales.div_(20)
    else:
        weight.multipliers.mul_(10 / 448)
    return x, FourBitTiles.of(weight.to(device))


def assert_near(got: Tensor, expected: Tensor, note: object, tolerance: float = TOLERANCE) -> None:
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error < tolerance, f"{note}: relative error {error}"


@pytest.mark.parametrize(
    ("form", "plan"),
    [(form, plan) for form in FORMS for plan in (PLANS if form.group != 32 else (PLANS[2], *PLANS[4::2]))],
    ids=str,
)
def test_products_match_reference(form: FourBitForm, plan: FourBitPlan, device: torch.device) -> None:
    """Twice: what the first call left must not matter. Shares have as many groups or not, and more than are loaded
    ahead or fewer."""
    few = 5 if plan.split * plan.shares <= 5 else 9
    for seed, (num_tokens, groups) in enumerate(((1, 9), (plan.block_m - 1, few), (plan.block_m + 3, 12))):
        shape = (2 * plan.block_o, 128 * groups)
        print(f"seed {seed}, {num_tokens} tokens, {groups} groups")
        x, weight = operands(form, num_tokens, shape, seed, device)
        residual = torch.randn(num_tokens, shape[0], dtype=DTYPE, device=device)
        exact = x.double() @ weight.dequantize(torch.float64).t()
        for with_residual in (False, True):
            out = torch.full((num_tokens, shape[0] + 8), torch.nan, dtype=DTYPE, device=device)
            for _ in range(2):
                launch_product(plan, x, weight, out, residual if with_residual else None)
            assert_near(out[:, :-8], exact + residual if with_residual else exact, (plan, with_residual))
            assert out[:, -8:].isnan().all(), "columns beside the outputs were written"


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.split == 1], ids=str)
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_gate_and_up_meet(form: FourBitForm, plan: FourBitPlan, device: torch.device) -> None:
    x, weight = operands(form, 5, (3 * plan.block_o, 512), 7, device)
    out = torch.full((5, 3 * plan.block_o // 2), torch.nan, dtype=DTYPE, device=device)
    launch_product(plan, x, weight, out, is_swiglu=True)
    gate, up = (x.double() @ weight.dequantize(torch.float64).t()).chunk(2, -1)
    assert_near(out, silu(gate) * up, plan)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_expand_to_what_they_stand_for(form: FourBitForm, device: torch.device) -> None:
    _, weight = operands(form, 1, (48, 384), 3, device)
    for dtype in (torch.float32, DTYPE):
        assert torch.equal(expanded(weight, dtype), weight.dequantize(dtype))


def check_layers(
    form: FourBitForm, num_tokens: int, shape: tuple[int, int], device: torch.device, tolerance: float = TOLERANCE
) -> None:
    """As models call them."""
    torch.manual_seed(num_tokens)
    x, weight = operands(form, num_tokens, shape, num_tokens, device)
    plain = weight.rows()
    norm = Norm(weight=torch.randn(shape[1], dtype=DTYPE, device=device) * 0.1, eps=1e-6)
    extra = torch.randn(21, shape[1], dtype=DTYPE, device=device) * 0.05
    residual = torch.randn(num_tokens, shape[0], dtype=DTYPE, device=device)
    for name, ours, theirs in (
        ("linear", linear_layers.linear(x, weight), reference.linear(x, plain)),
        (
            "norm_linear",
            linear_layers.norm_linear(x, norm, weight, extra),
            reference.norm_linear(x, norm, plain, extra),
        ),
        ("norm_swiglu", linear_layers.norm_swiglu(x, norm, weight), reference.norm_swiglu(x, norm, plain)),
        (
            "add_linear",
            linear_layers.add_linear(residual.clone(), x, weight),
            reference.add_linear(residual.clone(), x, plain),
        ),
    ):
        assert ours.shape == theirs.shape
        assert_near(ours, theirs.double(), name, tolerance)


@pytest.mark.parametrize(
    ("form", "num_tokens"), [*itertools.product(FORMS[:3], (1, 9, 40, FEW_TOKENS + 1)), (FORMS[3], 9)], ids=str
)
def test_layers_match_reference(form: FourBitForm, num_tokens: int, device: torch.device) -> None:
    """Few tokens, and many with expanded weights."""
    check_layers(form, num_tokens, (64, 384), device)


@pytest.mark.parametrize(
    ("form", "num_tokens"), [(FORMS[0], FEW_TOKENS + 1), (FORMS[1], 300), (FORMS[2], 300), (FORMS[3], 130)], ids=str
)
def test_short_prompts_match_reference(form: FourBitForm, num_tokens: int, device: torch.device) -> None:
    """With weights as Hopper's matrix units take them, which are rounded to bfloat16."""
    x, weight = operands(form, num_tokens, (256, 256), num_tokens, device)
    assert takes_decoded(weight, x)
    check_layers(form, num_tokens, (256, 256), device, 6e-3)


@pytest.mark.parametrize("form", FORMS[1:4], ids=str)
def test_scores_of_a_head_match_reference(
    form: FourBitForm, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, and minus infinity for padding; with weights as they are decoded, and expanded."""
    x, weight = operands(form, 5, (48, 256), 6, device)
    expected = x.double() @ weight.dequantize(torch.float64).t()
    for decoded in (True, False):
        monkeypatch.setattr(four_bit_layers, "INTERPRETED", decoded and INTERPRETED)
        scores = linear_layers.logits(x if decoded else x.float(), weight, 37)
        assert scores.dtype == torch.float32
        assert torch.isneginf(scores[:, 37:]).all()
        # Inputs are in 16 bits, sums and scores are not.
        assert_near(scores[:, :37], expected[:, :37], decoded, 1e-5)
    assert linear_layers.logits(x[:0], weight, 37).shape == (0, 48)


def test_every_plan_divides_its_weight() -> None:
    for num_outputs in (16, 48, 512, 2560, 5120, 16384, 34816):
        for depth in (128, 256, 384, 512, 2560, 5120, 17408):
            for num_tokens in (1, 4, 8, 9, 17, 33, 128):
                for format in {form.format for form in FORMS}:
                    plan = plan_for(num_outputs, depth, num_tokens, format)
                    assert num_outputs % plan.block_o == 0
                    assert plan.split * plan.shares <= depth // 128
                    assert plan.shares <= plan.warps <= plan.shares * plan.block_o // 16
                    assert plan.split * plan.block_o % 8 == 0
