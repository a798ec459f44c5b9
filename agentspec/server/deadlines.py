"""Time limits for a request's first token and for its end: an engine client that aborts overdue requests of every API.

Knows wire alone. Its errors become statuses and events like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agentspec.errors import OverloadedError
from agentspec.server.errors import ApiError
from agentspec.server.recorder import WatchedEngine
from agentspec.wire import EngineClient, Event, Submit

RETRY_SECONDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """In seconds; None: no limit."""

    queue_seconds: float | None = None
    """From the complete body to the first token."""
    request_seconds: float | None = None
    """From the complete body to the end of the answer."""

    def of_request(self, engine: EngineClient) -> EngineClient:
        """The engine client for one request, whose body is complete now."""
        return engine if self == NO_LIMITS else _TimedEngine(engine, self)


NO_LIMITS = TimeLimits()


class _TimedEngine(WatchedEngine):
    """Wraps all submits of one request. Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient, limits: TimeLimits) -> None:
        super().__init__(engine)
        now = asyncio.get_running_loop().time()
        self._limits = limits
        self._queue_due = None if limits.queue_seconds is None else now + limits.queue_seconds
        """None: no limit, or the first token has come."""
        self._request_due = None if limits.request_seconds is None else now + limits.request_seconds
        self._waiting: set[asyncio.Timeout] = set()

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events. Raises OverloadedError and ApiError (504) when a limit is reached."""
        async with self._opened(submit) as events:
            while True:
                limit = asyncio.timeout_at(self._due)
                self._waiting.add(limit)
                try:
                    async with limit:
                        event = await anext(events, None)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise self._error() from None
                finally:
                    self._waiting.remove(limit)
                if event is None:
                    return
                if self._queue_due is not None:
                    self._begin()
                yield event

    @property
    def _due(self) -> float | None:
        return min((due for due in (self._queue_due, self._request_due) if due is not None), default=None)

    def _begin(self) -> None:
        """End the queue limit for the whole request: after one token, its other choices may wait for each other."""
        self._queue_due = None
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(self._request_due)

    def _error(self) -> Exception:
        if self._due is not None and self._due == self._queue_due:
            return OverloadedError(
                f"no token within the {self._limits.queue_seconds:g} seconds that a request may wait here",
                RETRY_SECONDS,
            )
        reason = f"the request did not end within the {self._limits.request_seconds:g} seconds that it may take here"
        return ApiError(504, reason, code="request_timeout", headers={"x-should-retry": "false"})
