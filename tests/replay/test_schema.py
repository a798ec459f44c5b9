"""The file format: valid and invalid files, error messages, and lossless saving."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import load, save
from tests.replay.builders import TOOL, write_lines

META: dict[str, Any] = {
    "type": "meta",
    "schema": "agentspec.replay/1",
    "toolsets": {"desk": [TOOL]},
    "defaults": {"temperature": 0},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
SESSION: dict[str, Any] = {
    "type": "session",
    "session_id": "one",
    "toolset": "desk",
    "turns": [
        {
            "messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}],
            "expect": {
                "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
                "usage": {"completion_tokens": 7},
            },
        },
        {
            "messages": [{"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"}],
            "delay_ms": 20,
            "delay_kind": "tool",
        },
    ],
}
RUNS: dict[str, Any] = {
    "type": "session",
    "session_id": "two",
    "turns": [{"input_length": 20, "block_size": 8, "hash_ids": [0, 1, 2]}],
}


def changed(line: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    line = copy.deepcopy(line)
    change(line)
    return line


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets the value at a path of keys; the last argument is the value."""

    def change(line: Any) -> None:
        *keys, last, value = path
        for key in keys:
            line = line[key]
        line[last] = value

    return change


def test_loads_meta_messages_and_token_runs(tmp_path: Path) -> None:
    file = load(write_lines(tmp_path / "a.jsonl", [META, SESSION, "", RUNS]))
    assert [session.session_id for session in file.sessions] == ["one", "two"]
    assert file.tools(file.sessions[0]) == [TOOL]
    assert file.tools(file.sessions[1]) == []
    assert file.sessions[0].turns[0].recorded_output_tokens == 7
    assert file.sessions[1].turns[0].messages is None


def test_notes_of_other_tools_are_ignored(tmp_path: Path) -> None:
    noted = changed(
        SESSION, lambda line: (put("x_note", {"any": 1})(line), put("turns", 0, "expect", "x_score", 3)(line))
    )
    assert load(write_lines(tmp_path / "a.jsonl", [META | {"x_tool": "t"}, noted])) == load(
        write_lines(tmp_path / "a.jsonl", [META, SESSION])
    )


