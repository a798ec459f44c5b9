"""`python -m benchmarks.prefill` on a small CPU model: operation counts, caching, timing, checks and reports are
correct."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.engine.assembly import Assembly
from agentspec.kernels import PrefillBatch
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.state import row_bytes
from agentspec.models.tensors import parameter_shapes
from benchmarks import prefill, prefill_checks, prefill_engine, trace
from benchmarks.bandwidth import Bandwidth
from benchmarks.decode_checks import CheckFailedError
from benchmarks.prefill import Run, chosen_cases
from benchmarks.prefill_cases import (
    PaceCase,
    PaceFigures,
    PromptCase,
    PromptFigures,
    SessionCase,
    Shape,
    gaps_between,
    p99,
    run_pace,
    run_session,
    time_prompts,
)
from benchmarks.prefill_checks import check_cached_turns, check_resume_points
from benchmarks.prefill_engine import Answer, NoFigureError, PromptEngine, Room
from benchmarks.prefill_floor import (
    Operation,
    Rates,
    flops_by_kind,
    measure_matmul,
    measure_rates,
    operations,
    seconds_of,
)
from benchmarks.prefill_peers import compare_kernels
from benchmarks.prefill_profile import profile_prompt
from benchmarks.prefill_report import PROMPT_HEADER, Entry, Report
from benchmarks.published import CONFIGS, PrefilledModel, make_model
from benchmarks.trace import Kernel, Timeline
from tests.fakes import benchmark_ranks
from tests.test_decode_benchmark import SHAREABLE, TOY
from tests.test_mixture_benchmark import MOE

CPU = torch.device("cpu")
RATES = Rates(matmul=500e12, matmul_burst=600e12, bandwidth=Bandwidth(copy=3e12, read=2e12))
SMALL = Room(longest=900, others=600)
SHAPE = Shape(config=TOY, draft_vocab=300)


@pytest.fixture
def model() -> PrefilledModel:
    return make_model("toy", TOY, device=CPU, dtype=torch.float32)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Record (computed, tokens) of every prefill."""
    seen: list[tuple[bool, int]] = []
    run = PrefilledModel.prefill

    def spy(self: PrefilledModel, batch: PrefillBatch) -> Tensor:
        seen.append((self.computes_prompts, len(batch.token_ids_N)))
        return run(self, batch)

    monkeypatch.setattr(PrefilledModel, "prefill", spy)
    return seen


# The floor


def test_every_operation_of_a_prompt_is_counted_once() -> None:
    config = CONFIGS["4B"]
    count, start = 800, 50_048
    found = flops_by_kind(operations(config, count=count, start=start, num_drafts=3, draft_vocab=32_768))
    shapes = parameter_shapes(config)
    trunk = sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape) == 2
    )
    assert found["linear"] == 2 * count * trunk
    pairs = sum(start + place + 1 for place in range(count))
    assert found["attention"] == 8 * 4 * 16 * 256 * pairs
    assert found["recurrence"] == 24 * count * (6 * 32 * 128 * 128 + 8 * 8192)
    assert found["mtp"] == 2 * count * (2560 * 5120 + 2 * 1024 * 2560)
    assert set(found) == {"linear", "attention", "recurrence", "mtp"}


def test_compulsory_bytes_are_those_of_weights_state_and_keys() -> None:
    config = CONFIGS["4B"]
    ops = operations(config, count=1, start=1_000, num_drafts=0, draft_vocab=32_768)
    num_bytes = {
        kind: sum(op.num_bytes for op in ops if op.kind == kind)
        for kind in ("linear", "attention", "recurrence", "mtp", "first step")
    }
    shapes = parameter_shapes(config)
    assert num_bytes["linear"] == 2 * sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape) == 2
    )
    assert num_bytes["attention"] == 8 * 1_001 * 2 * 4 * 256 * 2
    conv_and_hidden = 24 * 3 * 8192 * 2 + 2560 * 2
    assert num_bytes["recurrence"] == 2 * (row_bytes(state_forms(config, torch.bfloat16)) - conv_and_hidden)
    assert num_bytes["mtp"] == 0
    assert num_bytes["first step"] == 248_320 * 2560 * 2
    with_drafts = operations(config, count=1, start=1_000, num_drafts=3, draft_vocab=32_768)
    mtp = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("mtp.")) * 2
    drafts = 3 * (mtp + 32_768 * 2560 * 2 + 1_001 * 2 * 4 * 256 * 2)
    assert sum(op.num_bytes for op in with_drafts if op.kind == "first step") == 248_320 * 2560 * 2 + drafts


