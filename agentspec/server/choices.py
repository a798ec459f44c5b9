"""Answers with choices, in OpenAI's shape (chat, completions): streamed in chunks, or whole.

Owns the chunk objects, the token counts in each chunk, and the cost of all choices. Knows nothing of prompts or of how
a choice's text is made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response

from agentspec.server import events, sse
from agentspec.server.answers import Head, metrics_body, of_choices, total, usage_body, usage_so_far
from agentspec.server.errors import ApiError
from agentspec.server.openai import Common
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.token_room import headers
from agentspec.wire import EngineClient, Event, FinishEvent, ModelInfo, Submit, TokensEvent, Usage

Piece = dict[str, Any]
"""A choice of one chunk."""


class Choice(Protocol):
    """One running choice. A stream sends its pieces one by one; the whole choice is assembled from the same pieces."""

    prompt_ids: Sequence[int]
    usage: Usage
    """Set when the choice has finished, as is reasoning_tokens."""
    reasoning_tokens: int

    @property
    def num_generated(self) -> int:
        """Tokens so far, including those whose text is still held back."""

    def opening(self) -> list[Piece]:
        """Pieces before the generated ones."""

    def tokens(self, event: TokensEvent) -> list[Piece]: ...

    def finish(self, event: FinishEvent) -> list[Piece]: ...

    def whole(self, pieces: Sequence[Piece]) -> Piece:
        """The choice as it appears in a whole answer. pieces: all of its own, in order."""


class Answer:
    """All choices of one answer, and their total cost. Implements sse.Streamed."""

    def __init__(
        self,
        request: Common,
        head: Head,
        choices: Sequence[Choice],
        info: ModelInfo,
        *,
        clamped: int | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        """clamped: see token_room.py. prompt_ids: shown beside the choices; None: not shown."""
        self._request = request
        self._head = head
        self._choices = choices
        self._info = info
        self._clamped = clamped
        self._prompt = {} if prompt_ids is None else {"prompt_token_ids": list(prompt_ids)}
        self._num_open = len(choices)

    async def respond(self, engine: EngineClient, submits: Sequence[Submit], head: sse.StreamHead) -> Response:
        """Run the choices' submits concurrently; the first error ends them all. The response is a stream if the request
        asks for one."""
        merged, told = events.merge(engine, submits), headers(self._clamped)
        if self._request.stream:
            return await FrameResponse.begin(sse.frames(merged, self, head), head, told)
        return json_response(await self._whole(merged), headers=told)

    def opening(self) -> list[dict[str, Any]]:
        chunks = [self._chunk(piece) for choice in self._choices for piece in choice.opening()]
        return [chunks[0] | self._prompt, *chunks[1:]] if chunks else []

    def convert(self, item: tuple[int, Event]) -> list[dict[str, Any]]:
        """The chunks of one event. The last event adds the costs."""
        chunks = [self._chunk(piece) for piece in self._pieces(*item)]
        if not self._num_open:
            costs = self._costs()
            if self._request.include_usage:
                chunks.append(self._head.body(choices=[], **costs))
            else:
                chunks[-1]["metrics"] = costs["metrics"]
        return chunks

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body()]

    async def _whole(self, merged: AsyncGenerator[tuple[int, Event], None]) -> dict[str, Any]:
        pieces = [choice.opening() for choice in self._choices]
        async with aclosing(merged):
            async for index, event in merged:
                pieces[index] += self._pieces(index, event)
        choices = [choice.whole(parts) for choice, parts in zip(self._choices, pieces, strict=True)]
        return self._head.body(choices=choices, **self._costs(), **self._prompt)

    def _pieces(self, index: int, event: Event) -> list[Piece]:
        if isinstance(event, TokensEvent):
            return self._choices[index].tokens(event)
        self._num_open -= 1
        return self._choices[index].finish(event)

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        if self._request.usage_so_far:
            choice = self._choices[piece["index"]]
            return self._head.body(choices=[piece], usage=usage_so_far(len(choice.prompt_ids), choice.num_generated))
        return self._head.body(choices=[piece], **({"usage": None} if self._request.include_usage else {}))

    def _costs(self) -> dict[str, Any]:
        n = self._request.n
        usage = total(
            of_choices([choice.usage for choice in self._choices[first : first + n]])
            for first in range(0, len(self._choices), n)
        )
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return {
            "usage": usage_body(usage, reasoning_tokens, self._clamped),
            "metrics": metrics_body(usage.spec, self._info),
        }
