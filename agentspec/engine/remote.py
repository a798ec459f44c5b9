"""An engine in a process of its own, as its server sees it. Implements wire.EngineClient without torch.

The server's HTTP, JSON and text work can't delay the engine's steps. Owns the engine's process from start to end:
however the server ends, the process does not outlive it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from agentspec.config import EngineConfig
from agentspec.engine.link import (
    Beat,
    Close,
    EngineSetup,
    Failed,
    Gone,
    Loading,
    Ready,
    Refused,
    Start,
    StatsQuery,
    StatsReply,
    ToServer,
    frame,
    packed,
    to_error,
)
from agentspec.engine.start import OPEN_DEVICE
from agentspec.engine.streams import Streams
from agentspec.errors import AgentspecError, EngineClosedError, EngineStalledError, RequestError
from agentspec.types import Progress, no_progress
from agentspec.wire import Abort, Event, FinishEvent, FrameReader, ModelInfo, Submit, TokensEvent, frame_head, framed

logger = logging.getLogger("agentspec")

CLOSE_SECONDS = 10
"""How long a closed engine may take to end its requests and its process before it is killed."""

ASK_SECONDS = 5.0
"""How long an engine may take to answer a query between two steps."""

HEARTBEAT_SECONDS, CPU_HEARTBEAT_SECONDS = 30.0, 300.0
"""How long an engine may send no heartbeat, unless its server sets another limit: longer than its longest step,
including a kernel that is compiled in it. On a CPU, a step of a large model takes minutes."""

TAKEN_FOR_DEAD = 10
"""After this many times the limit without a heartbeat, the engine's process is killed."""

PIECE_BYTES = 2**18
"""What is written at once of a body of any size."""

TICK_SECONDS = 0.5
"""How often a server checks its engine."""

ENGINE_ENTRY: Sequence[str] = ("-P", "-m", "agentspec.engine.start")
"""Python's arguments for the process. -P: don't import from the working directory."""

_CLOSED = "the engine was closed"


class EngineProcess:
    """A process that imports what engines need, and waits for its configuration. A context manager: the process ends no
    later than its context."""

    def __init__(self, entry: Sequence[str] = ENGINE_ENTRY, options: Sequence[str] = ()) -> None:
        """entry: Python's arguments for a module that runs process.main. options: further arguments of that module, see
        `engine_options`."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            # A session of its own, so that Ctrl-C reaches only the server, and so that the process can be killed with
            # everything it started.
            command = [sys.executable, *entry, str(number), *options]
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=(number,), stdin=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                self.socket.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.process.wait()
        self.socket.close()

    def kill(self) -> None:
        """Kill the process, if it still runs, and everything that it started (its process group)."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def engine_options(config: EngineConfig) -> Sequence[str]:
    """Arguments of an engine's process that begin its start before it has the config."""
    return () if config.device == "cpu" else (OPEN_DEVICE,)


