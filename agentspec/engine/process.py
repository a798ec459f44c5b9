"""The engine's own process, which engine/start.py runs, with one end of a socket pair to its server.

Owns an engine and carries messages between it and the socket. The process ends after `Close`; after its engine died,
which it reports first; or at once, with everything that it started, when the other end of the socket is closed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.link import (
    Beat,
    Close,
    EngineSetup,
    Failed,
    Gone,
    Loading,
    Packed,
    Ready,
    Refused,
    Start,
    StatsQuery,
    StatsReply,
    ToEngine,
    ToServer,
    error_data,
    frame,
    unpacked,
)
from agentspec.engine.thread import EngineThread
from agentspec.errors import AgentspecError, EngineClosedError, RequestError
from agentspec.runtime.grammar.imports import stand_in_for_transformers
from agentspec.types import Progress
from agentspec.wire import Abort, EngineClient, FrameReader, Submit

logger = logging.getLogger("agentspec")

_RECEIVE_BYTES = 2**18
_BEAT_SECONDS = 0.5
"""Between two heartbeats. Each costs the engine's thread one command."""
_TOLD_SECONDS = 0.1
"""Least time between two progress messages of one stage."""
_FAILED = 1
_SWITCH_SECONDS = 0.0005
"""How long a thread of this process keeps Python's lock while another one wants it; Python's default is 5 ms."""


class HostedEngine(EngineClient, AbstractAsyncContextManager[Any], Protocol):
    """The engine's interface to its process: an EngineThread, or a fake that computes nothing, to measure the
    overhead."""

    async def ended(self) -> str | None:
        """Wait until the engine has ended; returns the error it died of, or None after its context was left."""

    async def beat(self) -> None:
        """Wait until the engine's loop is between two steps, or has ended."""


def main(load: Callable[[EngineConfig, Progress], tuple[HostedEngine, EngineSetup]]) -> int:
    """Serve the engine that `load` makes of the server's config, until the process is to end; returns its exit status.
    The socket is the process's first argument."""
    # The server handles signals: it closes this process when it has drained, or by its own end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stand_in_for_transformers()
    link = _Link(socket.socket(fileno=int(sys.argv[1])))
    start = link.early.get()
    assert isinstance(start, Start)
    try:
        engine, setup = load(start.config, _Told(link))
    except AgentspecError as error:
        link.send(Failed(error_data(error)))
        return _FAILED
    # The engine's thread launches hundreds of kernels in a row. The event loop, which sends the last step's tokens,
    # must not wait for that.
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Loaded objects stay alive. Excluding them makes a full garbage collection so short that it delays no step.
    gc.collect()
    gc.freeze()
    return asyncio.run(_Host(engine, setup, link).run())


