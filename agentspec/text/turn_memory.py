"""What was generated, kept until the client sends it back: the ids of each turn, and the reasoning that clients drop.

A returned turn is known by the ids of its tool calls, or by the conversation that it ends: a hash chained over the
messages, reasoning left out. So a turn is never taken for one of another conversation that happens to read the same.
Knows nothing of templates or tokenization.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentspec.text.events import AssistantTurn
from agentspec.text.messages import Message, call_arguments, call_ids, read_arguments, with_reasoning
from agentspec.text.sized_cache import held_bytes

_ENTRY_OVERHEAD_BYTES = 1000


def conversation_seed(namespace: str) -> bytes:
    """The key of an empty conversation. Turns are remembered inside their namespace."""
    return hashlib.blake2b(json.dumps(namespace).encode(), digest_size=16).digest()


def extend_conversation(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one message more. Reasoning, ids and the spelling of arguments don't count."""
    calls = [call_arguments(call) for call in message.get("tool_calls", ())]
    return _extend(key, message["role"], message.get("content", ""), calls)


def extend_by_turn(key: bytes, turn: AssistantTurn) -> bytes:
    """The key of a conversation with the generated turn as its next message: equal to extend_conversation once the
    client returns it."""
    return _extend(key, "assistant", turn.content, _generated(turn))


def _extend(key: bytes, role: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> bytes:
    message = [role, content.strip(), calls]
    try:
        text = msgspec.json.encode(message, order="deterministic")
    except UnicodeEncodeError:  # tags that the server wrote into it (text/sentinels.py)
        text = json.dumps(message, sort_keys=True).encode()
    return hashlib.blake2b(key + text, digest_size=16).digest()


def _generated(turn: AssistantTurn) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the turn's calls, as a client's message has them once it is normalised."""
    return [(call.name, read_arguments(call.arguments)) for call in turn.shown_calls]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One generated turn."""

    turn: AssistantTurn
    token_ids: array[int]
    """As generated, without the stop id."""
    text: str
    """Text of token_ids, whose added tokens are sentinels (text/sentinels.py)."""
    lead: str
    """The end of the prompt that the turn continued."""
    is_cut: bool
    """The turn was ended by something else than the model, so the template may go on behind its text."""
    namespace: str = ""
    """Where it was generated: it is found there alone."""
    quotes_tags: bool = False
    """Added tokens stand as text somewhere in it: as it was generated, or as clients see it."""
    calls: list[tuple[str, dict[str, Any]]] = field(init=False)
    """Names and arguments of the turn's calls: read once, and asked for by every later prompt of the conversation."""
    num_bytes: int = field(init=False)
    """About what the record holds in memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", _generated(self.turn))
        made = [(call.arguments, call.as_written) for call in self.turn.shown_calls]
        held = (self.token_ids, self.text, self.lead, self.turn.reasoning, self.turn.content, made, self.calls)
        object.__setattr__(self, "num_bytes", _ENTRY_OVERHEAD_BYTES + sum(map(held_bytes, held)))

    def matches(self, message: Message) -> bool:
        """The message is this turn: same content, same calls, and its reasoning either unchanged or dropped."""
        reasoning = message.get("reasoning_content", "").strip()
        return (
            message.get("content", "").strip() == self.turn.content.strip()
            and [call_arguments(call) for call in message.get("tool_calls", ())] == self.calls
            and reasoning in ("", self.turn.reasoning.strip())
        )

    def restore(self, message: Message, *, arguments_as_written: bool) -> Message:
        """The message with the turn's reasoning, and its arguments in the order (as_written: in the very text) of the
        turn."""
        result = dict(message)
        if self.turn.reasoning:
            result = with_reasoning(result, self.turn.reasoning)
        if self.turn.shown_calls:
            result["tool_calls"] = [
                _with_arguments(call, made.as_written if arguments_as_written else arguments)
                for call, made, (_, arguments) in zip(
                    message["tool_calls"], self.turn.shown_calls, self.calls, strict=True
                )
            ]
        return result


def _with_arguments(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


class TurnMemory:
    """Records by conversation key, and by call ids; the least recently used go first. Thread-safe: prompts are built
    beside running answers."""

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: OrderedDict[bytes, TurnRecord] = OrderedDict()
        self._key_of_calls: dict[tuple[str, tuple[str, ...]], bytes] = {}
        """By namespace and ids: who knows the ids of another's calls doesn't get their reasoning by them."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """About what all records hold in memory; never above max_bytes."""
        return self._num_bytes

    def remember(self, key: bytes, record: TurnRecord) -> None:
        """Keep a turn under the key of the conversation that it ends (extend_by_turn)."""
        with self._lock:
            self._forget(key)
            self._records[key] = record
            self._num_bytes += record.num_bytes
            if record.turn.shown_calls:
                self._key_of_calls[record.namespace, _ids(record)] = key
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._records)))

    def find(self, key: bytes, message: Message, namespace: str = "") -> TurnRecord | None:
        """The turn that a returned assistant message is; `key` is the conversation's up to and including it
        (extend_conversation), begun in `namespace`."""
        ids = call_ids(message)
        with self._lock:
            for candidate in (self._key_of_calls.get((namespace, ids)) if ids else None, key):
                record = self._records.get(candidate) if candidate else None
                if candidate and record and record.matches(message):
                    self._records.move_to_end(candidate)
                    return record
        return None

    def _forget(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self._num_bytes -= record.num_bytes
        calls = record.namespace, _ids(record)
        if self._key_of_calls.get(calls) == key:
            del self._key_of_calls[calls]


def _ids(record: TurnRecord) -> tuple[str, ...]:
    return tuple(call.id for call in record.turn.shown_calls)
