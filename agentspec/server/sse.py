"""Server-sent events: the frames of one streamed answer, ended by exactly one terminal frame.

The terminal frame is `[DONE]` after a finish, or one error object when the request fails half-way. What the chunks say
is the business of chat.py and completions.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from agentspec.errors import AgentspecError, RequestError, printable
from agentspec.server.errors import ApiError, api_error
from agentspec.server.request_ids import log_mark
from agentspec.wire import Event, FinishEvent, TokensEvent

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which no client takes for an event."""

_log = logging.getLogger(__name__)


def _as_it_is(error: RequestError) -> RequestError:
    return error


@dataclass(kw_only=True, slots=True)
class StreamHead:
    """The part of a stream before its events. Until it is sent, an error still chooses the status."""

    renamed: Callable[[RequestError], RequestError] = _as_it_is
    """The error in the words of the endpoint."""
    keep_alive: bytes = KEEP_ALIVE
    """What is sent when there has been nothing else to send for a while."""
    is_sent: bool = False

    def described(self, error: Exception) -> ApiError:
        """The error that ends a stream half-way. It is logged here: the stream's status is 200."""
        if isinstance(error, RequestError):
            error = self.renamed(error)
        if isinstance(error, AgentspecError | ApiError):
            known = error if isinstance(error, ApiError) else api_error(error)
            _log.info("a stream ended early: %s%s", printable(known.for_log), log_mark())
            return known
        _log.error("a stream failed half-way%s", log_mark(), exc_info=error)
        return ApiError(500, "internal error")


class Chunks(Protocol):
    """Turns the events of one answer's requests into its chunk objects. `index` says which request an event belongs
    to."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before anything generated; called once, when the first event is there."""
        ...

    def tokens(self, index: int, event: TokensEvent) -> list[dict[str, Any]]: ...

    def finish(self, index: int, event: FinishEvent) -> list[dict[str, Any]]:
        """The rest of the text and the finish reason; behind the last one, what the answer cost."""
        ...


def frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def frames(
    events: AsyncGenerator[tuple[int, Event], None], chunks: Chunks, head: StreamHead
) -> AsyncGenerator[bytes, None]:
    """The frames of `events` (see events.merge), one item per engine event and a terminal one.

    An error before the first event is raised while `head` isn't sent; a later one becomes the terminal frame."""
    started = False
    async with aclosing(events):
        try:
            async for index, event in events:
                opening = [] if started else chunks.opening()
                started = True
                added = chunks.finish(index, event) if isinstance(event, FinishEvent) else chunks.tokens(index, event)
                if opening or added:
                    yield b"".join(map(frame, opening + added))
        except Exception as error:
            if not (started or head.is_sent):
                raise
            yield frame(head.described(error).body())
            return
    yield DONE
