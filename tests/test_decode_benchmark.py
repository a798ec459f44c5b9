"""`python -m benchmarks.decode` on a small CPU model: byte counts, forced acceptance, timing and reports are
correct."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.shards import Rank
from agentspec.models.state import page_bytes, row_bytes
from agentspec.models.tensors import parameter_dtype, parameter_shapes
from agentspec.types import ZERO_ROW
from benchmarks import decode, decode_checks, decode_timing, trace
from benchmarks.bandwidth import Bandwidth, measure_bandwidth
from benchmarks.decode import core_cases
from benchmarks.decode_checks import CheckFailedError, check_graphs, check_small_model
from benchmarks.decode_report import HEADER, Report
from benchmarks.decode_timing import Result, Steps, Traced, floor_of, time_case
from benchmarks.profile_step import order_table, pointers_line, shares_table
from benchmarks.published import CONFIGS, PrefilledModel, make_model
from benchmarks.running_engine import Case, RunningEngine, acceptance_rate, emitted_at, let_go, memory_for
from benchmarks.step_bytes import Experts, StepBytes, step_bytes
from tests.fakes import benchmark_ranks
from tests.models.test_published_sizes import SIZES

CPU = torch.device("cpu")
STEPS = Steps(warm_up=3, timed=12, host=2)
TOY = replace(
    CONFIGS["0.8B"],
    vocab_size=300,
    hidden_size=32,
    layer_types=("linear_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    num_key_heads=1,
    num_value_heads=2,
    key_dim=16,
    value_dim=16,
    intermediate_size=48,
    max_position=1024,
)
SHAREABLE = replace(TOY, num_heads=4, num_kv_heads=2, num_key_heads=2, num_value_heads=4)
"""Two ranks can share it."""


@pytest.fixture
def model() -> PrefilledModel:
    return make_model("toy", TOY, device=CPU, dtype=torch.float32)


def case(
    *, context: int = 70, batch: int = 2, depth: int | Literal["auto"] = 3, emitted: float = 3.39, sampled: bool = False
) -> Case:
    return Case(model="toy", context=context, batch=batch, depth=depth, emitted=emitted, sampled=sampled)


# Shapes and bytes


@pytest.mark.parametrize("size", ["4B", "9B", "27B", "122B-A10B", "397B-A17B"])
def test_configs_are_the_published_ones(size: str) -> None:
    """tests/models compares those configs with the published byte counts."""
    assert CONFIGS[size] == SIZES[f"3.5-{size}"][0]


def test_every_byte_of_a_step_is_counted_once() -> None:
    config = CONFIGS["4B"]
    least = step_bytes(config, batch=1, num_drafted=0, context=0, draft_vocab=32_768)
    once = step_bytes(config, batch=1, num_drafted=1, context=0, draft_vocab=32_768)
    sizes = {
        name: math.prod(shape) * parameter_dtype(name, torch.bfloat16).itemsize
        for name, shape in parameter_shapes(config).items()
    }
    assert config.tied
    assert once.weights + once.head + once.mtp == sum(sizes.values())
    assert (least.mtp, least.draft_head, least.kv) == (0, 0, 0)
    assert least.state == 2 * row_bytes(state_forms(config, torch.bfloat16))
    step = step_bytes(config, batch=8, num_drafted=3, context=1000, draft_vocab=32_768)
    assert (step.weights, step.mtp) == (once.weights, 3 * once.mtp)
    assert step.draft_head == 3 * 32_768 * 2560 * 2
    assert step.state == 8 * 5 * row_bytes(state_forms(config, torch.bfloat16))
    mtp_layers_more = 2  # pages store the MTP layer's keys once, but three drafts read them three times
    assert step.kv == 8 * 1000 * (
        page_bytes(state_forms(config, torch.bfloat16)) // 64 + mtp_layers_more * 2 * 4 * 256 * 2
    )
    assert step.total == step.weights + step.head + step.mtp + step.draft_head + step.state + step.kv
    fp8 = step_bytes(config, batch=8, num_drafted=3, context=1000, draft_vocab=32_768, fp8_pages=True)
    assert fp8.total - fp8.kv == step.total - step.kv
    assert fp8.kv == step.kv // 2 * (256 + 1) // 256, "a byte for each head"


# The forced schedule and the engine that follows it


@pytest.mark.parametrize("emitted", [1.0, 3.0, 3.39, 4.0])
def test_the_forced_rate_emits_the_named_number_of_tokens(emitted: float) -> None:
    assert emitted_at(acceptance_rate(emitted), 3) == pytest.approx(emitted)


@pytest.mark.parametrize("emitted", [0.9, 4.1])
def test_impossible_emitted_tokens_are_refused(emitted: float) -> None:
    with pytest.raises(ValueError, match="emitted="):
        acceptance_rate(emitted)


@pytest.mark.parametrize(("field", "value"), [("context", 0), ("batch", 0), ("depth", 16), ("emitted", 4.5)])
def test_an_impossible_case_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"={value}: "):
        replace(case(), **{field: value})


@pytest.mark.parametrize(("depth", "emitted", "seen"), [(3, 4.0, 4), (3, 1.0, 1), (0, 3.39, 1)])
def test_every_slot_decodes_from_the_first_step_to_the_last(
    model: PrefilledModel, depth: int, emitted: float, seen: int
) -> None:
    tried = case(depth=depth, emitted=emitted)
    engine = RunningEngine(tried, model, CPU, num_steps=12)
    for _ in range(11):
        assert [len(token_ids) for token_ids in engine.step()] == [seen] * tried.batch


def test_the_context_is_synthetic_and_not_empty(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[VerifyBatch] = []
    verify = PrefilledModel.verify

    def spy(self: PrefilledModel, batch: VerifyBatch) -> Tensor:
        batches.append(batch)
        return verify(self, batch)

    monkeypatch.setattr(PrefilledModel, "verify", spy)
    RunningEngine(case(context=130), model, CPU, num_steps=2)
    assert batches[0].length_B.tolist() == [130, 130]
    assert (batches[0].read_row_B != ZERO_ROW).all()
    for tensor in model.pools.tensors():
        assert torch.isfinite(tensor).all()
    assert model.pools["ssm_LRVDK"][:, batches[0].read_row_B].abs().amin() > 0
    assert not model.pools["ssm_LRVDK"][:, ZERO_ROW].any()


def test_a_case_is_measured(model: PrefilledModel) -> None:
    timing = time_case(case(sampled=True), model, CPU, STEPS)
    assert 1 <= timing.emitted <= 4
    assert timing.depths == {3: STEPS.timed}
    assert 70 < timing.mean_context < 70 + 4 * STEPS.total
    assert min(timing.step_ms, timing.device_ms, timing.host_ms, timing.start_seconds) > 0
    floor = floor_of(case(), TOY, timing, draft_vocab=300)
    assert floor is not None
    assert floor.kv > 0


def test_a_case_may_use_the_window_policy(model: PrefilledModel) -> None:
    steps = replace(STEPS, warm_up=1)
    timing = time_case(case(depth="auto"), model, CPU, steps)
    assert sum(timing.depths.values()) == steps.timed
    assert len(timing.depths) > 1  # the policy tries each depth in its first five steps
    assert floor_of(case(depth="auto"), TOY, timing, draft_vocab=300) is None


def test_pools_are_released(model: PrefilledModel) -> None:
    RunningEngine(case(), model, CPU, num_steps=2)
    let_go(model)
    with pytest.raises(AssertionError):
        _ = model.pools


def test_memory_fits_the_sessions_of_a_real_engine() -> None:
    plan = memory_for(
        case(context=2048, batch=8), make_model("toy", TOY, device=CPU, dtype=torch.float32).spec, num_steps=100
    )
    assert plan.num_rows == 2 + 8 * (3 + 2)
    assert plan.max_length == 2048 + 1 + 400
    assert plan.num_pages * 64 > 8 * plan.max_length


# The check before the measurement


def test_the_check_passes_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_checks, "PROMPT_LENGTHS", (1, 70))
    monkeypatch.setattr(decode_checks, "NUM_TOKENS", 6)
    assert "12 tokens" in check_small_model("cpu")
    streams, calls = decode_checks.streams, []

    def wrong(*arguments: Any) -> tuple[list[list[int]], int]:
        calls.append(arguments)
        found, accepted = streams(*arguments)
        found[1][3] += len(calls) - 1
        return found, accepted

    monkeypatch.setattr(decode_checks, "streams", wrong)
    with pytest.raises(CheckFailedError, match="prompt 1 of 70 tokens: token 3"):
        check_small_model("cpu")


def test_graphs_are_compared_with_eager_steps(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no graphs: this tests the comparison only."""
    monkeypatch.setattr(decode_checks, "NUM_STEPS", 4)
    assert "4 steps as graphs equal eager ones" in check_graphs(model, CPU)
    allocate = PrefilledModel.allocate
    allocations = []

    def one_bit_off(self: PrefilledModel, *, num_rows: int, **pools: Any) -> None:
        allocate(self, num_rows=num_rows, **pools)
        allocations.append(num_rows)
        self.pools["ssm_LRVDK"].view(torch.int32)[0, -1, 0, 0, 0] += len(allocations)

    monkeypatch.setattr(PrefilledModel, "allocate", one_bit_off)
    with pytest.raises(CheckFailedError, match="leave different states"):
        check_graphs(model, CPU)


