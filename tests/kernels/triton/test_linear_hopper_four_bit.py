"""Products on Hopper's matrix units in warp groups with 4-bit integers: every division of K between programs, any order
in which they arrive, and the order of columns. On a CPU without bfloat16, whose products are then of float32."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.four_bit import FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import four_bit_layers, linear_hopper
from agentspec.kernels.triton.four_bit_columns import in_order_of_words
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters
from agentspec.kernels.triton.linear_plans import Plan
from tests.kernels.test_four_bit_tiles import FORMS, random_weight
from tests.kernels.triton.gluon_warp_groups import WarpGroups
from tests.kernels.triton.test_linear_hopper import DTYPE, ORDERS, PROGRAMS, SIZES, check, in_turn, on_hopper, plan

pytestmark = on_hopper
FORM = FourBitForm(kind="int4", group=128, scale_dtype=torch.float16 if INTERPRETED else torch.bfloat16)


class Layer:
    def __init__(self, num_tokens: int, shape: tuple[int, int], seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        # With a mean, which shows offsets that do not cancel.
        self.x = (torch.randn(num_tokens, shape[1], generator=generator) + 0.5).to(DTYPE).to(device)
        self.residual = torch.randn(num_tokens, shape[0], generator=generator).to(DTYPE).to(device)
        weight = random_weight(FORM, shape, seed)
        weight.scales.div_(20)
        self.weight = FourBitTiles.of(weight.to(device))
        self.note = f"seed {seed}: {num_tokens} tokens, {shape}"
        print(self.note)

    @cached_property
    def product(self) -> Tensor:
        return self.x.double() @ self.weight.dequantize(torch.float64).t()


def run(plan: Plan, layer: Layer, order: Any = in_turn, seed: int = 0, **options: Any) -> Tensor:
    launch = WarpGroups(seed, order).launch_four_bit if INTERPRETED else linear_hopper.launch_four_bit
    num_outputs = layer.weight.shape[0] // (1 + options.get("is_swiglu", False))
    out = torch.full((len(layer.x), num_outputs + 8), torch.nan, dtype=DTYPE, device=layer.x.device)
    launch(plan, layer.x, layer.weight, out, **options)
    assert out[:, -8:].isnan().all(), "columns beside the outputs were written"
    assert not arrival_counters(layer.x.device).any(), f"{layer.note}: a counter of arrivals is not zero after a launch"
    return out[:, :-8]


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_columns_are_in_the_order_of_words(num_tokens: int, device: torch.device) -> None:
    """Of each 32: first those that the lanes t have in a word's first half, two at 8 t and two at 8 t + 2."""
    x = torch.arange(num_tokens * 1344, device=device).view(num_tokens, 1344).float()[:, :1312]
    order = [8 * t + 4 * j + 2 * h + e for j in (0, 1) for h in (0, 1) for t in range(4) for e in (0, 1)]
    assert order[:10] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    assert torch.equal(in_order_of_words(x), x.reshape(num_tokens, 41, 32)[..., order].flatten(1))


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("block_o", [128, 256])
def test_products_match_float64(block_o: int, programs: int, device: torch.device) -> None:
    """In every order of programs, with the same bits."""
    for seed, shape in enumerate(SIZES):
        layer = Layer((16, 13, 37)[seed], shape, seed, device)
        this = plan(block_o, 16, programs, stages=2 + seed)
        first = None
        for order in ORDERS:
            product = run(this, layer, order, seed)
            with_residual = run(this, layer, order, seed + 7, residual_NO=layer.residual)
            check(product, layer.product, layer.note)
            check(with_residual, layer.product + layer.residual.double(), layer.note)
            first = product if first is None else first
            assert torch.equal(product, first), layer.note


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("block_m", [32, 64])
def test_swiglu_matches_float64(block_m: int, programs: int, device: torch.device) -> None:
    for seed, shape in enumerate(SIZES):
        layer = Layer((9, 32, 64)[seed], shape, seed, device)
        gate, up = layer.product.chunk(2, -1)
        check(run(plan(256, block_m, programs), layer, ORDERS[-1], seed, is_swiglu=True), silu(gate) * up, layer.note)


def test_tokens_may_begin_anywhere(device: torch.device) -> None:
    layer = Layer(16, (256, 256), 4, device)
    wide = torch.zeros(32, 259, dtype=DTYPE, device=device)[::2, 3:]
    wide.copy_(layer.x)
    layer.x = wide
    check(run(plan(128, 16, 3), layer), layer.product, layer.note)


def test_only_integers_in_groups_of_128_without_zero_points_are_supported(device: torch.device) -> None:
    x = torch.zeros(16, 256, dtype=torch.bfloat16, device=device)
    for form in (*FORMS, FourBitForm(kind="int4", group=32)):
        weight = FourBitTiles.empty(form, (256, 256), device)
        is_supported = linear_hopper.supports_four_bit(plan(256, 16, 3), x, weight)
        is_taken = form.kind == "int4" and form.group == 128 and not form.has_zeros
        assert is_supported == (is_taken and not INTERPRETED)
    odd = FourBitTiles.empty(FORM, (144, 256), device)
    assert not linear_hopper.supports_four_bit(plan(128, 16, 3), x, odd)


def test_a_measured_plan_is_used_where_it_can_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper and from 9 tokens up; elsewhere the product is that of linear_four_bit.py."""
    launched: list[int] = []
    launch = linear_hopper.launch_four_bit

    def counted(plan: Plan, x: Tensor, *rest: Any, **options: Any) -> None:
        launched.append(len(x))
        launch(plan, x, *rest, **options)

    monkeypatch.setattr(linear_hopper, "launch_four_bit", counted)
    monkeypatch.setitem(four_bit_layers.HOPPER_PLANS, (256, 256), ((16, plan(256, 16, 3)), (40, plan(256, 32, 3))))
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    for num_tokens in (8, 9, 16, 40, 41):
        layer = Layer(num_tokens, (256, 256), 5, device)
        layer.x, residual = layer.x.to(dtype), layer.residual.to(dtype)
        got = four_bit_layers.step_product(layer.x, layer.weight, residual_NO=residual)
        expected = layer.product + residual.double()
        assert ((got.double() - expected).norm() / expected.norm()).item() < 6e-3, layer.note
    assert launched == ([] if INTERPRETED else [9, 16, 40])