def test_a_mixture_computes_each_tokens_experts_and_reads_the_distinct_ones() -> None:
    config = CONFIGS["35B-A3B-FP8"]
    moe = config.moe
    assert moe is not None
    one_expert = 3 * 2048 * 512
    for count in (1, 800):
        ops = operations(config, count=count, start=0, num_drafts=3, draft_vocab=32_768)
        experts = [op for op in ops if op.kind == "experts"]
        assert sum(op.flops for op in experts) == pytest.approx(2 * count * 40 * 8 * one_expert)
        assert all(op.fp8 for op in experts)
        touched = 8 if count == 1 else 256
        assert sum(op.num_bytes for op in experts) == pytest.approx(40 * touched * one_expert, rel=1e-3)
    router = sum(op.flops for op in ops if op.kind == "linear" and not op.fp8)
    assert router == 2 * 800 * 2048 * (40 * (256 + 1) + 30 * 2 * 32)  # router, shared gate, b and a
    first = next(op for op in ops if op.kind == "first step")
    plain = next(
        op
        for op in operations(CONFIGS["35B-A3B"], count=800, start=0, num_drafts=3, draft_vocab=32_768, fp8_drafts=True)
        if op.kind == "first step"
    )
    head_bytes = 3 * 32_768 * 2048
    assert first.num_bytes - plain.num_bytes == pytest.approx(
        head_bytes, rel=1e-3
    )  # only the draft head differs: the MTP layer has 8 bits in both


def test_8_bit_matmuls_have_their_own_rate() -> None:
    rates = replace(RATES, matmul_fp8=1000e12)
    op = Operation(kind="linear", flops=500e12, fp8=True)
    assert (op.seconds(rates), op.seconds(RATES)) == (0.5, 1.0)
    assert replace(op, fp8=False).seconds(rates) == 1.0
    assert replace(op, num_bytes=1.5e12).seconds(rates) == 0.75
    assert measure_rates(CPU).matmul_fp8 is None


def test_the_floor_is_the_maximum_of_compute_and_memory_per_operation() -> None:
    ops = [
        Operation(kind="linear", flops=500e12, num_bytes=1e12),
        Operation(kind="attention", flops=100e12, num_bytes=1e12),
    ]
    assert seconds_of(ops, RATES) == pytest.approx(1.0 + 0.5)


def test_the_floor_of_an_append_is_near_the_known_value() -> None:
    """About 13 ms for 890 tokens at 16k on a GPU of 700 TFLOPS."""
    rates = replace(RATES, matmul=700e12, bandwidth=Bandwidth(copy=3e12, read=3.2e12))
    ops = operations(CONFIGS["4B"], count=890, start=16_384, num_drafts=3, draft_vocab=32_768)
    assert 12e-3 < seconds_of(ops, rates) < 14e-3


def test_the_measured_matmul_rates_are_plausible() -> None:
    sustained, burst = measure_matmul(CPU, side=64)
    assert sustained > 1e6
    assert burst > 1e6


# The engine


def test_a_synthetic_context_is_cached_and_not_computed(
    model: PrefilledModel, prefills: list[tuple[bool, int]]
) -> None:
    engine = PromptEngine(model, CPU, SMALL)
    context = [token % 300 for token in range(330)]
    engine.cache_context(context, compute=False)
    assert not any(computed for computed, _ in prefills)
    prefills.clear()
    answer = engine.ask(context[:320] + [7] * 100)
    assert (answer.prompt_tokens, answer.cached_tokens) == (420, 320)
    assert all(computed for computed, _ in prefills)
    assert 99 <= sum(count for _, count in prefills) <= 100
    again = engine.ask(context[:320] + [8] * 50)
    assert again.cached_tokens == 320


def test_a_computed_context_is_computed(model: PrefilledModel, prefills: list[tuple[bool, int]]) -> None:
    PromptEngine(model, CPU, SMALL).cache_context([5] * 200, compute=True)
    assert all(computed for computed, _ in prefills)
    assert sum(count for _, count in prefills) >= 192


