"""The experts' products for Hopper are bitwise equal to those in Triton, for any distribution of tokens over experts,
and in every run.

Triton's products are checked against exact arithmetic by tests/kernels/triton/test_expert_prefill.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels import quantize_blocks
from agentspec.kernels.triton import expert_prefill, grouped_gemm, grouped_gemm_hopper
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.fp8_activations import quantize_tokens
from agentspec.kernels.triton.launch import arrival_counters
from agentspec.kernels.weights import BlockScaled
from tests.kernels.triton.poison import poison_new_memory

pytestmark = pytest.mark.gpu

SHAPES = {
    "35B-A3B": (64, 2048, 512),
    "one step of K and one block": (5, 256, 128),
    "an odd number of steps": (9, 768, 384),
    "weights of down that have no room at once": (9, 512, 1024),
}
"""Experts, hidden size, width."""
CHOICES = ("any", "one has everyone", "few have any", "sizes about 64 and 128")


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def choices(kind: str, num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Random ids, int32 [N, J]; a token may choose an expert twice, which the products support."""
    device = generator.device
    if kind == "one has everyone":
        return torch.full((num_tokens, top_k), num_experts - 1, dtype=torch.int32, device=device)
    if kind == "sizes about 64 and 128":
        sizes = torch.tensor([63, 64, 65, 127, 128, 129, 1], device=device).repeat(num_experts)[:num_experts]
        ids = torch.arange(num_experts, device=device).repeat_interleave(sizes)
        ids = ids[torch.randperm(len(ids), generator=generator, device=device)]
        return ids[: len(ids) // top_k * top_k].view(-1, top_k).int().contiguous()
    most = 2 if kind == "few have any" else num_experts
    return torch.randint(most, (num_tokens, top_k), generator=generator, device=device, dtype=torch.int32)


def random_weight(*shape: int, generator: torch.Generator) -> BlockScaled:
    return quantize_blocks(torch.randn(shape, generator=generator, device=generator.device) * shape[-1] ** -0.5)


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("num_tokens", [1, 300, 1500])
def test_hopper_products_are_bitwise_equal_to_triton(
    shape: tuple[int, int, int], kind: str, num_tokens: int, cuda: torch.device
) -> None:
    num_experts, hidden, width = shape
    generator = torch.Generator(cuda).manual_seed(num_tokens)
    gate_up = random_weight(num_experts, 2 * width, hidden, generator=generator)
    down = random_weight(num_experts, hidden, width, generator=generator)
    if not grouped_gemm_hopper.is_supported(gate_up, cuda):
        pytest.skip("no Hopper")
    ids = choices(kind, num_tokens, num_experts, 4, generator)
    x = quantize_tokens(torch.randn(len(ids), hidden, generator=generator, device=cuda, dtype=torch.bfloat16))
    weights_NJ = torch.rand(ids.shape, generator=generator, device=cuda)
    groups = group_pairs(ids, num_experts, grouped_gemm_hopper.BLOCK_M)
    gate_up_plan, down_plan = (
        plan(grouped_gemm_hopper.BLOCK_M, True, torch.bfloat16)
        for plan in (expert_prefill.gate_up_plan, expert_prefill.down_plan)
    )
    expected = grouped_gemm.gate_up(gate_up_plan, x, gate_up, groups, ids.shape[1])
    assert not isinstance(expected, Tensor)
    expected_parts = grouped_gemm.down(down_plan, expected, down, groups, weights_NJ, torch.bfloat16)
    for _ in range(3):
        h = grouped_gemm_hopper.gate_up(x, gate_up, groups, ids.shape[1])
        assert torch.equal(h.values_RK.view(torch.uint8), expected.values_RK.view(torch.uint8))
        assert torch.equal(h.scales_GR, expected.scales_GR)
        assert torch.equal(grouped_gemm_hopper.down(h, down, groups, weights_NJ, torch.bfloat16), expected_parts)
        assert not arrival_counters(cuda).any()
