"""Normalised chat messages, the form that templates, the turn memory and the prompt builder use.

Normalises what clients send (OpenAI's message objects as plain dicts). Knows nothing of templates or tokens.
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
"""Type of a content part -> field that holds its text. Parts of type `thinking` are reasoning
(returned_reasoning.py)."""

RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"

_READ = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))
"""Message fields that templates read, besides reasoning. Clients send back every field of an answer, including fields
of other servers; the others are dropped."""


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return normalised copies of the messages, with tool results in the order of their calls.

    Raises RequestError naming the invalid part."""
    if not messages:
        raise RequestError("messages", [], "must hold at least one message")
    result = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    refuse_surrogates(result, "messages")
    _order_tool_results(result)
    return result


def call_arguments(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of a call in a normalised message."""
    function = call.get("function", call)
    return function["name"], function["arguments"]


def raw_arguments(messages: Sequence[Message]) -> list[RawArguments]:
    """Return the call arguments in normalised messages that are not a JSON object."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    return [arguments for _, arguments in map(call_arguments, calls) if isinstance(arguments, RawArguments)]


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call: an object, empty for empty text. RawArguments for any other text, such as a
    malformed or truncated call."""
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # a prompt can't hold lone surrogates
    except (ValueError, RecursionError):
        return RawArguments(text)
    return RawArguments(text) if not isinstance(value, dict) or is_too_deep(value) else value


def call_ids(message: Message) -> tuple[str, ...] | None:
    """Return the ids of the message's calls; None when it has no calls, or when one has no id."""
    ids = tuple(call.get("id") for call in message.get("tool_calls", ()))
    return ids if ids and all(isinstance(call_id, str) for call_id in ids) else None


def is_question(message: Message) -> bool:
    """Whether a message is the user's own. Some clients send tool results as user messages, wrapped in the tags of
    Qwen's templates."""
    content = message.get("content", "").strip()
    return message["role"] == "user" and not (content.startswith(RESULT_OPEN) and content.endswith(RESULT_CLOSE))


def with_reasoning(message: Message, reasoning: str) -> Message:
    """Return a copy of the message with its reasoning under every name that templates read."""
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}


def _message(message: Mapping[str, Any], field: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(field, message, "must be an object")
    result: Message = {key: value for key, value in message.items() if value is not None and key in _READ}
    if not isinstance(result.get("role"), str):
        raise RequestError(f"{field}.role", result.get("role"), "must be a string")
    if result["role"] == "developer":  # OpenAI's newer name
        result["role"] = "system"
        # Null content next to calls becomes "": templates concatenate it or take its length.
    result["content"] = _content(result.get("content", ""), f"{field}.content")
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
    """Normalise a function call. Arguments may be an object or any text; missing or empty means no arguments."""
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
    """Sort each run of tool messages by the calls before it: templates match results to calls by position only."""
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
    """Sort one run of tool messages by call. Results without ids are already in order, and can't be mixed with
    others."""
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