def test_a_context_that_does_not_fit_has_no_figure(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_engine, "SPARE_CHECKPOINTS", 0)
    room = replace(SMALL, rows_a_slot=prefill_engine.NUM_DRAFTS + 3)
    with pytest.raises(NoFigureError, match="no row for a checkpoint behind 192 tokens"):
        PromptEngine(model, CPU, room).cache_context([5] * 200, compute=False)


def test_an_answer_is_timed_from_its_submission(model: PrefilledModel) -> None:
    answer = PromptEngine(model, CPU, SMALL).ask([1, 2, 3], max_tokens=6)
    assert len(answer.token_ids) == 6
    assert answer.first_token_s > 0
    assert len(answer.gaps_s) == len(answer.arrivals) - 1
    assert sum(answer.gaps_s) == pytest.approx(answer.arrivals[-1] - answer.arrivals[0])


# The parts


def test_prompts_are_timed_after_their_context(model: PrefilledModel, prefills: list[tuple[bool, int]]) -> None:
    figures = time_prompts(PromptEngine(model, CPU, SMALL), PromptCase(count=70, context=128), SHAPE, RATES, repeats=3)
    assert len(figures.seconds) == 3
    assert figures.tokens_per_second == pytest.approx(70 / figures.median_s)
    assert figures.floor_s == seconds_of(SHAPE.operations(70, 128), RATES)
    assert figures.times_floor > 1
    computed = sum(count for is_computed, count in prefills if is_computed)
    assert computed in (5 * 69, 5 * 70)


@pytest.mark.parametrize(("count", "context"), [(0, 64), (10, 63), (10, -64)])
def test_an_impossible_prompt_is_refused(count: int, context: int) -> None:
    with pytest.raises(ValueError, match=f"{count}@{context}: "):
        PromptCase(count=count, context=context)


def test_a_session_hits_its_last_turn(model: PrefilledModel) -> None:
    case = SessionCase(first=200, turns=3, append=40, output=30)
    figures = run_session(PromptEngine(model, CPU, case.room), case, SHAPE, RATES)
    assert [turn.prompt for turn in figures.turns] == [200, 270, 340, 410]
    assert [turn.cached for turn in figures.turns] == [0, 192, 256, 320]
    assert figures.hit_share == pytest.approx((192 + 256 + 320) / (270 + 340 + 410))
    assert figures.turns[1].floor_s == seconds_of(SHAPE.operations(270 - 192, 192), RATES)
    assert figures.turns[0].decode_tokens_per_second > 0


def test_streams_decode_while_a_long_prompt_is_computed(model: PrefilledModel) -> None:
    case = PaceCase(context=64, streams=2, prompt=300, idle_steps=12, warm_up_prompt=100)
    figures = run_pace(PromptEngine(model, CPU, case.room), case)
    assert len(figures.idle_s) == 2 * 12
    assert len(figures.busy_s) >= 2
    assert figures.prompt_s >= max(figures.busy_s) * 0.5
    assert figures.ratio == pytest.approx(p99(figures.busy_s) / p99(figures.idle_s))


def test_streams_that_end_too_early_have_no_figure(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaceCase, "tokens_a_stream", property(lambda self: 30))
    case = PaceCase(context=64, streams=2, prompt=300, idle_steps=3, warm_up_prompt=100)
    with pytest.raises(NoFigureError, match="ended before"):
        run_pace(PromptEngine(model, CPU, case.room), case)


def test_gaps_count_if_they_end_inside_the_interval() -> None:
    streams = [Answer(submitted=0.0, arrivals=[1.0, 2.0, 4.0, 7.0]), Answer(submitted=0.0, arrivals=[3.5, 4.5])]
    assert gaps_between(streams, 2.0, 5.0) == [1.0, 2.0, 1.0]


# The checks before the measurement


