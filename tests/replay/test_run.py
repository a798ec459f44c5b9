"""Whole replays against a scripted server on a virtual clock: requests, their times, and the measurements."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.errors import ConfigError
from agentspec.replay.client import TargetError
from agentspec.replay.options import ReplayOptions
from agentspec.replay.report import Report
from agentspec.replay.run import http_client, run_replay
from agentspec.replay.schema import ReplayFile, Session, load, save
from agentspec.replay.slo import Slo
from tests.replay.builders import TOOL, called, chats, replay_file, result, runs, said, system, turn, user
from tests.replay.fakes import Answer, FakeServer, run, speculation, usage


def replay(
    file: ReplayFile,
    server: FakeServer | None = None,
    *,
    model: str | None = None,
    progress: Any = None,
    **options: Any,
) -> Report:
    server = server or FakeServer()

    async def main() -> Report:
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(**options), client, model, progress=progress)

    report = run(main())
    assert isinstance(report, Report)
    return report


def test_single_turn_is_sent_and_measured() -> None:
    server = FakeServer(lambda body: Answer(texts="abcd", wait=0.5, gap=0.1, usage=usage(100, 4, 64)))
    session = Session(
        session_id="s/ü", turns=[turn(system(), user("hi"), max_tokens=9, extra={"top_p": 0.5})], toolset="desk"
    )
    report = replay(
        replay_file(session, toolsets={"desk": [TOOL]}, defaults={"temperature": 0, "max_tokens": 3}), server
    )
    [seen] = server.requests
    assert seen.path == "/v1/chat/completions"
    assert seen.session == "s/%C3%BC"
    assert seen.body == {
        "model": "fake-model",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 9,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    [[record]] = [session.turns for session in report.sessions]
    assert record.time_to_first_token == pytest.approx(0.5)
    assert record.time_per_token == pytest.approx(0.1)
    assert record.gaps == pytest.approx([0.1, 0.1, 0.1])
    assert record.latency == pytest.approx(0.8)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.finish_reason) == (
        100,
        4,
        64,
        "stop",
    )
    assert report.summary.wall == pytest.approx(0.8)


@pytest.mark.parametrize("owner", ["agentspec", "somebody"])
def test_non_object_recorded_arguments_are_replayed(owner: str, tmp_path: Path) -> None:
    """Unchanged to agentspec; as `{}` to other servers, which reject such a history. The rest of the request is
    equal."""
    texts = ['{"key": "x', "[1]", "", '{"key": 1}']
    first = turn(user(), expect=called(*((f"c{index}", "lookup", text) for index, text in enumerate(texts)), text="hm"))
    results = [result("no", f"c{index}") for index in range(len(texts))]
    save(
        replay_file(Session(session_id="s", turns=[first, turn(*results, expect=said()), turn(user())])),
        tmp_path / "file.jsonl",
    )
    server = FakeServer(owner=owner)
    report = replay(load(tmp_path / "file.jsonl"), server)
    assert report.sessions[0].error is None
    for request in server.requests[1:]:
        answer = request.body["messages"][1]
        assert answer["content"] == "hm"
        sent = [call["function"]["arguments"] for call in answer["tool_calls"]]
        assert sent == (texts if owner == "agentspec" else ["{}", "{}", "{}", '{"key": 1}'])


def test_running_usage_is_requested_from_agentspec_only() -> None:
    for owner, per_event in (("agentspec", 2), ("somebody", 1)):
        server = FakeServer(lambda body: Answer(texts=("aa", "bb"), gap=0.2, usage=usage(9, 4)), owner=owner)
        report = replay(chats(1, 1), server)
        assert ("continuous_usage_stats" in server.requests[0].body["stream_options"]) == (owner == "agentspec")
        record = report.sessions[0].turns[0]
        assert [count for _, count in record.tokens] == [per_event] * 2
        assert record.time_per_token == pytest.approx(0.2 / (4 - per_event))


def test_recorded_history_sends_recorded_answers() -> None:
    server = FakeServer(lambda body: Answer(calls=[("live", "lookup", "{}")]))
    session = Session(
        session_id="s",
        turns=[
            turn(system(), user("q"), expect=called(("c1", "lookup", {"k": 1}), text="let me see")),
            turn(result("42", "c1"), expect=said("done", reasoning="hm")),
            turn(user("more"), expect=said()),
        ],
    )
    replay(replay_file(session), server)
    assert server.requests[2].body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"k": 1}'}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "reasoning_content": "hm"},
        {"role": "user", "content": "more"},
    ]


def test_live_history_sends_live_answers_and_call_ids() -> None:
    server = FakeServer(
        lambda body: (
            Answer(texts=["see"], calls=[("live-1", "f", '{"a": 1}'), ("live-2", "g", "{}")])
            if len(body["messages"]) == 1
            else Answer(texts=["ok"])
        )
    )
    session = Session(
        session_id="s",
        turns=[
            turn(user("q"), expect=called(("c1", "f", {}), ("c2", "g", {}))),
            turn(result("of c2", "c2"), result("of c1", "c1"), expect=said()),
            turn(user("more")),
        ],
    )
    report = replay(replay_file(session), server, history="live")
    messages = server.requests[2].body["messages"]
    assert messages[1]["content"] == "see"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["live-1", "live-2"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert [(message["content"], message["tool_call_id"]) for message in messages[2:4]] == [
        ("of c2", "live-2"),
        ("of c1", "live-1"),
    ]
    assert messages[4] == {"role": "assistant", "content": "ok"}
    assert report.summary.num_diverged == 0


@pytest.mark.parametrize(
    "answer",
    [
        Answer(texts=["no call"]),
        Answer(calls=[("a", "f", "{}"), ("b", "f", "{}")]),
        Answer(calls=[("a", "f", '{"cut": ')]),
    ],
    ids=["no call", "too many calls", "cut arguments"],
)
def test_mismatched_live_answer_is_replaced_by_the_recorded_one(answer: Answer) -> None:
    server = FakeServer(lambda body: answer)
    session = Session(
        session_id="s", turns=[turn(user(), expect=called(("c1", "f", {}))), turn(result("42", "c1"), expect=said())]
    )
    report = replay(replay_file(session), server, history="live")
    messages = server.requests[1].body["messages"]
    assert messages[1]["tool_calls"][0]["id"] == "c1"
    assert messages[2]["tool_call_id"] == "c1"
    assert report.summary.num_diverged == 1
    assert "1 after a recorded answer" in report.table()


def test_mismatch_without_recorded_answer_fails_the_session() -> None:
    session = Session(session_id="s", turns=[turn(user()), turn(result("42"))])
    report = replay(replay_file(session), FakeServer(lambda body: Answer(texts=["no call"])))
    assert report.sessions[0].error is not None
    assert "0 usable tool calls where 1 results follow" in report.sessions[0].error
    assert report.has_failures


def test_results_without_ids_get_live_ids_in_order() -> None:
    server = FakeServer(
        lambda body: Answer(calls=[("x", "f", "{}"), ("y", "f", "{}")]) if len(body["messages"]) == 1 else Answer()
    )
    replay(replay_file(Session(session_id="s", turns=[turn(user()), turn(result("1"), result("2"))])), server)
    assert [message["tool_call_id"] for message in server.requests[1].body["messages"][2:]] == ["x", "y"]


def test_token_runs_are_sent_as_ids_to_completions() -> None:
    server = FakeServer()
    replay(
        replay_file(Session(session_id="s", turns=[runs(20, [7, 8, 9]), runs(26, [7, 8, 3, 4])])),
        server,
        token_ids=(50, 60),
        seed=5,
    )
    first, second = (seen.body["prompt"] for seen in server.requests)
    assert {seen.path for seen in server.requests} == {"/v1/completions"}
    assert (len(first), len(second)) == (20, 26)
    assert first[:16] == second[:16]
    assert first[16:] != second[16:20]
    assert all(50 <= token < 60 for token in first + second)


def test_output_length_fixes_the_number_of_tokens() -> None:
    server = FakeServer()
    replay(
        replay_file(Session(session_id="s", turns=[runs(8, [1], output_tokens=17, max_tokens=99)])),
        server,
        output="length",
    )
    assert (server.requests[0].body["max_tokens"], server.requests[0].body["ignore_eos"]) == (17, True)


def test_waits_start_at_the_last_token_and_delay_is_lag() -> None:
    report = replay(chats(1, 3, delay_ms=2000))
    turns = report.sessions[0].turns
    assert [round(record.sent, 3) for record in turns] == [0.0, 2.7, 5.4]  # an answer takes 0.7 s
    assert [record.lag for record in turns] == pytest.approx([0, 0, 0])


@pytest.mark.parametrize(("scale", "second"), [(0.0, 0.7), (0.5, 1.7), (1.0, 2.7)])
def test_waits_are_scaled(scale: float, second: float) -> None:
    report = replay(chats(1, 2, delay_ms=2000), delay_scale=scale)
    assert report.sessions[0].turns[1].sent == pytest.approx(second)


def test_closed_loop_keeps_its_lanes_busy() -> None:
    server = FakeServer()
    report = replay(chats(5, 2), server, concurrency=2)
    starts = {session.session_id: session.turns[0].sent for session in report.sessions}
    assert starts == pytest.approx({"s0": 0, "s1": 0, "s2": 1.4, "s3": 1.4, "s4": 2.8})
    for session in report.sessions:
        assert session.turns[1].sent >= session.turns[0].end
    assert report.summary.wall == pytest.approx(4.2)


def test_trace_arrivals_start_sessions_at_start_ms() -> None:
    file = replay_file(
        *(Session(session_id=f"s{index}", start_ms=1000 + 500 * index, turns=[turn(user())]) for index in range(4))
    )
    report = replay(file, arrival="trace", speed=2.0)
    assert [session.turns[0].sent for session in report.sessions] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert report.summary.lag.largest == pytest.approx(0)


def test_concurrency_limit_in_open_loop_shows_as_lag() -> None:
    file = replay_file(
        *(Session(session_id=f"s{index}", start_ms=100 * index, turns=[turn(user())]) for index in range(3))
    )
    report = replay(file, arrival="trace", concurrency=1)
    assert [session.turns[0].lag for session in report.sessions] == pytest.approx([0, 0.6, 1.2])


def test_poisson_arrivals_are_seeded() -> None:
    def starts(seed: int) -> list[float]:
        return [
            session.turns[0].sent
            for session in replay(chats(20, 1), arrival="poisson", arrival_rate=4.0, seed=seed).sessions
        ]

    assert starts(1) == starts(1)
    assert starts(1) != starts(2)
    assert 2 < starts(1)[-1] < 12  # 19 gaps of 0.25 s on average


def test_table_of_long_sessions_is_truncated_with_a_note() -> None:
    assert "and 5 later turns" in replay(chats(1, 20)).table()
    assert "listed by" not in replay(chats(1, 16)).table()


def test_times_and_bounds_in_table_and_json() -> None:
    """Two sessions of two turns; the first turn of one of them is slow."""
    waits = iter([4.0, 1.0, 0.5, 0.5])
    server = FakeServer(lambda body: Answer(texts="abcd", wait=next(waits), gap=0.1, usage=usage(100, 4, 64)))
    report = replay(chats(2, 2), server, concurrency=1, slo=Slo.parse(["turn=2s,ttft=750ms"]), gpus=2)
    seconds = 4.3 + 1.3 + 0.8 + 0.8
    data = report.to_json()
    summary = data["summary"]
    assert summary["wall_s"] == pytest.approx(seconds)
    assert [summary["e2el_ms"][name] for name in ("mean", "p50", "max")] == pytest.approx([seconds * 250, 1050, 4300])
    assert [summary[name]["count"] for name in ("ttft_ms", "ttft_first_turns_ms", "ttft_later_turns_ms")] == [4, 2, 2]
    assert [
        summary[name]["max"] for name in ("ttft_ms", "ttft_first_turns_ms", "ttft_later_turns_ms")
    ] == pytest.approx([4000, 4000, 1000])
    assert summary["output_tokens_per_s"] == pytest.approx(16 / seconds)
    assert (summary["gpus"], summary["output_tokens_per_s_per_gpu"]) == (2, pytest.approx(8 / seconds))
    assert summary["total_tokens_per_s_per_gpu"] == pytest.approx((8 + 200) / seconds)
    assert summary["e2e_normalized_interactivity_p90"] == pytest.approx(4 / (1.3 + 0.7 * 3.0))
    assert data["slo"]["bounds_ms"] == {"turn": 2000, "ttft": 750}
    assert (data["slo"]["turns"], data["slo"]["turns_met"], data["slo"]["missed"]) == (4, 2, {"turn": 1, "ttft": 2})
    assert data["slo"]["goodput_turns_per_s"] == pytest.approx(2 / seconds)
    assert [row["slo_missed"] for row in data["requests"]] == [["turn", "ttft"], ["ttft"], [], []]
    table = report.table()
    for line in (
        r"turn time +1,800 +1,050 ",
        "first token, first turns +2,250 ",
        "first token, later turns +750 ",
        "goodput +0.28 turns a second",
    ):
        assert re.search(line, table), table
    assert "turns within bounds       2 of 4, 50.0%" in table
    assert "1.2 tokens a second a user, P90" in table
    assert "of 2 GPUs" in table


def test_without_bounds_and_gpus_none_are_reported() -> None:
    report = replay(chats(1, 1))
    assert "slo" not in report.to_json()
    assert report.to_json()["requests"][0]["slo_missed"] is None
    assert report.to_json()["summary"]["output_tokens_per_s_per_gpu"] is None
    assert not re.search("goodput|bound|GPU", report.table())


def test_sessions_and_max_turns_limit_the_replay() -> None:
    server = FakeServer()
    report = replay(chats(5, 4), server, sessions=2, max_turns=3)
    assert (report.summary.num_sessions, report.summary.num_turns, len(server.requests)) == (2, 6, 6)


FAILURES = {
    "refused": (Answer(status=503), "503: refused with 503"),
    "no end": (Answer(ends_early=True), "without a finish_reason"),
    "timeout": (Answer(hangs=True), "no complete answer within 30 s"),
    "error event": (Answer(raw=['data: {"error": {"message": "out of cheese"}}\n\n']), "out of cheese"),
    "not JSON": (Answer(raw=["data: {\n\n"]), "not JSON"),
    "unknown shape": (Answer(raw=['data: {"choices": [3]}\n\n']), "unknown shape"),
}


@pytest.mark.parametrize(("answer", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_failed_turn_ends_only_its_session(answer: Answer, reason: str) -> None:
    server = FakeServer(lambda body: answer if "1/1" in str(body["messages"][-1]) else Answer())
    report = replay(chats(3, 3), server, timeout=30.0)
    summary = report.summary
    assert [session.error is None for session in report.sessions] == [True, False, True]
    assert reason in str(report.sessions[1].error)
    assert str(report.sessions[1].error).startswith("turn 2: ")
    assert (summary.num_failed_sessions, summary.num_failed_turns, summary.num_turns, summary.num_planned_turns) == (
        1,
        1,
        7,
        9,
    )
    assert "1 failed, 1 not sent" in report.table()
    assert reason in report.table()


def test_broken_connection_fails_the_turn() -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        raise httpx.ConnectError("nobody there")

    async def main() -> Report:
        async with httpx.AsyncClient(transport=httpx.MockTransport(break_off), base_url="http://server") as client:
            return await run_replay(chats(1, 1), ReplayOptions(), client, None)

    assert "connection failed: ConnectError: nobody there" in str(run(main()).sessions[0].error)


def test_unreported_values_are_not_zero() -> None:
    report = replay(chats(2, 2), FakeServer(lambda body: Answer(usage=None)))
    summary = report.summary
    assert (summary.hits.share, summary.output_rate, summary.emitted_per_step, summary.prompt_tokens) == (
        None,
        None,
        None,
        None,
    )
    assert report.table().count("not reported") >= 5
    assert report.to_json()["summary"]["cached_tokens"] is None


def test_forced_acceptance_is_labelled_in_every_format() -> None:
    stream = io.StringIO()
    server = FakeServer(
        lambda body: Answer(metrics=speculation(steps=10, drafted=[10, 8], accepted=[8, 4], forced=True))
    )
    report = replay(chats(1, 1), server, progress=stream)
    assert "FORCED ACCEPTANCE" in report.table()
    assert report.to_json()["forced_acceptance"] is True
    assert "FORCED ACCEPTANCE" in stream.getvalue()


def test_progress_in_a_log_is_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    replay(chats(1, 4, delay_ms=4000), progress=stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3  # at 5 and 10 seconds, and at the end
    assert "turns 4/4" in lines[-1]
    assert "prefix hit 64.0%" in lines[-1]
    assert "\r" not in stream.getvalue()


def test_progress_on_a_terminal_rewrites_one_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    replay(chats(1, 1), progress=stream)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") >= 3


def test_server_without_model_list_needs_a_model_name() -> None:
    server = FakeServer(has_models=False)
    assert replay(chats(1, 1), server, model="named").model == "named"
    with pytest.raises(TargetError, match="--served-model"):
        replay(chats(1, 1), server)


REFUSED: dict[str, tuple[ReplayFile, dict[str, Any], str]] = {
    "history": (
        replay_file(Session(session_id="s", turns=[turn(user()), turn(user())])),
        {"history": "recorded"},
        r"turns\[0\].expect.message",
    ),
    "length": (chats(1, 1), {"output": "length"}, "expect.output_tokens"),
    "constrained": (
        replay_file(Session(session_id="s", turns=[runs(8, [1], extra={"response_format": {"type": "json_object"}})])),
        {"output": "length"},
        "response_format",
    ),
    "trace": (chats(1, 1), {"arrival": "trace"}, "start_ms"),
}


@pytest.mark.parametrize(("file", "options", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_plan_is_rejected_before_any_request(file: ReplayFile, options: dict[str, Any], reason: str) -> None:
    server = FakeServer()
    with pytest.raises(ConfigError, match=reason):
        replay(file, server, **options)
    assert not server.requests


def test_base_url_with_or_without_v1() -> None:
    for url in ("http://host:8000", "http://host:8000/v1", "http://host:8000/v1/"):
        client = http_client(ReplayOptions(base_url=url, api_key="k"))
        assert str(client.base_url).rstrip("/") == "http://host:8000"
        assert client.headers["authorization"] == "Bearer k"
