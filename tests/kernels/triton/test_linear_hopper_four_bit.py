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
from tests.kernels.triton.gluon_warp_groups import LinearGroups
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
    launch = LinearGroups(seed, order).launch_four_bit if INTERPRETED else linear_hopper.launch_four_bit
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
        is_supported = linear_hopper.supports_four_bit(x, weight)
        is_taken = form.kind == "int4" and form.group == 128 and not form.has_zeros
        assert is_supported == (is_taken and not INTERPRETED)


@pytest.mark.parametrize("is_swiglu", [False, True], ids=["plain", "SwiGLU"])
def test_more_than_16_tokens_are_multiplied_in_warp_groups_where_they_can_be(
    is_swiglu: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper, with rows in whole tiles; elsewhere the product is that of linear_four_bit.py."""
    launched: list[int] = []
    launch = linear_hopper.launch_four_bit

    def counted(plan: Plan, x: Tensor, *rest: Any, **options: Any) -> None:
        launched.append(len(x))
        launch(plan, x, *rest, **options)

    monkeypatch.setattr(linear_hopper, "launch_four_bit", counted)
    monkeypatch.setattr(four_bit_layers, "_HOPPER_WEIGHTS", 256 * 256)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    for num_tokens, rows in ((16, 256), (17, 256), (17, 288), (64, 256), (128, 256), (17, 240)):
        layer = Layer(num_tokens, (rows, 256), 5, device)
        layer.x, residual = layer.x.to(dtype), layer.residual.to(dtype)
        expected = layer.product + residual.double()
        if is_swiglu:
            gate, up = layer.product.chunk(2, -1)
            expected = silu(gate) * up
        got = four_bit_layers.decoded_product(
            layer.x, layer.weight, residual_NO=None if is_swiglu else residual, is_swiglu=is_swiglu
        )
        assert ((got.double() - expected).norm() / expected.norm()).item() < 6e-3, layer.note
    assert launched == ([] if INTERPRETED else [17, 64, 128])


def test_plans_divide_tiles_between_almost_all_multiprocessors() -> None:
    for num_outputs, depth in ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (2560, 9216), (17408, 5120)):
        for num_tokens in (17, 32, 33, 64, 128):
            for is_swiglu in (False, True):
                found = four_bit_layers.hopper_plan_for(num_outputs, depth, num_tokens, 132, is_swiglu=is_swiglu)
                assert found is not None
                assert num_outputs % found.block_o == 0
                assert 112 < found.programs <= 132
    assert four_bit_layers.hopper_plan_for(34816, 5120, 16, 132, is_swiglu=True) is None
    assert four_bit_layers.hopper_plan_for(1024, 3584, 32, 132, is_swiglu=False) is None
