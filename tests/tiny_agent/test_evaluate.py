"""The evaluation against a scripted server: its counts, the listing of missed turns, and the acceptance rates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from agentspec.errors import ConfigError
from agentspec.replay.measure import Summary
from scripts.tiny_agent import acceptance, evaluate, quality
from scripts.tiny_agent.domain import Example, Turn
from scripts.tiny_agent.held_out import GREEDY, HeldOut, Played, Sampling, draw, play, replay_file
from scripts.tiny_agent.misses import Miss, count_kinds, find_misses, listing
from tests.replay.fakes import Answer, FakeServer, speculation
from tests.replay.worlds import TOOLS, world

Gold = tuple[str, dict[str, Any]]


def call(name: str, **arguments: Any) -> Gold:
    return name, arguments


def turn(user: str, goal: dict[str, Any], *calls: Gold, says: str) -> Turn:
    """A turn whose gold trajectory makes its calls in one message, if any, and then answers."""
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for n, (name, given) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": entry["id"], "content": "{}"} for entry in made]
    messages: list[dict[str, Any]] = (
        [{"role": "assistant", "content": "", "tool_calls": made}, *results] if made else []
    )
    return Turn(user=user, goal=goal, messages=[*messages, {"role": "assistant", "content": says}])


def held_out(*turns: Turn, name: str = "s", unseen: bool = False, thinking: bool = False) -> HeldOut:
    example = Example(
        session_id=name,
        unseen=unseen,
        system="be brief",
        thinking=thinking,
        tools=TOOLS,
        world=msgspec.to_builtins(world()),
        turns=list(turns),
    )
    return HeldOut(example=example, tasks=("look_up",))


LOOK_UP = turn(
    "how is A-098?", {"says": ["open"], "max_calls": 3}, call("get_order", order_id="A-098"), says="A-098 is open."
)
CANCEL = turn(
    "cancel A-098",
    {"changes": {"orders": {"A-098": {"status": "cancelled"}}}},
    call("cancel_order", order_id="A-098"),
    says="A-098 is cancelled.",
)
HELLO = turn("hello", {"max_calls": 0}, says="Hello!")


def calls(*made: Gold, text: str = "", **fields: Any) -> Answer:
    return Answer(
        texts=[text] if text else [],
        calls=[(f"c{n}", name, json.dumps(given)) for n, (name, given) in enumerate(made)],
        wait=0,
        **fields,
    )


def words(text: str, **fields: Any) -> Answer:
    return Answer(texts=[text], wait=0, **fields)


def run(
    sessions: list[HeldOut], answers: Iterable[Answer], sampling: Sampling = GREEDY
) -> tuple[list[Played], Summary, FakeServer]:
    """Run the evaluation; the server gives the answers in order, session after session."""
    script = iter(answers)
    server = FakeServer(lambda body: next(script))

    async def main() -> tuple[list[Played], Summary]:
        async with server.client() as client:
            return await play(sessions, client, sampling=sampling, concurrency=1)

    played, summary = asyncio.run(main())
    return played, summary, server


def misses_of(session: HeldOut, *answers: Answer) -> list[Miss]:
    played, _, _ = run([session], answers)
    return find_misses(played)


RIGHT = [calls(call("get_order", order_id="A-098")), words("It is open.")]


def test_counts_go_by_group_and_by_thinking() -> None:
    sessions = [held_out(LOOK_UP, HELLO, name="a"), held_out(LOOK_UP, name="b", unseen=True, thinking=True)]
    answers = [*RIGHT, words("Hi."), calls(call("no_such_tool")), words("I can't.")]
    played, summary, _ = run(sessions, answers)
    judged = quality.judge(played, seconds=summary.wall, num_failed=summary.num_failed_sessions)
    assert quality.markdown(judged).splitlines()[2:] == [
        "| known tools | 1 of 1, 100.0% | 2 of 2, 100.0% | 1 of 1, 100.0% |",
        "| unseen tools | 0 of 1, 0.0% | 0 of 1, 0.0% | 0 of 1, 0.0% |",
        "| thinking on | 0 of 1, 0.0% | 0 of 1, 0.0% | 0 of 1, 0.0% |",
        "| thinking off | 1 of 1, 100.0% | 2 of 2, 100.0% | 1 of 1, 100.0% |",
        "| all | 1 of 2, 50.0% | 2 of 3, 66.7% | 1 of 2, 50.0% |",
    ]
    assert [(kind.kind, kind.num_turns, kind.num_reached) for kind in judged.kinds] == [
        ("action: get", 2, 1),
        ("shape: no call", 1, 1),
        ("shape: one call", 2, 1),
    ]
    assert "invalid call: unknown tool" in quality.diagnosis(judged)
    data = json.loads(json.dumps(quality.to_json(judged)))
    assert data["misses"] == [{"kind": "invalid call: unknown tool", "first_of_session": 1, "after_a_miss": 0}]
    assert [session["at_goal"] for session in data["sessions"]] == [True, False]


def test_a_run_below_either_required_share_fails() -> None:
    def shortfalls(sessions: list[HeldOut], answers: list[Answer]) -> list[str]:
        played, _, _ = run(sessions, answers)
        return quality.judge(played, seconds=1.0, num_failed=0).shortfalls

    lookups = [held_out(LOOK_UP, name=str(number)) for number in range(5)]
    wrong_words = [RIGHT[0], words("It is closed.")]
    assert shortfalls(lookups, RIGHT * 4 + wrong_words) == []
    assert shortfalls(lookups, RIGHT * 3 + wrong_words * 2) == ["sessions at goal: 3 of 5, 60.0%, less than 80%"]
    invalid = calls(call("get_order", order=1))
    assert shortfalls(lookups, [invalid, *RIGHT] + RIGHT * 4) == ["tool calls valid: 5 of 6, 83.3%, less than 95%"]
    assert shortfalls([held_out(HELLO)], [words("Hi.")]) == ["tool calls valid: 0 of 0, less than 95%"]


@pytest.mark.parametrize(
    ("answers", "kind", "difference"),
    [
        ([words("It is closed.")], "a call is missing", "call 1: get_order was not called"),
        ([words("", finish="length")], "a call is missing: cut", "call 1: get_order was not called"),
        (
            [calls(call("cancel_order", order_id="A-098")), words("Done.")],
            "another tool",
            "call 1: cancel_order was called, not get_order",
        ),
        (
            [calls(call("get_order", order_id="A-908")), words("There is none.")],
            "wrong argument: a text that stands nowhere in the context",
            'call 1: order_id is "A-908", not "A-098"',
        ),
        (
            [calls(call("get_order", order_id="brief")), words("There is none.")],
            "wrong argument: another text of the context",
            'call 1: order_id is "brief", not "A-098"',
        ),
        ([RIGHT[0], words("It is closed.")], "right calls, wrong answer", "the answer does not say 'open'"),
        (
            [RIGHT[0], words("It is", finish="length")],
            "right calls, then no answer: cut",
            "the answer was cut off at max_tokens",
        ),
        (
            [RIGHT[0], Answer(status=500)],
            "right calls, then no answer: failed",
            "the request failed: 500: refused with 500",
        ),
        ([RIGHT[0]] * 3 + [RIGHT[0], words("It is open.")], "a call too many", "call 2: get_order was called"),
    ],
)
def test_a_miss_is_named_by_its_first_difference_from_gold(answers: list[Answer], kind: str, difference: str) -> None:
    (miss,) = misses_of(held_out(LOOK_UP), *answers)
    assert (miss.kind, miss.difference, miss.is_first) == (kind, difference, True)


def test_arguments_that_are_missing_or_too_many_are_named() -> None:
    create = turn(
        "three mugs",
        {"changes": {"orders": {"A-100": {"count": 3}}}},
        call("create_order", item="mug", count=3, city="Oslo"),
        says="Created.",
    )
    (miss,) = misses_of(held_out(create), calls(call("create_order", item="mug", count=3)), words("Created."))
    assert (miss.kind, miss.difference) == ("an argument is missing", 'call 1: city = "Oslo" was not given')
    (miss,) = misses_of(held_out(CANCEL), calls(call("update_order", order_id="A-098")), words("Done."))
    assert miss.kind == "another tool"
    change = turn(
        "5 of A-098",
        {"changes": {"orders": {"A-098": {"count": 5}}}},
        call("update_order", order_id="A-098", count=5),
        says="Done.",
    )
    (miss,) = misses_of(
        held_out(change), calls(call("update_order", order_id="A-098", count=5, city="Rome")), words("Done.")
    )
    assert (miss.kind, miss.difference) == ("an argument too many", 'call 1: city = "Rome" was given')
    (miss,) = misses_of(held_out(change), calls(call("update_order", order_id="A-098", count=6)), words("Done."))
    assert miss.kind == "wrong argument: number"


def test_turns_after_a_miss_are_counted_separately_and_listed_last() -> None:
    sessions = [held_out(CANCEL, LOOK_UP, name="a"), held_out(LOOK_UP, name="b")]
    played, _, _ = run(sessions, [words("No."), words("No."), words("No.")])
    misses = find_misses(played)
    assert [(miss.played.example.session_id, miss.place, miss.is_first) for miss in misses] == [
        ("a", 0, True),
        ("b", 0, True),
        ("a", 1, False),
    ]
    assert count_kinds(misses) == [("a call is missing", 2, 1)]


def test_a_listing_shows_the_models_and_the_gold_answer() -> None:
    session = held_out(HELLO, CANCEL, HELLO)
    answers = [
        words("Hello."),
        calls(call("get_order", order_id="A-098"), call("cancel_order", wrong="A-098"), text="let me see"),
        words("I could not."),
        words("Bye."),
    ]
    (miss,) = misses_of(session, *answers)
    lines = listing(miss).splitlines()
    assert lines[0] == "=== s  turn 2 of 3  thinking off"
    assert any(line.startswith("TOOL   create_order(item*: string, count*: integer, city: string)") for line in lines)
    assert lines[lines.index("SYSTEM be brief") + 1 :][:2] == ["1 USER hello", "1 SAYS Hello."]
    assert lines[lines.index("USER   cancel A-098") : lines.index("ENDED  answered, after 2 requests")] == [
        "USER   cancel A-098",
        "",
        "model:",
        "  SAYS let me see",
        '  CALL   get_order {"order_id": "A-098"}',
        '  RESULT {"order_id": "A-098", "item": "Blue lamp", "status": "open"}',
        '  CALL   cancel_order {"wrong": "A-098"}',
        "  INVALID unknown parameter 'wrong'",
        """  RESULT {"error": "unknown parameter 'wrong'"}""",
        "  SAYS I could not.",
        "",
        "gold:",
        '  CALL   cancel_order {"order_id": "A-098"}',
        "  RESULT {}",
        "  SAYS A-098 is cancelled.",
        "",
    ]
    assert "MISSED orders 'A-098': status is 'open', not 'cancelled'" in lines
    assert "FIRST DIFFERENCE  another tool: call 1: get_order was called, not cancel_order" in lines


@pytest.mark.parametrize(
    ("answers", "shown"),
    [
        (
            [words("<tool_call> broken")],
            [
                "  SAYS <tool_call> broken",
                "  CALL   (unreadable) <tool_call> broken",
                "  INVALID the server could not read the call",
                "  RESULT (not executed)",
            ],
        ),
        (
            [calls(call("get_order", order_id="A-098"), text="so", finish="length")],
            ["  SAYS so", '  CALL   get_order {"order_id": "A-098"}', "  RESULT (not executed)"],
        ),
        ([words("no such")], ["  SAYS no such"]),
        (
            [calls(call("find_orders", city="Rome"), text="again")] * 8,
            ["  SAYS again", '  CALL   find_orders {"city": "Rome"}', "  RESULT []"] * 8,
        ),
        ([Answer(status=500)], []),
    ],
)
def test_a_listing_shows_answers_that_ended_the_session(answers: list[Answer], shown: list[str]) -> None:
    (miss,) = misses_of(held_out(LOOK_UP), *answers)
    lines = listing(miss).splitlines()
    assert lines[lines.index("model:") + 1 : lines.index("gold:") - 1] == shown


def test_long_texts_are_cut_in_a_listing() -> None:
    (miss,) = misses_of(held_out(LOOK_UP), words("x" * 5000))
    assert "(4300 more characters)" in listing(miss)


def test_turns_after_a_failed_request_are_listed_as_not_started() -> None:
    misses = misses_of(held_out(LOOK_UP, HELLO), Answer(status=500))
    assert [(miss.kind, miss.is_first) for miss in misses] == [
        ("a call is missing: failed", True),
        ("never begun", False),
    ]
    assert "ENDED  not begun, after 0 requests" in listing(misses[1])


def test_sampled_sessions_have_a_seed_each_and_keep_their_own_fields() -> None:
    _, _, server = run(
        [held_out(HELLO, HELLO, name="a", thinking=True), held_out(HELLO, name="b")],
        [words("Hi.")] * 3,
        Sampling(name="sampled", fields={"temperature": 0.6, "top_p": 0.95}, seed=7),
    )
    bodies = [request.body for request in server.requests]
    assert [body["seed"] for body in bodies] == [7, 7, 8]
    assert all((body["temperature"], body["top_p"]) == (0.6, 0.95) for body in bodies)
    assert [body["chat_template_kwargs"]["enable_thinking"] for body in bodies] == [True, True, False]


def test_acceptance_is_read_from_the_counters_of_all_answers() -> None:
    metrics = [
        speculation(steps=10, drafted=[10, 10], accepted=[8, 4]),
        speculation(steps=6, drafted=[6, 6], accepted=[4, 4]),
    ]
    _, summary, _ = run(
        [held_out(HELLO, name=str(n)) for n in range(2)], [words("Hi.", metrics=each) for each in metrics]
    )
    row = acceptance.read(summary, sampling="greedy", num_drafts=2)
    assert (row.num_answers, row.num_steps, row.drafted, row.accepted) == (2, 16, [16, 16], [12, 8])
    assert row.shares == [0.75, 0.5]
    assert row.shares_given_before == [0.75, pytest.approx(2 / 3)]
    assert row.emitted_per_step == 2.25
    assert acceptance.markdown([row]).splitlines()[2] == "| greedy | 2 | 75.0% | 50.0% |  |  |  | 2.25 |"
    assert json.loads(json.dumps(acceptance.to_json([row])))[0]["acceptance_by_position"] == [0.75, 0.5]


def test_missing_counters_or_those_of_another_depth_are_refused() -> None:
    _, silent, _ = run([held_out(HELLO)], [words("Hi.")])
    with pytest.raises(ValueError, match="reports no speculation"):
        acceptance.read(silent, sampling="greedy", num_drafts=1)
    _, summary, _ = run(
        [held_out(HELLO)], [words("Hi.", metrics=speculation(steps=1, drafted=[1, 1], accepted=[0, 0]))]
    )
    with pytest.raises(ValueError, match="2 positions, not at 3"):
        acceptance.read(summary, sampling="greedy", num_drafts=3)


def test_sampled_sessions_cover_both_groups_and_make_a_valid_file() -> None:
    sessions = draw(evaluate.SEED, 6)
    assert [session.group for session in sessions] == [*["known"] * 4, "unseen", "known"]
    file = replay_file(sessions, GREEDY)
    assert [session.session_id for session in file.sessions] == [session.example.session_id for session in sessions]
    assert all(turn.goal is not None for session in file.sessions for turn in session.turns)
    assert [session.example for session in draw(evaluate.SEED, 6)] == [session.example for session in sessions]


def gold_answers(session: HeldOut) -> Iterator[Answer]:
    """The answers of a perfect model."""
    for turn in session.example.turns:
        for message in turn.messages:
            if message["role"] == "assistant":
                made = [
                    (call["function"]["name"], json.loads(call["function"]["arguments"]))
                    for call in message.get("tool_calls", [])
                ]
                yield calls(*made, text=message["content"] or "")


def test_gold_answers_reach_every_goal_with_valid_calls() -> None:
    sessions = draw(evaluate.SEED, 24)
    played, summary, _ = run(sessions, [answer for session in sessions for answer in gold_answers(session)])
    judged = quality.judge(played, seconds=summary.wall, num_failed=summary.num_failed_sessions)
    assert [listing(miss) for miss in find_misses(played)] == []
    assert judged.shortfalls == []
    assert (judged.total.num_valid, judged.total.num_sessions_reached) == (judged.total.num_calls, 24)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--what", "speed"], "what"),
        (["--what", "acceptance", "--check"], "what"),
        (["--sessions", "0"], "sessions"),
        (["--json", "no/such/directory/x.json"], "json"),
    ],
)
def test_bad_flags_are_named_before_anything_is_loaded(
    flags: list[str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", *flags])
    with pytest.raises(ConfigError, match=field):
        evaluate.main()
