"""Mixtures and 8-bit weights in `python -m benchmarks.decode` on a small CPU model: byte counts, experts, overlap and
checks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentspec.kernels import quantize_blocks, reference
from agentspec.models.hf_config import MoeConfig, TextConfig
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.quantization import is_convertible
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.shards import SINGLE_RANK, Rank
from agentspec.models.state import page_bytes, row_bytes
from agentspec.models.tensors import parameter_shapes, quantized_schemes
from agentspec.simulate.model_costs import model_costs
from benchmarks import block_checks, case_runs, decode, decode_checks, overlap, trace
from benchmarks.bandwidth import Bandwidth
from benchmarks.block_checks import check_blocks, wants_block_checks
from benchmarks.decode_checks import CheckFailedError
from benchmarks.decode_report import EXPERTS_HEADER, OVERLAP_HEADER, Report
from benchmarks.decode_timing import Result
from benchmarks.experts_touched import Spread, TouchedExperts, count_chosen, counting, touched_experts
from benchmarks.overlap import Turns, time_overlap
from benchmarks.published import CONFIGS, MANY_GPUS, PrefilledModel, make_model
from benchmarks.running_engine import RunningEngine
from benchmarks.step_bytes import Experts, StepBytes, parameter_bytes, step_bytes, weight_bytes
from tests.test_decode_benchmark import CPU, TOY, case, event

MOE = replace(
    TOY,
    intermediate_size=None,
    moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=32, shared_intermediate_size=32, normalize_top_k=True),
)


@pytest.fixture
def mixture() -> PrefilledModel:
    return make_model("toy", MOE, device=CPU, dtype=torch.float32)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fake for the module whose override decides on overlap."""
    module = ModuleType("mixture")
    module.forced_placement = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, overlap.MIXTURE_MODULE, module)
    return module


# Shapes and bytes


@pytest.mark.parametrize(("size", "plain"), [("27B-FP8", "27B"), ("35B-A3B-FP8", "35B-A3B")])
def test_fp8_configs_are_the_same_models_with_every_linear_in_8_bits(size: str, plain: str) -> None:
    assert replace(CONFIGS[size], quantization=None) == CONFIGS[plain]
    assert quantized_schemes(CONFIGS[size]).keys() == {
        name for name in parameter_shapes(CONFIGS[size]) if is_convertible(name)
    }


def test_dry_runs_have_costs_of_the_mixture() -> None:
    config, costs = CONFIGS["35B-A3B"], model_costs("35b-a3b")
    assert row_bytes(state_forms(config, torch.bfloat16)) == costs.row_bytes
    assert page_bytes(state_forms(config, torch.bfloat16)) == 64 * costs.kv_bytes_per_token


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (3, 100, 129)], ids=str)
def test_bytes_of_8_bit_weights_are_values_and_scales(shape: tuple[int, ...]) -> None:
    assert weight_bytes(shape, torch.bfloat16, fp8=True) == quantize_blocks(torch.ones(shape)).nbytes
    assert weight_bytes(shape, torch.bfloat16, fp8=False) == 2 * math.prod(shape)


@pytest.mark.parametrize("size", ["35B-A3B", "35B-A3B-FP8"])
def test_only_the_chosen_experts_of_a_mixture_count(size: str) -> None:
    config = CONFIGS[size]
    settings: dict[str, Any] = {"batch": 1, "num_drafted": 1, "context": 0, "draft_vocab": 0}
    every = step_bytes(config, **settings, experts=Experts(trunk=256, draft=256))
    embedding = math.prod(parameter_shapes(config)["model.embed_tokens.weight"]) * 2
    assert every.weights + every.experts + every.head + every.mtp + embedding == sum(
        parameter_bytes(config, torch.bfloat16).values()
    )
    some = step_bytes(config, **settings, experts=Experts(trunk=32, draft=8))
    assert some.experts == every.experts // 8
    expert = every.experts // (40 * 256)
    assert every.mtp - some.mtp == 248 * expert
    assert expert == pytest.approx(3 * 2048 * 512 * (1 if config.quantization else 2), rel=1e-3)
    with pytest.raises(AssertionError, match="need the chosen experts"):
        step_bytes(config, **settings)


