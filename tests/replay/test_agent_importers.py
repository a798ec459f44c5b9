"""Import of trajectories and workload files; the samples here follow the descriptions of the formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ReplayFileError
from agentspec.replay import importers
from agentspec.replay.schema import ReplayFile, load, save

SYSTEM = {"role": "system", "content": "brief"}
ASKED = {"role": "user", "content": "fix it"}


def call(call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "index": 0,
        "function": {"name": "bash", "arguments": json.dumps(arguments)},
    }


def convert(tmp_path: Path, name: str, text: str) -> ReplayFile:
    path, out = tmp_path / "run.traj.json", tmp_path / "out.jsonl"
    path.write_text(text)
    save(importers.convert(name, str(path)), out)
    return load(out)


def lines(*items: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def test_bailian_chats_with_a_parent_join_its_session(tmp_path: Path) -> None:
    def request(chat_id: int, parent: int, timestamp: float, input_length: int, hash_ids: list[int]) -> dict[str, Any]:
        lengths = {"input_length": input_length, "output_length": 7, "hash_ids": hash_ids}
        return {
            "chat_id": chat_id,
            "parent_chat_id": parent,
            "timestamp": timestamp,
            "type": "text",
            "turn": 1 + (parent >= 0),
        } | lengths

    file = convert(
        tmp_path,
        "bailian",
        lines(
            request(3, 1, 9.5, 40, [5, 6, 8]),
            request(1, -1, 2.0, 20, [5, 6]),
            request(2, 1, 4.0, 33, [5, 6, 7]),
            request(4, 77, 10.0, 16, [9]),
        ),
    )
    assert [
        (session.session_id, session.start_ms, [turn.input_length for turn in session.turns])
        for session in file.sessions
    ] == [
        ("chat-1", 2000.0, [20, 33]),
        ("chat-3", 9500.0, [40]),
        ("chat-4", 10_000.0, [16]),
    ]
    second = file.sessions[0].turns[1]
    assert (second.delay_ms, second.delay_kind, second.block_size, second.recorded_output_tokens) == (
        2000.0,
        "user",
        16,
        7,
    )


def weka(trace_id: str, *requests: dict[str, Any], scope: str = "local") -> dict[str, Any]:
    return {
        "id": trace_id,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": scope,
        "tool_tokens": 5,
        "system_tokens": 5,
        "requests": list(requests),
    }


def asked(t: float, num_in: int, hash_ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": num_in, "out": 9, "hash_ids": hash_ids} | fields


def test_weka_traces_keep_waits_subagents_and_unique_blocks(tmp_path: Path) -> None:
    agent = {
        "t": 4.0,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "status": "completed",
        "models": ["m"],
    }
    one = weka(
        "t1",
        asked(0.0, 128, [1, 2], stop="tool_use", api_time=1.5),
        agent | {"requests": [asked(0.0, 64, [1]), asked(1.0, 70, [1], type="s", ttft=0.1)]},
        asked(9.0, 150, [1, 2], api_time=2.0),
        asked(20.0, 192, [1, 2, 3], think_time=3.0),
    )
    file = convert(tmp_path, "weka", lines(one, weka("t2", asked(0.0, 64, [1]))))
    main, child, other = file.sessions
    assert [(turn.delay_ms, turn.delay_kind) for turn in main.turns] == [
        (0.0, "start"),
        (4000.0, "tool"),
        (3000.0, "user"),
    ]
    blocks = [turn.hash_ids or [] for turn in main.turns]
    assert blocks[0] == blocks[1][:2] == blocks[2][:2]
    assert len(blocks[1]) == 3
    assert blocks[1][2] != blocks[2][2], "the end of a prompt has no hash: it is like no other block"
    assert (
        child.session_id,
        child.parent and (child.parent.session_id, child.parent.turn, child.parent.join_turn),
    ) == ("t1/agent_001", ("t1", 0, 1))
    assert [turn.delay_ms for turn in child.turns] == [2500.0, 1000.0]
    assert child.turns[0].hash_ids == blocks[0][:1], "hashes are the whole trace's"
    assert other.turns[0].hash_ids != blocks[0][:1], "and no other's"


def agent(t: float, *requests: dict[str, Any], name: str = "a", **fields: Any) -> dict[str, Any]:
    head = {
        "t": t,
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "Explore",
        "status": "completed",
        "models": ["m"],
    }
    return head | {"requests": list(requests)} | fields


def links(file: Any) -> dict[str, tuple[int, int | None, float]]:
    """Return for each subagent the turns that start and join it, and its first wait in seconds."""
    return {
        session.session_id: (session.parent.turn, session.parent.join_turn, session.turns[0].delay_ms / 1000)
        for session in file.sessions
        if session.parent is not None
    }


@pytest.mark.parametrize("origin", [0.0, 4.0])
def test_weka_subagent_times_are_absolute_or_relative(tmp_path: Path, origin: float) -> None:
    inner = [asked(4.0 - origin, 64, [1], api_time=2.0), asked(8.0 - origin, 64, [1], api_time=1.0)]
    trace = weka("t", asked(0.0, 64, [1], api_time=1.5), agent(4.0, *inner), asked(9.5, 64, [1]))
    file = convert(tmp_path, "weka", lines(trace))
    assert links(file) == {"t/a": (0, 1, 2.5)}
    assert [turn.delay_ms for turn in file.sessions[1].turns] == [2500.0, 2000.0]
    assert [turn.delay_ms for turn in file.sessions[0].turns] == [0.0, 500.0], (
        "the wait behind a subagent counts from its end"
    )


def test_weka_subagents_are_joined_by_the_first_request_after_their_end(tmp_path: Path) -> None:
    trace = weka(
        "t",
        agent(0.0, asked(0.5, 64, [1]), name="first"),  # no request before it
        asked(0.0, 64, [1], api_time=1.0),
        agent(2.0, asked(2.0, 64, [1], api_time=5.0), name="long"),
        agent(2.0, asked(2.0, 64, [1]), name="timed", duration_ms=18_000.0),
        agent(2.0, asked(2.0, 64, [1], api_time=90.0), name="background"),
        agent(2.0, name="empty"),
        asked(3.0, 64, [1], api_time=1.0, think_time=2.0),
        asked(9.0, 64, [1], api_time=1.0, think_time=5.0),
        agent(10.0, asked(12.0, 64, [1], api_time=1.0), name="long"),  # a repeated name
        asked(21.0, 64, [1], think_time=11.0),
    )
    file = convert(tmp_path, "weka", lines(trace))
    assert links(file) == {
        "t/first": (0, 1, 0.0),
        "t/long": (0, 2, 1.0),
        "t/timed": (0, 3, 1.0),
        "t/background": (0, None, 1.0),
        "t/long/2": (2, 3, 2.0),
    }
    assert [turn.delay_ms for turn in file.sessions[0].turns] == [0.0, 2000.0, 2000.0, 1000.0]


def test_tau_bench_runs(tmp_path: Path) -> None:
    trajectory = [
        SYSTEM,
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call(k=1)], "function_call": None, "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "name": "bash", "content": "42"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "###STOP###"},
    ]
    text = json.dumps(
        [{"task_id": 3, "trial": trial, "reward": 1.0, "info": {}, "traj": trajectory} for trial in range(2)]
    )
    file = convert(tmp_path, "tau-bench", text)
    assert [(session.session_id, session.group) for session in file.sessions] == [
        ("task-3-0", "task-3"),
        ("task-3-1", "task-3"),
    ]
    assert [turn.delay_kind for turn in file.sessions[0].turns] == ["start", "tool"], (
        "nobody asked the model after it was done"
    )
    answer = file.sessions[0].turns[0].recorded_message
    assert answer is not None
    assert answer.tool_calls[0].function.arguments == '{"k": 1}'


def test_mini_swe_agent_trajectories_have_times_and_usage(tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": 900,
        "completion_tokens": 40,
        "total_tokens": 940,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    response = {"choices": [{"finish_reason": "tool_calls"}], "usage": usage}
    messages = [
        SYSTEM | {"extra": {}},
        ASKED | {"extra": {"timestamp": 100.0}},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(command="ls")],
            "extra": {"timestamp": 103.0, "response": response, "actions": []},
        },
        {"role": "tool", "tool_call_id": "c1", "content": "files", "extra": {"timestamp": 103.25, "returncode": 0}},
        {"role": "assistant", "content": "bye", "reasoning_content": "so", "extra": {"timestamp": 104.0}},
        {"role": "exit", "content": "Submitted", "extra": {}},
    ]
    document = {
        "info": {"model_stats": {}},
        "messages": messages,
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": "repo-1",
    }
    [session] = convert(tmp_path, "mini-swe-agent", json.dumps(document, indent=1)).sessions
    first, second = session.turns
    assert (session.session_id, session.tools and session.tools[0]["function"]["name"]) == ("repo-1", "bash")
    assert first.expect is not None
    assert first.expect.usage is not None
    assert (first.expect.latency_ms, first.expect.finish_reason, first.expect.usage.cached_tokens) == (
        3000.0,
        "tool_calls",
        64,
    )
    assert first.recorded_output_tokens == 40
    assert (second.delay_ms, second.delay_kind, second.expect and second.expect.latency_ms) == (250.0, "tool", 750.0)


def test_swe_agent_trajectories_take_tool_times_from_their_steps(tmp_path: Path) -> None:
    history = [
        SYSTEM | {"agent": "main", "message_type": "system_prompt"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "issue", "cache_control": {"type": "ephemeral"}}],
            "message_type": "observation",
        },
        {
            "role": "assistant",
            "content": "look",
            "thought": "look",
            "action": "ls",
            "tool_calls": [call(command="ls")],
            "message_type": "action",
        },
        {"role": "tool", "content": "files", "tool_call_ids": ["c1"], "agent": "main", "message_type": "observation"},
        {
            "role": "assistant",
            "content": "submit",
            "action": "submit",
            "agent": "main",
            "message_type": "action",
            "tool_calls": None,
        },
    ]
    steps = [{"action": "ls", "execution_time": 0.5}, {"action": "submit", "execution_time": 0.1}]
    [session] = convert(
        tmp_path, "swe-agent", json.dumps({"history": history, "trajectory": steps, "info": {}, "environment": "x"})
    ).sessions
    assert (session.session_id, [turn.delay_ms for turn in session.turns]) == ("run", [0.0, 500.0])
    assert session.turns[1].messages is not None
    assert session.turns[1].messages[0].tool_call_id == "c1"


def test_sglang_conversations_have_new_messages_only(tmp_path: Path) -> None:
    conversation = [
        {"messages": [SYSTEM, ASKED], "prompt_tokens": 70},
        {"messages": [{"role": "user", "content": "more"}], "prompt_tokens": 90},
    ]
    [first, second] = convert(
        tmp_path, "sglang-agentic", json.dumps({"metadata": {}, "conversations": [conversation, conversation]})
    ).sessions
    assert (first.session_id, second.session_id) == ("conversation-1", "conversation-2")
    assert [turn.delay_kind for turn in first.turns] == ["start", "user"]
    assert first.turns[1].expect is not None
    assert first.turns[1].expect.usage is not None
    assert first.turns[1].expect.usage.prompt_tokens == 90


def test_aiperf_turns_have_delays_or_timestamps(tmp_path: Path) -> None:
    one = {"session_id": "a", "turns": [{"text": "hi"}, {"texts": ["more"], "delay": 1500, "role": "user"}]}
    two = {"type": "multi_turn", "turns": [{"text": "hi", "timestamp": 250}, {"text": "more", "timestamp": 1000}]}
    first, second = convert(tmp_path, "aiperf-multi-turn", lines(one, two)).sessions
    assert (first.session_id, [turn.delay_ms for turn in first.turns], first.start_ms) == ("a", [0.0, 1500.0], None)
    assert (second.session_id, [turn.delay_ms for turn in second.turns], second.start_ms) == (
        "session-2",
        [0.0, 750.0],
        250.0,
    )


def test_evalscope_requests_that_continue_another_join_its_session(tmp_path: Path) -> None:
    made = {name: value for name, value in call().items() if name != "index"}
    said = {"role": "assistant", "content": None, "tool_calls": [made]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    opened = {"model": "m", "messages": [SYSTEM, ASKED], "max_tokens": 50, "stream": True}
    traced = [
        {"body": opened, "timestamp": "2026-01-01T00:00:10+00:00", "request_id": "x", "completion_tokens": 12},
        {
            "body": json.dumps(opened | {"messages": [SYSTEM, ASKED, said, told]}),
            "timestamp": "2026-01-01T00:00:13+00:00",
            "headers": {"a": "b"},
        },
        {
            "body": opened | {"messages": [{"role": "user", "content": "other"}], "temperature": 0.5},
            "timestamp": "2026-01-01T00:00:09+00:00",
        },
    ]
    file = convert(tmp_path, "evalscope-workload", lines(*traced))
    other, session = file.sessions
    assert (other.start_ms, session.start_ms, other.turns[0].extra) == (0.0, 1000.0, {"temperature": 0.5})
    assert [(turn.delay_ms, turn.delay_kind, turn.max_tokens) for turn in session.turns] == [
        (0.0, "start", 50),
        (3000.0, "tool", 50),
    ]
    assert session.turns[0].recorded_output_tokens == 12
    assert session.turns[0].recorded_message is not None
    assert session.turns[1].recorded_message is None
    assert file.meta.source["models"] == ["m"]


BAD: list[tuple[str, Any, int, str]] = [
    (
        "bailian",
        {"chat_id": 1, "timestamp": 0, "input_length": 17, "output_length": 1, "hash_ids": [1]},
        1,
        "makes 2 blocks of 16",
    ),
    (
        "bailian",
        {"chat_id": 1, "timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1], "user": 1},
        1,
        "user",
    ),
    ("weka", weka("t", asked(0.0, 64, [1, 2])), 1, "requests[0].hash_ids"),
    ("weka", weka("t", asked(0.0, 64, [1]) | {"cost": 1}), 1, "requests[0]"),
    ("weka", weka("t", scope="global"), 1, "requests"),
    ("tau-bench", {"task_id": 1, "traj": [{"role": "assistant", "content": "x"}]}, 1, "messages[0]"),
    (
        "tau-bench",
        {"task_id": 1, "traj": [ASKED | {"mood": 1}, {"role": "assistant", "content": "x"}]},
        1,
        "messages[0].mood",
    ),
    ("mini-swe-agent", {"messages": [ASKED], "trajectory_format": "mini-swe-agent-1"}, 1, "turns"),
    ("swe-agent", {"trajectory": []}, 1, "history"),
    ("sglang-agentic", {"conversations": [[{"messages": [{"role": "assistant", "content": "x"}]}]]}, 1, "role"),
    ("aiperf-multi-turn", {"turns": [{"image": "x"}]}, 1, "image"),
    ("aiperf-multi-turn", {"turns": [{"texts": ["a", "b"]}]}, 1, "turns[0]"),
    ("evalscope-workload", {"body": {"prompt": "x"}, "timestamp": 0}, 1, "body"),
    ("evalscope-workload", {"body": {"messages": [ASKED]}, "timestamp": "soon"}, 1, "timestamp"),
    (
        "evalscope-workload",
        {"body": {"messages": [ASKED, {"role": "assistant", "content": "x"}]}, "timestamp": 0},
        1,
        "the model's own",
    ),
]


@pytest.mark.parametrize(("name", "item", "line", "reason"), BAD)
def test_invalid_file_error_names_place_and_field(tmp_path: Path, name: str, item: Any, line: int, reason: str) -> None:
    with pytest.raises(ReplayFileError) as caught:
        convert(tmp_path, name, lines(item))
    assert caught.value.line == line
    assert reason in caught.value.reason, caught.value.reason


@pytest.mark.parametrize("name", [name for name in importers.FORMATS if name not in ("mooncake", "openai-messages")])
def test_files_may_be_gzipped_and_must_not_be_empty(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.gz"
    for data in (b"", gzip.compress(b"{"), gzip.compress(b"3")):
        path.write_bytes(data)
        with pytest.raises(ReplayFileError):
            importers.convert(name, str(path))
