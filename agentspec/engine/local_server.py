"""The engine and its HTTP app in this process: `serve` puts it behind a socket, `replay` uses it without one.

Importing this loads torch, so commands import it only when they need an engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.transport import InProcessTransport


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """A loaded engine that doesn't run yet (`async with engine`), and the app that serves it."""

    engine: AsyncEngine
    app: FastAPI

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Run the engine and yield an HTTP client for it, without a socket and without time limits."""
        transport = InProcessTransport(self.app)
        async with (
            self.engine,
            httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=None) as client,
        ):
            yield client


def load(config: EngineConfig) -> LocalServer:
    """Load the model that `config` names. Raises CheckpointError or ConfigError if that fails."""
    engine = AsyncEngine(config)
    return LocalServer(engine=engine, app=engine.app)
