"""Pairs in the order of their experts: in one go, in several, and by programs that have two experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels.triton import expert_groups
from agentspec.kernels.triton.expert_groups import group_pairs


def check_groups(ids: Tensor, num_experts: int, block_m: int) -> None:
    groups = group_pairs(ids, num_experts, block_m)
    order = ids.flatten().long().sort(stable=True)
    text = f"{tuple(ids.shape)} ids, {num_experts} experts, tiles of {block_m}"
    assert torch.equal(groups.pairs_P.long(), order.indices), text
    sizes = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    begins = [sum(sizes[:expert]) for expert in range(num_experts)]
    expected = [
        [expert, begins[expert] + done, min(block_m, sizes[expert] - done)]
        for expert in range(num_experts)
        for done in range(0, sizes[expert], block_m)
    ]
    assert [row[:3] for row in groups.tiles_T4.tolist() if row[2]] == expected, text


@pytest.mark.parametrize("num_experts", [5, 8, 40])
@pytest.mark.parametrize("at_once", [128, 4096])
@pytest.mark.parametrize("most_for_one", [100, 100_000])
def test_any_ids(num_experts: int, at_once: int, most_for_one: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "_MOST_PAIRS_AT_ONCE", at_once)
    monkeypatch.setattr(expert_groups, "_PAIRS_FOR_ONE", most_for_one)
    generator = torch.Generator(device).manual_seed(num_experts)
    for num_tokens, block_m in ((1, 16), (40, 16), (101, 8)):
        ids = torch.randint(num_experts, (num_tokens, 3), generator=generator, device=device, dtype=torch.int32)
        check_groups(ids, num_experts, block_m)


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_expert_has_everyone(expert: int, device: torch.device) -> None:
    check_groups(torch.full((70, 2), expert, dtype=torch.int32, device=device), 7, 16)
