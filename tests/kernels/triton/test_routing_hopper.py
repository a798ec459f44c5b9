"""Scores of many tokens on Hopper's matrix units: any division of the features, any order in which groups of warps run.
On a CPU without bfloat16, whose products are then of float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.triton import routing_hopper
from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.triton.gluon_warp_groups import ScoreGroups

pytestmark = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SIZES = ((1, 256, 64, 1), (65, 256, 512, 2), (130, 512, 448, 1), (64, 256, 384, 3))
"""(tokens, experts, features, parts)."""


def score(x: Tensor, router: Tensor, norm: Tensor, split: int, seed: int) -> tuple[Tensor, Tensor]:
    parts = torch.full((split, len(x), len(router)), torch.nan, device=x.device)
    squares = torch.full((split, len(x)), torch.nan, device=x.device)
    run: Any = ScoreGroups(seed).score if INTERPRETED else routing_hopper.score
    run(x, router, norm, parts, squares)
    return parts, squares


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_match_float64(size: tuple[int, int, int, int], device: torch.device) -> None:
    """Almost as precisely as float32 would: one bfloat16 for the input times the gain would be off by 2e-3."""
    num_tokens, num_experts, width, split = size
    seed = num_tokens
    generator = torch.Generator().manual_seed(seed)
    print(f"seed {seed}: {size}")
    x, router = (
        torch.randn(rows, width, generator=generator).to(DTYPE).to(device) for rows in (num_tokens, num_experts)
    )
    norm = (0.3 * torch.randn(width, generator=generator)).to(DTYPE).to(device)
    expected = x.double() * (1.0 + norm.double()) @ router.double().t()
    got = [score(x, router, norm, split, seed=10 * seed + i) for i in range(2)]
    parts, squares = got[0]
    assert ((parts.double().sum(0) - expected).norm() / expected.norm()).item() < 2e-5
    assert torch.allclose(squares.double().sum(0), x.double().square().sum(1), rtol=1e-5)
    assert torch.equal(parts, got[1][0]), "other bits in another order of warp groups"
    assert torch.equal(squares, got[1][1])


def test_features_are_divided_while_programs_fit() -> None:
    splits = [routing_hopper.split_of(num_tokens, 256, 2048, 132) for num_tokens in (257, 800, 2048, 4096, 8192)]
    assert splits == [8, 8, 4, 2, 1]
    assert routing_hopper.split_of(257, 512, 3072, 132) == 8
    assert routing_hopper.split_of(257, 256, 192, 132) == 1
