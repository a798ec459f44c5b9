"""`python -m benchmarks.linear`: the choice of plans from measured times, and the file that the package reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from agentspec.kernels import reference
from agentspec.kernels.backend import Norm
from agentspec.kernels.triton import linear_plans
from agentspec.kernels.triton.linear_plans import (
    MEASURED,
    MEASURED_FP8,
    MEASURED_FP8_ROWS,
    NO_TORCH_PRODUCT,
    Plan,
)
from benchmarks.linear import candidates, norm_of_sum, to_refine
from benchmarks.linear_results import (
    COUNTS,
    MODELS,
    Cell,
    Shape,
    cell_lines,
    chosen_lines,
    chosen_plans,
    describe,
    plan_file,
    without_plan,
)
from benchmarks.published import CONFIG_FILES

WIDE = Plan(block_o=64, block_m=16, block_k=128, stages=4, warps=4, ahead=3)
NARROW = Plan(block_o=16, block_m=8, block_k=256, stages=3, warps=1, ahead=2)
RUNNING = replace(WIDE, running=True)
SHAPE = MODELS["4B"].shapes()["delta in"]
NOTHING = '{"layers": []}'
APART = replace(WIDE, split=2, norm_apart=True)

ASKED = """
import json, sys
from pathlib import Path
from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.engine.assembly import rehearsal
from agentspec.engine.kernel_worker import stand_in_for_dynamo
from agentspec.kernels.triton import linear_layers
stand_in_for_dynamo()
compiler = kernels.compiler()
compiler.use_machine(kernels.Machine(capability=(9, 0), num_multiprocessors=132))
asked, plan_for = set(), linear_layers.plan_for
def recorded(kind, num_outputs, depth, num_tokens, element_bytes, plan_key, *others, **options):
    if num_tokens <= 4:
        asked.add((kind, num_outputs, depth, plan_key))
    return plan_for(kind, num_outputs, depth, num_tokens, element_bytes, plan_key, *others, **options)
linear_layers.plan_for = recorded
config = EngineConfig(tensor_parallel=2, max_running=1, draft_tokens=3, random_weights=True)
for directory in sys.argv[1:]:
    asked.clear()
    rehearsal(config, Path(directory), max_pages=9).variants(compiler)
    print(json.dumps(sorted(asked)))
