"""`agentspec serve`: the app behind a socket until a signal ends it. The engine is closed on every way out."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from agentspec import local_server
from agentspec.config import EngineConfig
from agentspec.errors import ConfigError
from agentspec.local_server import LocalServer

GRACE_SECONDS = 5
"""How long running answers may go on after the first signal; a second signal ends them at once."""

CLOSE_SECONDS = 10
"""How long the last events of ended answers may take to reach their clients."""


class _SignalledServer(uvicorn.Server):
    """uvicorn raises a caught signal again when it is done, which would cut the engine's close short. We handle signals ourselves."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: EngineConfig, host: str, port: int) -> signal.Signals | None:
    """Serve until a signal; returns it. Binds first: a port that is taken must not cost the loading of a model."""
    with _bind(host, port) as listener:
        return asyncio.run(_serve(local_server.load(config), listener))


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError("port", port, "must be between 0 and 65535")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("port", port, f"can't listen on {host}: {error.strerror or error}") from None
    return listener


async def _serve(local: LocalServer, listener: socket.socket) -> signal.Signals | None:
    settings = uvicorn.Config(
        local.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_SECONDS + CLOSE_SECONDS
    )
    server = _SignalledServer(settings)
    caught: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, caught.put_nowait, number)
    async with local.engine:
        listener.listen()
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"agentspec serves {local.engine.info.model_id} at http://{shown}:{port}/v1{_label(local)}", flush=True)
        stopper = asyncio.create_task(_stop_on_signal(server, local, caught))
        await server.serve(sockets=[listener])
        stopper.cancel()
        await asyncio.wait((stopper,))
        return None if stopper.cancelled() else stopper.result()


async def _stop_on_signal(server: uvicorn.Server, local: LocalServer, caught: asyncio.Queue[signal.Signals]) -> signal.Signals:
    """Take no more requests; after the grace, or a second signal, end the answers that still run with their terminal event."""
    first = await caught.get()
    server.should_exit = True
    with suppress(TimeoutError, asyncio.CancelledError):  # cancelled: every answer ended within the grace
        await asyncio.wait_for(caught.get(), GRACE_SECONDS)
    await local.engine.close()
    return first


def _label(local: LocalServer) -> str:
    rates = local.engine.info.forced_acceptance
    return "" if rates is None else f" (FORCED ACCEPTANCE {', '.join(f'{rate:g}' for rate in rates)}: benchmarks only, the text is meaningless)"
