"""Records of generated turns, kept until the client sends them back: token ids, and reasoning that clients drop.

A returned turn is recognised by its tool call ids, or by a hash chained over the conversation's messages without
reasoning. A turn of another conversation with the same text is therefore never used. Knows nothing of templates or
tokenization.
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
    """Return the key of an empty conversation in a namespace."""
    return hashlib.blake2b(json.dumps(namespace).encode(), digest_size=16).digest()


def extend_conversation(key: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message. Reasoning, ids and the spelling of arguments are
    ignored."""
    calls = [call_arguments(call) for call in message.get("tool_calls", ())]
    return _extend(key, message["role"], message.get("content", ""), calls)


def extend_by_turn(key: bytes, turn: AssistantTurn) -> bytes:
    """Return the key of a conversation with a generated turn as its next message. It equals the key from
    extend_conversation once the client returns the turn."""
    return _extend(key, "assistant", turn.content, _generated(turn))


def _extend(key: bytes, role: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> bytes:
    message = [role, content.strip(), calls]
    try:
        text = msgspec.json.encode(message, order="deterministic")
    except UnicodeEncodeError:  # OWN_TAG marks (text/sentinels.py) are lone surrogates
        text = json.dumps(message, sort_keys=True).encode()
    return hashlib.blake2b(key + text, digest_size=16).digest()


def _generated(turn: AssistantTurn) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of the turn's calls, equal to those of the client's message after normalisation."""
    return [(call.name, read_arguments(call.arguments)) for call in turn.shown_calls]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One generated turn."""

    turn: AssistantTurn
    token_ids: array[int]
    """As generated, without the stop id."""
    text: str
    """Text of token_ids, with sentinels for added tokens (text/sentinels.py)."""
    lead: str
    """The end of the prompt that the turn continued."""
    is_cut: bool
    """The model did not end the turn itself, so the template's text may continue after it."""
    namespace: str = ""
    """Namespace of the turn; it is found only there."""
    quotes_tags: bool = False
    """Whether the turn contains the text of an added token, as generated or as shown to the client."""
    calls: list[tuple[str, dict[str, Any]]] = field(init=False)
    """(name, arguments) of the turn's calls, parsed once for all later prompts of the conversation."""
    num_bytes: int = field(init=False)
    """Approximate memory of the record in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", _generated(self.turn))
        made = [(call.arguments, call.as_written) for call in self.turn.shown_calls]
        held = (self.token_ids, self.text, self.lead, self.turn.reasoning, self.turn.content, made, self.calls)
        object.__setattr__(self, "num_bytes", _ENTRY_OVERHEAD_BYTES + sum(map(held_bytes, held)))

    def matches(self, message: Message) -> bool:
        """Whether a message is this turn: same content and calls, and its reasoning either unchanged or dropped."""
        reasoning = message.get("reasoning_content", "").strip()
        return (
            message.get("content", "").strip() == self.turn.content.strip()
            and [call_arguments(call) for call in message.get("tool_calls", ())] == self.calls
            and reasoning in ("", self.turn.reasoning.strip())
        )

    def restore(self, message: Message, *, arguments_as_written: bool) -> Message:
        """Return the message with the turn's reasoning, and with the turn's order of arguments (`arguments_as_written`:
        their exact text)."""
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
    """Records by conversation key and by call ids; the least recently used are evicted first. Thread-safe, since
    prompts are built while answers are generated."""

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: OrderedDict[bytes, TurnRecord] = OrderedDict()
        self._key_of_calls: dict[tuple[str, tuple[str, ...]], bytes] = {}
        """(namespace, call ids) -> key. The namespace prevents other clients from getting reasoning by a known call
        id."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of all records in bytes; never above max_bytes."""
        return self._num_bytes

    def add_turn(self, key: bytes, record: TurnRecord) -> None:
        """Store a turn under the key of the conversation that ends with it (extend_by_turn)."""
        with self._lock:
            self._forget(key)
            self._records[key] = record
            self._num_bytes += record.num_bytes
            if record.turn.shown_calls:
                self._key_of_calls[record.namespace, _ids(record)] = key
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._records)))

    def find_turn(self, key: bytes, message: Message, namespace: str = "") -> TurnRecord | None:
        """Return the record of a returned assistant message, or None. `key`: of the conversation up to and including
        the message (extend_conversation), which began in `namespace`."""
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
