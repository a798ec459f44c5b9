"""One line for each request when it ends, on the logger `agentspec`: level INFO, and DEBUG for probes and scrapes that
were answered.

Owns the line, an ASGI app that writes it, and an engine client that notes what it says of tokens. Refusals have lines
of their own, which responding.py writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.server.door import PROBES
from agentspec.server.recorder import WatchedEngine
from agentspec.server.request_ids import log_mark
from agentspec.server.responding import shown_path
from agentspec.server.service import session_of
from agentspec.types import FinishReason
from agentspec.wire import EngineClient, Event, FinishEvent, Submit, Usage

logger = logging.getLogger("agentspec")

NOTE = "agentspec.note"
"""Where the scope of a request that is logged holds its Note."""

_OFTEN = PROBES | {"/metrics"}


class _Run:
    """One submit of a request, from its first event on."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.usage: Usage | None = None
        self.reason = FinishReason.ABORT
        """Until it ends by itself."""


class Note:
    """What becomes known of a request on its way."""

    def __init__(self, session_id: str | None, clock: Callable[[], float]) -> None:
        """session_id: what the request's headers say."""
        self.session_id = session_id
        self.status: int | None = None
        """None: the client went away before there was one."""
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._runs: dict[str, _Run] = {}

    def take(self, submit: Submit, event: Event) -> None:
        run = self._runs.setdefault(submit.request_id, _Run(submit.prompt_ids))
        if isinstance(event, FinishEvent):
            run.usage, run.reason = event.usage, event.reason
            return
        run.num_tokens += len(event.token_ids)
        if self._first is None and event.token_ids:
            self._first = self._clock()

    def line(self) -> str:
        """Everything behind method and path. Choices of one prompt count it once; cached are the tokens that none of
        them computed."""
        words = ["-" if self.status is None else str(self.status)]
        if self.session_id is not None:
            words.append(f"session={self.session_id!r}")
        if self._runs:
            by_prompt: dict[int, list[_Run]] = {}
            for run in self._runs.values():
                by_prompt.setdefault(id(run.prompt_ids), []).append(run)  # choices share the list itself
            words.append(f"prompt={sum(len(runs[0].prompt_ids) for runs in by_prompt.values())}")
            cached = [
                min((run.usage.cached_tokens for run in runs if run.usage is not None), default=None)
                for runs in by_prompt.values()
            ]
            if None not in cached:  # a request that was left early never said
                words.append(f"cached={sum(count or 0 for count in cached)}")
            words.append(
                f"output={sum(run.num_tokens if run.usage is None else run.usage.completion_tokens for run in self._runs.values())}"
            )
            words.append("finish=" + ",".join(sorted({run.reason.value for run in self._runs.values()})))
        if self._first is not None:
            words.append(f"first={_milliseconds(self._first - self._began)}")
        return " ".join([*words, f"all={_milliseconds(self._clock() - self._began)}"])


class RequestLog:
    """In front of `app` and of all that refuses requests before it."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        note = Note(session_of(Headers(scope=scope), None), self._clock)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
            await send(message)

        try:
            await self._app({**scope, NOTE: note}, receive, send_noted)
        finally:
            is_routine = note.status == 200 and scope["path"].rstrip("/") in _OFTEN
            level = logging.DEBUG if is_routine else logging.INFO
            logger.log(level, "%s %s %s%s", scope["method"], shown_path(scope["path"]), note.line(), log_mark())


class NotedEngine(WatchedEngine):
    """An engine client for one request, which notes what passes through it. Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient, note: Note) -> None:
        super().__init__(engine)
        self._note = note

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events, untouched."""
        self._note.session_id = submit.session_id
        # The protocol promises that closing the iterator aborts; AsyncIterator has no name for that.
        async with aclosing(cast(AsyncGenerator[Event, None], self._engine.stream(submit))) as events:
            async for event in events:
                self._note.take(submit, event)
                yield event


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"
