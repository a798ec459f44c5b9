"""Other tools' traces become valid replay files, or errors that name line and field."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ConfigError, ReplayFileError
from agentspec.replay import importers
from agentspec.replay.schema import load
from tests.replay.builders import TOOL, write_lines

CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it is 42"},
    {"role": "user", "content": "sure?"},
]


def request(timestamp: int, input_length: int, output_length: int, hash_ids: list[int]) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


def convert(tmp_path: Path, name: str, lines: list[Any], *flags: str) -> Any:
    """Convert through the command, which also checks the written file."""
    parser = argparse.ArgumentParser()
    importers.add_arguments(parser)
    out = tmp_path / "out.jsonl.gz"
    assert importers.main(parser.parse_args([name, write_lines(tmp_path / "in.jsonl", lines), str(out), *flags])) == 0
    return load(out)


def test_mooncake_requests_become_sessions_in_order_of_arrival(tmp_path: Path) -> None:
    file = convert(tmp_path, "mooncake", [request(900, 600, 7, [1, 2]), request(300, 512, 9, [1])])
    assert [(session.session_id, session.start_ms) for session in file.sessions] == [
        ("request-0", 300.0),
        ("request-1", 900.0),
    ]
    [turn] = file.sessions[1].turns
    assert (turn.input_length, turn.block_size, turn.hash_ids, turn.max_tokens, turn.recorded_output_tokens) == (
        600,
        512,
        [1, 2],
        7,
        7,
    )


def test_mooncake_links_requests_that_continue_an_earlier_one(tmp_path: Path) -> None:
    lines = [
        request(0, 1100, 50, [1, 2, 3]),
        request(1000, 1100, 50, [1, 2, 4]),  # as long as the first, so not its continuation
        request(2000, 1700, 10, [1, 2, 5, 6]),  # continues the latest with these whole blocks
        request(3000, 2100, 10, [1, 2, 5, 7, 8]),  # continues the one above: contains its three whole blocks
        request(4000, 1160, 10, [1, 2, 9]),  # continues the first
        request(5000, 700, 10, [1, 10]),  # one common block is not enough
    ]
    file = convert(tmp_path, "mooncake", lines, "--link")
    assert [[turn.input_length for turn in session.turns] for session in file.sessions] == [
        [1100, 1160],
        [1100, 1700, 2100],
        [700],
    ]
    assert [(turn.delay_ms, turn.delay_kind) for turn in file.sessions[1].turns] == [
        (0.0, "start"),
        (1000.0, "user"),
        (1000.0, "user"),
    ]
    assert "inferred" in file.meta.source["sessions"]


def test_messages_are_split_before_every_answer(tmp_path: Path) -> None:
    file = convert(tmp_path, "openai-messages", [CHAT])
    [session] = file.sessions
    assert [[message.role for message in turn.messages] for turn in session.turns] == [
        ["system", "user"],
        ["tool"],
        ["user"],
    ]
    assert [turn.delay_kind for turn in session.turns] == ["start", "tool", "user"]
    assert session.turns[0].recorded_message.content is None
    assert session.turns[0].recorded_message.tool_calls[0].id == "c1"
    assert session.turns[1].recorded_message.content == "it is 42"
    assert session.turns[2].expect is None


def test_request_fields_are_kept_and_equal_toolsets_shared(tmp_path: Path) -> None:
    lines = [
        {
            "id": "a",
            "messages": CHAT,
            "tools": [TOOL],
            "temperature": 0.5,
            "max_tokens": 9,
            "model": "m",
            "stream": True,
        },
        {"messages": CHAT[:2], "tools": [TOOL]},
    ]
    file = convert(tmp_path, "openai-messages", lines)
    assert file.meta.toolsets == {"tools-1": [TOOL]}
    assert [(session.session_id, session.toolset) for session in file.sessions] == [
        ("a", "tools-1"),
        ("conversation-2", "tools-1"),
    ]
    assert (file.sessions[0].turns[0].max_tokens, file.sessions[0].turns[0].extra) == (9, {"temperature": 0.5})
    assert file.meta.source["models"] == ["m"]


BAD: list[tuple[str, list[Any], int, str]] = [
    ("mooncake", [request(0, 600, 1, [1])], 1, "hash_ids"),
    ("mooncake", [request(0, 512, 1, [1]), request(-1, 512, 1, [1])], 2, "timestamp"),
    ("mooncake", [{"timestamp": 0}], 1, "input_length"),
    ("mooncake", [request(0, 512, 1, [1]) | {"text": "x"}], 1, "text"),
    ("openai-messages", [{"tools": []}], 1, "messages"),
    ("openai-messages", [CHAT, [{"role": "judge", "content": "x"}]], 2, "messages[0]"),
    ("openai-messages", [CHAT[:3] + CHAT[2:]], 1, "messages[3]"),
    ("openai-messages", [[{"role": "assistant", "content": "x"}]], 1, "messages[0]"),
    ("openai-messages", [{"messages": CHAT, "tools": [{"name": "x"}]}], 1, "tools"),
    ("openai-messages", [{"messages": CHAT, "tools": "x"}], 1, "array"),
    ("openai-messages", [{"messages": CHAT, "max_tokens": "many"}], 1, "max_tokens"),
    ("openai-messages", [{"messages": CHAT, "prompt": "x"}], 1, "prompt"),
    ("openai-messages", [{"id": "a", "messages": CHAT}, {"id": "a", "messages": CHAT}], 2, "twice"),
    ("openai-messages", ["{"], 1, "truncated"),
]


@pytest.mark.parametrize(("name", "lines", "line", "reason"), BAD)
def test_invalid_file_error_names_line_and_field(
    tmp_path: Path, name: str, lines: list[Any], line: int, reason: str
) -> None:
    with pytest.raises(ReplayFileError) as caught:
        importers.convert(name, write_lines(tmp_path / "in.jsonl", lines))
    assert caught.value.line == line
    assert reason in caught.value.reason, caught.value.reason


def test_link_flag_is_only_for_mooncake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="link"):
        convert(tmp_path, "openai-messages", [CHAT], "--link")
