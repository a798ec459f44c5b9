"""Sessions of tiny-agent: gold trajectories reach their goals and follow from their context, and the held-out split is
disjoint."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import msgspec
import pytest

from agentspec.replay.simulator import Simulator
from agentspec.replay.world import Goal, World
from scripts.tiny_agent import catalog, tasks
from scripts.tiny_agent.domain import Example, Split
from scripts.tiny_agent.sessions import make, make_example, readable, replay_line

NUM = 2000
KINDS: list[tuple[Split, bool]] = [("train", False), ("held_out", False), ("held_out", True)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'unseen' if kind[1] else 'known'}")
def made(request: pytest.FixtureRequest) -> list[tuple[Example, list[str]]]:
    split, unseen = request.param
    return [make(7, index, split=split, unseen=unseen if split == "held_out" else None) for index in range(NUM)]


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def test_gold_trajectories_reach_their_goals(made: list[tuple[Example, list[str]]]) -> None:
    for example, names in made:
        simulator = Simulator(msgspec.convert(example.world, World), example.tools)
        for turn in example.turns:
            before, num_calls = simulator.snapshot(), 0
            results: list[str] = []
            for message in turn.messages:
                if message["role"] == "tool":
                    assert message["content"] == results.pop(0), example.session_id
                for call in calls_of(message):
                    outcome = simulator.call(call["name"], call["arguments"])
                    assert outcome.problem is None, (example.session_id, call, outcome.problem)
                    results.append(outcome.text)
                    num_calls += 1
            goal = msgspec.convert(turn.goal, Goal)
            assert not simulator.misses(goal, before, answer=turn.messages[-1]["content"], num_calls=num_calls), (
                example.session_id,
                turn,
            )
            assert goal.max_calls is not None, example.session_id
            assert goal.max_calls > 0 or num_calls == 0, example.session_id
            if set(names) <= {"small_talk", "refusal"}:
                assert goal.max_calls == 0, example.session_id


def test_messages_have_the_shape_that_templates_expect(made: list[tuple[Example, list[str]]]) -> None:
    for example, _ in made:
        assert example.turns, example.session_id
        assert 1 <= len(example.tools) <= 16, example.session_id
        for turn in example.turns:
            assert turn.user.strip() == turn.user != "", example.session_id
            assert not re.search(r"[{}]|\(\w+\|", turn.user), (example.session_id, turn.user)
            *_, last = turn.messages
            assert last["content"], example.session_id
            assert "tool_calls" not in last, example.session_id
            for message in turn.messages:
                if message["role"] == "assistant":
                    assert ("reasoning_content" in message) == example.thinking, example.session_id
                    assert bool(message["content"]) != bool(message.get("tool_calls")), example.session_id


def test_values_come_from_the_context(made: list[tuple[Example, list[str]]]) -> None:
    for example, _ in made:
        context = json.dumps(example.tools, ensure_ascii=False) + (example.system or "")
        for turn in example.turns:
            context += "\n" + turn.user
            for message in turn.messages:
                for call in calls_of(message):
                    for value in words_of(json.loads(call["arguments"])):
                        assert value in unescaped(context), (example.session_id, value)
                if message["role"] == "tool":
                    context += "\n" + message["content"]
                for value in re.findall(
                    r"[\w./+-]*\d[\w./+-]*", message["content"] if message["role"] == "assistant" else ""
                ):
                    known = (
                        value.rstrip(".") in unescaped(context)
                        or is_count(message["content"], value)
                        or "capital" in message["content"]
                    )
                    assert known or turn.goal["max_calls"] == 0, (example.session_id, value, message)


def words_of(arguments: dict[str, Any]) -> list[str]:
    """Parts of a call's arguments that must be copied from the context."""
    found: list[str] = []
    for value in arguments.values():
        if isinstance(value, list):
            found += value
        elif isinstance(value, str):
            found += (
                re.split(r" ?[-+*/()]+ ?", value)
                if re.fullmatch(r"[\d. +*/()-]+", value)
                else re.split(r"\n|: | = | is |\.$", value)
            )
        elif not isinstance(value, bool):
            found.append(str(value))
    return [word.strip('"') for word in found]


def unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"')


def is_count(answer: str, value: str) -> bool:
    return re.search(rf"^(I found|There (are|is)) {re.escape(value)} ", answer) is not None


def test_every_task_occurs(made: list[tuple[Example, list[str]]]) -> None:
    posed = Counter(name for _, names in made for name in names)
    missing = (tasks.TASKS.keys() | tasks.FOLLOWING.keys() | {"try_again"}) - posed.keys()
    without_calculator = made[0][0].unseen
    assert missing <= ({"calculation", "sum_of_two", "sum_of_found"} if without_calculator else set())


def test_the_split_determines_the_domains(made: list[tuple[Example, list[str]]]) -> None:
    def names(templates: dict[str, Any]) -> set[str]:
        return {operation.name for template in templates.values() for operation in template.operations}

    known, unseen = names(catalog.TEMPLATES), names(catalog.UNSEEN)
    for example, _ in made:
        tools = {tool["function"]["name"] for tool in example.tools}
        if example.session_id.startswith("held_out"):
            assert not tools & known if example.unseen else tools <= known, example.session_id
        else:
            assert not tools & unseen, example.session_id


@pytest.mark.parametrize(("split", "unseen"), KINDS)
def test_a_session_depends_only_on_its_seed_and_index(split: Split, unseen: bool) -> None:
    kind = unseen if split == "held_out" else None
    texts = [readable(make_example(3, index, split=split, unseen=kind)) for index in range(20)]
    again = [readable(make_example(3, index, split=split, unseen=kind)) for index in reversed(range(20))]
    assert texts == again[::-1]
    assert len(set(texts)) == 20


def test_training_has_no_unseen_sessions() -> None:
    with pytest.raises(ValueError, match="unseen"):
        make_example(0, 0, split="train", unseen=True)


def test_a_replay_line_is_json_with_goals_and_the_world() -> None:
    for index in range(50):
        example = make_example(1, index, split="held_out")
        line = json.loads(json.dumps(replay_line(example)))
        assert line["group"] == ("unseen" if example.unseen else "known")
        assert [turn["messages"][-1]["content"] for turn in line["turns"]] == [turn.user for turn in example.turns]
        assert msgspec.convert(line["world"], World).actions.keys() == {
            tool["function"]["name"] for tool in line["tools"]
        }
        for turn in line["turns"]:
            msgspec.convert(turn["goal"], Goal)
            assert turn["extra"] == {"chat_template_kwargs": {"enable_thinking": example.thinking}}
