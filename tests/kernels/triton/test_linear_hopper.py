"""Products on Hopper's matrix units in warp groups: every form, any division of K between programs, any order in which
they arrive. On a CPU without bfloat16, whose products are then of float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.triton import linear_hopper, linear_layers
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters
from agentspec.kernels.triton.linear_plans import MEASURED_FP8, Key, Plan, plan_for
from agentspec.kernels.weights import FP8, BlockScaled
from tests.kernels.triton.gluon_warp_groups import LinearGroups

on_hopper = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
)
pytestmark = on_hopper
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-6 if INTERPRETED else 6e-3


def plan(block_o: int, block_m: int, programs: int, stages: int = 2, **options: Any) -> Plan:
    return Plan(block_o=block_o, block_m=block_m, block_k=128, stages=stages, warps=8, programs=programs, **options)


class Layer:
    def __init__(
        self, num_tokens: int, num_rows: int, depth: int, seed: int, device: torch.device, block_rows: int = 128
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        codes = torch.randint(0, 0x7F, (num_rows, depth), generator=generator, dtype=torch.uint8)
        codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
        scales = (torch.rand(num_rows // block_rows, depth // 128, generator=generator) + 0.5) * depth**-0.5 / 120
        self.weight = BlockScaled(values=codes.view(FP8).to(device), scales=scales.to(device), block_rows=block_rows)
        self.x = randn(num_tokens, depth).to(DTYPE).to(device)
        self.residual = randn(num_tokens, num_rows).to(DTYPE).to(device)
        self.note = f"seed {seed}: {num_tokens} tokens, {num_rows} x {depth}, scales of {block_rows} rows"
        print(self.note)

    @cached_property
    def product(self) -> Tensor:
        return self.x.double() @ self.weight.dequantize(torch.float64).t()


def check(got: Tensor, expected: Tensor, note: str) -> None:
    assert got.shape == expected.shape, note
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE, f"{note}: relative error {error}"


def in_turn(place: int, count: int) -> int:
    return place


def backwards(place: int, count: int) -> int:
    return count - 1 - place


def shuffled(seed: int) -> Callable[[int, int], int]:
    return lambda place, count: random.Random(seed + count).sample(range(count), count)[place]


ORDERS = (in_turn, backwards, shuffled(1))
"""On a GPU, which has its own, repetitions."""


def run(plan: Plan, layer: Layer, order: Any = in_turn, seed: int = 0, **options: Any) -> Tensor:
    launch = LinearGroups(seed, order).launch_product if INTERPRETED else linear_hopper.launch_product
    got: Tensor = launch(plan, layer.x, layer.weight, **options)
    counters = arrival_counters(layer.x.device)
    assert not counters.any(), f"{layer.note}: a counter of arrivals is not zero after a launch"
    return got


SIZES = ((512, 640), (256, 256), (768, 128))
PROGRAMS = (1, 3, 16)


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("block_o", [128, 256])
def test_products_match_float64(block_o: int, programs: int, device: torch.device) -> None:
    """In every order of programs, with the same bits."""
    for seed, (num_rows, depth) in enumerate(SIZES):
        layer = Layer((16, 13, 5)[seed], num_rows, depth, seed, device)
        launched = [
            (run(this, layer, order, seed), run(this, layer, order, seed + 7, residual_NO=layer.residual))
            for order in ORDERS
            for this in [plan(block_o, 16, programs, stages=2 + seed)]
        ]
        for product, with_residual in launched:
            check(product, layer.product, layer.note)
            check(with_residual, layer.product + layer.residual.double(), layer.note)
            assert torch.equal(product, launched[0][0]), layer.note
            assert torch.equal(with_residual, launched[0][1]), layer.note


@pytest.mark.parametrize("programs", PROGRAMS)
def test_swiglu_matches_float64(programs: int, device: torch.device) -> None:
    for seed, (num_rows, depth) in enumerate(SIZES):
        layer = Layer((9, 32, 40)[seed], num_rows, depth, seed, device)
        for order in ORDERS:
            gate, up = layer.product.chunk(2, -1)
            check(run(plan(256, 32, programs), layer, order, seed, is_swiglu=True), silu(gate) * up, layer.note)


def test_rows_may_share_scales_in_blocks_of_64(device: torch.device) -> None:
    layer = Layer(16, 512, 384, 3, device, block_rows=64)
    check(run(plan(256, 16, 3), layer), layer.product, layer.note)
    gate, up = layer.product.chunk(2, -1)
    check(run(plan(256, 16, 3), layer, is_swiglu=True), silu(gate) * up, layer.note)


def test_rows_of_tokens_may_begin_anywhere(device: torch.device) -> None:
    """TMA reads from multiples of 16 bytes on, and rows of multiples of 16 bytes."""
    layer = Layer(16, 256, 256, 4, device)
    for shape, offset in (((16, 259), 0), ((16, 272), 3), ((32, 256), 0)):
        wide = torch.zeros(shape, dtype=DTYPE, device=device)
        x = wide[:: shape[0] // 16, offset : offset + 256]
        x.copy_(layer.x)
        layer.x = x
        check(run(plan(128, 16, 3), layer), layer.product, layer.note)


def test_a_tokens_bits_do_not_depend_on_others(device: torch.device) -> None:
    layer = Layer(32, 512, 640, 5, device)
    x, together = layer.x, run(plan(256, 32, 3), layer)
    for n in (0, 17, 31):
        layer.x = x.clone()
        layer.x[:n], layer.x[n + 1 :] = 3, -3
        assert torch.equal(run(plan(256, 32, 3), layer)[n], together[n])


def test_a_plan_for_hopper_is_used_only_where_it_can_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the next plan is, or the rule: here on a CPU, for a weight whose rows are no whole tiles, and for
    scales of few rows."""
    on_hopper, walk = plan(256, 32, 132, stages=5), Plan(block_o=64, block_m=64, block_k=128, stages=4, warps=4)
    for rows, fallback in (((32, on_hopper), (64, walk)), walk), (((32, on_hopper),), None):
        key: Key = ("linear", 512, 384)
        monkeypatch.setitem(MEASURED_FP8, key, rows)
        plan_for.cache_clear()
        assert plan_for(*key, 32, 2, "fp8") == on_hopper
        elsewhere = plan_for(*key, 32, 2, "fp8", for_hopper=False)
        assert elsewhere is not None
        assert not elsewhere.programs
        assert fallback in (elsewhere, None)
    for block_rows in (128, 8):
        layer = Layer(32, 512, 384, 6, device, block_rows=block_rows)
        x = layer.x.to(torch.float16 if INTERPRETED else torch.bfloat16)
        is_supported = linear_hopper.supports(on_hopper, x, layer.weight)
        assert is_supported == (not INTERPRETED and block_rows == 128)
        error = ((linear_layers.linear(x, layer.weight).double() - layer.product).norm() / layer.product.norm()).item()
        assert error < 6e-3, layer.note
    monkeypatch.undo()
    plan_for.cache_clear()
