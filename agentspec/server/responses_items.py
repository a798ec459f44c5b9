"""Items of /v1/responses, and the messages that they mean: what a client sends, or what was stored for it.

Owns the shapes of input items and the rule that joins reasoning, text and calls into assistant messages. Knows nothing of requests, prompts
or HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.fields import check

Item = dict[str, Any]
_Status = Literal["in_progress", "completed", "incomplete"] | None


class _Given(msgspec.Struct, frozen=True, omit_defaults=True):
    """What clients send, or send back: null is absent."""


class _Part(_Given, frozen=True, kw_only=True):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    """Carried along from answers; without effect, like the next."""
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: None = None
    parsed: Any = None
    """Added by the openai package's parse helpers; without effect."""


class _Message(_Given, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status = None
    phase: None = None


class _FunctionCall(_Given, frozen=True, kw_only=True, rename={"is_async": "async"}):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status = None
    namespace: None = None
    caller: None = None
    is_async: Literal[False] | None = None
    parsed_arguments: Any = None
    """As _Part.parsed."""


class _FunctionCallOutput(_Given, frozen=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]
    id: str | None = None
    status: _Status = None
    name: str | None = None
    """A label, without effect: the call has the name."""
    namespace: None = None
    caller: None = None


class _Summary(_Given, frozen=True, kw_only=True):
    type: Literal["summary_text"]
    text: str


class _Thought(_Given, frozen=True, kw_only=True):
    type: Literal["reasoning_text"]
    text: str


class _Reasoning(_Given, frozen=True, kw_only=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[_Summary] = []
    content: list[_Thought] | None = None
    encrypted_content: None = None
    status: _Status = None


_KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "message": (_Message, "msg"),
    "function_call": (_FunctionCall, "fc"),
    "function_call_output": (_FunctionCallOutput, "fco"),
    "reasoning": (_Reasoning, "rs"),
}
"""What each type of item is, and how the ids begin that such items are given."""


ITEM_KINDS = tuple(struct for struct, _ in _KINDS.values())


def read_items(given: str | list[Any]) -> list[Item]:
    """A request's input as items in one form: every field that has a meaning here, an id, and content as parts.

    Raises RequestError naming the item and the field that is unknown, not supported or wrong."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _read_item(given: Any, name: str) -> Item:
    if not isinstance(given, dict):
        raise RequestError(name, given, "must be an object")
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(f"{name}.type", kind, f"is not supported (only {', '.join(_KINDS)})")
    struct, prefix = _KINDS[kind]
    read = check(given, struct, name)
    item: Item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **msgspec.to_builtins(read)}
    if kind == "message":
        item["content"] = _parts(item["content"], "output_text" if item["role"] == "assistant" else "input_text")
    elif kind == "reasoning":
        item.setdefault("summary", [])
    elif kind == "function_call":
        item.pop("parsed_arguments", None)
    return item


def _parts(content: str | list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return [{key: value for key, value in part.items() if key != "parsed"} for part in content]


@dataclass(slots=True)
class Conversation:
    """Items as OpenAI's chat messages, in the order of a prompt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """For each message, what the client knows it by."""
    _last: Item | None = None
    """The item before, when it is part of an assistant turn."""

    @classmethod
    def of(cls, instructions: str | None, named_items: Iterable[tuple[str, Item]]) -> Conversation:
        """`named_items`: items of `read_items` or of a response's output, each with its name for errors.

        One response's reasoning, texts and calls become one assistant message. Instructions and the system and developer messages at the start
        become one system message, because templates take one."""
        conversation = cls()
        if instructions:
            conversation._add("instructions", {"role": "system", "content": instructions})
        for name, item in named_items:
            conversation._take(name, item)
        return conversation

    def _take(self, name: str, item: Item) -> None:
        kind = item["type"]
        if kind == "function_call_output":
            self._add(name, {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message" and item["role"] == "user":
            self._add(name, {"role": "user", "content": _text(item["content"])})
        elif kind == "message" and item["role"] != "assistant":
            self._take_system(name, _text(item["content"]))
        else:
            if self._last is None or self._begins_turn(kind):
                self._add(name, {"role": "assistant", "content": ""})
            self._extend_turn(item)
            self._last = item

    def _take_system(self, name: str, text: str) -> None:
        if self.messages and all(message["role"] == "system" for message in self.messages):
            self.messages[-1]["content"] += "\n\n" + text
        else:
            self._add(name, {"role": "system", "content": text})

    def _begins_turn(self, kind: str) -> bool:
        """Reasoning opens a turn. Of two texts in a row each is a turn, since one turn's texts have calls between them."""
        assert self._last is not None
        return kind == "reasoning" or (kind == "message" and self._last["type"] == "message")

    def _extend_turn(self, item: Item) -> None:
        turn = self.messages[-1]
        if item["type"] == "message":
            turn["content"] += _text(item["content"])
        elif item["type"] == "reasoning":
            turn["reasoning_content"] = _text(item.get("content") or item["summary"])
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})

    def _add(self, name: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.names.append(name)
        self._last = None


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
