"""Subagents: start and join times, selection of sessions, failures, forks, and invalid parents."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentspec.commands.cli import main
from agentspec.errors import ConfigError, ReplayFileError
from agentspec.replay.measure import SessionRecord
from agentspec.replay.options import ReplayOptions
from agentspec.replay.page import render_page
from agentspec.replay.render import TraceRenderer
from agentspec.replay.report import Report
from agentspec.replay.run import run_replay
from agentspec.replay.schema import Parent, ReplayFile, Session, load, save
from tests.fakes.pieces import RegexPieces
from tests.replay.builders import TOOL, called, replay_file, result, runs, said, system, turn, user
from tests.replay.fakes import Answer, FakeServer, run
from tests.replay.worlds import ask, live_session

ANSWER = 0.7
"""Duration of a fake server's answer in seconds."""


def replay(
    file: ReplayFile, server: FakeServer | None = None, *, renderer: TraceRenderer | None = None, **options: Any
) -> Report:
    server = server or FakeServer()

    async def ask_all() -> Report:
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(**options), client, None, renderer=renderer)

    report = run(ask_all())
    assert isinstance(report, Report)
    return report


def chat(name: str, num_turns: int, *delays: float, parent: Parent | None = None, **fields: Any) -> Session:
    """Return a recorded session whose first turns wait `delays` seconds."""
    waits = [*delays, *([0.0] * num_turns)]
    turns = [turn(user(f"{name}/{place}"), expect=said(), delay_ms=waits[place] * 1000) for place in range(num_turns)]
    return Session(session_id=name, turns=turns, parent=parent, **fields)


def below(name: str, turn: int, join_turn: int | None = None, mode: Any = "spawn") -> Parent:
    return Parent(session_id=name, turn=turn, join_turn=join_turn, mode=mode)


def by_name(report: Report) -> dict[str, SessionRecord]:
    return {session.session_id: session for session in report.sessions}


def sent(record: SessionRecord) -> list[float]:
    return [round(entry.sent, 6) for entry in record.turns]


def test_subagent_runs_in_parallel_and_is_joined() -> None:
    file = replay_file(
        chat("main", 4, 0, 0, 0.5),
        chat("joined", 2, 1.0, parent=below("main", 0, 2)),
        chat("background", 1, 0.2, parent=below("main", 1)),
    )
    report = replay(file)
    records = by_name(report)
    assert sent(records["joined"]) == [1.7, 2.4]  # its first wait starts at the end of the parent's turn
    assert sent(records["main"]) == [
        0.0,
        0.7,
        3.6,
        4.3,
    ]  # turn 1 joins no subagent; the wait of turn 2 starts at the subagent's end at 3.1
    assert sent(records["background"]) == [1.6]
    assert report.summary.lag.largest == pytest.approx(0)
    assert (report.summary.num_sessions, report.summary.num_subagents) == (3, 2)
    assert report.summary.wall == pytest.approx(5.0)
    assert "3 completed of 3, 2 of them subagents" in report.table()
    assert "2 of them subagents" in render_page(report)
    written = report.to_json()
    assert written["summary"]["subagent_sessions"] == 2
    assert [session.get("parent") for session in written["sessions"]] == [None, "main", "main"]


def tree_of(rng: random.Random, number: int) -> list[Session]:
    """Return an agent with a random tree of subagents, in any order of lines."""
    sessions = [chat(f"a{number}", rng.randint(1, 5), *(rng.choice((0, 0.3, 2.0)) for _ in range(5)))]
    for index in range(rng.randint(0, 5)):
        above = rng.choice(sessions)
        start = rng.randrange(len(above.turns))
        joins = [None, *range(start + 1, len(above.turns))]
        parent = below(above.session_id, start, rng.choice(joins))
        sessions.append(
            chat(f"a{number}/{index}", rng.randint(1, 4), *(rng.choice((0, 0.3, 2.0)) for _ in range(4)), parent=parent)
        )
    rng.shuffle(sessions)
    return sessions


