"""The bundled model behind a socket, with recorded requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from scripts.clients.record import Recorder
from tests.server.loopback import bundled_app, served


@contextmanager
def recorded() -> Iterator[tuple[str, Recorder]]:
    """Yield the server's URL without a trailing slash, and the list of its requests."""
    recorders: list[Recorder] = []

    @asynccontextmanager
    async def watched() -> AsyncIterator[Any]:
        async with bundled_app() as app:
            recorders.append(Recorder(app))
            yield recorders[0]

    with served(watched) as url:
        yield url.rstrip("/"), recorders[0]
