"""/v1/messages and its count_tokens: Anthropic's API.

Owns the endpoints: from a body to a turn, and from a turn to the answer. The meaning of a body is in
messages_request.py, the shape of an answer in messages_events.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import answer_shapes, events, messages_request, token_room
from agentspec.server.errors import ANTHROPIC_ROOT
from agentspec.server.messages_edits import count_body
from agentspec.server.messages_events import PING, MessageEvents, assembled_message
from agentspec.server.messages_request import CountRequest, DisabledThinking, MessagesRequest
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.sse import StreamHead, frames, named_frame
from agentspec.server.tables.messages import COUNT, MESSAGES
from agentspec.server.turn import TurnRequest, begin_turns, build_prompt
from agentspec.text.prompt import BuiltPrompt
from agentspec.wire import Event

_NAMES = {
    "prompt_ids": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields that have another name in this API."""

_TOOL = re.compile(r"tools\[(\d+)\]")


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/messages."""
    asked = service.named(messages_request.parse_messages(call.body, call.notes))
    try:
        (turn,) = await begin_turns(service, _turn_request(service, asked, call))
        _check_thinking(asked, turn.prompt)
        tells_edits = asked.context_management is not None
        told = MessageEvents(
            turn, service.engine.info, model=asked.model, omits_thinking=asked.omits_thinking, tells_edits=tells_edits
        )
        stream, headers = events.generate(service.engine, turn.submit), token_room.headers(turn.clamped)
        if asked.stream:
            head = StreamHead(
                renamed=lambda error: _renamed(error, asked), keep_alive=PING, frame=named_frame, ending=b""
            )
            return await FrameResponse.begin(frames(stream, told, head), head, headers)
        return json_response(await complete(stream, told), headers=headers)
    except RequestError as error:
        raise _renamed(error, asked) from None


async def count_tokens(service: Service, call: Call) -> Response:
    """POST /v1/messages/count_tokens: the prompt's length, nothing is generated."""
    asked = service.named(messages_request.parse_count(call.body, call.notes))
    try:
        prompt = await build_prompt(service, _turn_request(service, asked, call), counts=True)
        _check_thinking(asked, prompt)
    except RequestError as error:
        raise _renamed(error, asked) from None
    size = len(prompt.prompt_ids)
    edited = {} if asked.context_management is None else {"context_management": count_body(prompt.applied, size)}
    return json_response({"input_tokens": size, **edited})


ROUTES = (
    Route(
        method="POST",
        path=ANTHROPIC_ROOT,
        handle=answer,
        body=MessagesRequest,
        table=MESSAGES,
        answers="json or events",
        answer=answer_shapes.MessageObject,
    ),
    Route(
        method="POST",
        path=f"{ANTHROPIC_ROOT}/count_tokens",
        handle=count_tokens,
        body=CountRequest,
        table=COUNT,
        answer=answer_shapes.CountedMessages,
    ),
)


async def complete(stream: AsyncGenerator[Event, None], told: MessageEvents) -> dict[str, Any]:
    """The whole message, assembled from the events that a stream would have."""
    async with aclosing(stream):
        added = [one async for event in stream for one in told.convert(event)]
    return assembled_message([*told.opening(), *added])


def _turn_request(service: Service, asked: CountRequest, call: Call) -> TurnRequest:
    _, prompts = service.chat_text("messages", asked.messages)
    return messages_request.turn_request(asked, session_of(call.headers, None), prompts.template_reads)


def _check_thinking(asked: CountRequest, prompt: BuiltPrompt) -> None:
    """Refuse disabled thinking if the template starts every answer with thinking anyway."""
    if isinstance(asked.thinking, DisabledThinking) and prompt.reasoning_open and not prompt.begun.turn.content:
        raise RequestError(
            "thinking.type", "disabled", "this checkpoint's chat template begins every answer with thinking"
        )


def _renamed(error: RequestError, asked: CountRequest) -> RequestError:
    """The error with this API's field names."""
    field = _NAMES.get(error.field, error.field)
    if found := _TOOL.match(field):
        places = [place for place, tool in enumerate(asked.tools) if tool.is_own]
        place = dict(enumerate(places)).get(int(found[1]), found[1])
        field = f"tools[{place}]" + field[found.end() :].replace(".function.parameters", ".input_schema").replace(
            ".function", ""
        )
    return type(error)(field, error.value, error.reason)
