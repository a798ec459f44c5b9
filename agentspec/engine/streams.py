"""Tracks request streams: which requests have a reader, and which ids are in use.

Used by the engine that its caller drives, the one on a thread, and the server's side of the one in another process.
Knows neither threads nor processes; its owner chooses the inbox type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from agentspec.errors import AgentspecError, RequestError
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, Usage


class Inbox(Protocol):
    """A reader's queue of events: a queue.SimpleQueue or an asyncio.Queue."""

    def put_nowait(self, item: Any, /) -> None: ...


InboxT = TypeVar("InboxT", bound=Inbox)


class Streams(Generic[InboxT]):
    """Streams by request id. An id is in use while its request runs or has a reader. Not thread-safe."""

    def __init__(self, new_inbox: Callable[[], InboxT]) -> None:
        self._new_inbox = new_inbox
        self._inboxes: dict[str, InboxT] = {}
        """Of requests that have a reader."""
        self._running: set[str] = set()
        """Requests whose last event hasn't come, with or without a reader."""

    def begin(self, request_id: str) -> InboxT:
        """Register a new request and its reader. Raises RequestError if the id is in use."""
        if request_id in self._inboxes or request_id in self._running:
            raise RequestError(
                "request_id", request_id, "is in use by a request that is running or was not read to its end"
            )
        self._running.add(request_id)
        inbox = self._inboxes[request_id] = self._new_inbox()
        return inbox

    def hand(self, request_id: str, item: Event | AgentspecError) -> None:
        """Pass an event to its reader, if there is one. A FinishEvent or an error is the last."""
        if request_id in self._inboxes:
            self._inboxes[request_id].put_nowait(item)
        if isinstance(item, FinishEvent | AgentspecError):
            self._running.discard(request_id)

    def leave(self, request_id: str) -> bool:
        """Unregister the reader. True: the request still runs and must be aborted; its id stays in use until `hand` or
        `free` ends it."""
        del self._inboxes[request_id]
        return request_id in self._running

    def free(self, request_id: str) -> None:
        """A request without a reader has ended. No-op for an id that has a reader: by now it is another request's."""
        if request_id not in self._inboxes:
            self._running.discard(request_id)

    def drop(self, request_id: str) -> None:
        """Remove a request that was registered and then refused."""
        self.leave(request_id)
        self.free(request_id)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        """Number of ids in use."""
        return len(self._inboxes.keys() | self._running)

    def end_all(self, error: str | None) -> None:
        """End every running request. error: what the engine died of; None if it was closed."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for request_id in list(self._running):
            self.hand(
                request_id,
                FinishEvent(
                    request_id=request_id, reason=reason, usage=Usage(), error=error, is_lost=error is not None
                ),
            )
