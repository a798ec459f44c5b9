"""workloads/agentic.jsonl equals the output of its command: live held-out sessions of every shape, few and short enough
for `make replay`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from agentspec.replay.options import ReplayOptions
from agentspec.replay.run import make_plans
from agentspec.replay.schema import ReplayFile, load
from scripts.tiny_agent import evaluate, workload
from scripts.tiny_agent.domain import Example, Turn
from tests.tiny_agent.examples import EXAMPLES


@pytest.fixture(scope="module")
def chosen() -> list[Example]:
    return workload.choose(workload.SEED)


@pytest.fixture(scope="module")
def file() -> ReplayFile:
    return load(workload.OUT)


def test_the_command_writes_the_file() -> None:
    text = workload.OUT.read_text(encoding="utf-8")
    assert workload.generate(workload.SEED) == text, "run python -m scripts.tiny_agent.workload"
    assert workload.generate(workload.SEED + 1) != text


def test_every_session_is_live_and_held_out(file: ReplayFile) -> None:
    assert workload.SEED != evaluate.SEED
    assert Counter(session.group for session in file.sessions) == {"known": 16, "unseen": 4}
    for session in file.sessions:
        assert session.session_id.startswith("held_out-")
        assert session.world is not None
        assert all(turn.goal is not None for turn in session.turns)
    assert len(make_plans(file, ReplayOptions())) == len(file.sessions)


def test_half_of_each_group_thinks_and_every_shape_occurs(chosen: list[Example]) -> None:
    assert Counter((example.unseen, example.thinking) for example in chosen) == {
        (u, t): 2 if u else 8 for u in (True, False) for t in (True, False)
    }
    found = Counter(shape for example in chosen for shape in workload.shapes(example))
    assert found["long"] == 2
    assert min(found["parallel"], found["row"], found["error"]) >= 4
    assert all(workload.shapes(example) for example in chosen)


def test_users_wait_before_each_turn_except_the_first(file: ReplayFile) -> None:
    for session in file.sessions:
        first, *others = session.turns
        assert (first.delay_ms, first.delay_kind) == (0, "start")
        assert all(120 <= turn.delay_ms < 420 and turn.delay_kind == "user" for turn in others), session.session_id
    assert len({turn.delay_ms for session in file.sessions for turn in session.turns}) > 10


def test_sessions_are_taken_in_the_order_of_their_indices(chosen: list[Example]) -> None:
    indices = [int(example.session_id.rpartition("-")[2]) for example in chosen]
    assert indices == sorted(indices)
    taken = {example.session_id for example in chosen}
    assert len(taken) == len(chosen)


def test_shapes_of_a_session() -> None:
    plain = EXAMPLES[0]
    assert workload.shapes(plain) == ["parallel", "row", "error", "any"]
    assert workload.shapes(replace(plain, turns=plain.turns[1:])) == ["row", "error", "any"]
    thanks, padded = plain.turns[-1], [Turn(user="x" * workload.LONG[0], goal={}, messages=plain.turns[-1].messages)]
    assert workload.shapes(replace(plain, turns=[thanks, thanks])) == ["any"]
    assert workload.shapes(replace(plain, turns=[thanks])) == [], "a session of one turn is too short"
    assert workload.shapes(replace(plain, turns=[thanks] * 6)) == []
    assert workload.shapes(replace(plain, turns=padded)) == ["long"]
    assert workload.shapes(replace(plain, turns=padded * 2)) == [], "neither long nor short"
    wordy = Turn(user="Hi", goal={}, messages=[{"role": "assistant", "content": "x" * workload.SHORT_ANSWERS.stop}])
    assert workload.shapes(replace(plain, turns=[wordy, thanks])) == []
