"""Warm-up requests, and the bound on waits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from agentspec.commands.cli import main
from agentspec.errors import ConfigError
from agentspec.replay.options import ReplayOptions
from agentspec.replay.report import Report
from agentspec.replay.run import run_replay
from agentspec.replay.schema import Parent, ReplayFile, Session, save
from tests.replay.builders import chats, replay_file, said, turn, user
from tests.replay.fakes import Answer, FakeServer, run
from tests.replay.worlds import ask, live_session


def replay(file: ReplayFile, server: FakeServer | None = None, *, progress: Any = None, **options: Any) -> Report:
    server = server or FakeServer()

    async def ask_all() -> Report:
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(**options), client, None, progress=progress)

    report = run(ask_all())
    assert isinstance(report, Report)
    return report


def sent(report: Report) -> dict[str, list[float]]:
    return {session.session_id: [round(entry.sent, 6) for entry in session.turns] for session in report.sessions}


@pytest.mark.parametrize(("max_idle", "second"), [(None, 5.7), (3.0, 3.7), (0.0, 0.7)])
def test_max_idle_bounds_waits(max_idle: float | None, second: float) -> None:
    report = replay(chats(1, 2, delay_ms=10_000), delay_scale=0.5, max_idle=max_idle)
    assert sent(report) == {"s0": [0.0, second]}
    assert ("longest wait 3 s" in report.table()) == (max_idle == 3.0)


def test_warm_up_requests_skip_waits_and_are_not_measured() -> None:
    server = FakeServer(lambda body: Answer(wait=5.5 if "1/" in str(body["messages"][-1]) else 0.5))
    report = replay(chats(2, 4, delay_ms=2000), server, warmup=2, concurrency=2)
    # s0: 0, 0.7, then idle from 1.4; s1: 0, 5.7, ends at 11.4, where the measurement begins
    assert [round(seen.time, 6) for seen in server.requests[:4]] == [0.0, 0.0, 0.7, 5.7]
    assert sent(report) == {"s0": [0.0, 2.7], "s1": [2.0, 9.7]}
    assert [[entry.turn for entry in session.turns] for session in report.sessions] == [[2, 3], [2, 3]]
    summary = report.summary
    assert (summary.num_turns, summary.num_planned_turns, summary.latency.count, summary.output_tokens) == (4, 4, 4, 12)
    assert summary.wall == pytest.approx(15.4)
    assert summary.lag.largest == pytest.approx(0)
    assert [column.turn for column in summary.by_turn] == [2, 3]
    assert "warm-up 2 requests a lane" in report.table()


def test_remaining_wait_follows_the_warm_up() -> None:
    server = FakeServer(lambda body: Answer(wait=1.3 if "1/" in str(body["messages"][-1]) else 0.5))
    report = replay(chats(2, 2, delay_ms=2000), server, warmup=1, concurrency=2)
    assert sent(report) == {
        "s0": [1.2],
        "s1": [2.0],
    }  # their answers ended at 0.7 and 1.5, and the measurement began at 1.5


def test_lane_warms_up_with_several_sessions() -> None:
    server = FakeServer()
    report = replay(chats(6, 1), server, warmup=2, concurrency=2)
    assert [round(seen.time, 6) for seen in server.requests] == [0.0, 0.0, 0.7, 0.7, 1.4, 1.4]
    assert sent(report) == {"s0": [], "s1": [], "s2": [], "s3": [], "s4": [0.0], "s5": [0.0]}
    assert (report.summary.num_sessions, report.summary.num_turns, report.summary.num_planned_turns) == (6, 2, 2)


def test_lane_without_sessions_does_not_block_warm_up() -> None:
    short = Session(session_id="short", turns=[turn(user("a"), expect=said())])
    long = Session(session_id="long", turns=[turn(user(str(place)), expect=said()) for place in range(9)])
    assert len(sent(replay(replay_file(short, long), warmup=3, concurrency=2))["long"]) == 6


def test_subagents_share_their_lanes_warm_up() -> None:
    def script(name: str, num_turns: int, parent: Parent | None = None) -> Session:
        return Session(
            session_id=name,
            turns=[turn(user(f"{name}/{place}"), expect=said()) for place in range(num_turns)],
            parent=parent,
        )

    children = [script(f"child{index}", 3, Parent(session_id="main", turn=0, join_turn=1)) for index in range(2)]
    report = replay(replay_file(script("main", 2), *children), warmup=4)
    assert sent(report) == {
        "main": [1.4],
        "child0": [0.0],
        "child1": [0.0, 0.7],
    }  # the warm-up: main's first turn, two of child0, one of child1
    assert report.summary.lag.largest == pytest.approx(0)


@pytest.mark.parametrize("seed", range(12))
def test_every_lane_sends_exactly_its_warm_up_requests(seed: int) -> None:
    print("seed", seed)
    lanes, warmup, num_sessions, num_turns = 1 + seed % 3, 1 + seed % 4, 8 + seed, 3
    server = FakeServer(lambda body: Answer(wait=0.1 + len(str(body["messages"])) * seed % 7))
    report = replay(chats(num_sessions, num_turns, delay_ms=400), server, warmup=warmup, concurrency=lanes)
    assert report.summary.num_turns == num_sessions * num_turns - lanes * warmup
    begin = min(min(times) for times in sent(report).values() if times)
    assert begin >= 0
    offset = server.requests[-1].time - max(max(times) for times in sent(report).values() if times)
    assert sum(seen.time < offset - 1e-6 for seen in server.requests) == lanes * warmup


def test_failed_warm_up_request_is_a_failure() -> None:
    server = FakeServer(lambda body: Answer(status=503) if "0/1" in str(body["messages"][-1]) else Answer())
    report = replay(chats(2, 4), server, warmup=2, concurrency=2)
    assert [str(session.error).startswith("turn 2: 503") for session in report.sessions] == [True, False]
    assert (report.summary.num_failed_turns, report.summary.num_turns, report.summary.latency.count) == (1, 2, 2)
    assert [row.get("warmup") for row in report.to_json()["requests"]] == [True, None, None]


def test_progress_shows_warm_up() -> None:
    stream = io.StringIO()
    replay(chats(1, 4, delay_ms=4000), FakeServer(lambda body: Answer(wait=6.8)), warmup=1, progress=stream)
    first, second, *_, last = stream.getvalue().splitlines()
    assert "warm-up" in first
    assert "tok/s" not in first
    assert "warm-up" not in second
    assert "turns 3/3" in last


@pytest.mark.parametrize(
    ("file", "options", "reason"),
    [
        (chats(2, 2), {"warmup": 2, "concurrency": 2}, "2 lanes could send all 4 requests"),
        (replay_file(live_session(ask(), ask(), ask())), {"warmup": 1}, "session 'live' has a world"),
    ],
)
def test_invalid_warm_up_is_rejected(file: ReplayFile, options: dict[str, Any], reason: str) -> None:
    server = FakeServer()
    with pytest.raises(ConfigError, match=reason):
        replay(file, server, **options)
    assert not server.requests


def test_dry_run_bounds_waits_and_skips_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    save(chats(1, 2, delay_ms=50_000), path)
    assert main(["replay", str(path), "--dry-run", "4b", "--warmup", "1"]) == 2
    assert "warmup=1: has no effect on a dry run" in capsys.readouterr().err
    assert main(["replay", str(path), "--dry-run", "4b", "--max-idle", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert '"virtual_seconds": 1.' in (tmp_path / "out.json").read_text()
