"""`agentspec serve`: HTTP in this process, the engine in one of its own, until a signal ends both. Imports no torch.

It listens from the beginning: until the engine is loaded, every answer is a 503 that says what the start is at, and so
do lines on stderr. The first signal drains: new requests are refused, running ones may end. What still runs after
`--drain` seconds, or at a second signal, ends with its terminal event. The engine's process is closed on every way out;
when it ends by itself, so does the server, for whoever starts it again, unless `--restart` asks for another engine.
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
from agentspec.engine.heap import return_large_blocks
from agentspec.engine.kept import KeptEngine
from agentspec.engine.remote import EngineProcess, RemoteEngine
from agentspec.engine.remote_text import RemoteText, pipeline_of
from agentspec.errors import ConfigError, EngineClosedError
from agentspec.server.app import create_app
from agentspec.server.connections import FOR_PROBES, Connections, Listener, room_for_connections
from agentspec.server.deadlines import TimeLimits
from agentspec.server.door import Door
from agentspec.server.front import in_front_of
from agentspec.server.keys import Keys
from agentspec.server.pipeline import TextPipeline
from agentspec.server.waiting_room import WaitingRoom

CLOSE_SECONDS = 10
"""How long the last events of ended answers may take to reach their clients."""

logger = logging.getLogger("agentspec")

Signals = asyncio.Queue[signal.Signals]


class _SignalledServer(uvicorn.Server):
    """uvicorn raises a caught signal again when it is done, which would cut the engine's close short. We handle signals
    ourselves."""

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
    """Serve an engine in `process` until a signal; returns it. Binds first: a port that is taken must not cost the
    loading of a model.
    text: renders and tokenises (remote_text.text_process).

    early: gets the signals that come until there are handlers here. Raises ConfigError or CheckpointError for a chat
    template that can't be used, ConfigError for keys that can't, and EngineClosedError when the engine ended without
    being told to."""
    return_large_blocks()
    _set_up_log(server.log_level)
    keys = Keys(server.api_keys, server.keys)
    with _bind(Connections(room_for_connections()), server.host, server.port) as listener:
        return asyncio.run(_serve(config, server, process, text, listener, early, keys))


def _set_up_log(level: LogLevel) -> None:
    """Without a word Python shows warnings and errors, bare. Lines of requests need a handler with times, unless a
    program around us has its own."""
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
            # What was loaded stays: without it, a full collection has next to nothing to look at, and no answer waits
            # for one.
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
    """Requests that wait for their text end with the context, whatever it hangs on."""
    try:
        yield
    finally:
        await remote.close()


@asynccontextmanager
async def _listening(app: ASGIApp, listener: Listener) -> AsyncIterator[asyncio.Task[None]]:
    """The task that serves HTTP within; ended afterwards, with what it still sends."""
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
    """Another engine like the first, while everybody waits. Its caches are empty; what the app keeps stays."""
    logger.warning("the engine is started again")
    progress = StartProgress()
    with room.waiting(progress.describe, lambda: progress.seconds), _told(progress):
        return await RemoteEngine.start(config, progress=progress, heartbeat_seconds=server.heartbeat_seconds)


async def _load(
    config: EngineConfig, server: ServerConfig, process: EngineProcess, remote: RemoteText, progress: StartProgress
) -> tuple[RemoteEngine, TextPipeline | None]:
    """The engine, and beside it what makes prompts of messages: at once where the checkpoint is a directory, else after
    its download."""
    template = None if server.chat_template is None else Path(server.chat_template).expanduser()
    named = Path(bundled.checkpoint_of(config.model)).expanduser()
    tasks: list[asyncio.Task[Any]] = []
    with _told(progress):
        try:
            if template is not None:
                await remote.check(template)  # what is wrong with the file is said before a model is loaded
            starting = asyncio.create_task(
                RemoteEngine.start(config, process, progress=progress, heartbeat_seconds=server.heartbeat_seconds)
            )
            tasks.append(starting)
            if named.is_dir():
                reading = asyncio.create_task(pipeline_of(named, template, remote))
                tasks.append(reading)
                await asyncio.wait((starting, reading), return_when=asyncio.FIRST_EXCEPTION)
                if not starting.done():
                    reading.result()  # nobody waits for an engine whose template can't be used
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
                task.cancelled() or task.exception()  # the first word about the checkpoint is the one that is told


@contextmanager
def _told(progress: StartProgress) -> Iterator[None]:
    """Lines on stderr say what the start is at."""
    lines = ProgressLines(progress, sys.stderr)
    telling = asyncio.create_task(_tell(lines))
    try:
        yield
    finally:
        telling.cancel()
        lines.clear()


async def _tell(lines: ProgressLines) -> None:
    while True:
        lines.tick()
        await asyncio.sleep(TICK_SECONDS)


async def _drain(door: Door, caught: Signals, seconds: float) -> None:
    """Until nothing runs any more, or the time is over, or a second signal comes."""
    ends = [asyncio.create_task(door.drain()), asyncio.create_task(caught.get())]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await asyncio.wait(ends)


def start_page(config: EngineConfig, server: ServerConfig, engine: RemoteEngine, address: tuple[str, int]) -> str:
    """What is served and what was chosen, for people to read."""
    info, setup = engine.info, engine.setup
    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    memory = setup.num_rows * setup.row_bytes + setup.num_pages * setup.page_bytes
    chosen = "chosen step by step" if config.draft_tokens == "auto" else "fixed"
    forced = "" if info.forced_acceptance is None else ", ".join(f"{rate:g}" for rate in info.forced_acceptance)
    lines = [
        ("chat page", url + "/"),
        ("served as", ", ".join(server.model_names) or info.model_id),
        ("chat template", server.chat_template or "the checkpoint's own"),
        (
            "clients' text",
            "TRUSTED: control tokens that it spells are control tokens"
            if server.trust_client_text
            else "holds no control tokens",
        ),
        ("device", f"{setup.device}, {setup.dtype}"),
        ("memory", f"{memory / 2**30:.2f} GiB"),
        (
            "  rows",
            f"{setup.num_rows:,} of {setup.row_bytes / 2**20:.2f} MiB (state of running requests and checkpoints)",
        ),
        (
            "  pages",
            f"{setup.num_pages:,} of {setup.page_bytes / 2**20:.2f} MiB (attention, {setup.block_tokens} tokens each)",
        ),
        (
            "host memory",
            f"{setup.host_bytes / 2**30:.2f} GiB for prefixes that the device lets go" if setup.host_bytes else "none",
        ),
        ("context", f"{info.max_context:,} tokens, prompt and output together"),
        ("requests", f"{info.max_running:,} run at the same time, {server.max_queue:,} more may wait"),
        ("drafts", f"up to {info.max_draft_tokens} a step, {chosen}" if info.max_draft_tokens else "none"),
        ("  chosen from", setup.draft_vocabulary),
        ("graphs", setup.graphs),
        ("prefix cache", "on" if config.prefix_cache else "off"),
        ("overlap", "on" if config.overlap else "off"),
        ("body", f"{server.max_body_mib:g} MiB at most"),
        ("API key", "needed" if server.api_keys or server.keys else "none: whoever reaches the address may ask"),
    ]
    if server.root_path:
        lines.append(("root path", server.root_path))
    if forced:
        lines.append(("FORCED ACCEPTANCE", f"{forced}: benchmarks only, the text is meaningless"))
    if config.allow_forced_output:
        lines.append(("FORCED OUTPUT", "allowed: benchmarks only, requests may bring their own answer"))
    width = max(len(name) for name, _ in lines)
    title = f"agentspec {version()} serves {info.model_id} at {url}/v1"
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])
