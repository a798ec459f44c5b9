"""Experts in 4 bits against the reference: every form, tiling, way to find visitors and placement of the shared
expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.backend import MixtureWeights, Norm
from agentspec.kernels.four_bit import FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import four_bit_experts, grouped_four_bit_hopper, mixture
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.experts import Visits
from agentspec.kernels.triton.four_bit_experts import down_plan, gate_up_plan
from agentspec.kernels.triton.four_bit_layers import FourBitPlan
from agentspec.kernels.triton.grouped_four_bit_hopper import PromptPlan
from agentspec.kernels.triton.mixture import Placement
from agentspec.kernels.triton.routing import Routing
from agentspec.kernels.weights import Plain, Weight, quantize_blocks
from tests.kernels.test_four_bit_tiles import FORMS, random_weight
from tests.kernels.triton.test_experts import held
from tests.kernels.triton.test_four_bit_product import DTYPE, assert_near

INT4, ZEROS, NVFP4, BY_32, ZEROS_BY_32 = FORMS
CASES = [
    (INT4, (1, 256, 8, 128, 2)),
    (NVFP4, (3, 128, 3, 256, 1)),
    (ZEROS, (9, 384, 2, 128, 1)),
    (INT4, (17, 128, 2, 128, 1)),
    (NVFP4, (17, 128, 2, 128, 1)),
    (ZEROS_BY_32, (2, 256, 2, 128, 1)),
]
"""Tokens, hidden size, experts, width, chosen."""
PLANS = (
    FourBitPlan(block_o=64, block_m=8, ahead=1, warps=1, shares=1),
    FourBitPlan(block_o=32, block_m=16, ahead=2, warps=4, shares=2),
    FourBitPlan(block_o=16, block_m=8, ahead=1, warps=4, shares=4),
)


def random_tiles(form: FourBitForm, shape: tuple[int, ...], seed: int, device: torch.device) -> FourBitTiles:
    """A weight of about unit products. Each row of floats has its own multiplier, so gate and up have different
    ones."""
    weight = random_weight(form, shape, seed)
    if weight.multipliers is None:
        weight.scales.div_(20)
    else:
        weight.multipliers.mul_(10 / 448)
    return FourBitTiles.of(weight.to(device))


def mixture_of(
    form: FourBitForm, hidden: int, num_experts: int, width: int, top_k: int, seed: int, device: torch.device
) -> MixtureWeights:
    """Router rows differ widely, so that 16 bits choose the same experts as 32."""
    generator = torch.Generator().manual_seed(seed)
    return MixtureWeights(
        router_XH=torch.randn(num_experts, hidden, generator=generator).to(DTYPE).to(device),
        top_k=top_k,
        normalize=True,
        gate_up_X2IH=random_tiles(form, (num_experts, 2 * width, hidden), seed, device),
        down_XHI=random_tiles(form, (num_experts, hidden, width), seed + 1, device),
        shared_gate_1H=(torch.randn(1, hidden, generator=generator) * hidden**-0.5).to(DTYPE).to(device),
        shared_gate_up_2IH=random_tiles(form, (2 * width, hidden), seed + 2, device),
        shared_down_HI=random_tiles(form, (hidden, width), seed + 3, device),
    )


def inputs(num_tokens: int, hidden: int, seed: int, device: torch.device) -> tuple[Tensor, Norm]:
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(num_tokens, hidden, generator=generator).to(DTYPE).to(device)
    norm = torch.randn(hidden, generator=generator) * 0.1
    return x, Norm(weight=norm.to(DTYPE).to(device), eps=1e-3)


def exact(weights: MixtureWeights) -> MixtureWeights:
    names = ("gate_up_X2IH", "down_XHI", "shared_gate_up_2IH", "shared_down_HI")
    plain: dict[str, Any] = {name: Plain(getattr(weights, name).dequantize()) for name in names}
    return replace(weights, router_XH=weights.router_XH.float(), shared_gate_1H=weights.shared_gate_1H.float(), **plain)


def expected_sum(x: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
    return reference.expert_sum(x.float(), replace(norm, weight=norm.weight.float()), exact(weights)).double()


@pytest.mark.parametrize(("form", "size"), CASES, ids=str)
def test_mixtures_match_reference(
    form: FourBitForm, size: tuple[int, int, int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, hidden, num_experts, width, top_k = size
    weights = mixture_of(form, hidden, num_experts, width, top_k, num_tokens, device)
    assert mixture.shared_matches_routed(weights)
    x, norm = inputs(num_tokens, hidden, num_tokens, device)
    monkeypatch.setattr(mixture, "forced_placement", "among")
    assert_near(mixture.expert_sum(x, norm, weights), expected_sum(x, norm, weights), size)


@pytest.mark.parametrize("placement", get_args(Placement))
def test_every_placement_of_shared_expert_matches_reference(
    placement: Placement, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = mixture_of(ZEROS, 128, 4, 128, 2, 3, device)
    x, norm = inputs(3, 128, 3, device)
    expected = expected_sum(x, norm, weights)
    monkeypatch.setattr(mixture, "forced_placement", placement)
    assert_near(mixture.expert_sum(x, norm, weights), expected, placement)
    assert_near(mixture.add_experts(x.clone(), norm, weights), x + expected, placement)


def visits_of(ids: list[list[int]], num_experts: int, block_m: int, x: Tensor, device: torch.device) -> Visits:
    ids_NC = torch.tensor(ids, dtype=torch.int32, device=device)
    weights_NC = torch.linspace(0.5, 1.5, ids_NC.numel(), device=device).view(ids_NC.shape)
    routing = Routing(ids_NC=ids_NC, weights_NC=weights_NC, gate_N=None, normed=x)
    return mixture.visits_of(routing, num_experts, block_m)


def check_products(
    plans: tuple[FourBitPlan, FourBitPlan],
    gate_up: FourBitTiles,
    down: FourBitTiles,
    ids: list[list[int]],
    device: torch.device,
    seed: int,
) -> None:
    """Each product of each visit on its own, by the given plans."""
    num_experts = len(down.values)
    x, _ = inputs(len(ids), gate_up.shape[2], seed, device)
    visits = visits_of(ids, num_experts, plans[0].block_m, x, device)
    pairs = [(token, expert) for token, chosen in enumerate(ids) for expert in chosen]
    h, (inner, _) = (
        four_bit_experts.gate_up(plans[0], x, gate_up, None, visits),
        inputs(len(pairs), down.shape[2], seed, device),
    )
    parts = four_bit_experts.down(plans[1], inner, down, None, visits)
    for pair, (token, expert) in enumerate(pairs):
        gate, up = (x[token].double() @ gate_up.matrix(expert).dequantize(torch.float64).t()).chunk(2, -1)
        assert_near(h[pair], silu(gate) * up, (plans, pair))
        weight, y = visits.weights_NC.view(-1)[pair].double(), down.matrix(expert).dequantize(torch.float64)
        assert_near(parts[pair], weight * (inner[pair].double() @ y.t()), (plans, pair))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    ("form", "unrolled"), [*((form, True) for form in FORMS), (INT4, False), (ZEROS_BY_32, False)], ids=str
)
def test_every_tiling_matches_reference(
    form: FourBitForm, plan: FourBitPlan, unrolled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depths that a tiling's steps divide, and others."""
    monkeypatch.setattr(four_bit_experts, "_MOST_STEPS", 8 if unrolled else 0)
    least = 128 * plan.shares
    for seed, depth in enumerate((2 * least, 2 * least + 128)):
        gate_up = random_tiles(form, (4, 2 * plan.block_o, depth), seed, device)
        down = random_tiles(form, (4, plan.block_o, depth), seed + 1, device)
        check_products((plan, plan), gate_up, down, [[3, 0], [1, 3]], device, seed)


