"""The simulated tools: results and effects of each action, validation of calls, and goals."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from agentspec.replay.simulator import Simulator, ToolError, calculate, changes, next_key
from agentspec.replay.world import Fails, Get, Goal, Table, World
from tests.replay.worlds import TOOLS, tool, world


def simulator(**options: Any) -> Simulator:
    return Simulator(world(**options), TOOLS)


def result(simulator: Simulator, name: str, /, **arguments: Any) -> Any:
    outcome = simulator.call(name, json.dumps(arguments))
    assert outcome.problem is None, outcome.problem
    return json.loads(outcome.text)


VALID: list[tuple[str, str, dict[str, Any], Any]] = [
    ("get", "get_order", {"order_id": "A-098"}, {"order_id": "A-098", "item": "Blue lamp", "status": "open"}),
    (
        "get without regard to case",
        "get_order",
        {"order_id": "a-098"},
        {"order_id": "A-098", "item": "Blue lamp", "status": "open"},
    ),
    ("get what is not there", "get_order", {"order_id": "B-1"}, {"error": "not found: order_id 'B-1'"}),
    ("find all", "find_orders", {}, [{"order_id": "A-098"}, {"order_id": "A-099"}]),
    ("find equal", "find_orders", {"city": "OSLO"}, [{"order_id": "A-098"}]),
    ("find a part of a text", "find_orders", {"word": "LAMP"}, [{"order_id": "A-098"}]),
    ("find an item of a list", "find_orders", {"tag": "Gift"}, [{"order_id": "A-098"}]),
    ("a part of an item is none", "find_orders", {"tag": "gif"}, []),
    ("find by two", "find_orders", {"city": "Bergen", "word": "lamp"}, []),
    ("find the first", "find_orders", {"limit": 1}, [{"order_id": "A-098"}]),
    ("find none", "find_orders", {"limit": 0}, []),
    ("a limit below zero", "find_orders", {"limit": -1}, {"error": "limit: -1 must not be negative"}),
    ("a limit that is a whole float", "find_orders", {"limit": 1.0}, [{"order_id": "A-098"}]),
    (
        "create",
        "create_order",
        {"item": "pen", "count": 3},
        {"order_id": "A-100", "item": "pen", "count": 3, "status": "open"},
    ),
    ("create with its own key", "write_note", {"path": "a.md", "text": "x"}, {"path": "a.md", "text": "x"}),
    ("create what exists", "write_note", {"path": "plan.md", "text": "x"}, {"error": "path 'plan.md' exists already"}),
    ("update", "update_order", {"order_id": "A-098", "count": 9}, {"order_id": "A-098", "count": 9}),
    ("update a locked one", "update_order", {"order_id": "A-099", "count": 9}, {"error": "A-099 is sent already"}),
    ("update by a fixed value", "cancel_order", {"order_id": "A-098"}, {"status": "cancelled"}),
    ("delete", "delete_order", {"order_id": "a-098"}, {"deleted": "A-098"}),
    ("delete a locked one", "delete_order", {"order_id": "A-099"}, {"error": "A-099 is sent already"}),
    (
        "replace",
        "edit_note",
        {"path": "plan.md", "old": "milk", "new": "rice"},
        {"path": "plan.md", "text": "buy rice, buy tea"},
    ),
    (
        "replace what is twice there",
        "edit_note",
        {"path": "plan.md", "old": "buy", "new": "x"},
        {"error": "'buy' occurs 2 times, not once"},
    ),
    (
        "replace nothing",
        "edit_note",
        {"path": "plan.md", "old": "", "new": "x"},
        {"error": "'' occurs 0 times, not once"},
    ),
    ("calculate", "add_up", {"expression": "2 * (3 + 4)"}, {"result": 14}),
    ("calculate what can't be", "add_up", {"expression": "1 / 0"}, {"error": "division by zero"}),
]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"), [case[1:] for case in VALID], ids=[case[0] for case in VALID]
)
def test_valid_call_returns_a_result(name: str, arguments: dict[str, Any], expected: Any) -> None:
    assert result(simulator(), name, **arguments) == expected


INVALID: list[tuple[str, str, str, str, str]] = [
    ("no such tool", "fly", "{}", "unknown tool", "there is no tool named 'fly'"),
    ("no JSON", "get_order", '{"order_id": ', "invalid JSON", "the arguments are not valid JSON"),
    ("bottomless JSON", "get_order", "[" * 100_000, "invalid JSON", "the arguments are not valid JSON"),
    ("a list", "get_order", "[]", "no object", "the arguments must be an object"),
    ("unknown parameter", "get_order", '{"order_id": "A-098", "id": 3}', "unknown parameter", "unknown parameter 'id'"),
    ("missing parameter", "get_order", "{}", "schema: required", "'order_id' is a required property"),
    (
        "wrong type",
        "update_order",
        '{"order_id": "A-098", "count": "3"}',
        "schema: type",
        "count: '3' is not of type 'integer'",
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "problem"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID]
)
def test_invalid_call_returns_an_error_and_changes_nothing(name: str, arguments: str, kind: str, problem: str) -> None:
    tools = simulator()
    before = tools.snapshot()
    outcome = tools.call(name, arguments)
    assert (outcome.problem, outcome.kind, json.loads(outcome.text)) == (problem, kind, {"error": problem})
    assert tools.problem(name, arguments) == (kind, problem)
    assert tools.snapshot() == before


def test_calls_change_the_simulator_and_not_the_world_data() -> None:
    tools = simulator()
    assert result(tools, "create_order", item="pen", count=1)["order_id"] == "A-100"
    assert result(tools, "create_order", item="cap", count=1)["order_id"] == "A-101"
    result(tools, "update_order", order_id="A-100", count=7, city="Rome")
    result(tools, "delete_order", order_id="A-098")
    assert [record["order_id"] for record in result(tools, "find_orders")] == ["A-099", "A-100", "A-101"]
    assert result(tools, "find_orders", city="rome") == [{"order_id": "A-100"}]
    assert len(result(simulator(), "find_orders")) == 2


def test_failing_tool_fails_its_first_valid_calls_only() -> None:
    tools = simulator(fails=Fails(times=2, error="busy, try again"))
    tools.call("get_order", "{}")
    assert [result(tools, "get_order", order_id="A-099") for _ in range(2)] == [{"error": "busy, try again"}] * 2
    assert result(tools, "get_order", order_id="A-099")["item"] == "chair"


def test_call_must_match_exactly_one_record() -> None:
    people = Table(key="id", records=[{"id": 1, "name": "Ada"}, {"id": 2, "name": "ADA", "city": None}])
    by_name = tool("get_person", {"name": {"type": "string"}, "city": {"type": "string"}}, [])
    get = Get(table="people", match={"name": "name", "city": "city"})
    tools = Simulator(World(tables={"people": people}, actions={"get_person": get}), [by_name])
    assert result(tools, "get_person", name="ada") == {"error": "2 records match name 'ada'"}
    assert result(tools, "get_person") == {"error": "name or city must be given"}


def test_missing_column_contains_nothing() -> None:
    tools = simulator()
    result(tools, "create_order", item="pen", count=1)  # no tags
    assert result(tools, "find_orders", tag="none") == []


@pytest.mark.parametrize(
    ("expression", "value"), [("1 + 2", 3), ("7 / 2", 3.5), ("-(2 - 5) * 1.5", 4.5), ("0.1 + 0.2", 0.3), ("6 / 3", 2)]
)
def test_calculate_evaluates_arithmetic(expression: str, value: float) -> None:
    found = calculate(expression)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "expression",
    ["", "2 **", "2 ** 9", "x + 1", "print(1)", "1e999", "1e308 * 10", "True + 1", "(" * 150, "1 +" * 100, "2j"],
)
def test_calculate_rejects_other_expressions(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def test_next_key_increments_and_keeps_width() -> None:
    assert [next_key(key) for key in ("A-099", "T-9", "x1-0007")] == ["A-100", "T-10", "x1-0008"]
    with pytest.raises(ValueError, match="'A-'"):
        next_key("A-")


GOALS: list[tuple[str, Goal, list[str]]] = [
    ("everything", Goal(says=["a-098", "NINE"], changes={"orders": {"A-098": {"count": 9}}}, max_calls=1), []),
    ("words", Goal(says=["ten"], changes={"orders": {"A-098": {"count": 9}}}), ["the answer does not say 'ten'"]),
    ("calls", Goal(changes={"orders": {"A-098": {"count": 9}}}, max_calls=0), ["1 calls, at most 0 were allowed"]),
    ("value", Goal(changes={"orders": {"A-098": {"count": 8}}}), ["orders 'A-098': count is 9, not 8"]),
    ("nothing was to change", Goal(), ["orders 'A-098': count is 9, not 2"]),
    (
        "another record",
        Goal(changes={"orders": {"A-099": {"count": 9}}}),
        ["orders 'A-098': count is 9, not 2", "orders 'A-099': count is 4, not 9"],
    ),
    ("removed", Goal(changes={"orders": {"A-098": None}}), ["orders 'A-098' should not be there"]),
    (
        "created",
        Goal(changes={"orders": {"A-098": {"count": 9}}, "notes": {"new.md": {"path": "new.md"}}}),
        ["notes 'new.md' is not there"],
    ),
]


@pytest.mark.parametrize(("goal", "missed"), [case[1:] for case in GOALS], ids=[case[0] for case in GOALS])
def test_goal_lists_its_misses(goal: Goal, missed: list[str]) -> None:
    tools = simulator()
    before = tools.snapshot()
    result(tools, "update_order", order_id="A-098", count=9)
    assert tools.misses(goal, before, answer="A-098 is nine now.", num_calls=1) == missed


def test_goal_needs_a_text_answer_and_compares_with_its_own_turn() -> None:
    tools = simulator()
    result(tools, "delete_order", order_id="A-098")
    before = tools.snapshot()
    assert tools.misses(Goal(), before, answer=" \n", num_calls=0) == ["no answer in words"]
    assert tools.misses(Goal(says=["x"]), before, answer=None, num_calls=0) == []
    assert tools.misses(Goal(), before, answer="done", num_calls=0) == []


def test_changes_of_a_turn_satisfy_a_goal_made_of_them() -> None:
    tools = simulator()
    before = tools.snapshot()
    result(tools, "delete_order", order_id="A-098")
    result(tools, "create_order", item="pen", count=1)
    result(tools, "edit_note", path="plan.md", old="milk", new="rice")
    goal = Goal(changes=changes(before, tools.snapshot()))
    assert goal.changes["orders"] == {
        "A-098": None,
        "A-100": {"order_id": "A-100", "item": "pen", "count": 1, "status": "open"},
    }
    assert tools.misses(goal, before, answer="done", num_calls=3) == []


POOL: list[Any] = [
    "A-098",
    "a-099",
    "A-100",
    "plan.md",
    "",
    "buy",
    "x" * 300,
    "1 + 1",
    "((",
    0,
    -3,
    9**30,
    1.0,
    1.5,
    True,
    None,
    [],
    {},
    math.nan,
    math.inf,
]


@pytest.mark.parametrize("seed", range(40))
def test_any_call_text_returns_a_result(seed: int) -> None:
    rng = random.Random(seed)
    tools = simulator()
    for _ in range(40):
        function = rng.choice(TOOLS)["function"]
        arguments = {name: rng.choice(POOL) for name in function["parameters"]["properties"] if rng.random() < 0.85}
        outcome = tools.call(function["name"], json.dumps(arguments))
        value = json.loads(outcome.text)
        assert outcome.problem is None or value == {"error": outcome.problem}, f"seed {seed}"
