"""One response of /v1/responses: the object around its output, and its stream of events.

Owns the events' sequence numbers, the ways a response ends, and its usage. Knows a turn's events; nothing of input
items or of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from agentspec.server.answers import metrics_body
from agentspec.server.errors import ApiError
from agentspec.server.logprobs import content_logprobs
from agentspec.server.responses_output import Event, Output
from agentspec.server.responses_request import ENCRYPTED, ResponsesRequest
from agentspec.server.responses_tools import Toolset
from agentspec.server.service import Service
from agentspec.server.token_room import usage_part
from agentspec.server.turn import Turn, TurnEnd
from agentspec.types import FinishReason
from agentspec.wire import Event as EngineEvent
from agentspec.wire import FinishEvent, TokensEvent, Usage

_ABORTED = "the request was aborted"


class Answer:
    """One running response: the object, and the numbered events of its stream. Implements sse.Streamed.

    The last event is response.completed, response.incomplete or response.failed."""

    def __init__(
        self,
        request: ResponsesRequest,
        tools: Toolset,
        turn: Turn,
        service: Service,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        """store: called with the finished response."""
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

    def convert(self, event: EngineEvent) -> list[Event]:
        """The stream events for an engine event. The last one completes `response`."""
        return self._numbered(self._finish(event) if isinstance(event, FinishEvent) else self._tokens(event))

    def failed(self, error: ApiError) -> list[Event]:
        """The last events of a request that failed after the stream's head was sent; the opening, too, if it is still
        missing."""
        opening = [] if self._num_events else self.opening()
        return opening + self._numbered([*self._output.close("incomplete"), self._failed(error.message)])

    def _tokens(self, event: TokensEvent) -> list[Event]:
        return self._output.push(self._turn.push(event), self._logprobs())

    def _logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the latest content. In OpenAI's shape `bytes` is a list even for a token without
        text."""
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
    """OpenAI's usage of a response. Cache writes count as 0: they are free here."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"bytes": entry["bytes"] or []}
