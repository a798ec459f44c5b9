"""Measures the requests that the server sends to the engine: their times and their costs.

Owns the histograms and an engine client that fills them. Knows nothing of requests' bodies; metrics.py exposes the
figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from agentspec.errors import OverloadedError
from agentspec.server.answers import total
from agentspec.server.events import opened
from agentspec.types import FinishReason, Histogram
from agentspec.wire import EngineClient, Event, FinishEvent, ModelInfo, Submit, TokensEvent, Usage

FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
BETWEEN_TOKENS_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
RETRY_SECONDS = 1
"""Retry-After for a client over the limit."""
TOKEN_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Figures:
    """Figures since the server started. A request here is one submit: an answer with three choices counts as three."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(FinishReason, 0)
        """By reason. A client that disconnects counts as an abort."""
        self.generated_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        """Seconds from submit to the first event with tokens."""
        self.between_steps = Histogram(BETWEEN_TOKENS_SECONDS)
        """Seconds between two events of one request. With drafts, an event has several tokens."""
        self.per_token = Histogram(BETWEEN_TOKENS_SECONDS)
        """Seconds per token after the first event: one observation per request."""
        self.whole = Histogram(REQUEST_SECONDS)
        """Seconds from submit to the terminal event."""
        self.prompt_tokens = Histogram(TOKEN_COUNTS)
        self.output_tokens = Histogram(TOKEN_COUNTS)
        self.usage = Usage()
        """Summed over requests with a terminal event."""

    def finish(self, event: FinishEvent, seconds: float) -> None:
        self.finished[event.reason] += 1
        self.whole.observe(seconds)
        self.prompt_tokens.observe(event.usage.prompt_tokens)
        self.output_tokens.observe(event.usage.completion_tokens)
        self.usage = total((self.usage, event.usage))


class WatchedEngine:
    """Base class of engine clients that wrap another one and observe its streams."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def check_alive(self) -> None:
        self._engine.check_alive()

    async def stats(self) -> dict[str, Any]:
        return await self._engine.stats()

    def _opened(self, submit: Submit) -> aclosing[AsyncGenerator[Event, None]]:
        """The inner engine's stream, closed on every exit."""
        return opened(self._engine, submit)


class RecordedEngine(WatchedEngine):
    """An engine client that records figures of its streams, and enforces a limit on open ones. Implements
    wire.EngineClient."""

    def __init__(
        self,
        engine: EngineClient,
        figures: Figures,
        clock: Callable[[], float] = time.perf_counter,
        *,
        max_open: int | None = None,
    ) -> None:
        """max_open: submits that may run or wait at the same time; None: no limit."""
        super().__init__(engine)
        self._figures = figures
        self._clock = clock
        self._max_open = max_open
        self._num_open = 0

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events, unchanged. A submit that the engine refuses is not recorded. Raises OverloadedError over
        the limit."""
        if self._max_open is not None and self._num_open >= self._max_open:
            raise OverloadedError(
                f"{self._num_open} prompts and choices run or wait here, which is the limit", RETRY_SECONDS
            )
        self._num_open += 1
        pace = _Pace(self._figures, self._clock)
        try:
            async with self._opened(submit) as events:
                async for event in events:
                    pace.note_event(event)
                    yield event
        except (GeneratorExit, asyncio.CancelledError):
            pace.note_abandoned(FinishReason.ABORT)
            raise
        except Exception:
            if pace.has_begun:
                pace.note_abandoned(FinishReason.ERROR)
            raise
        finally:
            self._num_open -= 1


class _Pace:
    """Timestamps of one request."""

    def __init__(self, figures: Figures, clock: Callable[[], float]) -> None:
        self._figures = figures
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last = self._start
        self._tokens_behind_first = 0
        self._ended = False
        self.has_begun = False

    def note_event(self, event: Event) -> None:
        now = self._clock()
        self.has_begun = True
        if isinstance(event, TokensEvent):
            if event.token_ids:
                self._note_tokens(len(event.token_ids), now)
            return
        self._ended = True
        if self._first is not None and self._tokens_behind_first:
            self._figures.per_token.observe((self._last - self._first) / self._tokens_behind_first)
        self._figures.finish(event, now - self._start)

    def note_abandoned(self, reason: FinishReason) -> None:
        """Record a stream that ended without a terminal event; no-op after one."""
        if not self._ended:
            self._ended = True
            self._figures.finished[reason] += 1

    def _note_tokens(self, count: int, now: float) -> None:
        self._figures.generated_tokens += count
        if self._first is None:
            self._first = now
            self._figures.first_token.observe(now - self._start)
        else:
            self._tokens_behind_first += count
            self._figures.between_steps.observe(now - self._last)
        self._last = now