@pytest.mark.parametrize(("num_tokens", "form"), [(5, INT4), (16, NVFP4), (18, ZEROS)], ids=str)
def test_all_tokens_may_visit_one_expert(num_tokens: int, form: FourBitForm, device: torch.device) -> None:
    """The others, which no token visits, aren't read."""
    gate_up, down = (random_tiles(form, shape, 3, device) for shape in ((3, 64, 128), (3, 64, 128)))
    for weight in (gate_up, down):
        unread = weight.cut((slice(0, 2),))
        (unread.scales if unread.multipliers is None else unread.multipliers).fill_(torch.nan)
    block_m = 8 if num_tokens <= 8 else 16
    plans = (gate_up_plan(32, 128, block_m), down_plan(64, 128, block_m))
    check_products(plans, gate_up, down, [[2]] * num_tokens, device, 3)


@pytest.mark.parametrize("num_tokens", [2, 17])
def test_ranks_may_hold_some_experts(num_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = mixture_of(INT4, 128, 4, 128, 2, num_tokens, device)
    x, norm = inputs(num_tokens, 128, num_tokens, device)
    for first, placement in ((0, "among"), (2, "behind")):
        monkeypatch.setattr(mixture, "forced_placement", placement)
        part = held(weights, first, 2)
        assert_near(mixture.expert_sum(x, norm, part), expected_sum(x, norm, part), (num_tokens, first))


def test_activations_in_full_precision_meet_expanded_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(four_bit_experts, "INTERPRETED", False)
    weights = mixture_of(ZEROS, 128, 4, 128, 2, 5, device)
    x, norm = inputs(3, 128, 5, device)
    full = replace(weights, router_XH=weights.router_XH.float(), shared_gate_1H=weights.shared_gate_1H.float())
    x, norm = x.float(), replace(norm, weight=norm.weight.float())
    assert not four_bit_experts.takes_decoded(weights.gate_up_X2IH, torch.float32)
    for placement in get_args(Placement):
        monkeypatch.setattr(mixture, "forced_placement", placement)
        assert_near(mixture.expert_sum(x, norm, full), expected_sum(x, norm, weights), placement)


@pytest.mark.parametrize("form", [INT4, NVFP4, BY_32], ids=str)
def test_prompts_match_reference(form: FourBitForm, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "MOST_TOKENS", 5)
    weights = mixture_of(form, 256, 3, 256, 1, 6, device)
    x, norm = inputs(12, 256, 6, device)
    assert grouped_four_bit_hopper.is_supported(weights.gate_up_X2IH, weights.down_XHI, DTYPE, device)
    expected = expected_sum(x, norm, weights)
    assert_near(mixture.expert_sum(x, norm, weights), expected, form, 2**-7)
    if form == INT4:
        monkeypatch.setattr(grouped_four_bit_hopper, "is_supported", lambda *_: False)
        assert_near(mixture.expert_sum(x, norm, weights), expected, "experts expanded", 2**-7)


PROMPTS = [
    (INT4, PromptPlan(block_m=32, warps=4), [3, 0, 1]),
    (ZEROS, PromptPlan(block_m=64, warps=4), [70, 0, 2]),
    (NVFP4, PromptPlan(block_m=32, warps=8), [33, 1, 0]),
    (INT4, PromptPlan(block_m=128, warps=4), [130, 5, 0]),
    (ZEROS_BY_32, PromptPlan(block_m=32, warps=4), [1, 40, 0]),
]


@pytest.mark.parametrize(("form", "plan", "counts"), PROMPTS, ids=str)
def test_prompt_products_match_rounded_weights(
    form: FourBitForm, plan: PromptPlan, counts: list[int], device: torch.device
) -> None:
    """Tiles that are full, almost empty, and missing; experts that no token visits."""
    rows, depth = 2 * plan.rows, 256
    gate_up, down = (random_tiles(form, (3, rows, depth), seed, device) for seed in (1, 2))
    ids_P = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    ids_P = ids_P[torch.randperm(len(ids_P), generator=torch.Generator().manual_seed(3))].to(device)
    x, _ = inputs(len(ids_P), depth, 4, device)
    groups = group_pairs(ids_P.int()[:, None].contiguous(), 3, plan.block_m)
    order = groups.pairs_P.long()
    h = grouped_four_bit_hopper.gate_up(plan, grouped_four_bit_hopper.operand_order(x), gate_up, groups, 1)
    rounded = torch.bfloat16 if form.kind == "int4" else torch.float32
    exact = [weight.dequantize(rounded).double() for weight in (gate_up, down)]
    gate, up = torch.einsum("pk,pok->po", x.double(), exact[0][ids_P]).chunk(2, -1)
    expected = grouped_four_bit_hopper.operand_order((silu(gate) * up)[order])
    assert_near(h, expected, (plan, counts))
    weights = torch.linspace(0.5, 1.5, len(ids_P), device=device)[:, None]
    inner, _ = inputs(len(ids_P), depth, 5, device)
    parts = grouped_four_bit_hopper.down(
        plan, grouped_four_bit_hopper.operand_order(inner)[order].contiguous(), down, groups, weights, DTYPE
    )
    assert_near(parts[:, 0], weights * torch.einsum("pk,pok->po", inner.double(), exact[1][ids_P]), (plan, counts))


def test_a_shared_expert_in_8_bits_is_not_placed_among_routed(device: torch.device) -> None:
    weights = mixture_of(INT4, 128, 4, 128, 2, 1, device)
    scaled: Weight = quantize_blocks(weights.shared_down_HI.dequantize())
    other = replace(weights, shared_down_HI=scaled)
    assert mixture.placement_for(4, weights) == "among"
    assert mixture.placement_for(4, other) == "beside"
    x, norm = inputs(3, 128, 1, device)
    assert_near(mixture.expert_sum(x, norm, other), expected_sum(x, norm, other), "shared expert in 8 bits")


def test_every_plan_divides_its_experts() -> None:
    for hidden in (128, 384, 2048, 3072, 4096):
        for width in (128, 256, 512, 1024):
            for block_m in (8, 16):
                plan = gate_up_plan(width, hidden, block_m)
                assert 2 * width % plan.block_o == 0
                other = down_plan(hidden, width, block_m)
                assert hidden % other.block_o == 0
                for each, depth in ((plan, hidden), (other, width)):
                    assert depth // 128 % (each.shares * each.ahead) == 0
                    assert each.shares <= each.warps <= each.shares * each.block_o // 16
