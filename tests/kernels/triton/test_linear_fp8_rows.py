"""The Triton logits and draft argmax over 8-bit weights with a scale for each row, against float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.linear_plans import MEASURED_FP8_ROWS, NO_TORCH_PRODUCT, Kind, Plan, plan_for
from agentspec.kernels.weights import FP8, RowScaled
from tests.kernels.triton.test_linear import LARGEST_SHARED_MEMORY, TOKEN_COUNTS, randn

PLAN = Plan(block_o=32, block_m=8, block_k=128, stages=2, warps=2)
PAIRED = Plan(block_o=64, block_m=16, block_k=128, stages=2, warps=4)
"""Reads weights in pairs."""
NUM_CODES = 256


def random_head(num_rows: int, depth: int, seed: int, device: torch.device) -> RowScaled:
    """Any code but NaN, and scales that span many powers of two."""
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, NUM_CODES, (num_rows, depth), generator=generator, device=device, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.exp2(torch.rand(num_rows, generator=generator, device=device) * 40 - 30)
    return RowScaled(values=codes.view(FP8), scales=scales)


def exact_scores(x: Tensor, head: RowScaled) -> Tensor:
    """float64, by the form's definition."""
    return torch_linear(x.double(), head.values.double()) * head.scales.double()


def check_logits(got: Tensor, x: Tensor, head: RowScaled, num_real: int, text: str) -> None:
    """Every score is within float32's rounding of the sum of its terms' magnitudes."""
    assert got.dtype == torch.float32, text
    assert (got[:, num_real:] == -torch.inf).all(), text
    exact = exact_scores(x, head)[:, :num_real]
    size = torch_linear(x.double().abs(), head.values.double().abs()) * head.scales.double()
    bound = 2.0**-23 * (8 + head.shape[1] ** 0.5) * size[:, :num_real]
    assert ((got[:, :num_real].double() - exact).abs() <= bound).all(), text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_8_bit_float_decodes_exactly(dtype: torch.dtype, device: torch.device) -> None:
    """Products with unit vectors return the weights. On the device also in bfloat16, which has its own decoder."""
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device=device)
    codes[codes & 0x7F == 0x7F] = 0
    values = torch.stack([codes.roll(shift) for shift in range(4)]).view(FP8)
    head = RowScaled(values=values, scales=torch.tensor([1.0, 0.75, 2.0**-20, 3.0 * 2**30], device=device))
    for activation in (dtype,) if INTERPRETED else (dtype, torch.bfloat16):
        for plan in (PLAN, PAIRED):
            x = torch.eye(NUM_CODES, device=device, dtype=activation)
            got = ours.launch_logits(plan, x, head, 4)
            assert torch.equal(got, head.dequantize().t()), f"{activation} {plan}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("plan", [PLAN, PAIRED, replace(PLAN, block_k=256), replace(PAIRED, block_k=64)], ids=str)
