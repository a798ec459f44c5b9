"""Serves an app on a real socket, in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline

OpenApp = Callable[[], AbstractAsyncContextManager[Any]]


@contextmanager
def served(open_app: OpenApp) -> Iterator[str]:
    """Serve the app that `open_app` yields; the value is its base URL, with a trailing slash."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server: list[uvicorn.Server] = []
    ready = threading.Event()

    async def run() -> None:
        async with open_app() as app:
            server.append(
                _Unsignalled(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=5))
            )
            ready.set()
            await server[0].serve(sockets=[listener])

    def serve() -> None:
        try:
            asyncio.run(run())
        finally:
            ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(60)
        assert server, "the app did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        for running in server:
            running.should_exit = True
        thread.join()
        listener.close()


@asynccontextmanager
async def bundled_app() -> AsyncIterator[Any]:
    """The app of the bundled model on the CPU."""
    engine = AsyncEngine(EngineConfig())
    async with engine:
        yield create_app(engine, TextPipeline.from_checkpoint(engine.tokenizer, engine.model_dir))


class _Unsignalled(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
