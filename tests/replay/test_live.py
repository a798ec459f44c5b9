"""Live sessions against a scripted server: calls are executed, results are sent back, and user turns are judged."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

import pytest

from agentspec.errors import ConfigError
from agentspec.replay.options import ReplayOptions
from agentspec.replay.page import render_page
from agentspec.replay.report import Report
from agentspec.replay.run import run_replay
from agentspec.replay.schema import ReplayFile, Session
from agentspec.replay.world import Goal
from tests.replay.builders import chats, replay_file
from tests.replay.fakes import Answer, FakeServer, run
from tests.replay.worlds import ask, live_session


def call(name: str, call_id: str = "c1", **arguments: Any) -> tuple[str, str, str]:
    return call_id, name, json.dumps(arguments)


def calls(*made: tuple[str, str, str], text: str = "") -> Answer:
    return Answer(texts=[text] if text else [], calls=list(made))


def words(text: str) -> Answer:
    return Answer(texts=[text])


def replay(
    session: Session | ReplayFile,
    answers: Iterable[Answer],
    *,
    progress: Any = None,
    owner: str = "somebody",
    **options: Any,
) -> tuple[Report, FakeServer]:
    """Run a replay; the server gives the answers in order, to any session."""
    script = iter(answers)
    server = FakeServer(lambda body: next(script), owner=owner)
    file = session if isinstance(session, ReplayFile) else replay_file(session)

    async def main() -> Report:
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(**options), client, None, progress=progress)

    report: Report = run(main())
    return report, server


def missed(report: Report) -> list[list[str]]:
    outcome = report.sessions[0].outcome
    assert outcome is not None
    return [turn.missed for turn in outcome.turns]


def test_call_results_are_sent_in_the_next_request() -> None:
    session = live_session(
        ask("how is A-098?", goal=Goal(says=["open"])),
        ask(
            "make it 9, and A-099 too",
            goal=Goal(says=["sent"], changes={"orders": {"A-098": {"count": 9}}}),
            delay_ms=2000,
            delay_kind="user",
        ),
    )
    report, server = replay(
        session,
        [
            calls(call("get_order", "x1", order_id="A-098"), text="let me see"),
            words("It is open."),
            calls(
                call("update_order", "x2", order_id="A-098", count=9),
                call("update_order", "x3", order_id="A-099", count=9),
            ),
            words("A-099 is sent already."),
        ],
    )
    messages = server.requests[-1].body["messages"]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert messages[1]["content"] == "let me see"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get_order", "arguments": '{"order_id": "A-098"}'}
    assert messages[2] == {
        "role": "tool",
        "content": '{"order_id": "A-098", "item": "Blue lamp", "status": "open"}',
        "tool_call_id": "x1",
    }
    assert [(message["tool_call_id"], json.loads(message["content"])) for message in messages[6:]] == [
        ("x2", {"order_id": "A-098", "count": 9}),
        ("x3", {"error": "A-099 is sent already"}),
    ]
    records = report.sessions[0].turns
    assert [(record.turn, record.user_turn, record.delay_kind) for record in records] == [
        (0, 0, "none"),
        (1, 0, "tool"),
        (2, 1, "user"),
        (3, 1, "tool"),
    ]
    assert [after.sent - before.end for before, after in itertools.pairwise(records)] == pytest.approx([0, 2, 0])
    assert missed(report) == [[], []]
    live = report.summary.live
    assert live is not None
    assert (live.num_calls, live.num_valid, live.num_turns_reached, live.num_sessions_reached) == (3, 3, 2, 1)
    assert (report.summary.num_turns, report.summary.num_planned_turns) == (4, 4)


def test_reasoning_is_sent_back_unchanged() -> None:
    thinking = [
        'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n',
        'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", '
        '"function": {"name": "find_orders", "arguments": "{}"}}]}}]}\n\n',
        'data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}\n\n',
    ]
    _, server = replay(live_session(ask()), [Answer(raw=thinking), words("two")])
    answer = server.requests[1].body["messages"][1]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", None)


def test_invalid_call_returns_an_error_and_may_be_retried() -> None:
    goal = Goal(says=["chair"], max_calls=2)
    report, server = replay(
        live_session(ask(goal=goal)),
        [calls(call("get_order", id="A-099")), calls(call("get_order", order_id="A-099")), words("A chair.")],
    )
    assert json.loads(server.requests[1].body["messages"][-1]["content"]) == {"error": "unknown parameter 'id'"}
    assert missed(report) == [[]]
    live = report.summary.live
    assert live is not None
    assert (live.num_calls, live.num_valid, live.problems) == (2, 1, [("unknown parameter", 1)])
    assert "tool calls valid          1 of 2, 50.0%" in report.table()
    assert "  1 x  unknown parameter" in report.table()


MISSED: dict[str, tuple[Goal, list[Answer], list[str]]] = {
    "words": (Goal(says=["open"]), [words("I don't know.")], ["the answer does not say 'open'"]),
    "no words": (Goal(), [words("")], ["no answer in words"]),
    "state": (Goal(changes={"orders": {"A-098": None}}), [words("Gone.")], ["orders 'A-098' should not be there"]),
    "calls": (Goal(max_calls=0), [calls(call("find_orders")), words("hello")], ["1 calls, at most 0 were allowed"]),
    "limit": (Goal(), [calls(call("find_orders"))] * 3, ["no answer within 3 requests"]),
    "cut": (Goal(says=["x"]), [Answer(texts=["x and so"], finish="length")], ["the answer was cut off at max_tokens"]),
    "malformed": (
        Goal(says=["A-098"]),
        [words("<tool_call>\nget_order A-098\n</tool_call>")],
        ["the answer holds a tool call that the server could not read"],
    ),
    "failed": (Goal(), [Answer(status=503)], ["the request failed: 503: refused with 503"]),
}


@pytest.mark.parametrize(("goal", "answers", "reasons"), MISSED.values(), ids=MISSED.keys())
def test_missed_goal_has_reasons(goal: Goal, answers: list[Answer], reasons: list[str]) -> None:
    report, _ = replay(live_session(ask(goal=goal, max_requests=3)), answers)
    assert missed(report) == [reasons]
    assert "sessions at goal          0 of 1" in report.table()


def test_next_turn_follows_after_max_requests() -> None:
    report, server = replay(
        live_session(ask(max_requests=2), ask("and now?")), [calls(call("find_orders"))] * 2 + [words("done")]
    )
    assert [message["role"] for message in server.requests[-1].body["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
    ]
    outcome = report.sessions[0].outcome
    assert outcome is not None
    assert [(turn.ending, turn.num_requests, turn.reached) for turn in outcome.turns] == [
        ("limit", 2, None),
        ("answered", 1, None),
    ]
    assert report.sessions[0].error is None
    assert "sessions at goal          0 of 0" in report.table()


def test_truncated_call_is_invalid_and_removed_from_history() -> None:
    cut = Answer(
        texts=[],
        calls=[call("delete_order", "c1", order_id="A-098"), ("c2", "get_order", '{"order_id": "A-0')],
        finish="length",
    )
    report, server = replay(live_session(ask(), ask("go on")), [cut, words("done")])
    assert server.requests[1].body["messages"][1] == {"role": "assistant", "content": ""}
    outcome = report.sessions[0].outcome
    assert outcome is not None
    assert [(made.name, made.kind, made.result) for made in outcome.calls] == [
        ("delete_order", None, None),
        ("get_order", "invalid JSON", None),
    ]


@pytest.mark.parametrize("owner", ["agentspec", "somebody"])
def test_non_object_arguments_are_sent_to_agentspec_only(owner: str) -> None:
    broken = [("c1", "get_order", '{"order_id": '), call("find_orders", "c2"), ("c3", "get_order", "[]")]
    _, server = replay(live_session(ask()), [calls(*broken), words("sorry")], owner=owner)
    messages = server.requests[1].body["messages"]
    sent = [made["function"]["arguments"] for made in messages[1]["tool_calls"]]
    assert sent == ([arguments for _, _, arguments in broken] if owner == "agentspec" else ["{}"] * 3)
    assert [json.loads(message["content"]) for message in (messages[2], messages[4])] == [
        {"error": "the arguments are not valid JSON"},
        {"error": "the arguments must be an object"},
    ]


def test_unparsed_call_counts_once_per_answer() -> None:
    garbled = "<tool_call>\n<function=get_order\n</tool_call><tool_call></tool_call>"
    report, _ = replay(
        live_session(ask(), ask()), [calls(call("find_orders"), text=garbled), words("two"), words(garbled)]
    )
    live = report.summary.live
    assert live is not None
    assert (live.num_calls, live.num_valid, live.problems) == (3, 1, [("not read", 2)])


def test_failed_request_ends_the_session_and_misses_its_goals() -> None:
    turns = [ask(goal=Goal()), ask(goal=Goal()), ask(goal=Goal())]
    report, _ = replay(live_session(*turns), [words("one"), calls(call("find_orders")), Answer(status=500)])
    assert missed(report) == [[], ["the request failed: 500: refused with 500"], ["the session ended before this turn"]]
    assert report.sessions[0].error == "turn 3: 500: refused with 500"
    assert (report.summary.num_turns, report.summary.num_failed_turns, report.summary.num_planned_turns) == (2, 1, 4)
    assert "1 failed, 1 not sent" in report.table()


def three_sessions() -> tuple[ReplayFile, list[Answer]]:
    goal = Goal(says=["yes"])
    sessions = [
        live_session(ask(goal=goal), name=name, group=group)
        for name, group in (("a", "known"), ("b", "unseen"), ("c", "unseen"))
    ]
    return replay_file(*sessions, *chats(1, 1).sessions), [
        calls(call("find_orders")),
        words("yes"),
        words("Yes."),
        words("no"),
        words("script"),
    ]


def test_groups_are_counted_separately() -> None:
    file, answers = three_sessions()
    report, _ = replay(file, answers, concurrency=1)
    groups = {
        counts.group: (counts.num_sessions_reached, counts.num_sessions, counts.num_calls)
        for counts in report.summary.live_groups
    }
    assert groups == {"known": (1, 1, 1), "unseen": (1, 2, 0)}
    table = report.table()
    assert "sessions at goal          2 of 3, 66.7%" in table
    assert [" ".join(line.split()) for line in table.splitlines() if line.startswith("unseen")] == [
        "unseen 0 of 0 1 of 2, 50.0% 1 of 2, 50.0%"
    ]
    written = report.to_json()
    assert written["live"]["sessions_at_goal"] == 2
    assert [group["group"] for group in written["live"]["groups"]] == ["known", "unseen"]
    assert written["sessions"][2]["live"]["turns"] == [
        {
            "user_turn": 0,
            "at_goal": False,
            "missed": ["the answer does not say 'yes'"],
            "ending": "answered",
            "requests": 1,
            "answer": "no",
            "reasoning": "",
            "calls": [],
        }
    ]
    [made] = written["sessions"][0]["live"]["turns"][0]["calls"]
    assert made == {
        "name": "find_orders",
        "arguments": "{}",
        "result": '[{"order_id": "A-098"}, {"order_id": "A-099"}]',
        "problem": None,
        "kind": None,
    }
    assert "live" not in written["sessions"][3]
    assert json.dumps(written)


def test_page_shows_goals_and_misses() -> None:
    file, answers = three_sessions()
    page = render_page(replay(file, answers, concurrency=1)[0])
    text = " ".join(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).itertext())
    assert "2 of 3 · 2 of 3 user turns" in text
    assert "the answer does not say 'yes'" in text
    assert "completed; 0 of 1 user turns at goal" in text


def test_report_without_worlds_has_no_live_part() -> None:
    report, _ = replay(chats(1, 1), [words("hi")])
    assert report.summary.live is None
    assert "live" not in report.to_json()
    for text in (report.table(), render_page(report)):
        assert "goal" not in text
        assert "tool calls valid" not in text


def test_max_turns_counts_user_turns() -> None:
    session = live_session(*(ask(goal=Goal()) for _ in range(3)))
    report, server = replay(session, [calls(call("find_orders")), words("a"), words("b")], max_turns=2)
    assert len(server.requests) == 3
    assert missed(report) == [[], []]


def test_progress_marks_an_open_number_of_turns() -> None:
    stream = io.StringIO()
    answers = [Answer(calls=[call("find_orders")], wait=4.0), Answer(texts=["done"], wait=4.0)]
    replay(live_session(ask()), answers, progress=stream)
    first, last = stream.getvalue().splitlines()
    assert "turns 1/2+" in first
    assert "turns 2/2 " in last


@pytest.mark.parametrize("options", [{"history": "recorded"}, {"output": "length"}], ids=["history", "output"])
def test_world_rejects_recorded_history_and_output(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="session 'live' has a world") as caught:
        replay(live_session(ask()), [], **options)
    assert caught.value.field in options