def test_logits_match_float64_at_ragged_edges(plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    """Rows, columns and tokens that fill no whole tile, odd columns, and padding rows in any place of a tile."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for num_tokens, num_rows, depth in ((1, 64, 128), (3, 70, 300), (9, 33, 135), (17, 130, 264), (5, 1, 7)):
        head = random_head(num_rows, depth, rng.randrange(2**32), device)
        x = randn(num_tokens, depth, seed=rng.randrange(2**32), device=device, dtype=dtype)
        for num_real in (num_rows, rng.randint(0, num_rows)):
            text = f"seed {seed}: {num_tokens} x {num_rows} x {depth}, {num_real} real"
            check_logits(ours.launch_logits(plan, x, head, num_real), x, head, num_real, text)


@pytest.mark.parametrize("num_tokens", [1, 4, 31, 70])
def test_logits_by_the_chosen_plans_match_float64(num_tokens: int, device: torch.device) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for dtype in (torch.float32, torch.float16):
        head = random_head(150, 160, seed, device)
        x = randn(num_tokens, 160, seed=seed + 1, device=device, dtype=dtype)
        check_logits(ours.logits(x, head, 147), x, head, 147, f"seed {seed}, {dtype}")


def test_a_slice_of_rows_scores_as_in_the_whole(device: torch.device) -> None:
    head, x = random_head(96, 130, 1, device), randn(3, 130, seed=2, device=device, dtype=torch.float16)
    whole = ours.launch_logits(PLAN, x, head, 96)
    assert torch.equal(ours.launch_logits(PLAN, x, head.cut((slice(32, 96),)), 64), whole[:, 32:])


def test_bits_are_run_and_batch_invariant(device: torch.device) -> None:
    head, x = random_head(70, 256, 3, device), randn(5, 256, seed=4, device=device, dtype=torch.float32)
    for plan in (PLAN, PAIRED):
        together = ours.launch_logits(plan, x, head, 70)
        assert torch.equal(ours.launch_logits(plan, x, head, 70), together)
        for n in range(5):
            assert torch.equal(ours.launch_logits(plan, x[n : n + 1], head, 70)[0], together[n])


def integer_head(device: torch.device) -> RowScaled:
    """Small integers with scales that are powers of two give exact scores, so that ties are ties in any order of
    summation. Rows 130 and 139 are equal."""
    values = (randn(140, 256, seed=5, device=device, dtype=torch.float32) * 2).round().clamp(-3, 3)
    values[139] = values[130]
    scales = torch.exp2(torch.arange(140, device=device) % 3 * 1.0)
    scales[139] = scales[130]
    return RowScaled(values=values.to(FP8), scales=scales)


@pytest.mark.parametrize("plan", [PLAN, PAIRED], ids=str)
def test_draft_argmax_returns_lowest_row_on_ties(plan: Plan, device: torch.device) -> None:
    head = integer_head(device)
    x = (randn(9, 256, seed=6, device=device, dtype=torch.float32) * 2).round().clamp(-3, 3)
    x[0] = head.values[130].float()  # so that one of the equal rows, or a larger one, wins
    ids = torch.randperm(140, generator=torch.Generator().manual_seed(5)).to(device)
    expected = exact_scores(x, head).argmax(-1)
    for got, wanted in (
        (ours.launch_draft_argmax(plan, x, head, None), expected),
        (ours.launch_draft_argmax(plan, x, head, ids), ids[expected]),
        (ours.draft_argmax(x, head, None), expected),
    ):
        assert torch.equal(got, wanted)


def test_best_draft_is_packed_as_in_the_reference(device: torch.device) -> None:
    head = integer_head(device)
    x = (randn(3, 256, seed=7, device=device, dtype=torch.float32) * 2).round().clamp(-3, 3)
    ids = torch.arange(7, 147, device=device)
    assert torch.equal(ours.draft_best(x, head, ids), reference.draft_best(x, head, ids))
    assert ours.draft_best(x[:0], head, ids).shape == (0, 1)


def test_zero_tokens_return_empty_results(device: torch.device) -> None:
    head, none = random_head(40, 64, 1, device), torch.empty(0, 64, device=device)
    assert ours.logits(none, head, 40).shape == (0, 40)
    assert ours.draft_argmax(none, head, None).shape == (0,)


def test_other_products_refuse_scales_of_rows(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="linear with scales of rows"):
        ours.linear(torch.zeros(1, 64, device=device), random_head(40, 64, 1, device))


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_plans_fit_any_shape(element_bytes: int) -> None:
    shapes = [(outputs, depth) for _, outputs, depth in MEASURED_FP8_ROWS]
    shapes += itertools.product((160, 31040, 248320), (64, 96, 640, 2048, 3072, 4096, 5120))
    kinds: tuple[Kind, ...] = NO_TORCH_PRODUCT
    for kind, (num_outputs, depth), num_tokens in itertools.product(kinds, shapes, TOKEN_COUNTS):
        plan = plan_for(kind, num_outputs, depth, num_tokens, element_bytes, "fp8 rows")
        text = f"{kind} {num_outputs} x {depth}, {num_tokens} tokens of {element_bytes} bytes: {plan}"
        assert plan is not None, text
        assert plan.split == 1, text
        assert not plan.programs, text
        assert 128 % plan.block_k == 0 or plan.block_k % 128 == 0, text
        assert plan.stages * plan.block_k * (plan.block_o + element_bytes * plan.block_m) <= LARGEST_SHARED_MEMORY, text


def test_accumulation_order_is_same_with_and_without_drafts() -> None:
    for kind, num_outputs, depth in [*MEASURED_FP8_ROWS, ("logits", 248320, 5120), ("logits", 248320, 2048)]:
        alone = plan_for(kind, num_outputs, depth, 1, 2, "fp8 rows")
        for num_tokens in (2, 3, 4):
            assert plan_for(kind, num_outputs, depth, num_tokens, 2, "fp8 rows") == alone, f"{kind} {num_outputs}"