# Traces


def event(name: str, start: float, duration: float, category: str = "kernel", stream: int = 7) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def two_steps() -> trace.Timeline:
    """Each 100 us: `a` for 40, `b` that overlaps its last 10 and runs 30, 20 idle, a copy of 10, 10 idle before the
    next."""
    events = [
        {"ph": "M", "name": "process_name"},
        event("cudaGraphLaunch", 0, 500, "cuda_runtime"),
        event("range", 0, 500, "gpu_user_annotation"),
    ]
    for step in (1000.0, 1100.0):
        events += [event("copy", step + 80, 10, "gpu_memcpy"), event("b", step + 30, 30), event("a", step, 40)]
    return trace.timeline({"traceEvents": events}, num_steps=2)


def test_a_timeline_counts_time_that_overlaps_once() -> None:
    timeline = two_steps()
    assert timeline.kernels_a_step == 3
    assert timeline.busy_ms == pytest.approx(0.070)
    assert timeline.step_ms == pytest.approx(0.095)
    assert timeline.idle_share == pytest.approx(1 - 70 / 95)
    assert [kernel.name for kernel in timeline.last_step()] == ["a", "b", "copy"]


def test_shares_add_up_to_busy_and_idle_time() -> None:
    timeline = two_steps()
    shares = {share.name: share for share in trace.by_name(timeline)}
    assert {name: (share.calls, share.covered_us, share.gap_us) for name, share in shares.items()} == {
        "a": (2, 80.0, 10.0),
        "b": (2, 40.0, 0.0),
        "copy": (2, 20.0, 40.0),
    }
    assert "| copy | 1.0 | 10.0 | 10.00 | 14.3 % | 20.0 |" in shares_table(timeline)
    assert "| 30.0 | -10.0 | 30.0 | b |" in order_table(timeline)


