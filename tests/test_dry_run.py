"""The dry run: its hits equal the engine's and never exceed the ideal; and the report of the command."""

from __future__ import annotations

import json
import os
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentspec.commands import dry_run as dry_run_command
from agentspec.commands.cli import main
from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.engine.in_process import Engine
from agentspec.errors import ConfigError
from agentspec.replay.encoders import Encoder
from agentspec.replay.ideal import IdealPrefix
from agentspec.replay.schema import Session, save
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.simulate.closed_loop import RecordedTurn
from agentspec.simulate.dry_run import DryMemory, DryRun, DryRunResult
from agentspec.simulate.model_costs import MODEL_COSTS, ModelCosts, model_costs
from agentspec.types import BLOCK_TOKENS, Breakpoint, CheckpointKind, SamplingParams
from agentspec.wire import Submit
from tests.fakes.pieces import RegexPieces
from tests.fakes.scripted_model import ScriptedModel
from tests.replay.builders import TOOL, called, replay_file, result, runs, said, system, turn, user
from tests.replay.worlds import ask, live_session

SYSTEM, USER = CheckpointKind.SYSTEM, CheckpointKind.USER
COSTS = model_costs("27b")
Sessions = list[tuple[str, list[RecordedTurn]]]


def dry(
    sessions: Sessions,
    *,
    concurrency: int = 1,
    costs: ModelCosts = COSTS,
    memory_gib: float | None = None,
    memory: DryMemory | None = None,
    **settings: Any,
) -> tuple[DryRunResult, int]:
    """The result of a run, and the hits of an ideal cache for the same order of requests. memory: None: bounded by
    `memory_gib`."""
    ideal, held = IdealPrefix(), 0

    def on_submit(asked: RecordedTurn) -> None:
        nonlocal held
        held += ideal.match_and_insert(asked.prompt, asked.output)

    asked_for = {"max_running": 8, "num_drafted": 3, "prefill_budget": 512, "hold_seconds": 5.0, "seed": 0} | settings
    if memory is None:
        memory = DryMemory.bounded(
            memory_gib, costs=costs, max_running=asked_for["max_running"], num_drafted=asked_for["num_drafted"]
        )
    run = DryRun(costs=costs, memory=memory, on_submit=on_submit, **asked_for)
    reached = run.run(iter([(name, iter(turns)) for name, turns in sessions]), concurrency)
    assert reached.cached_tokens <= held, "no cache exceeds the ideal one"
    assert reached.cached_tokens == sum(turn.cached_tokens for turn in reached.ended)
    assert reached.num_requests == sum(len(turns) for _, turns in sessions)
    assert reached.prompt_tokens == sum(len(one.prompt) for _, turns in sessions for one in turns)
    return reached, held


def made_turn(
    prompt: Sequence[int], output: Sequence[int], points: Sequence[tuple[int, CheckpointKind]] = (), delay: float = 0.0
) -> RecordedTurn:
    breakpoints = [Breakpoint(offset, kind) for offset, kind in points]
    return RecordedTurn(
        prompt=array("i", prompt), output=array("i", output), breakpoints=breakpoints, delay_seconds=delay
    )


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 48) for _ in range(count)]


def conversation(
    rng: random.Random, opening: list[int], num_turns: int, *, rewrites: float = 0.0
) -> list[RecordedTurn]:
    """Turns that mostly continue each other; `rewrites`: the share of turns whose template changes the last tool
    loop."""
    turns: list[RecordedTurn] = []
    history, query_end = list(opening), len(opening)
    for index in range(num_turns):
        if index and rng.random() < rewrites:
            del history[query_end:]
        history += words(rng, rng.randrange(5, 150))
        if index == 0 or rng.random() < 0.4:
            query_end = len(history)
        output = words(rng, rng.randrange(1, 60))
        turns.append(made_turn([*history, 1, 2, 3], output, [(len(opening), SYSTEM), (query_end, USER)]))
        history += [1, 2, 3, *output]
    return turns


