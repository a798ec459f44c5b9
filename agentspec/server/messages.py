"""/v1/messages and its count_tokens: Anthropic's API.

Owns the way from a body to a turn and back. What a body means is messages_request.py's business, what an answer looks
like messages_events.py's.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import answer_shapes, events, messages_request
from agentspec.server.messages_edits import count_body
from agentspec.server.messages_events import PING, MessageEvents, frames, put_together
from agentspec.server.messages_request import CountRequest, MessagesRequest
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.sse import StreamHead
from agentspec.server.tables.messages import COUNT, MESSAGES
from agentspec.server.token_room import headers
from agentspec.server.turn import TurnRequest, begin, build_prompt
from agentspec.text.prompt import BuiltPrompt
from agentspec.wire import EngineClient, Submit

_PATH = "/v1/messages"

_NAMES = {
    "prompt_ids": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields that this API calls otherwise."""

_TOOL = re.compile(r"tools\[(\d+)\]")


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/messages."""
    asked = service.named(messages_request.parse_messages(call.body, call.notes))
    try:
        (turn,) = await begin(service, _turn_request(service, asked, call))
        _check_thinking(asked, turn.prompt)
        tells_edits = asked.context_management is not None
        told = MessageEvents(
            turn, service.engine.info, model=asked.model, omits_thinking=asked.omits_thinking, tells_edits=tells_edits
        )
        if asked.stream:
            head = StreamHead(renamed=lambda error: _renamed(error, asked), keep_alive=PING)
            return await FrameResponse.begin(
                frames(events.generate(service.engine, turn.submit), told, _PATH, head), head, headers(turn.clamped)
            )
        return json_response(await complete(service.engine, turn.submit, told), headers=headers(turn.clamped))
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
        path=_PATH,
        handle=answer,
        body=MessagesRequest,
        table=MESSAGES,
        answers="json or events",
        answer=answer_shapes.MessageObject,
    ),
    Route(
        method="POST",
        path=f"{_PATH}/count_tokens",
        handle=count_tokens,
        body=CountRequest,
        table=COUNT,
        answer=answer_shapes.CountedMessages,
    ),
)


async def complete(engine: EngineClient, submit: Submit, told: MessageEvents) -> dict[str, Any]:
    """The whole message: the same events as streamed, put together."""
    parts, end = await events.collect(engine, submit)
    added = [event for part in parts for event in told.tokens(part)]
    return put_together([*told.opening(), *added, *told.finish(end)])


def _turn_request(service: Service, asked: CountRequest, call: Call) -> TurnRequest:
    prompts = service.chat_text("messages", asked.messages).prompts
    assert prompts is not None
    return messages_request.turn_request(asked, session_of(call.headers, None), prompts.template_reads)


def _check_thinking(asked: CountRequest, prompt: BuiltPrompt) -> None:
    """Thinking can't be switched off where the template begins it whatever it is told."""
    if asked.wants_no_thinking and prompt.reasoning_open and not prompt.begun.turn.content:
        raise RequestError(
            "thinking.type", "disabled", "this checkpoint's chat template begins every answer with thinking"
        )


def _renamed(error: RequestError, asked: CountRequest) -> RequestError:
    """The error in the words of this API."""
    field = _NAMES.get(error.field, error.field)
    if found := _TOOL.match(field):
        places = [place for place, tool in enumerate(asked.tools) if tool.is_own]
        place = dict(enumerate(places)).get(int(found[1]), found[1])
        field = f"tools[{place}]" + field[found.end() :].replace(".function.parameters", ".input_schema").replace(
            ".function", ""
        )
    return type(error)(field, error.value, error.reason)