@pytest.mark.parametrize("seed", range(20))
def test_random_subagent_trees_respect_start_and_join_order(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    sessions = [session for number in range(4) for session in tree_of(rng, number)]
    lanes = rng.randint(1, 3)
    report = replay(replay_file(*sessions), concurrency=lanes)
    records, ends = by_name(report), {record.session_id: record.turns[-1].end for record in report.sessions}
    for session in sessions:
        record = records[session.session_id]
        assert [entry.turn for entry in record.turns] == list(range(len(session.turns)))
        for index, entry in enumerate(record.turns):
            awaited = [
                ends[other.session_id]
                for other in sessions
                if other.parent in [below(session.session_id, t, index) for t in range(index)]
            ]
            if index:
                awaited.append(record.turns[index - 1].end)
            elif session.parent is not None:
                awaited.append(records[session.parent.session_id].turns[session.parent.turn].end)
            if awaited:
                assert entry.sent == pytest.approx(max(awaited) + session.turns[index].delay_ms / 1000)
    spans = [
        (
            records[f"a{number}"].turns[0].sent,
            max(end for name, end in ends.items() if name.split("/")[0] == f"a{number}"),
        )
        for number in range(4)
    ]
    for begin, _ in spans:
        assert sum(first <= begin < last - 1e-9 for first, last in spans) <= lanes, (
            "an agent with its subagents is one lane"
        )
    assert report.summary.wall == pytest.approx(max(ends.values()))


def test_lane_is_free_after_the_last_subagent() -> None:
    file = replay_file(chat("one", 1), chat("one/slow", 3, 1.0, parent=below("one", 0)), chat("two", 1))
    report = replay(file, concurrency=1)
    assert sent(by_name(report)["two"]) == [pytest.approx(ANSWER + 1.0 + 3 * ANSWER)]


@pytest.mark.parametrize("arrival", ["trace", "poisson"])
def test_subagents_start_by_their_parent_in_open_loop(arrival: str) -> None:
    file = replay_file(
        chat("one", 2, start_ms=5000.0),
        chat("one/a", 1, parent=below("one", 0, 1), start_ms=9e9),
        chat("two", 1, start_ms=5500.0),
    )
    records = by_name(replay(file, arrival=arrival, arrival_rate=2.0 if arrival == "poisson" else None))
    assert (sent(records["one"]), sent(records["one/a"])) == ([0.0, 1.4], [0.7])


def failing(*texts: str) -> FakeServer:
    return FakeServer(lambda body: Answer(status=503) if str(body["messages"][-1]["content"]) in texts else Answer())


FAMILY = (
    chat("main", 3),
    chat("joined", 2, parent=below("main", 0, 1)),
    chat("late", 1, parent=below("main", 1)),
    chat("late/own", 1, parent=below("late", 0)),
)


def test_failed_subagent_does_not_end_its_parent() -> None:
    report = replay(replay_file(*FAMILY), failing("joined/0"))
    records = by_name(report)
    assert records["main"].error is None
    assert sent(records["main"])[1] >= records["joined"].turns[0].end
    assert str(records["joined"].error).startswith("turn 1: 503")
    assert (report.summary.num_failed_sessions, report.summary.num_turns, report.summary.num_failed_turns) == (1, 5, 1)
    assert report.has_failures


def test_failed_parent_fails_subagents_not_yet_started() -> None:
    report = replay(replay_file(*FAMILY), failing("main/1"))
    records = by_name(report)
    assert [records[name].error is None for name in ("main", "joined", "late", "late/own")] == [
        False,
        True,
        False,
        False,
    ]
    assert len(records["joined"].turns) == 2
    assert not records["late"].turns
    assert report.summary.num_failed_sessions == 3
    assert "2 x  not started: the session that starts it failed before" in report.table()
    assert "1 failed, 3 not sent" in report.table()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"sessions": 1}, {"main": 3, "joined": 2, "late": 1, "late/own": 1}),
        ({"max_turns": 1}, {"main": 1, "joined": 1, "other": 1}),
        ({"max_turns": 2, "sessions": 1}, {"main": 2, "joined": 2, "late": 1, "late/own": 1}),
    ],
)
def test_excluded_sessions_exclude_their_subagents(options: dict[str, Any], left: dict[str, int]) -> None:
    children, (parent, *_) = FAMILY[1:], FAMILY
    report = replay(
        replay_file(*children, parent, chat("other", 2)), **options
    )  # a subagent may come before its parent
    assert {record.session_id: len(record.turns) for record in report.sessions} == left
    assert report.summary.num_failed_sessions == 0


def test_live_session_starts_and_joins_subagents_at_user_turns() -> None:
    calls = Answer(texts=[], calls=[("c", "get_order", '{"order_id": "A-098"}')])
    server = FakeServer(lambda body: calls if body["messages"][-1] == {"role": "user", "content": "look"} else Answer())
    file = replay_file(live_session(ask("look"), ask("and now?")), chat("child", 2, parent=below("live", 0, 1)))
    records = by_name(replay(file, server))
    first, answered, second = records["live"].turns
    assert (first.user_turn, answered.user_turn, second.user_turn) == (0, 0, 1)
    assert sent(records["child"])[0] == pytest.approx(answered.end)
    assert second.sent == pytest.approx(records["child"].turns[-1].end)


