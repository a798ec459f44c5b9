"""Experts for few tokens against the reference: both ways to find visitors, every form of weights, every placement of
the shared expert."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights, Norm
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import experts, mixture
from agentspec.kernels.triton.experts import Tiles
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters, separate_counters
from agentspec.kernels.triton.mixture import Placement
from agentspec.kernels.triton.routing import Routing
from agentspec.kernels.weights import Plain, Weight, quantize_blocks
from tests.fakes.compare import relative_error

TOLERANCES = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2**-6}
"""Largest difference over largest value, compared with float32: routing is exact, inputs and results are rounded."""
SIZES = [
    (1, 64, 8, 32, 2),
    (3, 72, 5, 24, 3),
    (9, 40, 7, 40, 1),
    (16, 32, 4, 16, 1),
    (17, 48, 5, 24, 2),
    (40, 32, 4, 16, 2),
]
"""Tokens, hidden size, experts, width, chosen."""


def randn(*shape: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator, device=device)


def mixture_of(
    hidden: int,
    num_experts: int,
    width: int,
    top_k: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    scaled: bool,
    shared_width: int = 0,
) -> MixtureWeights:
    """Random weights that give results of about 1. Router rows differ widely, so that 16 bits choose the same experts
    as 32."""
    generator = torch.Generator(device).manual_seed(seed)

    def weight(*shape: int) -> Weight:
        plain = randn(*shape, generator=generator, device=device) * shape[-1] ** -0.5
        return quantize_blocks(plain) if scaled else Plain(plain.to(dtype))

    shared = shared_width or width
    gate_up = weight(2 * shared, hidden) if not shared_width else weight(shared, hidden).stack([weight(shared, hidden)])
    return MixtureWeights(
        router_XH=randn(num_experts, hidden, generator=generator, device=device).to(dtype),
        top_k=top_k,
        normalize=True,
        gate_up_X2IH=weight(num_experts, 2 * width, hidden),
        down_XHI=weight(num_experts, hidden, width),
        shared_gate_1H=(randn(1, hidden, generator=generator, device=device) * hidden**-0.5).to(dtype),
        shared_gate_up_2IH=gate_up,
        shared_down_HI=weight(hidden, shared),
    )


def inputs(num_tokens: int, hidden: int, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Norm]:
    generator = torch.Generator(device).manual_seed(seed + 1)
    x = randn(num_tokens, hidden, generator=generator, device=device).to(dtype)
    return x, Norm(weight=(randn(hidden, generator=generator, device=device) * 0.1).to(dtype), eps=1e-3)


def in_float32(weights: MixtureWeights) -> MixtureWeights:
    names = ("gate_up_X2IH", "down_XHI", "shared_gate_up_2IH", "shared_down_HI")
    exact: dict[str, Any] = {name: Plain(getattr(weights, name).dequantize()) for name in names}
    return replace(weights, router_XH=weights.router_XH.float(), shared_gate_1H=weights.shared_gate_1H.float(), **exact)


def check_mixture(
    size: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    scaled: bool,
    placement: Placement,
    shared_width: int = 0,
) -> None:
    num_tokens, hidden, num_experts, width, top_k = size
    seed = 10 * num_tokens + hidden
    text = f"seed {seed}: {size}, {dtype}, scaled {scaled}, {placement}, shared width {shared_width}"
    weights = mixture_of(
        hidden, num_experts, width, top_k, seed, device, dtype, scaled=scaled, shared_width=shared_width
    )
    x, norm = inputs(num_tokens, hidden, seed, device, dtype)
    expected = reference.add_experts(x.float(), replace(norm, weight=norm.weight.float()), in_float32(weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "forced_placement", placement)
        got = mixture.add_experts(x.clone(), norm, weights)
    assert (got.shape, got.dtype) == (x.shape, dtype), text
    error = relative_error(got.float(), expected)
    assert error < TOLERANCES[dtype], f"{text}: {error}"
    assert not arrival_counters(x.device).any(), text


@pytest.mark.parametrize("form", ["float32", "float16", "scaled"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mixtures_match_reference(size: tuple[int, int, int, int, int], form: str, device: torch.device) -> None:
    check_mixture(
        size, device, torch.float16 if form == "float16" else torch.float32, scaled=form == "scaled", placement="among"
    )


@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize("placement", get_args(Placement))
def test_every_placement_of_shared_expert_matches_reference(
    placement: Placement, num_tokens: int, device: torch.device
) -> None:
    check_mixture((num_tokens, 32, 5, 16, 2), device, torch.float32, scaled=True, placement=placement)


@pytest.mark.parametrize("placement", [*get_args(Placement), "prefill"])
def test_expert_sum_does_not_modify_input(
    placement: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of a group needs the partial sum, without the residual."""
    if placement == "prefill":
        monkeypatch.setattr(mixture, "MOST_TOKENS", 2)
    else:
        monkeypatch.setattr(mixture, "forced_placement", placement)
    weights = mixture_of(32, 5, 16, 2, 4, device, torch.float32, scaled=False)
    x, norm = inputs(3, 32, 4, device, torch.float32)
    given = x.clone()
    assert (
        relative_error(mixture.expert_sum(given, norm, weights), reference.expert_sum(x, norm, weights))
        < TOLERANCES[torch.float32]
    )
    assert torch.equal(given, x)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expert_sum_is_what_add_experts_adds(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    weights = mixture_of(48, 5, 16, 2, num_tokens, device, dtype, scaled=False)
    x, norm = inputs(num_tokens, 48, num_tokens, device, dtype)
    found = mixture.expert_sum(x, norm, weights)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    added = mixture.add_experts(x.clone(), norm, weights).float() - x.float()
    assert relative_error(found.float(), added) < {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]


def test_expert_sum_of_few_tokens_fills_no_tensor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill between two kernels would end the chain of those that start before the last one has ended."""
    weights = mixture_of(32, 5, 16, 2, 4, device, torch.float32, scaled=False)
    x, norm = inputs(3, 32, 4, device, torch.float32)
    mixture.expert_sum(x, norm, weights)  # allocates the counters

    def fill(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a fill is launched")

    for name in ("zeros", "zeros_like"):
        monkeypatch.setattr(torch, name, fill)
    mixture.expert_sum(x, norm, weights)


@pytest.mark.parametrize("placement", ["beside", "behind"])
def test_shared_expert_of_other_width_matches_reference(placement: Placement, device: torch.device) -> None:
    check_mixture((2, 32, 5, 16, 2), device, torch.float32, scaled=True, placement=placement, shared_width=48)


def test_several_scale_blocks_match_reference(device: torch.device) -> None:
    check_mixture((1, 272, 2, 136, 1), device, torch.float32, scaled=True, placement="among")


def test_shared_expert_of_other_form_is_not_placed_among_routed(device: torch.device) -> None:
    alike = mixture_of(64, 4, 32, 2, 1, device, torch.float32, scaled=True)
    wider = mixture_of(64, 4, 32, 2, 1, device, torch.float32, scaled=True, shared_width=48)
    plain = replace(alike, shared_down_HI=Plain(alike.shared_down_HI.dequantize()))
    assert mixture.placement_for(4, alike) == "among"
    for weights in (wider, plain):
        assert mixture.placement_for(1, weights) == "beside"
        assert mixture.placement_for(200, weights) == "behind"


@pytest.mark.parametrize("num_tokens", [3, 18])
def test_bits_do_not_depend_on_other_tokens(num_tokens: int, device: torch.device) -> None:
    """Compares batches with equal numbers of tokens: another number may use another kernel. In the interpreter a
    library multiplies, which on some processors sums a row in an order that depends on its place."""
    weights = mixture_of(32, 5, 16, 2, 7, device, torch.float32, scaled=True)
    x, norm = inputs(num_tokens, 32, 7, device, torch.float32)
    together = mixture.add_experts(x.clone(), norm, weights)
    turned = mixture.add_experts(x.roll(2, 0), norm, weights)
    bound = 2**-20 if INTERPRETED else 0.0
    assert relative_error(turned.roll(-2, 0), together) <= bound
    others, _ = inputs(num_tokens, 32, 8, device, torch.float32)
    others[2] = x[2]
    assert relative_error(mixture.add_experts(others, norm, weights)[2], together[2]) <= bound


def test_all_tokens_may_visit_one_expert(device: torch.device) -> None:
    weights = mixture_of(64, 6, 32, 1, 3, device, torch.float32, scaled=False)
    weights.gate_up_X2IH.tensor[:5] = torch.nan
    for num_tokens in (5, 16, 40):
        x, _ = inputs(num_tokens, 64, 3, device, torch.float32)
        ids = torch.full((num_tokens, 1), 5, dtype=torch.int32, device=device)
        visit_weights = torch.linspace(0.5, 1.5, num_tokens, device=device)[:, None]
        visits = mixture.visits_of(Routing(ids_NC=ids, weights_NC=visit_weights, gate_N=None, normed=x), 6, 16)
        tiles = Tiles(block_o=32, block_k=32, warps=4, stages=2)
        parts = experts.down(
            tiles, experts.gate_up(tiles, x, weights.gate_up_X2IH, None, visits), weights.down_XHI, None, visits
        )
        expected = visit_weights * reference.linear(
            swiglu(reference.linear(x, weights.gate_up_X2IH.matrix(5))), weights.down_XHI.matrix(5)
        )
        assert relative_error(parts, expected) < 5e-6, num_tokens


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("shared", [False, True])
def test_visits_are_added_in_order(shared: bool, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(4)
    x, parts, shared_NH = (
        randn(*shape, generator=generator, device=device) for shape in ((5, 600), (15, 600), (5, 600))
    )
    gate = randn(5, generator=generator, device=device)
    expected = torch.zeros_like(x)
    for visit in range(3):
        expected += parts.view(5, 3, 600)[:, visit]
    if shared:
        expected += shared_NH * gate.sigmoid()[:, None]
    operands = (parts, 3, gate if shared else None, shared_NH if shared else None)
    assert relative_error(experts.add_visits(x, *operands, dtype=x.dtype), x + expected) < 1e-6
    without_residual = experts.add_visits(None, *operands, dtype=torch.float16)
    assert without_residual.dtype == torch.float16
    assert relative_error(without_residual.float(), expected) < 2**-10


def test_prompts_use_expert_prefill(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = mixture_of(64, 6, 32, 2, 4, device, torch.float32, scaled=False)
    x, norm = inputs(6, 64, 4, device, torch.float32)
    expected = reference.add_experts(x, norm, weights)
    monkeypatch.setattr(mixture, "MOST_TOKENS", 5)
    assert relative_error(mixture.add_experts(x.clone(), norm, weights), expected) < 5e-6


def test_zero_tokens_return_empty_results(device: torch.device) -> None:
    weights = mixture_of(64, 6, 32, 2, 4, device, torch.float32, scaled=False)
    x, norm = inputs(1, 64, 4, device, torch.float32)
    assert mixture.add_experts(x[:0], norm, weights).shape == (0, 64)
    assert mixture.expert_sum(x[:0], norm, weights).shape == (0, 64)


def test_second_stream_uses_separate_counters(device: torch.device) -> None:
    ours = arrival_counters(device)
    with separate_counters():
        theirs = arrival_counters(device)
    assert ours.data_ptr() + ours.nbytes <= theirs.data_ptr()
    assert arrival_counters(device).data_ptr() == ours.data_ptr()


def held(weights: MixtureWeights, first: int, count: int) -> MixtureWeights:
    """The part of a rank that holds some of the experts."""
    some = (slice(first, first + count),)
    gate_up, down = weights.gate_up_X2IH.cut(some), weights.down_XHI.cut(some)
    return replace(weights, first_expert=first, gate_up_X2IH=gate_up, down_XHI=down)


@pytest.mark.parametrize(
    ("num_tokens", "placement"),
    [*itertools.product((1, 16, 17, 40), get_args(Placement)), (300, None)],
)
def test_parts_of_the_experts_add_up_to_all(
    num_tokens: int, placement: Placement | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that hold whole experts, few and many tokens: each computes its own, and one of them the shared one."""
    monkeypatch.setattr(mixture, "forced_placement", placement)
    weights = mixture_of(32, 6, 16, 3, num_tokens, device, torch.float32, scaled=False)
    x, norm = inputs(num_tokens, 32, num_tokens, device, torch.float32)
    total = torch.zeros_like(x)
    for first in (0, 2, 4):
        shared_HI = Plain(weights.shared_down_HI.tensor * float(first == 2))
        part = replace(held(weights, first, 2), shared_down_HI=shared_HI)
        found, expected = mixture.expert_sum(x, norm, part), reference.expert_sum(x, norm, part)
        assert relative_error(found, expected) < TOLERANCES[torch.float32], (num_tokens, first)
        total += found
    assert relative_error(total, reference.expert_sum(x, norm, weights)) < TOLERANCES[torch.float32], num_tokens