def test_cached_turns_are_compared_with_uncached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_checks, "SESSION_TURNS", ((70, 6), (9, 5)))
    monkeypatch.setattr(prefill_checks, "NUM_SESSIONS", 1)
    assert "11 tokens on cpu behind 64 cached ones" in check_cached_turns("cpu")
    sessions = prefill_checks.all_sessions
    calls: list[None] = []

    def wrong(parts: Assembly) -> tuple[dict[str, list[int]], int]:
        found, num_cached = sessions(parts)
        calls.append(None)
        found["session 0, turn 1"][0] += len(calls)
        return found, num_cached

    monkeypatch.setattr(prefill_checks, "all_sessions", wrong)
    with pytest.raises(CheckFailedError, match="session 0, turn 1"):
        check_cached_turns("cpu")


@pytest.fixture
def short_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_checks, "RESUME_POINTS", (64, 128, 320))


@pytest.mark.usefixtures("short_points")
def test_resume_points_are_compared_with_whole_prefills() -> None:
    assert "prompts resumed at (64, 128) are as computed at once" in check_resume_points("toy", TOY, CPU)


def zero_states(tensor: Tensor) -> None:
    tensor.zero_()


def swap_rows(tensor: Tensor) -> None:
    tensor.copy_(tensor.flip(0))


@pytest.mark.usefixtures("short_points")
@pytest.mark.parametrize("spoil", [zero_states, swap_rows])
def test_a_resume_from_a_wrong_state_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], None]
) -> None:
    run = PrefilledModel.prefill

    def spoiled(self: PrefilledModel, batch: PrefillBatch) -> Tensor:
        if batch.spans_UF[0, 2] > 0:  # a resumed span reads a state that differs from the saved one
            spoil(self.pools["ssm_LRVDK"][0])
        return run(self, batch)

    monkeypatch.setattr(PrefilledModel, "prefill", spoiled)
    with pytest.raises(CheckFailedError, match="resumed: off by"):
        check_resume_points("toy", TOY, CPU)


# Peers, report, command


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "measure_rates", lambda device: RATES)


def test_single_kernels_are_compared() -> None:
    """The CPU has only torch to compare with; the small float32 shapes test only the table's format."""
    lines = compare_kernels("toy", TOY, CPU, spans=((70, 64), (100, 0))).splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines
        if line.startswith(("| attention", "| recurrence"))
    ]
    assert [row[:4] for row in rows if row[3] in ("agentspec", "torch")] == [
        ["attention", "70", "64", "agentspec"],
        ["attention", "70", "64", "torch"],
        ["recurrence", "70", "64", "agentspec"],
        ["attention", "100", "0", "agentspec"],
        ["attention", "100", "0", "torch"],
        ["recurrence", "100", "0", "agentspec"],
    ]
    assert all(float(row[4]) > 0 for row in rows if row[3] in ("agentspec", "torch"))


def test_the_report_names_missing_cases_with_reasons() -> None:
    case = PromptCase(count=800, context=50_048)
    prompts = PromptFigures(
        case=case,
        seconds=[0.03, 0.02, 0.04],
        flops={"linear": 6e12, "attention": 3e12},
        arithmetic_s=0.018,
        floor_s=0.015,
    )
    paced = PaceFigures(case=PaceCase(context=64), idle_s=[0.010] * 50, busy_s=[0.015] * 50, prompt_s=2.0)
    entries = [
        Entry(model="4B", what=str(case), figures=prompts),
        Entry(model="4B", what="pace", figures=paced),
        Entry(model="27B", what="pace", note="does not fit: 4.0 GiB more than the device has"),
    ]
    report = Report(machine="m", command="c", checks=["x"], rates=RATES, entries=entries)
    text = report.markdown()
    row = next(line for line in text.splitlines() if line.startswith("| 4B | 800 | 50,048"))
    assert row.count("|") == PROMPT_HEADER.count("|")
    assert "| 30.00 (20.00, 40.00) | 26,667 | 300 (0.006, 0.003, 0.000) | 60.0 % | 15.00 | 2.00 |" in row
    assert "| 2.00 | 10.00, 10.00, 10.00 | 15.00, 15.00, 15.00 | 1.50 |" in text
    assert "- 27B, pace: does not fit: 4.0 GiB more than the device has" in text
    written = json.loads(report.as_json())
    assert written["entries"][0]["figures"]["times_floor"] == pytest.approx(2.0)
    assert written["entries"][1]["figures"]["ratio"] == pytest.approx(1.5)
    assert written["entries"][2]["figures"] is None


