"""An engine client that survives its engine's process: with `agentspec serve --restart` a dead engine is started again.

Owns when to restart, and passes requests to the current engine. Knows neither processes nor HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from agentspec.engine.remote import RemoteEngine
from agentspec.errors import AgentspecError, EngineClosedError
from agentspec.server.recorder import WatchedEngine
from agentspec.wire import Event, Submit

AGAIN_SECONDS = 600
"""If an engine ends by itself this soon after a restart, it is not restarted again: the same cause would end the next
one."""


class KeptEngine(WatchedEngine):
    """Implements wire.EngineClient. A context manager that closes the current engine."""

    def __init__(
        self,
        engine: RemoteEngine,
        restart: Callable[[], Awaitable[RemoteEngine]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """restart: makes another engine when this one ended by itself; None: it is not replaced."""
        super().__init__(engine)
        self._remote = engine
        self._restart = restart
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remote.close()

    def stream(self, submit: Submit) -> AsyncIterator[Event]:
        return self._engine.stream(submit)

    async def lost(self) -> None:
        """Wait until the engine has ended for good. Raises EngineClosedError if a restart failed."""
        restarted = -float("inf")
        while True:
            await self._remote.lost()
            if self._restart is None or self._clock() - restarted < AGAIN_SECONDS:
                return
            await self._remote.close()  # the process's memory is free only when it has ended
            try:
                self._engine = self._remote = await self._restart()
            except AgentspecError as error:
                raise EngineClosedError(f"the engine could not be started again: {error}") from error
            restarted = self._clock()
