"""Assembly of streams from several kinds of servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentspec.replay.reply import Positions, Reply, ServerError, Speculation, read_events


def collect(*lines: str) -> list[dict[str, Any]]:
    return collect_parts("".join(line + "\n" for line in lines).encode())


def collect_parts(*parts: bytes) -> list[dict[str, Any]]:
    async def given() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def main() -> list[dict[str, Any]]:
        return [event async for event in read_events(given())]

    return asyncio.run(main())


def take(*events: dict[str, Any]) -> Reply:
    reply = Reply()
    for event in events:
        reply.add_event(event)
    return reply


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


def test_events_end_at_done_and_comments_are_skipped() -> None:
    assert collect(
        ": ping", "", 'data: {"a": 1}', "", 'data:{"b":', "data: 2}", "", "data: [DONE]", "", 'data: {"c": 3}', ""
    ) == [{"a": 1}, {"b": 2}]


def test_last_event_without_a_blank_line_is_read() -> None:
    assert collect('data: {"a": 1}') == [{"a": 1}]
    assert collect("data: [DONE]") == []
    assert collect_parts(b'data: {"a": 1}') == [{"a": 1}]
    assert collect_parts(b"data: [DONE]") == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_stream_may_be_split_anywhere(end: str) -> None:
    stream = end.join(
        ('data: {"a": "é\u2028\x85"}', "", ": ping", 'data: {"b":', "data: 2}", "", "data: [DONE]", "", "data: 3", "")
    ).encode()
    expected = [{"a": "é\u2028\x85"}, {"b": 2}]
    assert collect_parts(stream) == expected
    assert collect_parts(*(stream[place : place + 1] for place in range(len(stream)))) == expected
    for place in range(len(stream)):
        assert collect_parts(stream[:place], stream[place:]) == expected


def test_lenient_json_of_other_servers_is_read() -> None:
    (first, second, third) = collect_parts(
        b'data: {"a": -Infinity}\n\ndata: {"a": "\\ud83d"}\n\ndata: {"a": "\xff"}\n\n'
    )
    assert (first, second, third) == ({"a": float("-inf")}, {"a": "\ud83d"}, {"a": "\ufffd"})


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "an event that is not JSON: '{'"), ("[1]", "an event that is no object: '[1]'")]
)
def test_invalid_event_is_shown_in_the_error(text: str, reason: str) -> None:
    with pytest.raises(ServerError) as caught:
        collect(f"data: {text}", "")
    assert reason in str(caught.value)


@pytest.mark.parametrize("error", [{"error": {"message": "no"}}, {"error": "no"}])
def test_error_event_raises_server_error(error: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match=r"^no$"):
        collect(f"data: {json.dumps(error)}", "")


def test_tool_call_is_assembled_from_deltas() -> None:
    reply = take(
        delta(content="so "),
        delta(content="be it"),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]),
        delta(
            tool_calls=[
                {"index": 0, "function": {"arguments": '{"x"'}},
                {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}},
            ]
        ),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    )
    assert reply.message() == {
        "role": "assistant",
        "content": "so be it",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_keeps_its_field_name(name: str) -> None:
    assert take(delta(**{name: "hm"}), delta(content="x")).message() == {
        "role": "assistant",
        "content": "x",
        name: "hm",
    }


def test_tokens_of_an_event() -> None:
    reply = Reply()
    assert reply.add_event(delta(role="assistant", content="")) == 0
    assert reply.add_event(delta(content="word")) == 1
    assert reply.add_event({"choices": [{"text": "w"}], "usage": {"prompt_tokens": 1, "completion_tokens": 9}}) == 1
    assert reply.add_event({"choices": [], "usage": {"prompt_tokens": 1}}) == 0


def test_tokens_of_an_event_with_running_usage() -> None:
    reply = Reply(counts_so_far=True)

    def shown(delta: dict[str, Any], tokens: int, index: int = 0) -> int:
        return reply.add_event(
            {"choices": [{"index": index, "delta": delta}], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
        )

    assert shown({"role": "assistant", "content": ""}, 0) == 0
    assert shown({"content": "some words"}, 3) == 3
    assert shown({}, 4) == 1  # a token without text, which is held back
    assert shown({"content": "x"}, 2, index=1) == 2
    assert shown({"content": "held back"}, 4) == 0
    assert reply.completion_tokens is None, "not a word about the whole answer"
    assert reply.add_event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}) == 0
    assert [reply.prompt_tokens, reply.completion_tokens] == [5, 6]


def test_agentspec_speculation_counters() -> None:
    mtp = {"drafted_by_position": [10, 6], "accepted_by_position": [8, 3]}
    copy = {"drafted_by_position": [1, 1, 1], "accepted_by_position": [1, 1]}
    counters = {
        "num_spec_steps": 10,
        "num_draft_tokens": 19,
        "num_accepted_draft_tokens": 13,
        "by_source": {"mtp": mtp, "copy": copy},
    }
    reply = take({"choices": [], "metrics": {"speculative_decoding": counters}})
    assert reply.speculation == Speculation(
        num_steps=10,
        num_drafted=19,
        num_accepted=13,
        by_source={
            "mtp": Positions(drafted=[10, 6], accepted=[8, 3]),
            "copy": Positions(drafted=[1, 1, 1], accepted=[1, 1, 0]),
        },
    )
    assert reply.speculation.drafted_by_position == [10, 6, 1, 1, 1], "copies are behind the MTP drafts"
    assert reply.speculation.accepted_by_position == [8, 3, 1, 1, 0]
    assert not reply.forced_acceptance


def test_vllm_speculation_counters_have_no_positions() -> None:
    counters = {
        "num_spec_steps": 4,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 5,
        "mean_acceptance_length": 2.25,
    }
    reply = take({"choices": [], "metrics": {"speculative_decoding": counters}})
    assert reply.speculation == Speculation(num_steps=4, num_drafted=8, num_accepted=5)


def test_unreported_values_stay_none() -> None:
    reply = take({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}})
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens, reply.speculation) == (5, 2, None, None)