def test_the_default_run_includes_the_target_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prefill"])
    options = prefill.arguments()
    for size in prefill.MODELS:
        cases = chosen_cases(options, size)
        assert {PromptCase(count=8_192), PromptCase(count=32_768), PromptCase(count=800, context=50_048)} <= set(cases)
    of_4b = chosen_cases(options, "4B")
    assert {
        PromptCase(count=890, context=16_384),
        PromptCase(count=890, context=25_600),
        PromptCase(count=2_048),
        SessionCase(),
    } <= set(of_4b)
    assert any(isinstance(case, PaceCase) and case.streams == 8 for case in of_4b)


@pytest.mark.usefixtures("short_points", "known_rates")
def test_the_command_measures_the_selected_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill, "CONFIGS", {"toy": TOY})
    monkeypatch.setattr(prefill, "check_cached_turns", lambda device: "nothing")
    flags = [
        "--device",
        "cpu",
        "--models",
        "toy",
        "--prompts",
        "100",
        "60@128",
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    monkeypatch.setattr("sys.argv", ["prefill", *flags])
    assert prefill.main() == 0
    printed = capsys.readouterr().out.partition("Synthetic")[2]
    rows = [line.split(" | ")[:3] for line in printed.splitlines() if line.startswith("| toy")]
    assert rows == [["| toy", "100", "0"], ["| toy", "60", "128"]]
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [len(entry["figures"]["seconds"]) for entry in written["entries"]] == [2, 2]
    assert "resumed at (64, 128)" in written["checks"][1]


@pytest.mark.usefixtures("short_points", "known_rates")
def test_a_mixture_in_8_bits_is_checked_by_blocks_and_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill, "CONFIGS", {"toy": replace(MOE, quantization=CONFIGS["27B-FP8"].quantization)})
    monkeypatch.setattr(prefill, "check_cached_turns", lambda device: "nothing")
    monkeypatch.setattr(
        "sys.argv", ["prefill", "--device", "cpu", "--models", "toy", "--prompts", "100", "--repeats", "1"]
    )
    assert prefill.main() == 0
    printed = capsys.readouterr().out
    assert "blocks are as in float32" in printed
    assert "resumed at (64, 128)" in printed
    assert "| toy | 100 | 0 |" in printed


@pytest.mark.usefixtures("known_rates")
def test_a_model_that_is_too_large_stays_in_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill, "check_cached_turns", lambda device: "nothing")
    monkeypatch.setattr(prefill, "missing_for_weights", lambda *arguments, **options: 2 * 2**30)
    monkeypatch.setattr("sys.argv", ["prefill", "--device", "cpu", "--models", "35B-A3B", "--parts", "fresh"])
    assert prefill.main() == 0
    assert "- 35B-A3B, 2,048 tokens behind 0: does not fit: 2.0 GiB more than the device has" in capsys.readouterr().out


@pytest.mark.usefixtures("short_points", "known_rates")
def test_every_part_has_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "zero": [PromptCase(count=100)],
        "agentic": [SessionCase(first=200, turns=2, append=40, output=30)],
        "pace": [PaceCase(context=64, streams=2, prompt=200, idle_steps=5, warm_up_prompt=100)],
    }
    monkeypatch.setattr(prefill, "CONFIGS", {"toy": TOY})
    monkeypatch.setattr(prefill, "CASES", cases)
    monkeypatch.setattr(prefill, "check_cached_turns", lambda device: "nothing")
    monkeypatch.setattr(
        "sys.argv", ["prefill", "--device", "cpu", "--models", "toy", "--parts", *cases, "--repeats", "1"]
    )
    assert prefill.main() == 0
    printed = capsys.readouterr().out.partition("Synthetic")[2].splitlines()
    headers = [index for index, line in enumerate(printed) if line.startswith("| model")]
    rows = [
        [line for line in printed[begin:end] if line.startswith("| toy")]
        for begin, end in zip(headers, [*headers[1:], None], strict=True)
    ]
    assert [len(part) for part in rows] == [1, 4, 1]
    for header, part in zip(headers, rows, strict=True):
        assert {row.count("|") for row in part} == {printed[header].count("|")}
    assert "| 2 and later |" in rows[1][-1]