class _Link:
    """The server's socket. A separate thread reads it, so that the server's death is noticed whatever the rest of the
    process does."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.early: queue.SimpleQueue[ToEngine | Refused] = queue.SimpleQueue()
        self.hand: Callable[[ToEngine | Refused], object] = self.early.put
        """Called from the reading thread with each message. A malformed submit comes as its own refusal."""
        threading.Thread(target=self._read, name="agentspec-link", daemon=True).start()

    def send(self, *messages: ToServer) -> None:
        """Send messages in one frame. Blocks while the other end is behind with reading."""
        with suppress(BrokenPipeError, ConnectionResetError):  # the reading thread ends the process
            self._connection.sendall(frame(messages))

    def _read(self) -> None:
        try:
            self._read_messages()
        except ConnectionResetError:
            pass
        except Exception:
            logger.exception("the link to the server broke")
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def _read_messages(self) -> None:
        """Read until the other end is closed."""
        frames = FrameReader()
        decoder = msgspec.msgpack.Decoder(list[ToEngine])
        while data := self._connection.recv(_RECEIVE_BYTES):
            for body in frames.feed(data):
                for message in _decoded(decoder, body):
                    self.hand(message)


class _Told:
    """A types.Progress that sends to the server. Skips most updates, since there may be thousands."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._turn = threading.Lock()
        self._last: dict[str, float] = {}
        """By stage: when its last message was sent."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        with self._turn:
            if done == total or now - self._last.get(stage, 0.0) >= _TOLD_SECONDS:
                self._last[stage] = now
                self._link.send(Loading(stage, done, total))


def _decoded(decoder: msgspec.msgpack.Decoder[list[ToEngine]], body: bytes) -> list[ToEngine | Refused]:
    try:
        return [unpacked(message) if isinstance(message, Packed) else message for message in decoder.decode(body)]
    except msgspec.ValidationError as error:  # a submit with wrong types must fail only its own request
        refusal = RequestError("submit", "", f"is malformed: {error}")
        submits = [message.get("submit", message) for message in msgspec.msgpack.decode(body)]
        return [Refused(submit["request_id"], error_data(refusal)) for submit in submits]


class _Host:
    """Runs the engine, and one task for each request and query."""

    def __init__(self, engine: HostedEngine, setup: EngineSetup, link: _Link) -> None:
        self._engine = engine
        self._setup = setup
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._outbox: list[ToServer] = []
        self._closing = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to close, or until the engine dies; returns the exit status."""
        loop = asyncio.get_running_loop()
        async with self._engine:
            self._link.hand = lambda message: loop.call_soon_threadsafe(self._take, message)
            self._link.send(Ready(self._engine.info, self._setup))
            beating = asyncio.create_task(self._beat())
            ends = [asyncio.create_task(self._closing.wait()), asyncio.create_task(self._engine.ended())]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            beating.cancel()
        death = await self._engine.ended()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if death is not None:
            self._outbox.append(Failed(error_data(EngineClosedError(death))))
        self._flush()
        return 0 if death is None else _FAILED

    def _take(self, message: ToEngine | Refused) -> None:
        match message:
            case Submit(request_id=request_id):
                self._requests[request_id] = self._spawn(self._answer(message))
                self._requests[request_id].add_done_callback(partial(self._end, request_id))
            case Abort(request_id=request_id):
                if request_id in self._requests:  # otherwise the request ended before the abort arrived
                    self._requests[request_id].cancel()
            case StatsQuery(number=number):
                self._spawn(self._report(number))
            case Close():
                self._closing.set()
            case Refused():
                self._send(message)
            case Start():
                raise AssertionError("started twice")

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, submit: Submit) -> None:
        async for event in self._engine.stream(submit):
            self._send(event)

    async def _beat(self) -> None:
        """Send heartbeats of the engine's thread, not only of this process."""
        while True:
            await self._engine.beat()
            self._send(Beat())
            await asyncio.sleep(_BEAT_SECONDS)

    async def _report(self, number: int) -> None:
        self._send(StatsReply(number, await self._engine.stats()))

    def _end(self, request_id: str, task: asyncio.Task[None]) -> None:
        """Send the last message of a request that ended without a FinishEvent."""
        del self._requests[request_id]
        if task.cancelled():
            self._send(Gone(request_id))
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, AgentspecError):
            logger.error("a request failed", exc_info=error)
            error = AgentspecError("internal error")
        self._send(Refused(request_id, error_data(error)))

    def _send(self, message: ToServer) -> None:
        """Queue a message. All messages of one pass of the event loop leave in one frame."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._link.send(*messages)


def _load(config: EngineConfig, progress: Progress) -> tuple[HostedEngine, EngineSetup]:
    parts = assemble(config, progress, serves=True)
    return EngineThread(parts), _setup(parts)


def _setup(parts: Assembly) -> EngineSetup:
    spec, host = parts.spec, parts.memory.host
    return EngineSetup(
        model_dir=None if parts.model_dir is None else str(parts.model_dir),
        device=torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else parts.device.type,
        dtype=str(parts.dtype).removeprefix("torch."),
        num_rows=parts.memory.num_rows,
        row_bytes=spec.row_bytes,
        num_pages=parts.memory.num_pages,
        page_bytes=spec.page_bytes,
        host_bytes=0 if host is None else host.num_rows * spec.row_bytes + host.num_pages * spec.page_bytes,
        block_tokens=spec.block_tokens,
        graphs=parts.graphs,
        draft_vocabulary=parts.draft_vocabulary,
        weights=spec.weights,
        num_ranks=parts.config.tensor_parallel,
    )


def run() -> int:
    """`main` with the real engine."""
    return main(_load)