"""
"""Lists the products of up to four tokens of a rank of two."""
Keys = set[tuple[str, int, int, str]]
"""Of products: kind, outputs, depth, form of the weight."""


def cells(times: dict[int, dict[Plan | None, float]], shape: Shape = SHAPE) -> dict[tuple[Shape, int], Cell]:
    return {
        (shape, count): Cell(shape, count, {plan: us * 1e-6 for plan, us in at.items()}) for count, at in times.items()
    }


def test_one_plan_serves_all_small_counts_if_it_costs_little() -> None:
    times = {count: {WIDE: 10.1, NARROW: 10.0, None: 12.0} for count in (1, 2, 4, 8)} | {16: {WIDE: 11.0, None: 12.0}}
    assert chosen_plans(SHAPE, cells(times)) == [(16, WIDE)]


def test_a_single_stream_has_its_own_plan_if_a_shared_one_costs_more() -> None:
    times = {count: {WIDE: 10.5, NARROW: 10.0, None: 12.0} for count in (1, 2, 4)}
    times |= {8: {WIDE: 10.5, NARROW: 11.0, None: 12.0}, 16: {WIDE: 11.0, None: 12.0}}
    assert chosen_plans(SHAPE, cells(times)) == [(4, NARROW), (16, WIDE)]


def test_of_equal_plans_the_one_without_a_running_prefetch_is_chosen() -> None:
    assert chosen_plans(SHAPE, cells({32: {WIDE: 10.09, RUNNING: 10.0}})) == [(32, WIDE)]
    assert chosen_plans(SHAPE, cells({32: {WIDE: 10.2, RUNNING: 10.0}})) == [(32, RUNNING)]


def test_torch_is_chosen_where_clearly_faster_and_never_for_scores() -> None:
    times: dict[int, dict[Plan | None, float]] = {64: {WIDE: 10.05, None: 10.0}, 128: {WIDE: 12.0, None: 10.0}}
    assert chosen_plans(SHAPE, cells(times)) == [(64, WIDE), (128, None)]
    logits = MODELS["4B"].shapes()["logits"]
    assert chosen_plans(logits, cells(times, logits)) == [(128, WIDE)]


def test_the_package_reads_the_written_file(tmp_path: Path) -> None:
    measured = cells(
        {4: {NARROW: 10.0, WIDE: 12.0, None: 13.0}, 16: {RUNNING: 12.0, None: 13.0}, 128: {WIDE: 30.0, None: 20.0}}
    )
    path = tmp_path / "plans.json"
    path.write_text(plan_file("some device", measured, NOTHING))
    assert linear_plans._read(path) == {("norm_linear", 12352, 2560): ((4, NARROW), (16, RUNNING), (128, None))}
    assert linear_plans._read(path, "fp8") == {}


def test_token_counts_that_were_not_measured_again_keep_their_plans(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    before: dict[int, dict[Plan | None, float]] = {4: {NARROW: 10.0}, 16: {WIDE: 12.0}, 64: {WIDE: 30.0}}
    path.write_text(plan_file("some device", cells(before), NOTHING))
    path.write_text(plan_file("some device", cells({32: {RUNNING: 12.0}, 64: {APART: 20.0}}), path.read_text()))
    assert linear_plans._read(path) == {
        ("norm_linear", 12352, 2560): ((4, NARROW), (16, WIDE), (32, RUNNING), (64, APART))
    }


def test_what_has_no_plan_yet() -> None:
    recorded = plan_file("some device", cells({4: {NARROW: 10.0}, 16: {WIDE: 12.0}}), NOTHING)
    others = (replace(SHAPE, fp8=True), MODELS["4B"].shapes()["delta out"])
    asked = [(shape, count) for count in (32, 16, 4) for shape in (SHAPE, *others)]
    assert without_plan(asked, recorded) == [at for at in asked if at[0] != SHAPE or at[1] == 32]


def test_remarks_on_who_measured_stay() -> None:
    first = plan_file("some device", cells({4: {NARROW: 10.0}}), NOTHING)
    second = plan_file("other device", cells({4: {WIDE: 9.0}}), first.replace('linear.py"', 'linear.py; a remark"', 1))
    assert json.loads(second)["measured"] == "on one other device by benchmarks/linear.py; a remark"


def test_a_plan_records_whether_its_norm_is_separate(tmp_path: Path) -> None:
    scaled = replace(SHAPE, fp8=True)
    measured = cells({4: {NARROW: 10.0, APART: 8.0}, 64: {WIDE: 10.0, APART: 12.0}}, scaled)
    path = tmp_path / "plans.json"
    path.write_text(plan_file("some device", measured, NOTHING))
    assert linear_plans._read(path, "fp8") == {("norm_linear", 12352, 2560): ((4, APART), (64, WIDE))}
    assert [describe(plan) for plan in (APART, WIDE)] == ["norm + 64x16x128 s4 w4 /2 r2 a3", "64x16x128 s4 w4 r2 a3"]


def test_8_bit_candidates_fuse_or_separate_the_norm_and_split_only_if_separate() -> None:
    for layer in ("delta in", "ffn in"):
        shape = MODELS["27B-FP8"].shapes()[layer]
        for num_tokens in (4, 16, 64):
            plans = list(candidates(shape, num_tokens, 132))
            assert {plan.norm_apart for plan in plans} == {False, True}
            assert all(plan.norm_apart or plan.split == 1 for plan in plans)
            assert any(plan.split > 1 for plan in plans) == (shape.kind == "norm_linear")
    shape = MODELS["27B"].shapes()["ffn in"]
    assert not any(plan.norm_apart for plan in candidates(shape, 4, 132)), "16-bit weights fuse the norm"


def test_entries_that_were_not_measured_again_are_kept(tmp_path: Path) -> None:
    scaled = replace(SHAPE, fp8=True)
    other = MODELS["4B"].shapes()["delta out"]
    first = plan_file("some device", cells({4: {NARROW: 10.0}}) | cells({4: {NARROW: 9.0}}, other), NOTHING)
    path = tmp_path / "plans.json"
    path.write_text(
        plan_file(
            "some device", cells({4: {WIDE: 5.0}}, scaled) | cells({4: {WIDE: 9.0}}) | cells({4: {}}, other), first
        )
    )
    assert linear_plans._read(path) == {
        ("norm_linear", 12352, 2560): ((4, WIDE),),
        ("add_linear", 2560, 4096): ((4, NARROW),),
    }
    assert linear_plans._read(path, "fp8") == {("norm_linear", 12352, 2560): ((4, WIDE),)}


def test_the_tables_have_a_row_per_layer_and_a_row_per_cell() -> None:
    measured = cells({4: {NARROW: 20.0, None: 26.0}, 128: {WIDE: 40.0, None: 30.0}})
    assert list(chosen_lines(measured, ["4B"], 3e12))[2:] == [
        "| 4B | delta in | 12352 x 2560 | 20.0 105%, 26.0 | 30.0 70%, 30.0 |"
    ]
    assert len(list(cell_lines(measured, ["4B"], 3e12))) == 2 + 2


def test_heads_with_scales_of_rows_are_measured_for_entries_of_their_own(tmp_path: Path) -> None:
    shapes = MODELS["27B-mixed4"].shapes()
    assert shapes.keys() == {"logits", "draft head"}
    logits = shapes["logits"]
    assert logits.weight_bytes == 248_320 * (5120 + 4)
    assert MODELS["27B-mixed4, 2 ranks"].shapes()["logits"].weight_bytes == logits.weight_bytes // 2
    for num_tokens in (1, 4, 16, 32, 64, 128):
        plans = list(candidates(logits, num_tokens, 132))
        assert len(plans) > 3
        assert not any(plan.programs or plan.norm_apart or plan.split > 1 for plan in plans)
    measured = cells({4: {NARROW: 10.0}, 16: {WIDE: 12.0}}, logits)
    path = tmp_path / "plans.json"
    recorded = json.loads(linear_plans.FILE.read_text())
    recorded["layers"] = [layer for layer in recorded["layers"] if layer.get("weight") != "fp8 rows"]
    path.write_text(plan_file("some device", measured, json.dumps(recorded)))
    assert linear_plans._read(path, "fp8 rows")["logits", 248_320, 5120] == ((4, NARROW), (16, WIDE))
    assert linear_plans._read(path) == MEASURED
    assert linear_plans._read(path, "fp8") == MEASURED_FP8


def test_the_shapes_of_ranks_are_those_that_an_engine_asks_for(tmp_path: Path) -> None:
    names = ("27B-FP8", "35B-A3B-FP8", "122B-A10B-FP8", "397B-A17B-mixed4")
    asked = dict(zip(names, asked_by_a_rank(names, tmp_path), strict=True))
    for name in names[2:]:
        assert keys(f"{name}, 2 ranks") == asked[name], name
    # Of the others the layers in 16 bits are those of another entry, or of none.
    for name in names[:2]:
        hidden = MODELS[name].hidden
        rest = {("linear", hidden, hidden, "plain"), ("logits", 124_160, hidden, "plain")}
        assert keys(f"{name}, 2 ranks") | rest == asked[name], name


def keys(name: str) -> Keys:
    """What up to four tokens need of an entry: the shared expert of a mixture then runs among the routed ones."""
    return {
        (shape.kind, shape.num_outputs, shape.depth, shape.weight or "plain")
        for layer, shape in MODELS[name].shapes().items()
        if not (MODELS[name].mixture and layer.startswith("ffn"))
    }


def asked_by_a_rank(names: tuple[str, ...], directory: Path) -> list[Keys]:
    for name in names:
        text = CONFIG_FILES[name]["text_config"] | {"num_hidden_layers": 4}  # as many have one layer of each kind
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(CONFIG_FILES[name] | {"text_config": text}))
    # Not in the interpreter, which launches.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *(str(directory / name) for name in names)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return [{tuple(key) for key in json.loads(line)} for line in done.stdout.splitlines()]


def test_every_published_layer_has_a_measured_plan() -> None:
    """Apart from heads with scales of rows."""
    for name in (name for name in MODELS if not MODELS[name].only_head):
        for layer, shape in MODELS[name].shapes().items():
            measured = MEASURED_FP8_ROWS if shape.by_row else MEASURED_FP8 if shape.fp8 else MEASURED
            assert (shape.kind, shape.num_outputs, shape.depth) in measured, f"{name} {layer}"


def test_heads_have_plans_for_up_to_128_tokens() -> None:
    """More tokens than a head was measured with take its last plan, which reads the weights once for each of its blocks
    of tokens."""
    shapes = [shape for model in MODELS.values() for shape in model.shapes().values()]
    heads = [(shape, max(COUNTS)) for shape in shapes if shape.kind in NO_TORCH_PRODUCT]
    assert without_plan(heads, linear_plans.FILE.read_text()) == []


def test_the_best_plan_of_linear_hopper_is_refined_too() -> None:
    on_hopper = [replace(WIDE, programs=132, stages=stages) for stages in (4, 5)]
    assert to_refine([WIDE, NARROW, *on_hopper], 1) == [WIDE, on_hopper[0]]
    assert to_refine([on_hopper[1], WIDE, on_hopper[0]], 2) == [on_hopper[1], WIDE]
    assert to_refine([], 3) == []


def test_products_are_timed_with_the_norm_that_a_sum_leaves() -> None:
    """Its input times its factor is the normed input."""
    generator = torch.Generator().manual_seed(3)
    x, norm = (
        torch.randn(20, 256, generator=generator) * 3,
        Norm(weight=torch.randn(256, generator=generator), eps=1e-6),
    )
    ahead = norm_of_sum(x, norm)
    assert ahead.squares_PN.shape == (4, 20)
    factor = (ahead.squares_PN.sum(0) / 256 + norm.eps).rsqrt()
    assert torch.allclose(ahead.gained_NH * factor[:, None], reference.rms_norm(x, norm), atol=1e-5)
