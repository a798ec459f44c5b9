"""Chat messages in the one form that templates, the turn memory and the prompt builder work with.

Owns the normalisation of what clients send (OpenAI's message objects as plain dicts). Knows nothing of templates or
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.errors import RequestError
from agentspec.files import is_too_deep
from agentspec.text.raw_arguments import RawArguments
from agentspec.text.returned_reasoning import returned_reasoning
from agentspec.text.sentinels import refuse_surrogates

Message = dict[str, Any]
"""Normalised: no None values, `content` a string, call arguments as objects (RawArguments where they are none),
reasoning under every name that templates read."""

_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""By the type of a content's part: where its text is. Parts of type `thinking` are reasoning
(returned_reasoning.py)."""

RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"

_READ = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))
"""What templates read of a message, beside its reasoning. Clients send back all that answers had, of other servers too;
the rest is left out."""


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Fresh, normalised copies of the messages, tool results in the order of their calls.

    Raises RequestError naming the part that can't be used."""
    if not messages:
        raise RequestError("messages", [], "must hold at least one message")
    result = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    refuse_surrogates(result, "messages")
    _order_tool_results(result)
    return result


def call_arguments(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in a normalised message."""
    function = call.get("function", call)
    return function["name"], function["arguments"]


def raw_arguments(messages: Sequence[Message]) -> list[RawArguments]:
    """The arguments in normalised messages that are no JSON object."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    return [arguments for _, arguments in map(call_arguments, calls) if isinstance(arguments, RawArguments)]


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments from their text: an object, empty for a call without any; RawArguments for any other text, as
    models write it and as a token limit leaves it."""
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text that a prompt could hold
    except (ValueError, RecursionError):
        return RawArguments(text)
    return RawArguments(text) if not isinstance(value, dict) or is_too_deep(value) else value


def call_ids(message: Message) -> tuple[str, ...] | None:
    """The ids of the message's calls; None when it has no calls, or one of them no id."""
    ids = tuple(call.get("id") for call in message.get("tool_calls", ()))
    return ids if ids and all(isinstance(call_id, str) for call_id in ids) else None


def is_question(message: Message) -> bool:
    """A user message with the user's words: some clients send tool results as user messages, wrapped in the tags that
    Qwen's templates use."""
    content = message.get("content", "").strip()
    return message["role"] == "user" and not (content.startswith(RESULT_OPEN) and content.endswith(RESULT_CLOSE))


def with_reasoning(message: Message, reasoning: str) -> Message:
    """A copy of the message with its reasoning under the names that templates read."""
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}


def _message(message: Mapping[str, Any], field: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(field, message, "must be an object")
    result: Message = {key: value for key, value in message.items() if value is not None and key in _READ}
    if not isinstance(result.get("role"), str):
        raise RequestError(f"{field}.role", result.get("role"), "must be a string")
    if result["role"] == "developer":  # OpenAI's newer word
        result["role"] = "system"
    result["content"] = _content(
        result.get("content", ""), f"{field}.content"
    )  # null beside calls: templates add to it, or ask for its length
    if "tool_calls" in result:
        result["tool_calls"] = _calls(result["tool_calls"], f"{field}.tool_calls")
    reasoning = returned_reasoning(message)
    return result if reasoning is None else with_reasoning(result, reasoning)


def _content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(field, content, "must be a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "thinking":
            continue
        if not isinstance(kind, str) or kind not in _PARTS:
            raise RequestError(f"{field}[{index}].type", kind, "only text parts are supported")
        text = part.get(_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{field}[{index}].{_PARTS[kind]}", text, "must be a string")
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(field, calls, "must be a list")
    return [_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(field, call, "must be an object")
    if "function" not in call:
        return _function(call, field)
    function = call["function"]
    if not isinstance(function, Mapping):
        raise RequestError(f"{field}.function", function, "must be an object")
    named = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return {**named, "function": _function(function, f"{field}.function")}


def _function(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Arguments may be an object, any text, or empty for a call without arguments."""
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{field}.name", function.get("name"), "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        refuse_surrogates(arguments, f"{field}.arguments")
        return {"name": function["name"], "arguments": read_arguments(arguments)}
    value = {} if arguments is None else arguments
    if not isinstance(value, Mapping):
        raise RequestError(f"{field}.arguments", arguments, "must be an object or its text")
    return {"name": function["name"], "arguments": dict(value)}


def _order_tool_results(messages: list[Message]) -> None:
    """Templates associate results with calls by position alone, so each run of tool messages takes the order of the
    calls before it."""
    start = 0
    while start < len(messages):
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        if end > start:
            calls = messages[start - 1].get("tool_calls", []) if start else []
            places = {call.get("id"): place for place, call in enumerate(calls) if call.get("id") is not None}
            messages[start:end] = _ordered(messages, start, end, places)
        start = end + 1


def _ordered(messages: list[Message], start: int, end: int, places: dict[str, int]) -> list[Message]:
    """Results without an id are associated by position already; they can't be mixed with results that have one."""
    run = messages[start:end]
    if all("tool_call_id" not in message for message in run):
        return run
    seen: set[str] = set()
    for offset, message in enumerate(run):
        field = f"messages[{start + offset}].tool_call_id"
        call_id = message.get("tool_call_id")
        if call_id not in places:
            raise RequestError(field, call_id, "is not the id of a tool call in the assistant message before it")
        if call_id in seen:
            raise RequestError(field, call_id, "has more than one result")
        seen.add(call_id)
    return sorted(run, key=lambda message: places[message["tool_call_id"]])
