"""A norm that a sum computes ahead, in every kernel that ends in the residual and every one behind it: no launch of its
own, the same values, and never that of another norm or of an older result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import linear_hopper
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.linear_plans import Plan
from agentspec.kernels.triton.norm_ahead import LEAST_AHEAD, NormAhead, ahead_of, attach
from agentspec.kernels.weights import BlockScaled, Plain, quantize_blocks
from tests.kernels.triton.gluon_warp_groups import LinearGroups
from tests.kernels.triton.test_linear_hopper import DTYPE, ORDERS, check, on_hopper, plan

SUM = Plan(block_o=32, block_m=16, block_k=128, stages=2, warps=2)
PRODUCT = Plan(block_o=64, block_m=16, block_k=128, stages=2, warps=4, norm_apart=True)
WIDTH = 512


class Chain:
    """A sum [N, WIDTH] and what comes behind it."""

    def __init__(self, num_tokens: int, device: torch.device, seed: int) -> None:
        self.note = f"seed {seed}: {num_tokens} tokens"
        print(self.note)
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(DTYPE).to(device)

        def weight(*size: int) -> BlockScaled:
            return quantize_blocks(randn(*size, scale=size[-1] ** -0.5))

        self.x, self.residual = randn(num_tokens, 256), randn(num_tokens, WIDTH) * 3
        self.norm = Norm(weight=randn(WIDTH, scale=0.2), eps=1e-6)
        self.sum, self.product = weight(WIDTH, 256), weight(512, WIDTH)
        self.extra = randn(96, WIDTH, scale=WIDTH**-0.5)

    def expected(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(product with extra rows, SwiGLU) of a sum, in float64."""
        x = y.double()
        x = x * (x.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt() * (1 + self.norm.weight.double())
        product = x @ self.product.dequantize(torch.float64).t()
        gate, up = product.chunk(2, -1)
        return torch.cat([product, x @ self.extra.double().t()], -1), torch.nn.functional.silu(gate) * up

    def check_sum(self, y: Tensor) -> NormAhead:
        check(y, self.x.double() @ self.sum.dequantize(torch.float64).t() + self.residual.double(), self.note)
        ahead = ahead_of(y, self.norm)
        assert ahead is not None
        squares = ahead.squares_PN.double().sum(0)
        assert torch.allclose(squares, y.double().square().sum(-1), rtol=1e-5), self.note
        check(ahead.gained_NH, y.double() * (1 + self.norm.weight.double()), self.note)
        return ahead


def no_norm(x: Tensor, norm: Norm) -> Tensor:
    raise AssertionError("a norm of its own")


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("num_tokens", [LEAST_AHEAD, LEAST_AHEAD + 19])
def test_products_behind_a_sum_launch_no_norm(
    num_tokens: int, split: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(num_tokens, device, seed=num_tokens + split)
    sum_plan, plan = replace(SUM, split=split), replace(PRODUCT, split=split)
    y = ours.launch_linear(sum_plan, chain.x, chain.sum, None, chain.residual, next_norm=chain.norm)
    chain.check_sum(y)
    monkeypatch.setattr(ours, "rms_norm", no_norm)
    expected, gated = chain.expected(y)
    check(ours.launch_linear(plan, y, chain.product, chain.norm, None, chain.extra), expected, chain.note)
    check(ours.launch_linear(plan, y, chain.product, chain.norm, None), expected[:, :512], chain.note)
    check(ours.launch_swiglu(PRODUCT, y, chain.norm, chain.product), gated, chain.note)


@on_hopper
@pytest.mark.parametrize("programs", [1, 3, 16])
@pytest.mark.parametrize("block_o", [128, 256])
def test_products_of_warp_groups_behind_a_sum(block_o: int, programs: int, device: torch.device) -> None:
    """In every order of programs with the same bits, also where the blocks of tokens are several."""
    chain = Chain(21, device, seed=programs)
    results: list[tuple[Tensor, ...]] = []
    for i, order in enumerate(ORDERS):
        launch: Any = LinearGroups(i, order).launch_product if INTERPRETED else linear_hopper.launch_product
        following = NormAhead.empty(chain.norm, chain.residual, WIDTH // 64)
        options = {"residual_NO": chain.residual, "following": following}
        y = attach(launch(plan(block_o, 16, programs), chain.x, chain.sum, **options), following)
        ahead = chain.check_sum(y)
        expected, gated = chain.expected(y)
        product = launch(plan(block_o, 16, programs), ahead.gained_NH, chain.product, ahead=ahead)
        check(product, expected[:, :512], chain.note)
        swiglu = launch(plan(256, 16, programs), ahead.gained_NH, chain.product, is_swiglu=True, ahead=ahead)
        check(swiglu, gated, chain.note)
        results.append((y, ahead.gained_NH, ahead.squares_PN, product, swiglu))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, results[0], strict=True)), chain.note


def test_only_that_norm_of_that_result_is_used(device: torch.device) -> None:
    chain = Chain(LEAST_AHEAD, device, seed=5)
    y = ours.launch_linear(SUM, chain.x, chain.sum, None, chain.residual, next_norm=chain.norm)
    other = Norm(weight=chain.norm.weight + 1, eps=chain.norm.eps)
    assert ahead_of(y, other) is None
    assert ahead_of(y.clone(), chain.norm) is None
    got = ours.launch_linear(PRODUCT, y, chain.product, other, None)
    check(got, reference.norm_linear(y, other, chain.product).double(), chain.note)
    for weight in (Plain(torch.zeros(WIDTH, 256, dtype=DTYPE, device=device)), chain.sum):
        # A library's product changes the residual in place.
        x = torch.zeros(300, 256, dtype=DTYPE, device=device)
        wide = attach(torch.zeros(300, WIDTH, dtype=DTYPE, device=device), ahead_of(y, chain.norm))
        result = ours.add_linear(wide, x, weight, chain.norm)
        assert ahead_of(result, chain.norm) is None


def test_without_a_sum_of_few_tokens_nothing_is_ahead(device: torch.device) -> None:
    """Fewer tokens than it is worth for, weights in 16 bits, a product without a residual, and no next norm."""
    chain = Chain(LEAST_AHEAD, device, seed=6)
    plain = Plain(chain.sum.dequantize(DTYPE))
    few, few_residual = chain.x[: LEAST_AHEAD - 1], chain.residual[: LEAST_AHEAD - 1]
    for x, weight, residual, norm in (
        (few, chain.sum, few_residual, chain.norm),
        (chain.x, plain, chain.residual, chain.norm),
        (chain.x, chain.sum, None, chain.norm),
        (chain.x, chain.sum, chain.residual, None),
    ):
        y = ours.launch_linear(SUM, x, weight, None, residual, next_norm=norm)
        assert ahead_of(y, chain.norm) is None