def test_the_pointer_share_is_that_of_commit_and_publish() -> None:
    kernels = [
        trace.Kernel(name=name, start=start, duration=10.0)
        for name, start in (("_commit_window", 0.0), ("a", 10.0), ("_publish_drafts", 40.0))
    ]
    assert pointers_line(trace.Timeline(kernels=kernels, num_steps=1)).endswith(": 20.0 us a step, 40.00 % of it")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        trace.timeline({"traceEvents": [event("aten::add", 0, 1, "cpu_op")]}, num_steps=1)


# The report


def test_the_bandwidth_is_measured_on_memory() -> None:
    bandwidth = measure_bandwidth(CPU, num_bytes=2**20)
    assert bandwidth.copy > 1e6
    assert bandwidth.read > 1e6


def test_the_read_kernel_reads_everything() -> None:
    kernel = pytest.importorskip("benchmarks.read_kernel", reason="needs Triton", exc_type=ImportError)
    values = torch.arange(3 * kernel.READ_BLOCK, dtype=torch.float32) % 7
    sums = torch.full((3,), torch.nan)
    kernel.read_all(values, sums)
    assert sums.tolist() == values.view(3, -1).sum(1).tolist()


def test_the_core_cases_include_the_target_cases() -> None:
    cases = core_cases()
    assert len(set(cases)) == len(cases)
    for size in ("4B", "9B", "27B"):
        assert Case(model=size, context=2048, batch=1, depth=3, emitted=3.0) in cases
        assert {found.batch for found in cases if found.model == size and found.depth == 0} == {1, 8, 32}