class Wire(asyncio.Protocol):
    """The server's end of the socket to one of its processes.

    `write` never waits: the amount of unsent data is bounded by the requests that the server accepts. `send` is for
    bodies of any size."""

    def __init__(self, process: EngineProcess, take: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        """take: called with the body of each frame. lose: called when the other end is closed."""
        self._socket = process.socket
        self._take = take
        self._lose = lose
        self._frames = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._has_room = asyncio.Event()
        """The other end has read most of what was written, or is closed."""
        self._has_room.set()
        self._held: list[bytes] | None = None
        """Frames to write after the body that is being sent; None: there is none."""

    async def connect(self) -> None:
        self._socket.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._take(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._has_room.set()
        self._lose()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Write whole frames."""
        if self._held is not None:
            self._held.append(data)
        else:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def send(self, body: bytes) -> None:
        """Write one frame with this body, as fast as the other end reads. The body isn't copied, and others run between
        its pieces. A cancelled send leaves the connection unusable. Never call it twice at the same time."""
        if len(body) <= PIECE_BYTES:
            self._write(framed(body))
            return
        self._held = []
        self._write(frame_head(body))
        for start in range(0, len(body), PIECE_BYTES):
            self._write(memoryview(body)[start : start + PIECE_BYTES])
            await asyncio.sleep(0)
            await self._has_room.wait()
        held, self._held = self._held, None
        for data in held:
            self._write(data)

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()


class Pulse:
    """Time since the engine's last heartbeat, not counting time in which this process itself was stopped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat = self._ticked = clock()

    @property
    def seconds(self) -> float:
        """Since the last heartbeat."""
        return self._clock() - self._beat

    def beat(self) -> None:
        self._beat = self._clock()

    def tick(self) -> None:
        """Call every TICK_SECONDS. If a call is late, this process was stopped, and the engine's silence during that
        time doesn't count."""
        now = self._clock()
        late = now - self._ticked - 2 * TICK_SECONDS
        self._beat, self._ticked = min(now, self._beat + max(0.0, late)), now


class RemoteEngine:
    """A running engine. Make one with `start`, end it with `close` or as a context manager.

        async with await RemoteEngine.start(EngineConfig(model="path/to/checkpoint")) as engine:
            async for event in engine.stream(Submit(request_id="a", prompt_ids=[1, 2, 3])):
                ...

    If the process or its engine dies, every open stream ends with an ERROR event and later submits raise
    EngineClosedError."""

    info: ModelInfo
    setup: EngineSetup

    def __init__(self, process: EngineProcess, progress: Progress, heartbeat_seconds: float | None) -> None:
        """Called by `start`."""
        self._group = process
        self._heartbeat_seconds = heartbeat_seconds or HEARTBEAT_SECONDS
        self._pulse = Pulse()
        self._watching: asyncio.Task[None] | None = None
        self._process = process.process
        self._progress = progress
        self._wire = Wire(process, self._take_frame, self._lose)
        self._decoder = msgspec.msgpack.Decoder(list[ToServer])
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._streams: Streams[asyncio.Queue[Event | AgentspecError]] = Streams(asyncio.Queue)
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._death: str | None = None
        self._lost = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        process: EngineProcess | None = None,
        *,
        progress: Progress = no_progress,
        heartbeat_seconds: float | None = None,
    ) -> Self:
        """Start an engine in `process`, which the engine owns from then on, and wait until its model is loaded.

        process: None: a new one. progress: called by the event loop. heartbeat_seconds: how long the loaded engine may
        send no heartbeat before it counts as not alive; None: HEARTBEAT_SECONDS, or CPU_HEARTBEAT_SECONDS. Raises what
        loading raised there: CheckpointError, ConfigError; AgentspecError if the process ended without a message."""
        process = EngineProcess(options=engine_options(config)) if process is None else process
        engine = cls(process, progress, heartbeat_seconds)
        try:
            await engine._load(config)
            if heartbeat_seconds is None and engine.setup.device == "cpu":
                engine._heartbeat_seconds = CPU_HEARTBEAT_SECONDS
            engine._pulse = Pulse()
            engine._watching = asyncio.create_task(engine._watch())
        except BaseException:
            process.kill()
            await engine._lost.wait()
            assert engine._burial is not None
            await engine._burial
            raise
        return engine

    async def _load(self, config: EngineConfig) -> None:
        await self._wire.connect()
        self._wire.write(frame([Start(config)]))
        ready = await self._ready
        self.info, self.setup = ready.info, ready.setup

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        return self._death is None and self._closing is None and not self._is_silent

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """Submit a request and yield its events, the FinishEvent last. Leaving early aborts the request.

        Raises RequestError if the request is refused, EngineClosedError if the engine is not running."""
        self.check_alive()
        request_id = submit.request_id
        data = _framed(submit, self.info)
        events = self._streams.begin(request_id)
        self._wire.write(data)
        finished = False
        try:
            while not finished:
                event = await events.get()
                if isinstance(event, AgentspecError):
                    raise event
                finished = isinstance(event, FinishEvent)
                yield event
        finally:
            if self._streams.leave(request_id):
                self._wire.write(frame([Abort(request_id)]))

    async def stats(self) -> dict[str, Any]:
        """A snapshot between two steps. Raises EngineClosedError if the engine is not running, EngineStalledError if it
        doesn't answer in ASK_SECONDS."""
        self.check_alive()
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self._wire.write(frame([StatsQuery(number)]))
        try:
            return await asyncio.wait_for(answer, ASK_SECONDS)
        except TimeoutError:
            raise EngineStalledError(f"the engine did not answer within {ASK_SECONDS:g} seconds") from None
        finally:
            del self._questions[number]

    async def lost(self) -> None:
        """Wait until the process has ended, or is about to."""
        await self._lost.wait()

    async def close(self) -> None:
        """End the process. Running requests end with an ABORT event, or with an ERROR event if the process has to be
        killed."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self._lost.is_set():
            self._wire.write(frame([Close()]))
            try:
                await asyncio.wait_for(self._lost.wait(), CLOSE_SECONDS)
            except TimeoutError:
                logger.error("the engine's process did not end within %d seconds and is killed", CLOSE_SECONDS)
                self._death = "it did not end when it was told to"
                self._group.kill()
                await self._lost.wait()
        assert self._burial is not None
        await self._burial

    def check_alive(self) -> None:
        """Raises EngineClosedError when the engine is not running, EngineStalledError while it sends no heartbeat."""
        if self._death is not None:
            raise EngineClosedError(f"the engine is not running: {self._death}")
        if self._closing is not None:
            raise EngineClosedError(_CLOSED)
        if self._is_silent:
            raise EngineStalledError(f"the engine has sent no heartbeat for {self._pulse.seconds:.0f} seconds")

    @property
    def _is_silent(self) -> bool:
        return self._pulse.seconds > self._heartbeat_seconds

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.look()

    def look(self) -> None:
        """Called every TICK_SECONDS: kill a process that has sent no heartbeat for TAKEN_FOR_DEAD times the limit. Its
        streams then end."""
        self._pulse.tick()
        if (
            self._death is None
            and self._closing is None
            and self._pulse.seconds > TAKEN_FOR_DEAD * self._heartbeat_seconds
        ):
            self._death = f"it sent no heartbeat for {self._pulse.seconds:.0f} seconds and was killed"
            self._group.kill()

    def _take_frame(self, body: bytes) -> None:
        for message in self._decoder.decode(body):
            self._take(message)

    def _take(self, message: ToServer) -> None:
        match message:
            case TokensEvent() | FinishEvent():
                self._streams.hand(message.request_id, message)
            case Refused():
                self._streams.hand(message.request_id, to_error(message.error))
            case Gone():
                self._streams.free(message.request_id)
            case StatsReply(number=number):
                if number in self._questions and not self._questions[number].done():
                    self._questions[number].set_result(message.stats)
            case Beat():
                self._pulse.beat()
            case Loading():
                self._progress(message.stage, message.done, message.total)
            case Ready():
                self._ready.set_result(message)
            case Failed():
                error = to_error(message.error)
                self._death = str(error)
                if not self._ready.done():
                    self._ready.set_exception(error)

    def _lose(self) -> None:
        """The process ended, or is about to: end its streams and answer what waits for it."""
        self._group.kill()
        self._lost.set()
        if self._watching is not None:
            self._watching.cancel()
        is_closed = self._closing is not None and self._death is None
        if self._death is None:
            self._death = _CLOSED if is_closed else "its process died"
        self._streams.end_all(None if is_closed else f"the engine is not running: {self._death}")
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineClosedError(f"the engine is not running: {self._death}"))
        self._burial = asyncio.create_task(self._bury(is_expected=self._closing is not None))

    async def _bury(self, *, is_expected: bool) -> None:
        """Wait for the process's end, and report how it ended."""
        try:
            status = await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            how = "it does not end"
        else:
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        if not self._ready.done():
            self._ready.set_exception(AgentspecError(f"the engine's process ended before its model was loaded ({how})"))
        elif not is_expected and not self._ready.cancelled() and self._ready.exception() is None:
            logger.error("the engine's process ended (%s)", how)


def _framed(submit: Submit, info: ModelInfo) -> bytes:
    """Encode a submit. Raises RequestError naming the field that can't be sent: a number beyond 64 bits, or text that
    isn't Unicode."""
    try:
        return frame([packed(submit)])
    except (OverflowError, UnicodeEncodeError) as error:
        submit.sampling.validate(vocab_size=info.vocab_size)  # raises with the field's own name
        for name in submit.__struct_fields__:
            value = getattr(submit, name)
            try:
                msgspec.msgpack.encode(value, enc_hook=list)  # the prompt may be an array
            except (OverflowError, UnicodeEncodeError):
                raise RequestError(name, value, f"can't be sent to the engine: {error}") from None
        raise
