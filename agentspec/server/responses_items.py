"""Input items of /v1/responses, sent by the client or stored, and their conversion to chat messages.

Owns the shapes of input items and the rule that joins reasoning, text and calls into assistant messages. Unknown fields
of items are left out. Knows nothing of the rest of a request, of prompts or of HTTP.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.carried_reasoning import decode_reasoning
from agentspec.server.fields import Notes, check
from agentspec.server.responses_tools import INPUT, function_name

Item = dict[str, Any]


class _Given(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item as clients send it, or send it back: null means absent."""


class _PartOf(_Given, frozen=True, kw_only=True, tag_field="type"):
    annotations: list[Any] | None = None
    """Copied from answers; without effect, as are logprobs."""
    logprobs: list[Any] | None = None


class _InputText(_PartOf, frozen=True, kw_only=True, tag="input_text"):
    text: str


class _OutputText(_PartOf, frozen=True, kw_only=True, tag="output_text"):
    text: str


class _Refusal(_PartOf, frozen=True, kw_only=True, tag="refusal"):
    refusal: str


_Part = _InputText | _OutputText | _Refusal


class _Item(_Given, frozen=True, kw_only=True):
    id: str | None = None
    status: str | None = None


class _Message(_Item, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part] | None
    type: Literal["message"] = "message"
    phase: str | None = None
    """A label, without effect."""


class _FunctionCall(_Item, frozen=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None
    namespace: str | None = None


class _CallOutput(_Item, frozen=True, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[_Part] | None


class _CustomCall(_Item, frozen=True, kw_only=True):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None
    namespace: str | None = None


class _Summary(_Given, frozen=True, kw_only=True):
    type: Literal["summary_text"]
    text: str


class _Thought(_Given, frozen=True, kw_only=True):
    type: Literal["reasoning_text", "text"]
    text: str


class _Reasoning(_Item, frozen=True, kw_only=True):
    type: Literal["reasoning"]
    summary: list[_Summary] | None = None
    content: list[_Thought] | None = None
    encrypted_content: str | None = None
    """Read if there is no content, and if this server encoded it."""


_KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "message": (_Message, "msg"),
    "function_call": (_FunctionCall, "fc"),
    "function_call_output": (_CallOutput, "fco"),
    "custom_tool_call": (_CustomCall, "ctc"),
    "custom_tool_call_output": (_CallOutput, "ctco"),
    "reasoning": (_Reasoning, "rs"),
}
"""By type of item: its struct, and the prefix of generated ids."""

HostedItemKind = Literal[
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]


class HostedItem(msgspec.Struct, frozen=True):
    """A call or result of a hosted tool in another server's answer: templates can't render it."""

    type: HostedItemKind


_HOSTED = frozenset(HostedItemKind.__args__)  # type: ignore[attr-defined]


class ItemReference(msgspec.Struct, frozen=True):
    """A reference to a stored item."""

    id: str
    type: Literal["item_reference"] | None = None


ITEM_KINDS = (*dict.fromkeys(struct for struct, _ in _KINDS.values()), HostedItem, ItemReference)

_TEXTS = ("content", "arguments", "input", "output")
"""Fields of items other than reasoning in which null means an empty text, as in chat."""

_OWN_ID = re.compile(f"(?:{'|'.join(prefix for _, prefix in _KINDS.values())})_[0-9a-f]{{32}}(?:_[0-9]+)?")


def is_own_id(item_id: str) -> bool:
    """Whether the id was generated here, so that no two items have it. Clients' own ids may collide."""
    return _OWN_ID.fullmatch(item_id) is not None


def read_items(given: str | list[Any], notes: Notes, find: Callable[[str, str], Item]) -> list[tuple[str, Item]]:
    """Convert a request's input to items in normal form, each with its field name: known fields only, an id, and
    content as parts.

    notes: collects what is left out. find: returns a stored item by its id and field name. Raises RequestError with the
    item and the field that is refused or wrong, and any error of `find`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    left_out: set[str] = set()
    for index, one in enumerate(given):
        name = f"input[{index}]"
        if not isinstance(one, dict):
            raise RequestError(name, one, "must be an object")
        kind = one.get("type")
        if isinstance(kind, str) and (kind in _HOSTED or _is_result_of(one, left_out)):
            notes.leave_out(f"input.{kind}", one, "is of a tool that its service runs, and none is run here")
            left_out |= {one[key] for key in ("id", "call_id") if isinstance(one.get(key), str)}
        elif kind == "item_reference" or (kind is None and "id" in one and "role" not in one):
            items.append((name, find(check(one, ItemReference, name).id, f"{name}.id")))
        else:
            items.append((name, _read_item(one, "message" if kind is None else kind, name, notes)))
    return items


def _is_result_of(item: dict[str, Any], calls: set[str]) -> bool:
    """Whether this is the result of a hosted call. Clients run some of these (`local_shell_call`) and send back a
    function's result."""
    call_id = item.get("call_id")
    return item["type"] == "function_call_output" and isinstance(call_id, str) and call_id in calls


def _read_item(given: dict[str, Any], kind: Any, name: str, notes: Notes) -> Item:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(f"{name}.type", kind, f"is not supported (only {', '.join(_KINDS)})")
    struct, prefix = _KINDS[kind]
    empty = {field: "" for field in _TEXTS if field in given and given[field] is None and kind != "reasoning"}
    read = check({**given, **empty, "type": kind}, struct, name)
    item: Item = {
        "id": f"{prefix}_{uuid.uuid4().hex}",
        "type": kind,
        "status": "completed",
        **msgspec.to_builtins(read),
    }
    if kind == "message":
        item["content"] = _parts(item["content"], "output_text" if item["role"] == "assistant" else "input_text")
    elif isinstance(item.get("output"), list):
        item["output"] = _parts(item["output"], "input_text")
    elif kind == "reasoning":
        item.setdefault("summary", [])
        _open_reasoning(item, notes)
    return item


def _open_reasoning(item: Item, notes: Notes) -> None:
    """Replace encrypted content by its text, if it can be decoded."""
    sealed = item.pop("encrypted_content", None)
    if not sealed or item.get("content"):
        return
    text = decode_reasoning(sealed)
    if text is None:
        notes.leave_out("input.encrypted_content", sealed, "is not of this server's making, and can't be read")
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]


