"""workloads/recorded.jsonl is what its generator writes, and as small and varied as a script for every mode should be."""

from __future__ import annotations

import json
from pathlib import Path

from agentspec.replay.options import ReplayOptions
from agentspec.replay.run import make_plans
from agentspec.replay.schema import ReplayFile, load
from workloads import generate

FILE = Path(__file__).parents[2] / "workloads" / "recorded.jsonl"


def workload() -> ReplayFile:
    return load(FILE)


def test_the_generator_writes_the_file() -> None:
    assert generate.generate(generate.SEED) == FILE.read_text(encoding="utf-8"), "run python -m workloads.generate"
    assert generate.generate(generate.SEED + 1) != generate.generate(generate.SEED)


def test_its_size_suits_a_small_machine() -> None:
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
            characters += sum(len(str(message.content)) for message in turn.messages or []) + 4 * (turn.recorded_output_tokens or 0)
        assert characters / 4 < 6000


def test_it_is_varied_and_can_be_replayed_in_every_mode() -> None:
    file = workload()
    assert len(file.meta.toolsets) == 3
    assert len({session.group for session in file.sessions}) >= 8
    kinds = {turn.delay_kind for session in file.sessions for turn in session.turns}
    assert kinds == {"start", "tool", "user"}
    sizes = [
        len(str(message.content)) for session in file.sessions for turn in session.turns for message in turn.messages or [] if message.role == "tool"
    ]
    assert min(sizes) < 40
    assert max(sizes) > 2500
    for options in (ReplayOptions(history="recorded", output="length"), ReplayOptions(history="live")):
        assert len(make_plans(file, options)) == len(file.sessions)