def test_8_bit_drafts_are_counted_with_8_bits() -> None:
    config = CONFIGS["4B"]
    plain, fp8 = (
        step_bytes(config, batch=1, num_drafted=3, context=0, draft_vocab=32_768, fp8_drafts=choice)
        for choice in (False, True)
    )
    assert (plain.weights, plain.head, plain.state) == (fp8.weights, fp8.head, fp8.state)
    assert fp8.draft_head == pytest.approx(plain.draft_head / 2, rel=1e-3)
    fc = 3 * 2 * 2560 * 5120
    assert fp8.mtp - fc == pytest.approx((plain.mtp - fc) / 2, rel=1e-3)


def test_a_head_in_8_bits_is_read_and_drafted_from_in_8_bits() -> None:
    """As `agentspec quantize --to mixed4` writes it; beside it one in int4, whose draft head is as of any other."""
    rows, depth = CONFIGS["27B"].vocab_size, CONFIGS["27B"].hidden_size
    for rank, fp8_drafts in ((SINGLE_RANK, True), (SINGLE_RANK, False), (Rank(1, 2), True)):
        settings: dict[str, Any] = {"batch": 1, "num_drafted": 3, "context": 0, "draft_vocab": 32_768, "rank": rank}
        full, eight, four = (
            step_bytes(CONFIGS[name], **settings, fp8_drafts=fp8_drafts)
            for name in ("27B", "27B-mixed4", "27B-mixed4-head4")
        )
        assert full.head == rows * depth * 2 // rank.count
        assert eight.head == rows * (depth + 4) // rank.count
        assert four.head == rows * (depth // 2 + depth // 128 * 2) // rank.count
        assert eight.draft_head == 3 * 32_768 * (depth + 4) // rank.count
        assert four.draft_head == full.draft_head
        assert (four.weights, four.mtp) == (eight.weights, eight.mtp)


# Experts


def test_distinct_experts_of_a_call_are_counted(mixture: PrefilledModel) -> None:
    [layer] = mixture.mixtures[1]
    assert isinstance(layer.ffn, MixtureOfExperts)
    x_NH = torch.randn(5, MOE.hidden_size, generator=torch.Generator().manual_seed(0))
    scores_NX = reference.rms_norm(x_NH, layer.post_norm) @ layer.ffn.weights.router_XH.T
    expected = len(set(scores_NX.topk(2).indices.flatten().tolist()))
    assert expected > 2
    assert int(count_chosen(x_NH, layer.post_norm, layer.ffn.weights)) == expected
    assert int(count_chosen(x_NH[:1], layer.post_norm, layer.ffn.weights)) == 2


def test_touched_experts_are_those_of_the_engines_steps(mixture: PrefilledModel) -> None:
    ffns = [layer.ffn for layer in mixture.layers]
    touched = touched_experts(case(batch=1, depth=3), mixture, CPU, num_steps=5)
    assert 2 <= touched.trunk.least <= touched.trunk.mean <= touched.trunk.most <= 8
    assert touched.draft is not None
    assert touched.draft.least == 2  # one token's, in the chain
    assert touched.draft.mean < touched.trunk.mean
    assert [layer.ffn for layer in mixture.layers] == ffns
    assert touched_experts(case(batch=1, depth=0), mixture, CPU, num_steps=5).draft is None
    for layer in mixture.layers:
        assert isinstance(layer.ffn, MixtureOfExperts)
        layer.ffn.weights.router_XH.zero_()  # equal scores select the same experts for every token
    assert touched_experts(case(batch=4), mixture, CPU, num_steps=5).trunk == Spread(mean=2.0, least=2, most=2)


def test_counting_ends_with_its_context(mixture: PrefilledModel) -> None:
    layer = mixture.layers[0]
    before = layer.ffn
    with counting([layer]) as [counter]:
        assert layer.ffn is counter
    assert layer.ffn is before


# Overlap


def test_two_engines_are_measured_alternately(
    mixture: PrefilledModel, switch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, turns = [], []
    init, turn = RunningEngine.__init__, overlap._turn_ms

    def spy(self: RunningEngine, *arguments: Any, **options: Any) -> None:
        built.append((switch.forced_placement, self))
        init(self, *arguments, **options)

    def spied_turn(engine: RunningEngine) -> float:
        turns.append(next(choice for choice, known in built if known is engine))
        return turn(engine)

    monkeypatch.setattr(RunningEngine, "__init__", spy)
    monkeypatch.setattr(overlap, "_turn_ms", spied_turn)
    monkeypatch.setattr(overlap, "ROUNDS", 3)
    monkeypatch.setattr(overlap, "STEPS_A_TURN", 2)
    off, on = time_overlap(case(), mixture, CPU, ("off", "on"))
    assert turns == ["behind", "beside"] * 3
    assert switch.forced_placement is None
    assert len(off.turns_ms) == len(on.turns_ms) == 3
    assert min(off.turns_ms + on.turns_ms) > 0
    with pytest.raises(AssertionError):
        _ = mixture.pools


def test_a_sibling_has_the_same_weights_and_its_own_state(mixture: PrefilledModel) -> None:
    RunningEngine(case(), mixture, CPU, num_steps=2)
    pools = mixture.pools
    sibling = mixture.sibling()
    RunningEngine(case(), sibling, CPU, num_steps=2)
    assert mixture.pools is pools
    assert sibling.pools is not pools
    assert sibling.layers is mixture.layers


def test_the_gain_compares_medians() -> None:
    off, on = Turns(choice="off", turns_ms=[4.0, 5.0, 9.0]), Turns(choice="on", turns_ms=[4.5, 4.0, 3.0])
    assert on.saved(off) == pytest.approx(1 - 4.0 / 5.0)
    assert on.num_won(off) == 2


def layer_of_a_mixture(start: float, *, shift: float) -> list[dict[str, object]]:
    """100 us: a mixer, two routed kernels in sequence, and the shared expert's kernel, `shift` earlier than after
    them."""
    gate_up, down = overlap.ROUTED_KERNELS
    return [
        event("mixer", start, 20),
        event(gate_up, start + 20, 30),
        event(down, start + 50, 20),
        event("shared", start + 70 - shift, 20, stream=7 + (shift > 0)),
    ]


@pytest.mark.parametrize(("shift", "expected"), [(0.0, {}), (45.0, {"shared": 40.0}), (10.0, {"shared": 20.0})])
def test_kernels_that_overlap_the_routed_experts_are_found(shift: float, expected: dict[str, float]) -> None:
    events = [kernel for start in (0.0, 100.0, 200.0, 300.0) for kernel in layer_of_a_mixture(start, shift=shift)]
    timeline = trace.timeline({"traceEvents": events}, num_steps=2)
    turns = Turns(choice="on")
    overlap.read_trace(turns, timeline)
    assert turns.beside_us == expected
    assert sorted(kernel.name for kernel in turns.layer) == sorted(
        ["mixer", "mixer", *overlap.ROUTED_KERNELS, "shared"]
    )


# Blocks


@pytest.mark.parametrize("config", [TOY, MOE], ids=["dense", "mixture"])
def test_blocks_are_compared_with_float32(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = replace(config, quantization=CONFIGS["27B-FP8"].quantization)
    assert "FFN of 300" in check_blocks("toy", fp8, CPU)
    made = block_checks.twins

    def spoiled(*arguments: Any) -> Any:
        ours, exact = made(*arguments)
        ffn = ours.model.layers[1].ffn
        weight = ffn.weights.down_XHI.matrix(3) if isinstance(ffn, MixtureOfExperts) else ffn.down_proj
        weight.tensor.mul_(1.2)
        return ours, exact

    monkeypatch.setattr(block_checks, "twins", spoiled)
    with pytest.raises(CheckFailedError, match=r"toy: FFN of \d+ tokens: off by"):
        check_blocks("toy", fp8, CPU)


def test_only_parts_missing_in_the_small_model_are_checked_by_blocks() -> None:
    assert {name for name, config in CONFIGS.items() if wants_block_checks(config)} - {*MANY_GPUS} == {
        "4B-int4",
        "4B-mixed4",
        "27B-FP8",
        "27B-int4",
        "27B-mixed4",
        "27B-mixed4-head4",
        "27B-nvfp4",
        "35B-A3B",
        "35B-A3B-FP8",
        "35B-A3B-int4",
        "35B-A3B-mixed4",
        "35B-A3B-mixed4-head4",
        "35B-A3B-nvfp4",
    }


# Report and command


def test_experts_and_overlap_have_tables_of_their_own() -> None:
    kernels = [
        trace.Kernel(name="a", start=1.0, duration=2.0),
        trace.Kernel(name="b", start=2.0, duration=2.0, stream=8),
    ]
    off = Turns(choice="off", turns_ms=[5.0, 5.0])
    on = Turns(choice="on", turns_ms=[4.0, 4.0], beside_us={"shared": 120.0, "b": 3.0}, layer=kernels)
    result = Result(
        case=case(), overlap=[off, on], experts=TouchedExperts(trunk=Spread(mean=30.5, least=20, most=32), draft=None)
    )
    result.floor_bytes = StepBytes(weights=10**9, experts=4 * 10**9, head=10**9, mtp=0, draft_head=10**6, state=0, kv=0)
    plain = Result(case=case(batch=8))
    report = Report(
        machine="m", command="c", checks=["x"], bandwidth=Bandwidth(copy=3e12, read=1e12), results=[plain, result]
    )
    lines = report.markdown().splitlines()
    for header, expected in (
        (EXPERTS_HEADER, ["| 30.5 (20 to 32) | – | 4,000 | 1,000 | 1,000 | 1 | 0 |"]),
        (
            OVERLAP_HEADER,
            ["| off | 5.000 | – | – | – | – |", "| on | 4.000 | 20.0 % | 2 of 2 | 123 | shared 120, b 3 |"],
        ),
    ):
        rows = lines[lines.index(header) + 2 :]
        for row, cells in zip(rows, expected, strict=False):
            assert row.endswith(cells)
            assert row.count("|") == header.count("|")
        assert rows[len(expected)] == ""
    assert "| 1.0 | 3.0 | 8 | b |" in lines
    assert json.loads(report.as_json())["results"][1]["overlap"][1]["turns_ms"] == [4.0, 4.0]


def test_a_mixture_is_measured_with_its_experts_and_its_overlap(
    monkeypatch: pytest.MonkeyPatch, switch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "CONFIGS", {"toy": MOE})
    monkeypatch.setattr(decode, "check_small_model", lambda device: "nothing")
    monkeypatch.setattr(decode_checks, "NUM_STEPS", 2)
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(copy=2e9, read=1e9))
    monkeypatch.setattr(overlap, "ROUNDS", 1)
    flags = [
        "--device",
        "cpu",
        "--models",
        "toy",
        "--batch",
        "1",
        "--k",
        "2",
        "--context",
        "65",
        "--steps",
        "3",
        "--overlap",
        "off",
        "on",
    ]
    monkeypatch.setattr("sys.argv", ["decode", *flags, "--json", str(tmp_path / "figures.json")])
    assert decode.main() == 0
    printed = capsys.readouterr().out
    assert "blocks are as in float32" in printed
    assert EXPERTS_HEADER in printed
    assert OVERLAP_HEADER in printed
    [result] = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert result["floor_bytes"]["experts"] > 0
    assert [(turns["choice"], len(turns["turns_ms"])) for turns in result["overlap"]] == [("off", 1), ("on", 1)]


def test_a_model_that_is_too_large_stays_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "CONFIGS", {"toy": MOE})
    monkeypatch.setattr(decode, "check_small_model", lambda device: "nothing")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(copy=2e9, read=1e9))
    monkeypatch.setattr(case_runs, "missing_for_weights", lambda *arguments, **options: 3 * 2**30)
    monkeypatch.setattr("sys.argv", ["decode", "--device", "cpu", "--models", "toy"])
    assert decode.main() == 0
    assert "does not fit: 3.0 GiB more than the device has" in capsys.readouterr().out


def test_overlap_of_a_model_without_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["decode", "--device", "cpu", "--models", "4B", "--overlap", "off", "on"])
    with pytest.raises(SystemExit, match="none of these models has experts"):
        decode.main()
