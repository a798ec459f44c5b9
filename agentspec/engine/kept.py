"""An engine client that outlives its engine's process: behind `agentspec serve --restart` a dead engine is started
again.

Owns when that is done, and passes requests on to the engine that runs now. Knows neither processes nor HTTP.
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
"""An engine that ends by itself so soon after it was started again is not started a third time: what ended it would end
the next one."""


class KeptEngine(WatchedEngine):
    """Implements wire.EngineClient. A context manager, which closes the engine that runs then."""

    def __init__(
        self,
        engine: RemoteEngine,
        restart: Callable[[], Awaitable[RemoteEngine]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """restart: makes another engine when this one ended by itself; None: nobody does."""
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
        """Wait until the engine has ended, and won't be started again. Raises EngineClosedError when it could not
        be."""
        restarted = -float("inf")
        while True:
            await self._remote.lost()
            if self._restart is None or self._clock() - restarted < AGAIN_SECONDS:
                return
            await self._remote.close()  # what the process held is free only when it has ended
            try:
                self._engine = self._remote = await self._restart()
            except AgentspecError as error:
                raise EngineClosedError(f"the engine could not be started again: {error}") from error
            restarted = self._clock()
