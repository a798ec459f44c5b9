"""Logs one line when a request ends, on the logger `agentspec`: at INFO, or at DEBUG for successful probes and scrapes.

Owns the line, an ASGI layer that writes it, and an engine client that collects its token counts. Refusals have lines of
their own, written by responding.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

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
"""The scope key of a logged request's Note."""

_OFTEN = PROBES | {"/metrics"}


class _Run:
    """One submit of a request, from its first event on."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.usage: Usage | None = None
        self.reason = FinishReason.ABORT
        """ABORT until a terminal event arrives."""


class Note:
    """Collects the facts of one request for its log line."""

    def __init__(self, session_id: str | None, clock: Callable[[], float]) -> None:
        """session_id: from the request's headers."""
        self.session_id = session_id
        self.status: int | None = None
        """None: the client disconnected before there was a status."""
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._runs: dict[str, _Run] = {}

    def note_event(self, submit: Submit, event: Event) -> None:
        run = self._runs.setdefault(submit.request_id, _Run(submit.prompt_ids))
        if isinstance(event, FinishEvent):
            run.usage, run.reason = event.usage, event.reason
            return
        run.num_tokens += len(event.token_ids)
        if self._first is None and event.token_ids:
            self._first = self._clock()

    def line(self) -> str:
        """The line's part after method and path. The choices of a prompt count it once; cached tokens are those that no
        choice had to compute."""
        words = ["-" if self.status is None else str(self.status)]
        if self.session_id is not None:
            words.append(f"session={self.session_id!r}")
        if self._runs:
            by_prompt: dict[int, list[_Run]] = {}
            for run in self._runs.values():
                by_prompt.setdefault(id(run.prompt_ids), []).append(run)  # choices share the list object
            words.append(f"prompt={sum(len(runs[0].prompt_ids) for runs in by_prompt.values())}")
            cached = [
                min((run.usage.cached_tokens for run in runs if run.usage is not None), default=None)
                for runs in by_prompt.values()
            ]
            if None not in cached:  # unknown for an aborted request
                words.append(f"cached={sum(count or 0 for count in cached)}")
            outputs = (
                run.num_tokens if run.usage is None else run.usage.completion_tokens for run in self._runs.values()
            )
            words.append(f"output={sum(outputs)}")
            words.append("finish=" + ",".join(sorted({run.reason.value for run in self._runs.values()})))
        if self._first is not None:
            words.append(f"first={_milliseconds(self._first - self._began)}")
        return " ".join([*words, f"all={_milliseconds(self._clock() - self._began)}"])


class RequestLog:
    """The logging layer, in front of `app` and of everything that refuses requests."""

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
    """An engine client for one request that records its events in a Note. Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient, note: Note) -> None:
        super().__init__(engine)
        self._note = note

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events, unchanged."""
        self._note.session_id = submit.session_id
        async with self._opened(submit) as events:
            async for event in events:
                self._note.note_event(submit, event)
                yield event


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"
