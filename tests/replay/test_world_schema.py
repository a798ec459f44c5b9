"""Sessions with a world in a replay file: lossless round trips, and errors with line and field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import load, save
from agentspec.replay.world import Fails, Goal
from tests.replay.builders import TOOL, replay_file, write_lines
from tests.replay.test_schema import changed, put
from tests.replay.worlds import ask, live_session, world

GOAL = Goal(says=["open"], changes={"orders": {"A-098": {"count": 9}, "A-099": None}}, max_calls=3)
LIVE: dict[str, Any] = msgspec.to_builtins(
    live_session(ask(goal=GOAL, max_requests=5), ask(), of=world(fails=Fails(times=1, error="busy")))
)


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(line: Any) -> None:
        *keys, last = path
        for key in keys:
            line = line[key]
        del line[last]

    return change


def test_world_survives_a_round_trip(tmp_path: Path) -> None:
    file = load(write_lines(tmp_path / "in.jsonl", [LIVE]))
    [session] = file.sessions
    assert (session.world, session.turns[0].goal, session.turns[0].max_requests) == (
        world(fails=Fails(times=1, error="busy")),
        GOAL,
        5,
    )
    assert (session.turns[1].goal, session.turns[1].max_requests) == (None, 8)
    save(file, tmp_path / "out.jsonl")
    assert load(tmp_path / "out.jsonl").sessions == file.sessions
    assert b'"do":"calculate"' in (tmp_path / "out.jsonl").read_bytes()


def test_documentation_example_is_a_valid_session(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    [example] = [block for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if '"world"' in block]
    [session] = load(write_lines(tmp_path / "a.jsonl", [json.loads(example)])).sessions
    assert session.world is not None


def test_x_notes_are_ignored_and_x_columns_kept_in_a_world(tmp_path: Path) -> None:
    noted = changed(LIVE, lambda line: (put("world", "x_seed", 3)(line), put("turns", 0, "goal", "x_gold", [])(line)))
    noted["world"]["tables"]["notes"]["records"][0]["x_axis"] = 1
    [session] = load(write_lines(tmp_path / "a.jsonl", [noted])).sessions
    assert session.world is not None
    assert session.world.tables["notes"].records[0]["x_axis"] == 1


def test_world_may_use_a_toolset(tmp_path: Path) -> None:
    line = changed(LIVE, lambda line: line.update(toolset="desk"))
    meta = {"type": "meta", "schema": "agentspec.replay/1", "toolsets": {"desk": line.pop("tools")}}
    assert load(write_lines(tmp_path / "a.jsonl", [meta, line])).sessions[0].world is not None


def action(name: str, *path: Any) -> Callable[[dict[str, Any]], None]:
    return put("world", "actions", name, *path)


SCRIPT: dict[str, Any] = {
    "type": "session",
    "session_id": "s",
    "turns": [{"messages": [{"role": "user", "content": "hi"}]}],
}
TOOL_MESSAGE = {"role": "tool", "content": "x"}
ANSWER = {"message": {"role": "assistant", "content": "x"}}
PARAMETERS = ("tools", 0, "function", "parameters")

BAD: list[tuple[str, Any, str]] = [
    ("no tools", drop("tools"), "world: needs tools"),
    ("a tool twice", lambda line: line["tools"].append(line["tools"][0]), "tools: 'get_order' occurs twice"),
    ("a tool without action", lambda line: line["tools"].append(TOOL), "world.actions: tool 'lookup' has none"),
    ("an action without tool", drop("tools", 8), "world.actions.add_up: there is no such tool"),
    ("no schema", put(*PARAMETERS, "type", "thing"), "tools: 'get_order': parameters: 'thing'"),
    ("a schema that refers", put(*PARAMETERS, "properties", "order_id", {"$ref": "http://x"}), "$ref"),
    ("properties that are none", put(*PARAMETERS, "properties", 3), "is no JSON schema"),
    ("an unknown action", action("add_up", {"do": "fly"}), "'fly'"),
    ("an unknown key of an action", action("add_up", "table", "orders"), "`table`"),
    (
        "no record key",
        drop("world", "tables", "orders", "records", 1, "order_id"),
        "world.tables.orders.records[1].order_id",
    ),
    (
        "same key twice",
        put("world", "tables", "orders", "records", 1, "order_id", "A-098"),
        "world.tables.orders.records[1].order_id: 'A-098'",
    ),
    (
        "a key that does not count",
        put("world", "tables", "orders", "next_key", "A-"),
        "world.tables.orders.next_key: key 'A-'",
    ),
    (
        "an unknown table",
        action("get_order", "table", "shops"),
        "world.actions.get_order.table: there is no table 'shops'",
    ),
    (
        "an unknown parameter",
        action("get_order", "match", {"id": "order_id"}),
        "world.actions.get_order.match: the tool has no parameter 'id'",
    ),
    ("nothing to match", action("get_order", "match", {}), "world.actions.get_order.match: needs"),
    (
        "an unknown column",
        action("get_order", "match", {"order_id": "id"}),
        "world.actions.get_order.match.order_id: no record has a column 'id'",
    ),
    (
        "an unknown column shown",
        action("get_order", "show", ["colour"]),
        "world.actions.get_order.show: no record has a column 'colour'",
    ),
    (
        "no column to search",
        action("find_orders", "contains", {"tag": "tag"}),
        "world.actions.find_orders.contains.tag",
    ),
    (
        "a limit that is text",
        action("find_orders", "limit", "city"),
        "world.actions.find_orders.limit: parameter 'city' must have type integer",
    ),
    (
        "an unknown set",
        action("create_order", "set", {"name": "item"}),
        "world.actions.create_order.set: the tool has no parameter 'name'",
    ),
    (
        "no key for what is created",
        drop("world", "tables", "orders", "next_key"),
        "world.actions.create_order.set: nothing gives column 'order_id'",
    ),
    (
        "a key that is updated",
        action("update_order", "set", {"city": "order_id"}),
        "world.actions.update_order.set: column 'order_id'",
    ),
    (
        "a key that is fixed",
        action("cancel_order", "fixed", {"order_id": "x"}),
        "world.actions.cancel_order.fixed: column 'order_id'",
    ),
    (
        "an unknown lock",
        action("delete_order", "locked", "column", "state"),
        "world.actions.delete_order.locked.column",
    ),
    (
        "an error that can't be filled in",
        action("delete_order", "locked", "error", "{id} is sent"),
        "world.actions.delete_order.locked.error",
    ),
    (
        "a key that is edited",
        action("edit_note", "column", "path"),
        "world.actions.edit_note.column: 'path' is the key",
    ),
    (
        "an edit of nothing",
        action("edit_note", "old", "text"),
        "world.actions.edit_note.old: the tool has no parameter 'text'",
    ),
    (
        "an edit that may be missing",
        put("tools", 6, "function", "parameters", "required", ["path"]),
        "world.actions.edit_note.old: parameter 'old'",
    ),
    (
        "an expression of a number",
        put("tools", 8, "function", "parameters", "properties", "expression", {}),
        "world.actions.add_up.expression",
    ),
    ("a failure that never comes", action("get_order", "fails", "times", 0), "world.actions.get_order.fails.times: 0"),
    ("a tool message", lambda line: line["turns"][1]["messages"].insert(0, TOOL_MESSAGE), "turns[1].messages[0].role"),
    ("no user", put("turns", 0, "messages", [{"role": "system", "content": "x"}]), "turns[0].messages: the last one"),
    ("a recorded answer", put("turns", 0, "expect", ANSWER), "turns[0].expect"),
    (
        "token runs",
        lambda line: line.update(turns=[{"input_length": 4, "block_size": 8, "hash_ids": [1]}]),
        "turns[0]: a session with a world",
    ),
    ("no requests", put("turns", 1, "max_requests", 0), "turns[1].max_requests: 0"),
    (
        "a goal elsewhere",
        put("turns", 0, "goal", "changes", {"shops": {}}),
        "turns[0].goal.changes: there is no table 'shops'",
    ),
    ("fewer calls than none", put("turns", 0, "goal", "max_calls", -1), "turns[0].goal.max_calls: -1"),
    ("a word that is none", put("turns", 0, "goal", "says", [" "]), "turns[0].goal.says[0]"),
    ("an unknown key of a goal", put("turns", 0, "goal", "words", []), "`words`"),
]


@pytest.mark.parametrize(("change", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_invalid_file_error_names_line_and_field(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [changed(LIVE, change)])
    with pytest.raises(ReplayFileError) as caught:
        load(path)
    assert (caught.value.path, caught.value.line) == (path, 1)
    assert reason in caught.value.reason, caught.value.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("turns", 0, "goal", {}), "turns[0].goal: only"),
        (put("turns", 0, "max_requests", 3), "turns[0].max_requests: only"),
    ],
    ids=["goal", "max_requests"],
)
def test_goals_require_a_world(tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    with pytest.raises(ReplayFileError) as caught:
        load(write_lines(tmp_path / "bad.jsonl", [changed(SCRIPT, change)]))
    assert reason in caught.value.reason


def test_world_built_in_code_is_checked_like_a_loaded_one(tmp_path: Path) -> None:
    file = replay_file(live_session(ask(goal=GOAL)))
    save(file, tmp_path / "a.jsonl")
    assert load(tmp_path / "a.jsonl").sessions == file.sessions