def test_x_keys_in_tools_and_arguments_are_kept(tmp_path: Path) -> None:
    tool = copy.deepcopy(TOOL)
    tool["function"]["parameters"]["properties"] = {"x_axis": {"type": "string"}}  # type: ignore[index]
    file = load(write_lines(tmp_path / "a.jsonl", [META | {"toolsets": {"desk": [tool]}}, SESSION]))
    assert "x_axis" in file.tools(file.sessions[0])[0]["function"]["parameters"]["properties"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_saving_keeps_everything_and_is_deterministic(tmp_path: Path, name: str) -> None:
    file = load(write_lines(tmp_path / "in.jsonl", [META, SESSION, RUNS]))
    save(file, tmp_path / name)
    again = load(tmp_path / name)
    assert (again.meta, again.sessions) == (file.meta, file.sessions)
    first = (tmp_path / name).read_bytes()
    save(again, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_gzip_is_detected_by_content(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_bytes(gzip.compress(json.dumps(RUNS).encode()))
    assert len(load(tmp_path / "plain.jsonl").sessions) == 1


BAD: list[tuple[str, list[Any], int, str]] = [
    ("malformed JSON", [META, "{"], 2, "truncated"),
    ("a line that is no object", [[1]], 1, "Expected `object`"),
    ("unknown type", [{"type": "other"}], 1, "Invalid value 'other'"),
    ("unknown schema", [META | {"schema": "agentspec.replay/2"}], 1, "$.schema"),
    ("unknown meta key", [META | {"author": "me"}], 1, "author"),
    ("second meta", [META, META], 2, "type"),
    ("no sessions", [META], 1, "no sessions"),
    ("unknown session key", [META, SESSION | {"colour": 1}], 2, "colour"),
    ("unknown turn key", [META, changed(SESSION, put("turns", 1, "delay", 3))], 2, "`delay` - at `$.turns[1]`"),
    ("unknown message key", [META, changed(SESSION, put("turns", 0, "messages", 0, "text", "x"))], 2, "`text`"),
    ("unknown expect key", [META, changed(SESSION, put("turns", 0, "expect", "tokens", 4))], 2, "`tokens`"),
    ("wrong type", [META, changed(SESSION, put("turns", 1, "delay_ms", "soon"))], 2, "delay_ms"),
    ("unknown delay kind", [META, changed(SESSION, put("turns", 1, "delay_kind", "lunch"))], 2, "delay_kind"),
    ("unknown role", [META, changed(SESSION, put("turns", 0, "messages", 0, "role", "judge"))], 2, "role"),
    (
        "assistant among the new messages",
        [META, changed(SESSION, put("turns", 0, "messages", 1, "role", "assistant"))],
        2,
        "role",
    ),
    (
        "image part",
        [META, changed(SESSION, put("turns", 1, "messages", 0, "content", [{"type": "image_url"}]))],
        2,
        "image_url",
    ),
    ("negative delay", [META, changed(SESSION, put("turns", 1, "delay_ms", -1))], 2, "turns[1].delay_ms: -1"),
    ("negative start", [META, SESSION | {"start_ms": -5}], 2, "start_ms"),
    ("no turns", [META, SESSION | {"turns": []}], 2, "turns"),
    ("empty id", [META, SESSION | {"session_id": ""}], 2, "session_id"),
    ("same id twice", [META, SESSION, SESSION], 3, "'one' occurs twice"),
    ("unknown toolset", [SESSION], 1, "toolset: 'desk'"),
    ("tools beside a toolset", [META, SESSION | {"tools": [TOOL]}], 2, "tools"),
    ("a tool that is none", [META, changed(SESSION, put("tools", [{"name": "x"}])) | {"toolset": None}], 2, "tools[0]"),
    ("no messages", [META, changed(SESSION, put("turns", 1, "messages", []))], 2, "turns[1].messages"),
    ("no prompt", [META, changed(SESSION, put("turns", 1, {"delay_ms": 1}))], 2, "turns[1]: needs messages"),
    ("two prompts", [META, changed(SESSION, put("turns", 1, "input_length", 4))], 2, "exactly one"),
    ("mixed prompt forms", [META, changed(SESSION, put("turns", 1, RUNS["turns"][0]))], 2, "mixed"),
    ("half a token run", [changed(RUNS, put("turns", 0, {"input_length": 4, "block_size": 8}))], 1, "hash_ids"),
    ("too few hashes", [changed(RUNS, put("turns", 0, "hash_ids", [1]))], 1, "makes 3 blocks"),
    ("negative hash", [changed(RUNS, put("turns", 0, "hash_ids", [1, 2, -3]))], 1, "hash_ids"),
    (
        "late system message",
        [META, changed(SESSION, put("turns", 1, "messages", 0, {"role": "system", "content": "x"}))],
        2,
        "turns[1].messages[0].role",
    ),
    (
        "tool result first",
        [META, changed(SESSION, put("turns", 0, "messages", 1, {"role": "tool", "content": "x"}))],
        2,
        "turns[0].messages[1].role",
    ),
    (
        "call id of a user",
        [META, changed(SESSION, put("turns", 0, "messages", 1, "tool_call_id", "c"))],
        2,
        "tool_call_id",
    ),
    (
        "arguments that are an object",
        [META, changed(SESSION, put("turns", 0, "expect", "message", "tool_calls", 0, "function", "arguments", {}))],
        2,
        "arguments",
    ),
    ("no output", [META, changed(SESSION, put("turns", 0, "expect", "output_tokens", 0))], 2, "output_tokens"),
    ("no room", [META, changed(SESSION, put("turns", 0, "max_tokens", 0))], 2, "max_tokens"),
    (
        "two limits",
        [META, changed(SESSION, lambda line: line["turns"][0].update(max_tokens=4, extra={"max_tokens": 5}))],
        2,
        "max_tokens",
    ),
    (
        "client's field in extra",
        [META, changed(SESSION, put("turns", 0, "extra", {"stream": False}))],
        2,
        "extra: stream",
    ),
    ("client's field in defaults", [META | {"defaults": {"model": "m"}}], 1, "defaults: model"),
]


@pytest.mark.parametrize(("lines", "line", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_invalid_file_error_names_line_and_field(tmp_path: Path, lines: list[Any], line: int, reason: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", lines)
    with pytest.raises(ReplayFileError) as caught:
        load(path)
    assert caught.value.path == path
    assert caught.value.line == line
    assert reason in caught.value.reason, caught.value.reason


def test_missing_file_error(tmp_path: Path) -> None:
    with pytest.raises(ReplayFileError, match="No such file"):
        load(tmp_path / "none.jsonl")


def test_truncated_gzip_file_error(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(RUNS).encode())[:-12])
    with pytest.raises(ReplayFileError, match="can't be read"):
        load(tmp_path / "cut.gz")