FORKED = (
    Session(
        session_id="main",
        toolset="desk",
        turns=[
            turn(system(), user("q"), expect=called(("c1", "lookup", {"k": 1}))),
            turn(result("42", "c1"), expect=said("done")),
        ],
    ),
    Session(
        session_id="fork",
        parent=below("main", 0, 1, "fork"),
        turns=[
            turn(result("not yet", "c1"), user("look elsewhere"), expect=said("there")),
            turn(user("and?"), expect=said("no")),
        ],
    ),
    Session(session_id="fork/of", parent=below("fork", 0, None, "fork"), turns=[turn(user("third"), expect=said())]),
)


def forked() -> ReplayFile:
    return replay_file(*FORKED, toolsets={"desk": [TOOL]})


def test_fork_continues_its_parents_messages_and_tools() -> None:
    server = FakeServer()
    replay(forked(), server)
    asked = {(seen.session, len(seen.body["messages"])): seen.body for seen in server.requests}
    opening = asked["main", 4]["messages"][:3]
    assert opening[2]["tool_calls"][0]["id"] == "c1"
    fork = asked["fork", 5]["messages"]
    assert fork == [
        *opening,
        {"role": "tool", "content": "not yet", "tool_call_id": "c1"},
        {"role": "user", "content": "look elsewhere"},
    ]
    assert asked["fork", 7]["messages"] == [
        *fork,
        {"role": "assistant", "content": "there"},
        {"role": "user", "content": "and?"},
    ]
    assert asked["fork/of", 7]["messages"] == [
        *fork,
        {"role": "assistant", "content": "there"},
        {"role": "user", "content": "third"},
    ]
    assert all(body["tools"] == [TOOL] for body in asked.values())


def test_fork_of_live_history_gets_the_live_answer_and_ids() -> None:
    server = FakeServer(
        lambda body: (
            Answer(texts=["see"], calls=[("live", "f", "{}")]) if len(body["messages"]) == 2 else Answer(texts=["ok"])
        )
    )
    replay(forked(), server, history="live")
    fork = next(seen.body["messages"] for seen in server.requests if seen.session == "fork")
    assert [fork[2]["tool_calls"][0]["id"], fork[3]["tool_call_id"], fork[2]["content"]] == ["live", "live", "see"]


def test_recorded_history_needs_the_answers_before_forks() -> None:
    main_session = Session(session_id="main", turns=[turn(user())])
    fork = Session(session_id="fork", parent=below("main", 0, None, "fork"), turns=[turn(user())])
    with pytest.raises(ConfigError, match=r"session 'main': turns\[0\].expect.message is missing"):
        replay(replay_file(main_session, fork), history="recorded")
    replay(replay_file(main_session, chat("child", 1, parent=below("main", 0))), history="recorded")
    server = FakeServer(lambda body: Answer(texts=["so"]))
    replay(replay_file(main_session, fork), server)
    assert server.requests[1].body["messages"][1] == {"role": "assistant", "content": "so"}


def test_forced_fork_is_rendered_after_its_parents_turns() -> None:
    server, file = FakeServer(owner="agentspec"), forked()
    replay(file, server, renderer=TraceRenderer(RegexPieces(), "stable"), output="forced")
    asked = {
        seen.session: [one.body for one in server.requests if one.session == seen.session] for seen in server.requests
    }
    assert [len(bodies) for bodies in asked.values()] == [2, 2, 1]
    opening = asked["main"][0]["prompt"] + asked["main"][0]["forced_output"]
    for body in (*asked["fork"], *asked["fork/of"]):
        assert body["prompt"][: len(opening)] == opening
    behind = asked["fork"][0]["prompt"] + asked["fork"][0]["forced_output"]
    assert asked["fork/of"][0]["prompt"][: len(behind)] == behind


def test_dry_run_rejects_subagents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    save(replay_file(*FAMILY), path)
    assert main(["replay", str(path), "--dry-run", "4b"]) == 2
    assert "session 'joined': parent: a dry run has no subagents" in capsys.readouterr().err


def refusal(*sessions: Session) -> tuple[Session, ...]:
    return sessions


