"""`agentspec serve`: HTTP in this process, the engine in another one, until a signal ends both. Imports no torch.

The server listens from the beginning. Until the engine is loaded, every answer is a 503 with the progress of the start,
which lines on stderr show too. The first signal starts draining: new requests are refused, running ones may finish.
After `--drain` seconds or at a second signal, the remaining requests end with their terminal event. The engine's
process is closed on every exit. When it ends by itself, the server exits, so that a supervisor can restart it; with
`--restart` the server starts another engine.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from agentspec import version
from agentspec.commands.start_progress import TICK_SECONDS, ProgressLines, StartProgress
from agentspec.config import EngineConfig, LogLevel, ServerConfig
from agentspec.engine import bundled
from agentspec.engine.kept import KeptEngine
from agentspec.engine.remote import EngineProcess, RemoteEngine
from agentspec.engine.remote_text import RemoteText, pipeline_of
from agentspec.errors import ConfigError, EngineClosedError
from agentspec.heap import return_large_blocks
from agentspec.server.app import create_app
from agentspec.server.connections import FOR_PROBES, Connections, Listener, room_for_connections
from agentspec.server.deadlines import TimeLimits
from agentspec.server.door import Door
from agentspec.server.front import in_front_of
from agentspec.server.keys import Keys
from agentspec.server.pipeline import TextPipeline
from agentspec.server.waiting_room import WaitingRoom

CLOSE_SECONDS = 10
"""Time limit for sending the last events of ended answers."""

logger = logging.getLogger("agentspec")

Signals = asyncio.Queue[signal.Signals]


class _SignalledServer(uvicorn.Server):
    """A uvicorn server without signal handlers: uvicorn raises a caught signal again at its end, before the engine is
    closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    config: EngineConfig,
    server: ServerConfig,
    process: EngineProcess,
    text: EngineProcess,
    early: Sequence[signal.Signals] = (),
) -> signal.Signals | None:
    """Serve an engine in `process` until a signal; return the signal. Binds the port first, so that a port in use is
    reported before a model is loaded.

    text: the process that renders and tokenises (remote_text.text_process). early: receives signals until handlers are
    installed here. Raises ConfigError or CheckpointError for an invalid chat template, ConfigError for invalid keys,
    and EngineClosedError when the engine ended by itself."""
    return_large_blocks()
    _set_up_log(server.log_level)
    keys = Keys(server.api_keys, server.keys)
    with _bind(Connections(room_for_connections()), server.host, server.port) as listener:
        return asyncio.run(_serve(config, server, process, text, listener, early, keys))


def _set_up_log(level: LogLevel) -> None:
    """Set the log level. Python prints warnings without a handler; request lines need a handler with timestamps, unless
    the embedding program has installed one."""
    if level == "warning":
        return
    logger.setLevel(level.upper())
    if level != "error" and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def _bind(connections: Connections, host: str, port: int) -> Listener:
    listener = Listener(connections, socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("port", port, f"can't listen on {host}: {error.strerror or error}") from None
    return listener


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    process: EngineProcess,
    text_process: EngineProcess,
    listener: Listener,
    early: Sequence[signal.Signals],
    keys: Keys,
) -> signal.Signals | None:
    caught: Signals = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, caught.put_nowait, number)
    if server.keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
    if early:
        return early[0]
    first = asyncio.create_task(caught.get())
    progress = StartProgress()
    room = WaitingRoom(progress.describe, lambda: progress.seconds)
    remote = RemoteText(text_process, server.text_seconds, trusts_client_text=server.trust_client_text)
    async with _listening(in_front_of(room, server), listener) as serving, _closing(remote):
        loading = asyncio.create_task(_load(config, server, process, remote, progress))
        await asyncio.wait((first, serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,))
            return first.result() if first.done() else None
        loaded, text = await loading
        async with KeptEngine(loaded, partial(_restart, config, server, room) if server.restart else None) as engine:
            app = create_app(
                engine,
                text,
                max_body_bytes=server.max_body_bytes,
                names=server.model_names,
                strict_fields=server.strict_fields,
                drops_images=server.images == "drop",
                tenants=keys.tenants,
                limits=TimeLimits(
                    queue_seconds=server.queue_timeout_seconds, request_seconds=server.request_timeout_seconds
                ),
                root_path=server.root_path,
                max_open=engine.info.max_running + server.max_queue,
            )
            most_waiting = max(0, listener.connections.limit - FOR_PROBES - engine.info.max_running)
            server = replace(server, max_queue=min(server.max_queue, most_waiting))
            door = Door(app, server, max_running=engine.info.max_running, keys=keys)
            # Exclude the loaded objects from garbage collection: a full collection would delay answers.
            gc.collect()
            gc.freeze()
            room.enter(door)
            print(start_page(config, server, loaded, listener.getsockname()), flush=True)
            lost = asyncio.create_task(engine.lost())
            await asyncio.wait((first, serving, lost), return_when=asyncio.FIRST_COMPLETED)
            ended = lost.done()
            lost.cancel()
            if first.done() or ended:
                await _drain(door, caught, server.drain_seconds)
            await asyncio.wait((lost,))
            if ended and not first.done():
                lost.result()
                raise EngineClosedError("the engine ended by itself")
        return first.result() if first.done() else None


