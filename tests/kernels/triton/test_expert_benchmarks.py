"""The sweeps of products with experts: their shapes on ranks, their candidates, and the check of a plan."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.models.hf_config import MoeConfig
from agentspec.models.shards import Rank, shard_shape
from agentspec.models.tensors import parameter_forms
from benchmarks import expert_work, four_bit_experts, fp8_experts
from benchmarks.expert_work import FP8, PRODUCTS, AnyPlan, Cell, Work, cells_of, describe
from benchmarks.four_bit import TOLERANCE
from benchmarks.published import CONFIGS

TINY = replace(
    CONFIGS["35B-A3B"],
    hidden_size=256,
    moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=256, shared_intermediate_size=256, normalize_top_k=True),
)


def plans_of(cell: Cell) -> list[AnyPlan]:
    return (fp8_experts if cell.form == FP8 else four_bit_experts).plans_of(cell, sweep=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", ["35B-A3B-FP8", "122B-A10B-FP8", "397B-A17B-mixed4"])
def test_shapes_are_those_of_a_ranks_parameters(model: str, num_ranks: int) -> None:
    forms = parameter_forms(CONFIGS[model], num_ranks)
    for product in PRODUCTS:
        name = f"model.layers.0.mlp.experts.{product}_proj"
        shape = shard_shape(name, forms[name].shape, forms[name].shard, Rank(0, num_ranks))
        assert Cell(model, product, FP8, 4, num_ranks).shape == shape


@pytest.mark.parametrize(("model", "form"), [("122B-A10B", FP8), ("35B-A3B", FP8), ("397B-A17B", "int4")])
def test_a_sweep_has_a_moderate_number_of_candidates(model: str, form: str) -> None:
    for product in PRODUCTS:
        cell = Cell(model, product, form, 4, 2)
        plans = plans_of(cell)
        assert plans[0] == cell.chosen
        assert len(plans) == len({*plans}) == len({describe(plan) for plan in plans})
        assert 30 <= len(plans) <= 80


def test_experts_that_ranks_would_hold_whole_are_refused() -> None:
    options = Namespace(models=["35B-A3B"], products=["down"], tokens=[4, 8], tensor_parallel=4)
    assert [cell.num_tokens for cell in cells_of(options, ["int4"])] == [4, 8]
    with pytest.raises(SystemExit, match="35B-A3B are too narrow to be cut between 8 ranks"):
        cells_of(Namespace(**vars(options) | {"tensor_parallel": 8}), ["int4"])
    with pytest.raises(SystemExit, match="27B has no experts"):
        cells_of(Namespace(**vars(options) | {"models": ["27B"]}), ["int4"])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("form", [FP8, "int4", "nvfp4"])
def test_plans_are_checked_against_float64(
    form: str, product: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "tiny", TINY)
    monkeypatch.setattr(expert_work, "DEVICE", device)
    cell = Cell("tiny", product, form, 4, 2)
    plans, work = plans_of(cell), Work(cell, expert_work.CHECKED_EXPERTS)
    if INTERPRETED and form == FP8:
        work.x = work.x.float()  # the interpreter has no products in bfloat16
    for plan in plans[:: max(1, len(plans) // 4)]:
        assert work.error(plan) < TOLERANCE, describe(plan)
    spoiled = work.run(plans[0], work.choices[0]) * 1.1
    monkeypatch.setattr(Work, "run", lambda self, plan, visits: spoiled)
    assert work.error(plans[0]) == pytest.approx(0.1, rel=0.1)
    assert expert_work.check(cell, plans[0]).startswith("relative error ")
    monkeypatch.setattr(Work, "error", lambda self, plan: 0.9 * TOLERANCE)
    assert expert_work.check(cell, plans[0]) == ""
