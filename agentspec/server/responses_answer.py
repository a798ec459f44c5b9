"""One response of /v1/responses: the object around its output, and the stream of events that tells of it.

Owns the events' numbers, the ways a response ends, and its usage. Knows a turn's events; nothing of items that come in,
or of what is stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from agentspec.server.answers import metrics_body
from agentspec.server.logprobs import content_logprobs
from agentspec.server.responses_output import Event, Output
from agentspec.server.responses_request import ENCRYPTED, ResponsesRequest
from agentspec.server.responses_tools import Toolset
from agentspec.server.service import Service
from agentspec.server.sse import StreamHead
from agentspec.server.token_room import usage_part
from agentspec.server.turn import Turn, TurnEnd
from agentspec.types import FinishReason
from agentspec.wire import Event as EngineEvent
from agentspec.wire import FinishEvent, TokensEvent, Usage

_ABORTED = "the request was aborted"


class Answer:
    """One response on its way: the object, and the events of its stream, numbered."""

    def __init__(
        self,
        request: ResponsesRequest,
        tools: Toolset,
        turn: Turn,
        service: Service,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        """`store` is given the finished response."""
        self._turn = turn
        self._info = service.engine.info
        self._store = store
        self._output = Output(turn.submit.request_id, tools, carries_reasoning=ENCRYPTED in request.include)
        self._num_events = 0
        self.response: dict[str, Any] = {
            "id": f"resp_{turn.submit.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **request.echo(),
            "output": [],
            "usage": None,
        }

    def opening(self) -> list[Event]:
        return self._numbered([self._state("response.created"), self._state("response.in_progress")])

    def take(self, event: EngineEvent) -> list[Event]:
        """What an engine event adds. The last one makes `response` whole."""
        return self._numbered(self._finish(event) if isinstance(event, FinishEvent) else self._tokens(event))

    def failed(self, message: str) -> list[Event]:
        """The request failed half-way."""
        return self._numbered([*self._output.close("incomplete"), self._failed(message)])

    def _tokens(self, event: TokensEvent) -> list[Event]:
        return self._output.push(self._turn.push(event), self._logprobs())

    def _logprobs(self) -> list[dict[str, Any]]:
        """Those of the content that came last; OpenAI's bytes are a list here even where a token stands for none."""
        content: list[dict[str, Any]] = content_logprobs(self._turn.take_content_scores(), self._turn.token_bytes)[
            "content"
        ]
        return [_with_bytes(entry) | {"top_logprobs": [*map(_with_bytes, entry["top_logprobs"])]} for entry in content]

    def _finish(self, event: FinishEvent) -> list[Event]:
        end = self._turn.finish(event)
        told = self._output.push(end.events, self._logprobs())
        is_whole = end.reason is FinishReason.STOP
        told += self._output.close("completed" if is_whole else "incomplete")
        if is_whole and not self._output.has_answer:
            told += self._output.add_empty_message()
        self.response |= {
            "usage": usage_body(event.usage, end) | usage_part(self._turn.clamped),
            "metrics": metrics_body(event.usage.spec, self._info),
        }
        if end.reason is FinishReason.ABORT:
            return [*told, self._failed(_ABORTED)]
        status = "completed" if is_whole else "incomplete"
        self.response |= {"status": status, "output": self._output.items}
        self.response |= (
            {"completed_at": int(time.time())} if is_whole else {"incomplete_details": {"reason": "max_output_tokens"}}
        )
        self._store(self.response)
        return [*told, self._state(f"response.{status}")]

    def _failed(self, message: str) -> Event:
        self.response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": message},
            "output": self._output.items,
        }
        return self._state("response.failed")

    def _state(self, name: str) -> Event:
        return {"type": name, "response": dict(self.response)}

    def _numbered(self, told: list[Event]) -> list[Event]:
        first = self._num_events
        self._num_events += len(told)
        return [event | {"sequence_number": first + index} for index, event in enumerate(told)]


def usage_body(usage: Usage, end: TurnEnd) -> dict[str, Any]:
    """OpenAI's usage of a response. Writing to the cache is never counted: it costs nothing."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def frames(
    stream: AsyncGenerator[EngineEvent, None], answer: Answer, head: StreamHead
) -> AsyncGenerator[bytes, None]:
    """The frames of a response, one item per engine event. The last event is response.completed, response.incomplete or
    response.failed.

    An error before the first event is raised while `head` isn't sent."""
    is_started = False
    async with aclosing(stream):
        try:
            async for event in stream:
                opening = [] if is_started else answer.opening()
                is_started = True
                if told := opening + answer.take(event):
                    yield _frame(told)
        except Exception as error:
            if not (is_started or head.is_sent):
                raise
            opening = [] if is_started else answer.opening()
            yield _frame(opening + answer.failed(head.described(error).message))


def _frame(told: list[Event]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in told)


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"bytes": entry["bytes"] or []}
