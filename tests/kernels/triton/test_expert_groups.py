"""Grouping of pairs by expert, in one launch and in two by chunks; tiles that several programs share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentspec.kernels.triton import expert_groups, grouped_gemm
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.grouped_gemm import GroupedPlan
from agentspec.kernels.weights import Plain


def check_groups(ids: Tensor, num_experts: int, block_m: int) -> None:
    groups = group_pairs(ids, num_experts, block_m)
    order = ids.flatten().long().sort(stable=True)
    text = f"{tuple(ids.shape)} ids, {num_experts} experts, tiles of {block_m}"
    assert torch.equal(groups.pairs_P.long(), order.indices), text
    sizes = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    begins = [sum(sizes[:expert]) for expert in range(num_experts)]
    for table_T4, size in ((groups.tiles_T4, block_m), (groups.runs_U4, block_m * expert_groups.RUN_TILES.value)):
        expected = [
            [expert, begins[expert] + done, min(size, sizes[expert] - done)]
            for expert in range(num_experts)
            for done in range(0, sizes[expert], size)
        ]
        rows = table_T4.tolist()
        assert [row[:3] for row in rows if row[2]] == expected, text
        (num_rows,) = {row[3] for row in rows}
        assert not any(row[2] for row in rows[num_rows:]), text
        if ids.numel() > expert_groups._PAIRS_OF_ONE_LAUNCH:
            assert num_rows == len(expected), f"the tiles must fill the first rows: {text}"


@pytest.fixture(params=["one launch", "small chunks", "large chunks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "_PAIRS_OF_ONE_LAUNCH", 100_000 if request.param == "one launch" else 0)
    monkeypatch.setattr(expert_groups, "_PAIRS_OF_SMALL_CHUNKS", 100_000 if request.param == "small chunks" else 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_experts", [1, 5, 8, 40, 257])
def test_grouping_of_random_ids_is_correct(num_experts: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(num_experts)
    for num_tokens, block_m in ((1, 16), (40, 16), (256, 64), (701, 8)):
        ids = torch.randint(num_experts, (num_tokens, 3), generator=generator, device=device, dtype=torch.int32)
        check_groups(ids, num_experts, block_m)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_expert_may_have_all_pairs(expert: int, device: torch.device) -> None:
    check_groups(torch.full((350, 2), expert, dtype=torch.int32, device=device), 7, 16)


def test_grouping_works_when_chunks_exceed_one_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "_COUNTS_OF_A_THREAD", 1)
    monkeypatch.setattr(expert_groups, "_SMALL_CHUNK", 128)
    ids = torch.randint(
        7, (2500, 1), generator=torch.Generator(device).manual_seed(3), device=device, dtype=torch.int32
    )
    check_groups(ids, 7, 64)


@pytest.mark.usefixtures("way")
def test_absent_experts_have_neither_tiles_nor_runs(device: torch.device) -> None:
    ids = torch.randint(6, (300, 1), generator=torch.Generator(device).manual_seed(5), device=device, dtype=torch.int32)
    groups, expected = group_pairs(ids, 5, 16, all_held=False), group_pairs(ids, 6, 16)
    assert not groups.all_held
    for got, table_T4 in ((groups.tiles_T4, expected.tiles_T4), (groups.runs_U4, expected.runs_U4)):
        assert [row for row in got.tolist() if row[2]] == [row for row in table_T4.tolist() if row[2] and row[0] < 5]


def test_programs_sharing_tile_match_programs_of_smaller_tiles(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(4)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    ids = torch.randint(4, (70, 2), generator=generator, device=device, dtype=torch.int32)
    h, gate_up, down, weights = randn(140, 32), Plain(randn(4, 64, 48)), Plain(randn(4, 48, 32)), randn(70, 2)
    whole = GroupedPlan(block_o=32, block_k=32, warps=4, stages=2)
    shared, small, large = replace(whole, programs_per_tile=2), group_pairs(ids, 4, 16), group_pairs(ids, 4, 32)
    x = randn(70, 48)
    assert torch.equal(
        grouped_gemm.gate_up(shared, x, gate_up, large, 2),  # type: ignore[arg-type]
        grouped_gemm.gate_up(whole, x, gate_up, small, 2),  # type: ignore[arg-type]
    )
    assert torch.equal(
        grouped_gemm.down(shared, h, down, large, weights, torch.float32),
        grouped_gemm.down(whole, h, down, small, weights, torch.float32),
    )