def test_an_append_only_session_misses_less_than_a_block_a_request() -> None:
    """Turn n+1 resumes at the last block boundary of turn n, whose last output token is not in the state."""
    for seed in range(10):
        rng = random.Random(seed)
        turns = conversation(rng, words(rng, 200), 12)
        reached, held = dry([("s", turns)])
        expected = [0] + [(len(one.prompt) + len(one.output) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for one in turns[:-1]]
        assert [turn.cached_tokens for turn in reached.ended] == expected, f"seed {seed}"
        assert held - reached.cached_tokens <= BLOCK_TOKENS * len(turns), f"seed {seed}"


@pytest.mark.parametrize("budget", [512, 8192, "auto"])
def test_a_fleet_computes_its_system_prompt_once(budget: int | str) -> None:
    """Even if one step computes all of it: requests wait for a prefix that is being computed."""
    rng = random.Random(1)
    shared = words(rng, 40 * BLOCK_TOKENS)
    sessions = [
        (f"s{number}", [made_turn([*shared, *words(rng, 50)], [5], [(len(shared), SYSTEM)])]) for number in range(12)
    ]
    for concurrency in (1, 4, 12):
        reached, held = dry(sessions, concurrency=concurrency, prefill_budget=budget)
        assert reached.cached_tokens == 11 * len(shared)
        assert held - reached.cached_tokens < 12 * BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_hits_equal_those_of_the_real_engine(seed: int) -> None:
    """The same turns through a real Engine, on a model that is scripted to generate the recorded outputs."""
    rng = random.Random(seed)
    shared = [words(rng, 330), words(rng, 100)]
    sessions = [(f"s{number}", conversation(rng, shared[number % 2], 5, rewrites=0.4)) for number in range(4)]
    model = ScriptedModel(max_context=4096)
    for _, turns in sessions:
        for one in turns:
            model.script(one.prompt, one.output)
    memory = MemoryPlan(num_rows=300, num_pages=600, max_length=4096)
    parts = build(
        model, config=EngineConfig(draft_tokens=3, max_running=8, prefill_budget=512), memory=memory, clock=lambda: 0.0
    )
    cached: list[int] = []
    with Engine(parts) as engine:
        for name, turns in sessions:
            for index, one in enumerate(turns):
                asked = Submit(
                    request_id=f"{name}/{index}",
                    prompt_ids=list(one.prompt),
                    sampling=SamplingParams(temperature=0.0, max_tokens=len(one.output)),
                    breakpoints=one.breakpoints,
                    session_id=name,
                )
                ids, finish = engine.generate(asked)
                assert ids == list(one.output), f"seed {seed}: the script was not followed"
                cached.append(finish.usage.cached_tokens)
    reached, _ = dry(sessions)
    assert [turn.cached_tokens for turn in reached.ended] == cached, f"seed {seed}"
    assert reached.prefill_tokens == parts.loop.metrics.prefill_tokens, f"seed {seed}"
    assert sum(cached) > 0


def small_costs() -> ModelCosts:
    """One MiB per row and one MiB per page, which makes budgets easy to compute."""
    return ModelCosts(
        name="small",
        row_bytes=2**20,
        kv_bytes_per_token=2**14,
        passes=((64, 64e-5), (6400, 64e-3)),
        steps=((1, 0.01), (8, 0.01)),
    )


@pytest.mark.parametrize("mebibytes", [50, 70, 100])
def test_a_tight_memory_budget_is_kept_and_costs_hits(mebibytes: int) -> None:
    rng = random.Random(2)
    sessions = [(f"s{number}", conversation(rng, words(rng, 300), 6)) for number in range(8)]
    loose, _ = dry(sessions, concurrency=6, costs=small_costs())
    reached, _ = dry(sessions, concurrency=6, costs=small_costs(), memory_gib=mebibytes / 1024, max_running=4)
    running_rows = 2 + 4 * 6
    cache = reached.cache
    assert cache["budget_bytes"] <= (mebibytes + running_rows) * 2**20
    assert cache["checkpoints_peak"] <= mebibytes
    assert cache["pages_peak"] < mebibytes
    assert cache["leases"] == 0
    assert reached.output_tokens == loose.output_tokens
    assert reached.cached_tokens <= loose.cached_tokens
    assert cache["checkpoints_evicted"] > 0


def grown(rng: random.Random) -> list[RecordedTurn]:
    """A tool loop that grows to 40 blocks."""
    history, turns = words(rng, 4 * BLOCK_TOKENS), []
    for _ in range(12):
        turns.append(made_turn(history, words(rng, 20), [(4 * BLOCK_TOKENS, USER)]))
        history = [*history, *turns[-1].output, *words(rng, 3 * BLOCK_TOKENS - 20)]
    return turns


def test_long_sessions_wait_for_pages_even_if_rows_are_free() -> None:
    """Rows and pages are two pools. All four sessions fit by the bytes of both, but the pages hold only one and a
    half."""
    rng = random.Random(4)
    sessions = [(f"s{number}", grown(rng)) for number in range(4)]
    memory = DryMemory.of_engine(MemoryPlan(num_rows=2 + 4 * 6 + 200, num_pages=60, max_length=59 * BLOCK_TOKENS))
    alone, together = (
        dry(sessions, concurrency=lanes, costs=small_costs(), memory=memory, max_running=4)[0] for lanes in (1, 4)
    )
    assert alone.preemptions == together.preemptions == 0
    assert together.prefill_tokens < 2 * alone.prefill_tokens, (
        "a preempted session recomputes its prefix once, not in every turn"
    )


def test_a_turn_that_cannot_fit_reports_the_memory_needed() -> None:
    rng = random.Random(3)
    big = [("big", [made_turn(words(rng, 1000), [1])])]
    with pytest.raises(
        ConfigError,
        match=r"memory=0\.01: a turn of session 'big' has 1001 tokens, whose keys and values alone need 0\.017 GiB",
    ):
        dry(big, costs=small_costs(), memory_gib=0.01)
    assert dry(big, costs=small_costs(), memory_gib=0.017)[0].num_requests == 1
    with pytest.raises(ConfigError, match=r"memory=0\.001: .*needs 0\.002 GiB"):
        dry(big, costs=small_costs(), memory_gib=0.001)


def test_waits_between_turns_change_only_the_clock() -> None:
    turns = [made_turn([1] * 100, [2]), made_turn([1] * 100, [2], delay=30.0), made_turn([1] * 100, [2], delay=12.0)]
    reached, _ = dry([("s", turns)])
    assert 42.0 < reached.virtual_seconds < 43.0
    again, _ = dry([("s", turns)])
    assert again == reached, "the same input gives the same result"


def test_costs_are_listed_by_name() -> None:
    with pytest.raises(ConfigError, match=r"dry_run='28b'.*27b") as caught:
        model_costs("28b")
    assert all(name in str(caught.value) for name in MODEL_COSTS)
    full, half = MODEL_COSTS["27b"], MODEL_COSTS["27b-bf16-state"]
    assert full.row_bytes - half.row_bytes == 48 * 48 * 128 * 128 * 2
    assert full.kv_bytes_per_token == 17 * 2 * 4 * 256 * 2


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two sessions with tools, and one with token runs."""
    prose = "Look for the parcel in every depot of the region and say where it was last seen. " * 12
    loop = [
        turn(system(prose), user("where is it?"), expect=called(("c1", "lookup", {"k": 1}))),
        turn(result("42 " * 300), expect=said("There.")),
        turn(user("and now?"), expect=said("Gone.")),
    ]
    sessions = [
        Session(session_id="a", turns=loop, toolset="desk"),
        Session(session_id="b", turns=loop, toolset="desk"),
        Session(
            session_id="c",
            turns=[runs(160, [1, 2, 3, 4, 5], block_size=32), runs(192, [1, 2, 3, 4, 5, 6], block_size=32)],
        ),
    ]
    path = tmp_path / "trace.jsonl"
    save(replay_file(*sessions, toolsets={"desk": [TOOL]}), path)
    return str(path)


def test_the_command_prints_the_hit_share(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["replay", trace, "--dry-run", "27b", "--json", str(out), "--concurrency", "1"]) == 0
    shown = capsys.readouterr().out
    written = json.loads(out.read_text())
    summary, rows = written["summary"], written["requests"]
    assert (summary["sessions"], summary["requests"], len(rows)) == (3, 8, 8)
    assert (summary["tokens_by"], summary["template"], summary["lanes"], summary["memory_gib"]) == (
        "the tokenizer of tiny-agent",
        "qwen35",
        1,
        None,
    )
    assert summary["costs"]["name"] == "27b"
    assert sum(row["prompt_tokens"] for row in rows) == summary["prompt_tokens"]
    assert sum(row["cached_tokens"] for row in rows) / summary["prompt_tokens"] == summary["hit_share"]
    assert 0.5 < summary["hit_share"] <= summary["ideal_hit_share"] < 1
    for text in (
        "27b",
        "by the tokenizer of tiny-agent",
        f"{summary['hit_share']:.2%}",
        f"{summary['ideal_hit_share']:.2%}",
        "no bound",
        "no forward pass",
    ):
        assert text in shown


def test_flags_shape_the_dry_run(trace: str, tmp_path: Path) -> None:
    def summary(*flags: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert main(["replay", trace, "--dry-run", "27b", "--json", str(out), *flags]) == 0
        result: dict[str, Any] = json.loads(out.read_text())["summary"]
        return result

    plain = summary()
    assert summary() == plain
    assert summary("--sessions", "1")["sessions"] == 1
    assert summary("--max-turns", "2")["requests"] == 6
    assert summary("--memory", "4")["memory_gib"] == 4
    assert summary("--concurrency", "2")["lanes"] == 2
    assert summary("--max-running", "3")["max_running"] == 3
    assert summary("--tool-delay", "zero")["virtual_seconds"] <= plain["virtual_seconds"]
    assert summary("--draft-tokens", "0")["virtual_seconds"] > plain["virtual_seconds"]
    assert summary("--template", "stable")["hit_share"] >= plain["hit_share"]
    assert summary("--prefill-budget", "64")["output_tokens"] == plain["output_tokens"]
    assert summary("--token-ids", "5:9")["prompt_tokens"] == plain["prompt_tokens"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--base-url", "http://localhost:1"],
        ["--html", "out.html"],
        ["--force-acceptance", "0.5"],
        ["--arrival", "trace"],
        ["--arrival", "poisson:3"],
        ["--history", "live"],
        ["--no-prefix-cache"],
        ["--draft-vocab", "64"],
        ["--draft-precision", "fp8"],
        ["--kv-dtype", "fp8"],
        ["--token-counts", "counts.json"],
        ["--no-overlap"],
        ["--no-graphs"],
        ["--allow-forced-output"],
        ["--random-weights"],
        ["--device", "cuda"],
        ["--dtype", "bfloat16"],
        ["--timeout", "5"],
        ["--memory", "inf"],
        ["--memory", "0.0001"],
        ["--json", "no/such/directory/out.json"],
        ["--model", "no/such/directory"],
    ],
    ids=" ".join,
)
def test_a_flag_without_effect_is_refused_by_name(
    flags: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, "--dry-run", "27b", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    name = flags[0].removeprefix("--").replace("-", "_")
    assert name in shown.err or flags[-1] in shown.err


def test_a_template_without_a_dry_run_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--template", "stable", "--model", "anything"]) == 2
    assert capsys.readouterr().err.startswith("agentspec: error: template='stable': is for --dry-run")


def test_a_session_with_a_world_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.jsonl"
    save(replay_file(Session(session_id="script", turns=[turn(user())]), live_session(ask(), name="played")), path)
    assert main(["replay", str(path), "--dry-run", "27b"]) == 2
    shown = capsys.readouterr().err
    assert "session 'played' has a world" in shown
    assert "a dry run has no model" in shown
    main(["replay", str(path), "--dry-run", "27b", "--sessions", "1"])
    assert "world" not in capsys.readouterr().err


def shared_data() -> Path:
    return Path(os.environ.get("AGENTSPEC_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@pytest.mark.parametrize(
    ("name", "flags", "requests", "computed", "encoder"),
    [
        ("tau_airline", [], 1381, 450, None),
        ("bfcl_multi_turn", [], 635, 230, None),
        (
            "miniswe_deepseek",
            ["--sessions", "8"],
            639,
            300,
            RegexPieces(),
        ),  # code and logs, which tiny-agent's vocabulary splits into too many tokens
    ],
)
def test_real_agents_are_within_0_7_points_of_the_ideal_hit_share(
    name: str,
    flags: list[str],
    requests: int,
    computed: int,
    encoder: Encoder | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """computed: maximum prompt tokens per request, as a measure of time. encoder: None for the bundled tokenizer."""
    file = shared_data() / f"{name}.replay.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"{file.name} is not here: set AGENTSPEC_SHARED_DATA to the folder of recorded sessions")
    out = tmp_path / "out.json"
    if encoder is not None:
        monkeypatch.setattr(dry_run_command, "find_encoder", lambda _: encoder)
    assert main(["replay", str(file), "--dry-run", "27b", "--json", str(out), *flags]) == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["tokens_by"] == (encoder.name if encoder is not None else "the tokenizer of tiny-agent")
    print(f"{name}: hit share {summary['hit_share']:.2%} of an ideal {summary['ideal_hit_share']:.2%}")
    assert summary["requests"] == requests
    assert 0 <= summary["ideal_hit_share"] - summary["hit_share"] <= 0.007
    assert summary["computed_tokens_per_request"] <= computed
    assert summary["preemptions"] == 0