def test_the_report_names_missing_cases_with_reasons(model: PrefilledModel) -> None:
    timed = Result(case=case(), timing=time_case(case(), model, CPU, STEPS))
    timed.floor_bytes = StepBytes(weights=10**9, experts=0, head=0, mtp=0, draft_head=0, state=0, kv=0)
    assert timed.timing is not None
    timed.traced = Traced(kernels=7.0, busy_ms=timed.timing.step_ms / 2, step_ms=timed.timing.step_ms)
    too_large = Result(case=case(batch=32), note="does not fit: 4.0 GiB more than the device has")
    report = Report(
        machine="m", command="c", checks=["x"], bandwidth=Bandwidth(copy=3e12, read=1e12), results=[timed, too_large]
    )
    lines = report.markdown().splitlines()
    rows = [line for line in lines if line.startswith("| toy")]
    assert len(rows) == 2
    assert {row.count("|") for row in rows} == {HEADER.count("|")}
    assert "| 1.000 |" in rows[0]
    assert "| 50.0 % (50.0 %) |" in rows[0]
    assert "does not fit: 4.0 GiB" in rows[1]
    written = json.loads(report.as_json())
    assert written["results"][0]["idle_share"] == pytest.approx(0.5)
    assert written["results"][0]["tokens_per_second"] == pytest.approx(2 * 3.39 / timed.timing.step_ms * 1e3)
    assert written["results"][1]["timing"] is None
    assert "Synthetic" in written["synthetic"]


def test_the_command_measures_the_selected_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "CONFIGS", {"toy": TOY})
    monkeypatch.setattr(decode, "check_small_model", lambda device: "nothing")
    monkeypatch.setattr(decode_checks, "NUM_STEPS", 2)
    flags = [
        "--device",
        "cpu",
        "--models",
        "toy",
        "--batch",
        "1",
        "2",
        "--k",
        "0",
        "auto",
        "--context",
        "65",
        "--steps",
        "3",
    ]
    monkeypatch.setattr("sys.argv", ["decode", *flags, "--json", str(tmp_path / "figures.json")])
    assert decode.main() == 0
    rows = [
        line.split(" | ")[:4]
        for line in capsys.readouterr().out.partition("Synthetic")[2].splitlines()
        if line.startswith("| toy")
    ]
    assert rows == [["| toy", "65", batch, depth] for batch in ("1", "2") for depth in ("0", "auto")]
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [result["case"]["batch"] for result in written["results"]] == [1, 1, 2, 2]
    assert all(result["timing"]["step_ms"] > 0 for result in written["results"])
    assert "2 steps as graphs equal eager ones" in written["checks"][1]


def test_cases_beyond_the_time_limit_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "check_small_model", lambda device: "nothing")
    monkeypatch.setattr("sys.argv", ["decode", "--device", "cpu", "--quick", "--max-seconds", "0"])
    assert decode.main() == 0
    assert capsys.readouterr().out.count("not run: the time was up") == 2


def test_ranks_take_the_same_steps(tmp_path: Path) -> None:
    """Each plans by itself; a step that only one of them took would hang."""
    (first, agreed), (second, agreed_too) = benchmark_ranks.both(benchmark_ranks.decode, SHAREABLE, tmp_path)
    assert first == second
    assert sum(len(tokens) for step in first for tokens in step) > 8
    assert agreed == agreed_too == [1.0, 5.0]


def test_ranks_share_the_bytes_of_a_step() -> None:
    config = CONFIGS["122B-A10B-FP8"]
    whole, half = (
        step_bytes(
            config,
            batch=1,
            num_drafted=3,
            context=2048,
            draft_vocab=32_768,
            experts=Experts(trunk=30, draft=9),
            fp8_drafts=True,
            ring_emitted=3.39,
            rank=Rank(0, count),
        )
        for count in (1, 2)
    )
    assert half.experts == pytest.approx(whole.experts / 2)
    assert half.head == whole.head // 2
    assert half.kv == whole.kv // 2
    assert whole.total / 2 < half.total < 0.62 * whole.total, "routers and norms are on every rank"
    assert decode_timing.num_sums(config, 3) == 2 * 48 + 3 * 3


def test_steps_of_different_counts_are_compared_by_case(model: PrefilledModel, tmp_path: Path) -> None:
    timing = time_case(case(), model, CPU, STEPS)
    results = [Result(case=replace(case(), ranks=2), timing=timing), Result(case=case(batch=8), note="not run")]
    results[0].exchange_us, results[0].num_exchanges = 5.0, 100
    report = Report(
        machine="m", command="c", checks=[], bandwidth=measure_bandwidth(CPU, num_bytes=2**20), results=results
    )
    (tmp_path / "decode.json").write_text(report.as_json())
    assert decode.step_ms_of(tmp_path / "decode.json") == {str(case()): timing.step_ms}
    assert "100 sums a step of 5.00 us, measured alone in a graph: 0.500 ms of the floor" in report.markdown()
    assert "| toy, 2 GPUs |" in report.markdown()
