"""Build the request body of one turn from the file's fields and the options. Knows nothing of HTTP, streams or time.

Precedence, weakest first: `meta.defaults`, the turn's `max_tokens`, the turn's `extra`, `--output length`.
"""

from __future__ import annotations

from array import array
from typing import Any

from agentspec.replay.conversation import Message, is_object
from agentspec.replay.render import RenderedTurn
from agentspec.replay.schema import Meta, Turn

_CONSTRAINING = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def chat_body(
    *, messages: list[Message], tools: list[dict[str, Any]], fields: dict[str, Any], model: str
) -> dict[str, Any]:
    """Return a body for /v1/chat/completions. The order of `tools` and of their keys is kept: it is part of the
    prompt."""
    body: dict[str, Any] = {"model": model, "messages": messages}
    if tools:
        body["tools"] = tools
    return body | fields | _streaming()


def completion_body(*, prompt_ids: array[int], fields: dict[str, Any], model: str) -> dict[str, Any]:
    """Return a body for /v1/completions with a prompt of token ids."""
    return {"model": model, "prompt": prompt_ids.tolist()} | fields | _streaming()


def forced_body(turn: RenderedTurn, *, model: str) -> dict[str, Any]:
    """Return a body for agentspec's /v1/completions with the recorded answer as forced output. The file's sampling
    fields are not used."""
    output = turn.output_ids.tolist()
    breakpoints = [{"offset": point.offset, "kind": point.kind.name.lower()} for point in turn.breakpoints]
    fields = {
        "breakpoints": breakpoints,
        "forced_output": output,
        "max_tokens": len(output),
        "ignore_eos": True,
        "temperature": 0,
    }
    return completion_body(prompt_ids=turn.prompt_ids, fields=fields, model=model)


def counting(body: dict[str, Any]) -> dict[str, Any]:
    """Request running usage in every chunk: with accepted drafts a chunk has several tokens, with held-back text
    none."""
    return body | {"stream_options": body["stream_options"] | {"continuous_usage_stats": True}}


def portable(body: dict[str, Any]) -> dict[str, Any]:
    """Make a body acceptable to any server: call arguments in the history that are not a JSON object become `{}`, since
    many servers reject them."""
    messages = body.get("messages", ())
    if all(is_object(call["function"]["arguments"]) for message in messages for call in message.get("tool_calls", ())):
        return body
    return body | {"messages": [_with_objects(message) if "tool_calls" in message else message for message in messages]}


def _with_objects(message: Message) -> Message:
    calls = [
        call
        if is_object(call["function"]["arguments"])
        else call | {"function": call["function"] | {"arguments": "{}"}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def turn_fields(turn: Turn, meta: Meta, *, fixed_length: bool) -> dict[str, Any]:
    """Return the sampling fields of a turn. With `fixed_length` the answer gets exactly the recorded number of tokens.

    Raises ValueError when that number was not recorded, or when the answer is constrained, so that its length can't be
    forced."""
    fields: dict[str, Any] = dict(meta.defaults)
    if turn.max_tokens is not None:
        fields["max_tokens"] = turn.max_tokens
    fields |= turn.extra
    if fixed_length:
        if turn.recorded_output_tokens is None:
            raise ValueError(
                "has neither expect.output_tokens nor expect.usage.completion_tokens, which --output length needs"
            )
        constrained = [name for name in _CONSTRAINING if fields.get(name) is not None]
        if fields.get("tool_choice", "auto") not in ("auto", "none"):
            constrained.append("tool_choice")
        if constrained:
            raise ValueError(f"{constrained[0]} constrains the answer, so --output length can't stretch it")
        fields.pop("max_completion_tokens", None)
        fields |= {"max_tokens": turn.recorded_output_tokens, "ignore_eos": True}
    return fields


def _streaming() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}
