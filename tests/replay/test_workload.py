"""The files in workloads/ equal the output of their generators, and have the documented shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.commands.cli import main
from agentspec.replay.options import ReplayOptions
from agentspec.replay.run import make_plans
from agentspec.replay.schema import ReplayFile, load
from agentspec.replay.token_runs import TokenRuns
from workloads import generate, profiles

WORKLOADS = Path(__file__).parents[2] / "workloads"
FILE = WORKLOADS / "recorded.jsonl"


def workload() -> ReplayFile:
    return load(FILE)


def test_generator_reproduces_the_workload_file() -> None:
    assert generate.generate(generate.SEED) == FILE.read_text(encoding="utf-8"), "run python -m workloads.generate"
    assert generate.generate(generate.SEED + 1) != generate.generate(generate.SEED)


def test_workload_fits_a_small_machine() -> None:
    file = workload()
    turns = [turn for session in file.sessions for turn in session.turns]
    assert 16 <= len(file.sessions) <= 24
    assert all(3 <= len(session.turns) <= 8 for session in file.sessions)
    assert all(turn.max_tokens is not None and 32 <= turn.max_tokens <= 96 for turn in turns)
    assert sum(turn.max_tokens or 0 for turn in turns) < 6000
    assert all(turn.delay_ms <= 500 for turn in turns)
    for session in file.sessions:
        characters = len(json.dumps(file.tools(session)))
        for turn in session.turns:
            characters += sum(len(str(message.content)) for message in turn.messages or []) + 4 * (
                turn.recorded_output_tokens or 0
            )
        assert characters / 4 < 6000


def test_workload_is_varied_and_replayable_in_every_mode() -> None:
    file = workload()
    assert len(file.meta.toolsets) == 3
    assert len({session.group for session in file.sessions}) >= 8
    kinds = {turn.delay_kind for session in file.sessions for turn in session.turns}
    assert kinds == {"start", "tool", "user"}
    sizes = [
        len(str(message.content))
        for session in file.sessions
        for turn in session.turns
        for message in turn.messages or []
        if message.role == "tool"
    ]
    assert min(sizes) < 40
    assert max(sizes) > 2500
    for options in (ReplayOptions(history="recorded", output="length"), ReplayOptions(history="live")):
        assert len(make_plans(file, options)) == len(file.sessions)


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_generator_reproduces_the_profiles(name: str) -> None:
    assert profiles.generate(name) == (WORKLOADS / name).read_text(encoding="utf-8"), "run python -m workloads.profiles"
    for options in (ReplayOptions(output="forced"), ReplayOptions(output="length")):
        assert make_plans(load(WORKLOADS / name), options)


def test_fleet_profile_shape() -> None:
    """One session for each of 32 lanes: first 16,384 tokens, 4,096 of them shared, then eight turns of 800 after
    answers of 160."""
    sessions, runs = load(WORKLOADS / "profile_agents.jsonl").sessions, TokenRuns(0, 100, 2000)
    assert len(sessions) == 32
    prompts = [[runs.prompt(turn) for turn in session.turns] for session in sessions]
    assert all([len(prompt) for prompt in turns] == [16_384 + 960 * place for place in range(9)] for turns in prompts)
    assert all(
        turn.recorded_output_tokens == turn.max_tokens == 160 and turn.delay_ms == 0
        for session in sessions
        for turn in session.turns
    )
    assert len({turns[0][:4096].tobytes() for turns in prompts}) == 1
    assert len({turns[0][4096:4128].tobytes() for turns in prompts}) == 32
    for session, turns in zip(sessions, prompts, strict=True):
        for turn, prompt, following in zip(session.turns, turns, turns[1:], strict=False):
            said = prompt + runs.answer(turn)
            assert following[: len(said)] == said, "forced answers make a session append-only"


def dry_run(name: str, out: Path, *flags: str) -> list[dict[str, Any]]:
    assert main(["replay", str(WORKLOADS / name), "--dry-run", "4b", "--json", str(out), *flags]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["requests"]
    return rows


def test_agentic_profile_shape(tmp_path: Path) -> None:
    """First 50,000 tokens, then 800 per turn; the hit share is at least 98 % from the second turn on."""
    rows = dry_run("profile_agentic.jsonl", tmp_path / "out.json", "--sessions", "1")
    assert [row["prompt_tokens"] for row in rows] == [50_000 + 1000 * turn for turn in range(12)]
    assert all(row["cached_tokens"] >= 0.98 * row["prompt_tokens"] for row in rows[1:])
    second = dry_run(
        "profile_agentic.jsonl", tmp_path / "out.json", "--sessions", "2", "--max-turns", "1", "--concurrency", "1"
    )[1]
    assert second["cached_tokens"] == 0, (
        "nothing marks the end of what token runs share, so only a third session finds a checkpoint there"
    )


def test_short_chats_profile_shape(tmp_path: Path) -> None:
    rows = dry_run("profile_chat.jsonl", tmp_path / "out.json", "--concurrency", "4")
    assert 64 <= len(rows) <= 128
    assert max(row["prompt_tokens"] for row in rows) < 4000
    assert sum(row["cached_tokens"] for row in rows) > 0.85 * sum(row["prompt_tokens"] for row in rows)
