"""The turn memory: keys, restored turns and eviction."""

from __future__ import annotations

from array import array
from dataclasses import replace

from agentspec.text.events import AssistantTurn, ToolCall
from agentspec.text.messages import normalise
from agentspec.text.turn_memory import TurnMemory, TurnRecord, conversation_seed, extend_by_turn, extend_conversation
from tests.text.conversations import call

KEY = conversation_seed("")


def record(content: str, *ids: str, size: int = 1) -> TurnRecord:
    calls = tuple(ToolCall(id=call_id, name="f", arguments='{"b": 1, "a": [2]}') for call_id in ids)
    return TurnRecord(AssistantTurn(reasoning="r", content=content, calls=calls), array("i", [0] * size), "", "", False)


def message(content: str, *ids: str, arguments: str = '{"a":[2],"b":1}') -> dict[str, object]:
    return normalise(
        [{"role": "assistant", "content": content, "tool_calls": [call(call_id, "f", arguments) for call_id in ids]}]
    )[0]


def test_returned_turn_has_the_key_of_the_generated_turn() -> None:
    for content, ids in (("Done.", ()), ("", ("x", "y")), (" spaced\n", ("x",))):
        turn = record(content, *ids).turn
        key = extend_by_turn(KEY, turn)
        assert key == extend_conversation(KEY, message(content.strip(), *ids))
        assert key == extend_conversation(KEY, {**message(content, *ids), "reasoning_content": "anything"})
        assert key == extend_conversation(KEY, message(content, *(f"other {call_id}" for call_id in ids)))
        assert key != extend_conversation(conversation_seed("salt"), message(content, *ids))
        assert key != extend_conversation(KEY, message(content + "!", *ids))
        assert key != extend_conversation(KEY, {**message(content, *ids), "role": "user"})


def test_found_by_ids_or_by_conversation() -> None:
    memory = TurnMemory()
    made = record("", "x", "y")
    key = extend_by_turn(KEY, made.turn)
    memory.add_turn(key, made)
    assert memory.find_turn(b"elsewhere", message("", "x", "y")) is made
    assert memory.find_turn(key, message("", "renamed", "ids")) is made
    assert memory.find_turn(b"elsewhere", message("", "renamed", "ids")) is None
    assert memory.find_turn(b"elsewhere", message("", "x")) is None
    assert memory.find_turn(key, message("", "x", "y", arguments='{"a": [3], "b": 1}')) is None
    assert memory.find_turn(key, message("changed", "x", "y")) is None
    assert memory.find_turn(key, {**message("", "x", "y"), "reasoning_content": "other"}) is None
    assert memory.find_turn(key, {**message("", "x", "y"), "reasoning_content": " r\n"}) is made


def test_same_call_ids_in_two_namespaces_are_separate() -> None:
    memory = TurnMemory()
    made = [replace(record("", "x"), namespace=namespace) for namespace in ("", "salt")]
    keys = [extend_by_turn(conversation_seed(one.namespace), one.turn) for one in made]
    for key, one in zip(keys, made, strict=True):
        memory.add_turn(key, one)
    assert [memory.find_turn(b"elsewhere", message("", "x"), namespace) for namespace in ("", "salt", "other")] == [
        *made,
        None,
    ]


def test_turn_is_restored_with_reasoning_and_argument_order() -> None:
    made = TurnRecord(
        AssistantTurn(reasoning="r", calls=(ToolCall(id="x", name="f", arguments='{"b": 1}', as_written={"b": "01"}),)),
        array("i"),
        "",
        "",
        False,
    )
    returned = message("", "x", arguments='{"b": 1}')
    restored = made.restore(returned, arguments_as_written=True)
    assert restored["reasoning_content"] == restored["thinking"] == "r"
    assert restored["tool_calls"][0]["function"] == {"name": "f", "arguments": {"b": "01"}}
    assert made.restore(returned, arguments_as_written=False)["tool_calls"][0]["function"]["arguments"] == {"b": 1}
    assert "reasoning_content" not in returned


def test_memory_is_bounded_and_evicts_least_recently_used() -> None:
    one = record("x", size=1000).num_bytes
    memory = TurnMemory(max_bytes=3 * one)
    for name in "abc":
        memory.add_turn(name.encode(), record(name, size=1000))
    assert memory.find_turn(b"a", message("a")) is not None
    memory.add_turn(b"d", record("d", size=1000))
    assert [memory.find_turn(name.encode(), message(name)) is not None for name in "abcd"] == [True, False, True, True]
    assert (len(memory), memory.num_bytes) == (3, 3 * one)
    memory.add_turn(b"d", record("d", size=1000))
    assert (len(memory), memory.num_bytes) == (3, 3 * one)
    memory.add_turn(b"e", record("e", size=10_000))
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_evicted_turns_leave_no_call_ids() -> None:
    memory = TurnMemory(max_bytes=5 * record("", "id 0").num_bytes)
    for number in range(100):
        memory.add_turn(str(number % 10).encode(), record("", f"id {number}"))
    assert len(memory) == len(memory._key_of_calls) == 5
