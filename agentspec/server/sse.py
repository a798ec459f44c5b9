"""Server-sent events: the frames of one streamed answer, ended by exactly one terminal frame.

The terminal frame is `[DONE]` or the API's own last event after a finish, or an error when the request fails. Owns the
frames; the APIs' modules own the events.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from agentspec.errors import AgentspecError, RequestError, printable
from agentspec.server.errors import ApiError, api_error
from agentspec.server.request_ids import log_mark

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item", contravariant=True)


def frame(event: dict[str, Any]) -> bytes:
    """The frame of an event without a name."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def named_frame(event: dict[str, Any]) -> bytes:
    """The frame of an event that is named by its `type`."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


@dataclass(kw_only=True, slots=True)
class StreamHead:
    """The format of a stream, and whether its head is sent. Until then, an error can still determine the status."""

    renamed: Callable[[RequestError], RequestError] = lambda error: error
    """Maps an error to the endpoint's field names."""
    keep_alive: bytes = KEEP_ALIVE
    """Sent when a stream has been silent for a while."""
    frame: Callable[[dict[str, Any]], bytes] = frame
    ending: bytes = DONE
    """The terminal frame after a finish; empty: the last event is the terminal frame."""
    is_sent: bool = False

    def described(self, error: Exception) -> ApiError:
        """The error that ends a running stream. It is logged here, since the stream's status is 200."""
        if isinstance(error, RequestError):
            error = self.renamed(error)
        if isinstance(error, AgentspecError | ApiError):
            known = error if isinstance(error, ApiError) else api_error(error)
            _log.info("a stream ended early: %s%s", printable(known.for_log), log_mark())
            return known
        _log.error("a stream failed half-way%s", log_mark(), exc_info=error)
        return ApiError(500, "internal error")


class Streamed(Protocol[_Item]):
    """Converts what one answer gets from the engine to the events of its stream."""

    def opening(self) -> list[dict[str, Any]]:
        """Events before the generated ones; called once, at the first item."""

    def convert(self, item: _Item, /) -> list[dict[str, Any]]:
        """The stream events for one item."""

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """The last events of a request that failed after the stream's head was sent."""


async def frames(
    items: AsyncGenerator[_Item, None], answer: Streamed[_Item], head: StreamHead
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream, one part per item, and a terminal frame.

    An error before the first item is raised if the stream's head isn't sent yet; a later one becomes the terminal
    frame."""
    started = False
    async with aclosing(items):
        try:
            async for item in items:
                opening = [] if started else answer.opening()
                started = True
                if made := opening + answer.convert(item):
                    yield b"".join(map(head.frame, made))
        except Exception as error:
            if not (started or head.is_sent):
                raise
            yield b"".join(map(head.frame, answer.failed(head.described(error))))
            return
    if head.ending:
        yield head.ending