def _parts(content: str | list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Content as parts. A refusal becomes a text."""
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return [{"type": kind, "text": part["refusal"]} if part["type"] == "refusal" else part for part in content]


@dataclass(slots=True)
class Conversation:
    """Items as OpenAI's chat messages, in prompt order."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The client's field name of each message."""
    _last: Item | None = None
    """The previous item, if it is part of an assistant turn."""

    @classmethod
    def of(cls, instructions: str | None, named_items: Iterable[tuple[str, Item]]) -> Conversation:
        """named_items: items of `read_items` or of a response's output, each with its field name for errors.

        Reasoning, texts and calls of one response become one assistant message."""
        conversation = cls()
        if instructions:
            conversation._add_message("instructions", {"role": "system", "content": instructions})
        for name, item in named_items:
            conversation._add_item(name, item)
        return conversation

    def _add_item(self, name: str, item: Item) -> None:
        kind = item["type"]
        if kind in ("function_call_output", "custom_tool_call_output"):
            self._add_message(name, {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message" and item["role"] == "user":
            self._add_message(name, {"role": "user", "content": _text(item["content"])})
        elif kind == "message" and item["role"] != "assistant":
            self._add_message(name, {"role": "system", "content": _text(item["content"])})
        else:
            if self._last is None or self._begins_turn(kind):
                self._add_message(name, {"role": "assistant", "content": ""})
            self._extend_turn(item)
            self._last = item

    def _begins_turn(self, kind: str) -> bool:
        """Reasoning starts a turn. So does a text directly after a text: within one turn, calls separate texts."""
        assert self._last is not None
        return kind == "reasoning" or (kind == "message" and self._last["type"] == "message")

    def _extend_turn(self, item: Item) -> None:
        turn = self.messages[-1]
        if item["type"] == "message":
            turn["content"] += _text(item["content"])
        elif item["type"] == "reasoning":
            if text := _text(item.get("content") or item["summary"]):
                turn["reasoning_content"] = text
        else:
            arguments = (
                json.dumps({INPUT: item["input"]}, ensure_ascii=False)
                if item["type"] == "custom_tool_call"
                else item["arguments"]
            )
            function = {"name": function_name(item.get("namespace"), item["name"]), "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})

    def _add_message(self, name: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.names.append(name)
        self._last = None


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