@asynccontextmanager
async def _closing(remote: RemoteText) -> AsyncIterator[None]:
    """Close `remote` at the end of the context; requests that wait for their text end then."""
    try:
        yield
    finally:
        await remote.close()


@asynccontextmanager
async def _listening(app: ASGIApp, listener: Listener) -> AsyncIterator[asyncio.Task[None]]:
    """Serve HTTP in a task, which is yielded. On exit, stop listening and wait until the last answers are sent."""
    http = _SignalledServer(
        uvicorn.Config(
            app,
            http=cast(Any, listener.connections.protocol),
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )
    listener.listen()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    watching = asyncio.create_task(listener.connections.watch())
    try:
        yield serving
    finally:
        watching.cancel()
        listener.connections.close_unfinished()
        http.should_exit = True
        await serving


async def _restart(config: EngineConfig, server: ServerConfig, room: WaitingRoom) -> RemoteEngine:
    """Start another engine while requests wait. Its caches are empty; the app's own state remains."""
    logger.warning("the engine is started again")
    progress = StartProgress()
    with room.waiting(progress.describe, lambda: progress.seconds), _progress_lines(progress):
        return await RemoteEngine.start(config, progress=progress, heartbeat_seconds=server.heartbeat_seconds)


async def _load(
    config: EngineConfig, server: ServerConfig, process: EngineProcess, remote: RemoteText, progress: StartProgress
) -> tuple[RemoteEngine, TextPipeline | None]:
    """Load the engine and the text pipeline: in parallel where the checkpoint is a directory, else the pipeline after
    the download. The pipeline is None for an engine without a model directory."""
    template = None if server.chat_template is None else Path(server.chat_template).expanduser()
    named = Path(bundled.checkpoint_of(config.model)).expanduser()
    tasks: list[asyncio.Task[Any]] = []
    with _progress_lines(progress):
        try:
            if template is not None:
                await remote.check(template)  # reports a fault of the file before a model is loaded
            starting = asyncio.create_task(
                RemoteEngine.start(config, process, progress=progress, heartbeat_seconds=server.heartbeat_seconds)
            )
            tasks.append(starting)
            if named.is_dir():
                reading = asyncio.create_task(pipeline_of(named, template, remote))
                tasks.append(reading)
                await asyncio.wait((starting, reading), return_when=asyncio.FIRST_EXCEPTION)
                if not starting.done():
                    reading.result()  # raises for an unusable template without waiting for the engine
            engine = await starting
            directory = engine.setup.model_dir
            try:
                if directory is None:
                    return engine, None
                return engine, await (reading if named.is_dir() else pipeline_of(Path(directory), template, remote))
            except BaseException:
                await engine.close()
                raise
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for task in tasks:
                task.cancelled() or task.exception()  # retrieve it: only the first error is reported


@contextmanager
def _progress_lines(progress: StartProgress) -> Iterator[None]:
    """Print the progress of the start on stderr."""
    lines = ProgressLines(progress, sys.stderr)
    printing = asyncio.create_task(_print_lines(lines))
    try:
        yield
    finally:
        printing.cancel()
        lines.clear()


async def _print_lines(lines: ProgressLines) -> None:
    while True:
        lines.tick()
        await asyncio.sleep(TICK_SECONDS)


async def _drain(door: Door, caught: Signals, seconds: float) -> None:
    """Wait until no request runs, the time is over, or a second signal comes."""
    ends = [asyncio.create_task(door.drain()), asyncio.create_task(caught.get())]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await asyncio.wait(ends)


def start_page(config: EngineConfig, server: ServerConfig, engine: RemoteEngine, address: tuple[str, int]) -> str:
    """The text that `serve` prints when it is ready: addresses and settings."""
    info, setup = engine.info, engine.setup
    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    memory = setup.num_rows * setup.row_bytes + setup.num_pages * setup.page_bytes
    chosen = "chosen step by step" if config.draft_tokens == "auto" else "fixed"
    lines = [
        ("chat page", url + "/"),
        ("served as", ", ".join(server.model_names) or info.model_id),
        ("chat template", server.chat_template or "the checkpoint's own"),
        (
            "clients' text",
            "TRUSTED: may contain control tokens" if server.trust_client_text else "can't contain control tokens",
        ),
        ("device", f"{setup.device}, {setup.dtype}"),
        ("ranks", _ranks(setup.num_ranks)),
        ("weights", setup.weights),
        ("memory", f"{memory / 2**30:.2f} GiB" + (" on each rank" if setup.num_ranks > 1 else "")),
        (
            "  rows",
            f"{setup.num_rows:,} of {setup.row_bytes / 2**20:.2f} MiB (state of running requests and checkpoints)",
        ),
        (
            "  pages",
            f"{setup.num_pages:,} of {setup.page_bytes / 2**20:.2f} MiB (attention{_kv_form(config)}, "
            f"{setup.block_tokens} tokens each)",
        ),
        (
            "host memory",
            f"{setup.host_bytes / 2**30:.2f} GiB for prefixes that the device evicts" if setup.host_bytes else "none",
        ),
        ("context", f"{info.max_context:,} tokens, prompt and output together"),
        ("requests", f"{info.max_running:,} run at the same time, {server.max_queue:,} more may wait"),
        ("drafts", f"up to {info.max_draft_tokens} a step, {chosen}" if info.max_draft_tokens else "none"),
        ("  chosen from", setup.draft_vocabulary),
        ("graphs", setup.graphs),
        ("prefix cache", "on" if config.prefix_cache else "off"),
        ("overlap", "on" if config.overlap else "off"),
        ("body", f"{server.max_body_mib:g} MiB at most"),
        ("API key", "required" if server.api_keys or server.keys else "none: any client may send requests"),
    ]
    if server.root_path:
        lines.append(("root path", server.root_path))
    if info.forced_acceptance:
        rates = ", ".join(f"{rate:g}" for rate in info.forced_acceptance)
        lines.append(("FORCED ACCEPTANCE", f"{rates}: benchmarks only, the text is meaningless"))
    if config.allow_forced_output:
        lines.append(("FORCED OUTPUT", "allowed: benchmarks only, requests may prescribe their output"))
    width = max(len(name) for name, _ in lines)
    title = f"agentspec {version()} serves {info.model_id} at {url}/v1"
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _kv_form(config: EngineConfig) -> str:
    return " in FP8" if config.kv_dtype == "fp8" else ""


def _ranks(count: int) -> str:
    return "1: one process holds the model" if count == 1 else f"{count} processes, each with a part of every layer"