TOKENS = Session(session_id="s", turns=[runs(8, [1])], parent=below("main", 0, None, "fork"))
BAD = {
    "unknown": (refusal(chat("s", 1, parent=below("nobody", 0))), "parent.session_id: 'nobody'"),
    "itself": (
        refusal(chat("s", 1, parent=below("s", 0))),
        "parent.session_id: the parents go round in a circle: s -> s",
    ),
    "circle": (refusal(chat("s", 1, parent=below("b", 0)), chat("b", 1, parent=below("s", 0))), "circle: s -> b -> s"),
    "turn": (
        refusal(chat("main", 2), chat("s", 1, parent=below("main", 2))),
        "parent.turn: 2 is no turn of session 'main', which has 2",
    ),
    "negative turn": (refusal(chat("main", 2), chat("s", 1, parent=below("main", -1))), "parent.turn: -1"),
    "join before spawn": (
        refusal(chat("main", 3), chat("s", 1, parent=below("main", 1, 0))),
        "parent.join_turn: 0 must come after",
    ),
    "join at spawn": (
        refusal(chat("main", 3), chat("s", 1, parent=below("main", 1, 1))),
        "parent.join_turn: 1 must come after",
    ),
    "late join": (refusal(chat("main", 3), chat("s", 1, parent=below("main", 1, 3))), "parent.join_turn: 3 is no turn"),
    "fork of a world": (
        refusal(live_session(ask()), chat("s", 1, parent=below("live", 0, None, "fork"))),
        "parent.mode: a fork",
    ),
    "fork of another form": (refusal(chat("main", 1), TOKENS), "parent.mode: a fork's turns"),
    "tools of a fork": (
        refusal(chat("main", 1), chat("s", 1, parent=below("main", 0, None, "fork"), tools=[TOOL])),
        "tools: a fork has",
    ),
}


@pytest.mark.parametrize(("sessions", "reason"), BAD.values(), ids=BAD.keys())
def test_invalid_parent_is_rejected_at_load(tmp_path: Path, sessions: tuple[Session, ...], reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    save(replay_file(*sessions), path)
    with pytest.raises(ReplayFileError) as caught:
        load(path)
    assert caught.value.line == 2 + [session.session_id for session in sessions].index("s")
    assert caught.value.reason.startswith("session 's': ")
    assert reason in caught.value.reason, caught.value.reason


def test_fork_must_not_start_with_a_system_message(tmp_path: Path) -> None:
    fork = Session(session_id="s", turns=[turn(system(), user())], parent=below("main", 0, None, "fork"))
    save(replay_file(chat("main", 1), fork), tmp_path / "bad.jsonl")
    with pytest.raises(ReplayFileError, match=r"turns\[0\].messages\[0\].role"):
        load(tmp_path / "bad.jsonl")


def test_weka_trace_with_subagents_runs_on_the_bundled_model(tmp_path: Path) -> None:
    """Imported, rendered and forced, through the engine thread."""

    def call(t: float, num_in: int, hash_ids: list[int]) -> dict[str, Any]:
        return {
            "t": t,
            "type": "s",
            "model": "m",
            "in": num_in,
            "out": 4,
            "hash_ids": hash_ids,
            "api_time": 0.01,
            "stop": "tool_use",
        }

    def agent(name: str, t: float, *requests: dict[str, Any]) -> dict[str, Any]:
        return {
            "t": t,
            "type": "subagent",
            "agent_id": name,
            "subagent_type": "Explore",
            "status": "completed",
            "models": ["m"],
        } | {"requests": list(requests)}

    requests = [
        call(0.0, 128, [1, 2]),
        agent("agent_001", 0.02, call(0.02, 192, [1, 2, 7]), call(0.04, 200, [1, 2, 7, 8])),
        agent("agent_002", 0.02, call(0.03, 64, [9])),
        call(0.06, 256, [1, 2, 3, 4]),
    ]
    trace, path, out = tmp_path / "trace.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text(
        json.dumps({"id": "t", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests})
    )
    assert main(["import", "weka", str(trace), str(path)]) == 0
    assert main(["replay", str(path), "--output", "forced", "--quiet", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert (written["summary"]["sessions"], written["summary"]["subagent_sessions"], written["summary"]["turns"]) == (
        3,
        2,
        5,
    )
    rows = {(row["session_id"], row["turn"]): row for row in written["requests"]}
    assert all(row["completion_tokens"] == 4 for row in rows.values())
    assert rows["t/agent_001", 1]["cached_tokens"] == 192
    ended = max(rows[name, 0]["sent_ms"] + rows[name, 0]["e2el_ms"] for name in ("t/agent_001", "t/agent_002"))
    assert rows["t", 1]["sent_ms"] >= ended - 0.01


def test_token_run_forks_contain_inherited_tokens() -> None:
    server = FakeServer()
    sessions = [
        Session(session_id="main", turns=[runs(16, [1, 2])]),
        Session(session_id="s", turns=[runs(24, [1, 2, 3])], parent=below("main", 0, None, "fork")),
    ]
    replay(replay_file(*sessions), server)
    first, second = (seen.body["prompt"] for seen in server.requests)
    assert second[:16] == first


def test_saving_keeps_subagents(tmp_path: Path) -> None:
    save(forked(), tmp_path / "a.jsonl")
    again = load(tmp_path / "a.jsonl")
    assert again.sessions == list(FORKED)
    assert (
        msgspec.json.encode(again.sessions[1].parent) == b'{"session_id":"main","turn":0,"mode":"fork","join_turn":1}'
    )
