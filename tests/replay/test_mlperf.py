"""Import of MLPerf Endpoints' agentic conversations, and its salts."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ConfigError, ReplayFileError
from agentspec.replay import importers
from agentspec.replay.options import ReplayOptions
from agentspec.replay.report import Report
from agentspec.replay.run import run_replay
from agentspec.replay.salt import salted
from agentspec.replay.schema import InputMessage, Parent, ReplayFile, Session, TextPart, Turn, load, save
from tests.replay.builders import TOOL, chats, replay_file, runs, said, system, turn, user
from tests.replay.fakes import FakeServer, run

DATA = Path(os.environ.get("AGENTSPEC_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def row(turn: int, role: str, name: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"conversation_id": name, "turn": turn, "role": role} | fields


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def results(*ids: str) -> list[dict[str, Any]]:
    return [{"tool_call_id": call_id, "content": f"of {call_id}"} for call_id in ids]


ROWS = [
    {"_type": "dataset_metadata", "version": 3},
    row(
        1,
        "user",
        system="Be brief.",
        content="Look it up.",
        tools=[TOOL],
        delay_seconds=0.5,
        max_new_tokens=64,
        temperature=0.6,
        some_note=1,
    ),
    row(
        2,
        "assistant",
        reasoning_content="Two calls.",
        tool_calls=[call("a", '{"key": "x"}'), call("b", {"key": "é"})],
        content=None,
    ),
    row(3, "tool", tool_results=results("b", "a"), delay_seconds=0.25),
    row(4, "assistant", content="Hm.", tool_calls=[call("c", '{"key": "y')]),
    row(5, "tool", tool_results=results("c"), delay_seconds=1.5),
    row(6, "user", content="And in short?", top_k=20, delay_seconds=2.0),
    row(7, "assistant", content="It is so."),
    row(1, "user", name="c2", content="Hello", tools=[TOOL], chat_template_kwargs={"preserve_thinking": True}),
    row(2, "assistant", name="c2", content="Hello to you."),
    row(3, "user", name="c2", content="Bye", max_new_tokens=7),
]


def convert(tmp_path: Path, rows: list[dict[str, Any]]) -> ReplayFile:
    path, out = tmp_path / "flat.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    save(importers.convert("mlperf-agentic", str(path)), out)
    return load(out)


def shape(turn: Turn) -> tuple[Any, ...]:
    return (
        [message.role for message in turn.messages or []],
        turn.delay_kind,
        turn.delay_ms,
        turn.max_tokens,
        turn.extra,
    )


def test_mlperf_rows_become_sessions(tmp_path: Path) -> None:
    file = convert(tmp_path, ROWS)
    first, second = file.sessions
    assert [session.session_id for session in file.sessions] == ["c1", "c2"]
    assert (file.tools(first), first.toolset) == ([TOOL], second.toolset), "equal tools are shared"
    assert [shape(turn) for turn in first.turns] == [
        (["system", "user"], "start", 500.0, 64, {"temperature": 0.6}),
        (["tool", "tool"], "tool", 250.0, 64, {}),
        (["tool", "user"], "tool", 3500.0, 64, {"top_k": 20}),
    ]
    assert [message.tool_call_id for message in first.turns[1].messages or []] == ["b", "a"]
    answers = [turn.recorded_message for turn in first.turns]
    assert [answer and (answer.content, answer.reasoning_content) for answer in answers] == [
        (None, "Two calls."),
        ("Hm.", None),
        ("It is so.", None),
    ]
    arguments = [call.function.arguments for answer in answers if answer for call in answer.tool_calls]
    assert arguments == ['{"key": "x"}', '{"key": "é"}', '{"key": "y'], "as the model wrote them, a broken one too"
    assert [shape(turn) for turn in second.turns] == [
        (["user"], "start", 0.0, None, {"chat_template_kwargs": {"preserve_thinking": True}}),
        (["user"], "user", 0.0, 7, {}),
    ]
    assert [turn.recorded_message is not None for turn in second.turns] == [True, False]


def test_mlperf_rows_are_replayed_with_history_and_waits(tmp_path: Path) -> None:
    """Each request contains the recorded history with reasoning, and waits as recorded."""
    file, server = convert(tmp_path, ROWS), FakeServer(owner="agentspec")

    async def main() -> Report:
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(concurrency=1), client, None)

    report: Report = run(main())
    assert [session.error for session in report.sessions] == [None, None]
    bodies = [request.body for request in server.requests]
    assert [len(body["messages"]) for body in bodies] == [2, 5, 8, 1, 3]
    assert bodies[2]["messages"][2]["reasoning_content"] == "Two calls."
    assert bodies[2]["messages"][5]["tool_calls"][0]["function"]["arguments"] == '{"key": "y'
    assert [body.get("max_tokens") for body in bodies] == [64, 64, 64, None, 7]
    assert (bodies[0]["temperature"], bodies[2]["top_k"], bodies[3]["chat_template_kwargs"]) == (
        0.6,
        20,
        {"preserve_thinking": True},
    )
    starts = [turn.sent for turn in report.sessions[0].turns]
    ends = [turn.end for turn in report.sessions[0].turns]
    assert [starts[0], starts[1] - ends[0], starts[2] - ends[1]] == pytest.approx([0.5, 0.25, 3.5])


@pytest.mark.parametrize(
    ("rows", "line", "reason"),
    [
        ([row(1, "user", content="a", conversation_id=7)], 1, "conversation_id"),
        ([row(1, "judge", content="a")], 1, "role"),
        ([row(2, "user", content="a")], 1, "turn: 2 must be 1"),
        ([row(1, "user", content="a"), row(3, "assistant", content="b")], 2, "turn: 3 must be 2"),
        ([row(1, "user")], 1, "content"),
        ([row(1, "assistant", content="a")], 1, "an answer needs a row of the client"),
        ([row(1, "tool", tool_results=results("a"))], 1, "tool_results[0].tool_call_id: 'a'"),
        (
            [row(1, "user", content="a"), row(2, "assistant", tool_calls=[call("a", "{}")]), row(3, "tool")],
            3,
            "tool_results",
        ),
        (
            [row(1, "user", content="a"), row(2, "assistant", content="b"), row(3, "tool", tool_results=results("a"))],
            3,
            "'a' is no call",
        ),
        ([row(1, "user", content="a", delay_seconds="soon")], 1, "delay_seconds"),
        ([row(1, "user", content="a", chat_template="{{ messages }}")], 1, "chat_template"),
        ([row(1, "user", content="a", tools=[{"name": "x"}])], 1, "is not an OpenAI function tool"),
        ([], 1, "no conversations"),
    ],
)
def test_invalid_mlperf_file_error_names_line_and_field(
    tmp_path: Path, rows: list[dict[str, Any]], line: int, reason: str
) -> None:
    with pytest.raises(ReplayFileError, match=re.escape(reason)) as caught:
        convert(tmp_path, rows)
    assert f":{line}:" in str(caught.value)


def test_mlperf_public_sample_is_imported(tmp_path: Path) -> None:
    path = DATA / "mlperf_agentic.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not there; AGENTSPEC_SHARED_DATA names the folder")
    file = importers.convert("mlperf-agentic", str(path))
    save(file, tmp_path / "out.jsonl.gz")
    turns = [turn for session in load(tmp_path / "out.jsonl.gz").sessions for turn in session.turns]
    assert (len(file.sessions), len(turns)) == (10, 514)
    assert all(turn.recorded_message is not None and turn.recorded_message.reasoning_content for turn in turns)
    assert sum(turn.delay_ms > 0 for turn in turns) == 504
    assert {message.role for session in file.sessions for message in (session.turns[0].messages or [])[:1]} == {
        "system"
    }


def texts(session: Session) -> list[str]:
    return [
        message.content if isinstance(message.content, str) else "|".join(p.text for p in message.content)
        for message in session.turns[0].messages or []
    ]


def test_salts_around_the_system_prompt() -> None:
    file = replay_file(
        *(
            Session(session_id=name, turns=[turn(system("S"), user("U"), expect=said()), turn(user("V"))])
            for name in ("a", "b")
        )
    )
    assert salted(file, ReplayOptions()) == file
    runs_ = [salted(file, ReplayOptions(salt="system", seed=seed)) for seed in (1, 1, 2)]
    assert runs_[0] == runs_[1]
    opened = [[texts(session)[0] for session in one.sessions] for one in (runs_[0], runs_[2])]
    found = [
        re.fullmatch(r"(\[salt: [0-9a-f]{4}\])\n\nS\n\n(\[salt: [0-9a-f]{4}\])", text) for one in opened for text in one
    ]
    before, after = zip(*(match.groups() for match in found if match), strict=True)
    assert before[0] == before[1] != before[2] == before[3], "one a run"
    assert len(set(after)) == 4, "one a session and run"
    for session, changed in zip(file.sessions, runs_[0].sessions, strict=True):
        assert texts(changed)[1:] == texts(session)[1:]
        assert changed.turns[1:] == session.turns[1:]


def test_salts_before_the_first_user_message() -> None:
    opening = turn(system("S"), user("U"))
    parts = turn(InputMessage(role="user", content=[TextPart(text="U"), TextPart(text="W")]))
    file = replay_file(
        Session(session_id="a", turns=[opening]),
        Session(session_id="b", turns=[opening]),
        Session(session_id="c", turns=[parts]),
    )
    changed = [texts(session) for session in salted(file, ReplayOptions(salt="first-user")).sessions]
    assert changed[0][0] == "S"
    assert all(re.fullmatch(r"\[salt: [0-9a-f]{16}\]\n\n\|?U(\|W)?", session[-1]) for session in changed), changed
    assert all(one != other for one, other in pairwise(session[-1] for session in changed))


def test_subagents_use_their_agents_salts_and_forks_none() -> None:
    parents = {
        "b": Parent(session_id="a", turn=0),
        "c": Parent(session_id="b", turn=0),
        "d": Parent(session_id="a", turn=0, mode="fork"),
    }
    opening = turn(system("S"), user("U"), expect=said())
    sessions = [Session(session_id=name, turns=[opening], parent=parents.get(name)) for name in "abcde"]
    changed = salted(replay_file(*sessions), ReplayOptions(salt="first-user", sessions=1)).sessions
    found = [texts(session)[1] for session in changed]
    assert found[0] == found[1] == found[2] != "U"
    assert found[3:] == ["U"]


def test_session_without_a_place_for_salt_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'s0': it has no system message"):
        salted(chats(1, 1), ReplayOptions(salt="system"))
    with pytest.raises(ConfigError, match="'s': a prompt of token runs has no text to salt"):
        salted(replay_file(Session(session_id="s", turns=[runs(4, [1])])), ReplayOptions(salt="first-user"))
    with pytest.raises(ConfigError, match="must be none, system or first-user"):
        ReplayOptions(salt="pepper")  # type: ignore[arg-type]