def test_a_profile_covers_one_prompt(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, this tests only what would be recorded."""
    asked: list[int] = []

    def record(step: Callable[[], object], num_steps: int) -> Timeline:
        asked.append(num_steps)
        step()
        return Timeline(
            kernels=[Kernel(name="a", start=0.0, duration=40.0), Kernel(name="b", start=50.0, duration=10.0)],
            num_steps=num_steps,
        )

    monkeypatch.setattr(trace, "record", record)
    text = profile_prompt(PromptEngine(model, CPU, SMALL, overlap=False), PromptCase(count=70, context=128))
    assert asked == [1]
    assert "ms to the first token by the host's clock" in text
    assert "2.0 kernels, 0.060 ms a step under the profiler, 16.7 % of it idle" in text


@pytest.mark.usefixtures("known_rates")
def test_parts_beyond_the_time_limit_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill, "check_cached_turns", lambda device: "nothing")
    monkeypatch.setattr(
        "sys.argv", ["prefill", "--device", "cpu", "--models", "4B", "--parts", "zero", "--max-seconds", "0"]
    )
    assert prefill.main() == 0
    assert capsys.readouterr().out.count("the time was up") == 4


def test_a_part_without_figures_does_not_affect_the_others(
    model: PrefilledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CONFIGS", {"toy": TOY})
    monkeypatch.setattr(prefill, "make_model", lambda *arguments, **options: model)
    monkeypatch.setattr(prefill, "check_resume_points", lambda *arguments: "nothing")
    measured = time_prompts

    def some(engine: PromptEngine, case: PromptCase, *arguments: Any, **options: Any) -> PromptFigures:
        if case.count == 11:
            raise NoFigureError("for a reason")
        return measured(engine, case, *arguments, **options)

    monkeypatch.setattr(prefill, "time_prompts", some)
    report = Report(machine="m", command="c", checks=[], rates=RATES)
    Run(report, CPU, repeats=1, deadline=math.inf, save=lambda report: None).measure(
        "toy", [PromptCase(count=11), PromptCase(count=12)]
    )
    assert [(entry.figures is None, entry.note) for entry in report.entries] == [(True, "for a reason"), (False, "")]


# Several GPUs


def test_ranks_compute_the_same_prompts(tmp_path: Path) -> None:
    """Each plans by itself; a pass that only one of them took would hang."""
    first, second = benchmark_ranks.both(benchmark_ranks.prefill, SHAREABLE, tmp_path)
    assert first == second
    (_, answered), (cached, answered_later) = first
    assert len(answered) == len(answered_later) == 9
    assert cached == 192


def test_the_floor_of_several_gpus_is_a_gpus_part() -> None:
    shared = replace(SHAPE, ranks=2)
    assert shared.floor_s(70, 128, RATES) == SHAPE.floor_s(70, 128, RATES) / 2


def test_numbers_of_gpus_are_compared_by_case(
    model: PrefilledModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = PromptCase(count=70, context=128)
    figures = time_prompts(PromptEngine(model, CPU, SMALL), case, SHAPE, RATES, repeats=1)
    files = {}
    for count in (1, 2):
        report = Report(machine="m", command="c", checks=[], rates=RATES)
        report.entries = [
            Entry(model="toy", what=str(case), figures=replace(figures, seconds=[1.5 / count])),
            Entry(model="toy", what="another", note="the time was up"),
        ]
        files[count] = tmp_path / f"{count}.json"
        files[count].write_text(report.as_json())
    prefill.FIRST_TOKENS_COMPARED.print(files)
    assert capsys.readouterr().out.splitlines() == [
        "toy, 70 tokens behind 128, 1 GPUs: 1500.00 ms to the first token, 1.000 times as fast as on 1",
        "toy, 70 tokens behind 128, 2 GPUs: 750.00 ms to the first token, 2.000 times as fast as on 1",
    ]


@pytest.mark.parametrize(("parts", "why"), [(["pace"], "beside streams"), (["zero", "profile"], "of one GPU")])
def test_parts_that_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch, parts: list[str], why: str) -> None:
    monkeypatch.setattr("sys.argv", ["prefill", "--parts", *parts, "--tensor-parallel", "1", "2"])
    with pytest.raises(SystemExit, match=why):
        prefill.main()
