"""An engine on a thread of its own, and the part it shares with the engine that its caller drives
(engine/in_process.py).

Speaks wire messages, and is all of an engine that its own process needs (engine/process.py). Knows nothing of HTTP,
templates or messages.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.streams import Streams
from agentspec.errors import EngineClosedError, OverloadedError, RequestError
from agentspec.fair_queue import FairQueue
from agentspec.runtime.constraint import Constraint
from agentspec.runtime.request import Request, flow_of, new_request
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, Grammar, ModelInfo, Submit, Usage

logger = logging.getLogger("agentspec")

COMPILE_THREADS = 2
"""Grammars that an EngineThread compiles at the same time: one is compiled while the next is parsed."""
MAX_COMPILES = 256
"""Requests whose grammars may wait for a compile. Beyond that, a request of the flow with the most waiting is
refused."""
_RETRY_SECONDS = 5


_CompileJob = tuple[Grammar, "asyncio.Future[Constraint | None]"]
"""A grammar, and the future of its constraint."""


class EngineCore:
    """The part that both engines share: an assembly, the numbering of requests, and their validation. Not
    thread-safe."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._number = 0
        self.loop = assembly.loop

    def submit(self, submit: Submit, constraint: Constraint | None) -> Request:
        if self.loop.scheduler.knows(submit.request_id):
            raise RequestError("request_id", submit.request_id, "is in use by a running request")
        parts = self._assembly
        request = new_request(
            submit,
            number=self._number,
            spec=parts.spec,
            max_length=parts.info.max_context,
            engine_seed=parts.config.seed,
            token_bytes=None
            if parts.tokenizer is None
            else parts.tokenizer.shown_bytes(skip_special_tokens=submit.skip_special_tokens),
            constraint=constraint,
            allow_forced_output=parts.config.allow_forced_output,
            forces_acceptance=parts.config.force_acceptance is not None,
        )
        self._number += 1
        self.loop.submit(request)
        return request

    def stats(self) -> dict[str, Any]:
        scheduler = self.loop.scheduler
        return {
            "model": self._assembly.info.model_id,
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "engine": self.loop.metrics.as_dict(),
            "cache": self._assembly.cache.stats(),
        }


class EngineThread:
    """An engine on its own thread, for asyncio callers. Implements wire.EngineClient.

    If the thread dies, every open stream ends with an ERROR event and later submits raise EngineClosedError."""

    def __init__(self, config: EngineConfig | Assembly) -> None:
        self._assembly = config if isinstance(config, Assembly) else assemble(config)
        self._core = EngineCore(self._assembly)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._streams: Streams[asyncio.Queue[Event]] = Streams(asyncio.Queue)
        self._compiling: dict[str, asyncio.Future[Constraint | None]] = {}
        """By request id: requests that wait for their grammar and are not in the engine yet. The result None ends
        them."""
        self._uncompiled: FairQueue[_CompileJob] = FairQueue()
        """Grammars whose compile hasn't begun; one whose request has ended is skipped when its turn comes."""
        self._num_compiling = 0
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="agentspec-grammar")
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._death: str | None = None
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._asyncio = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="agentspec-engine", daemon=True)
        self._thread.start()
        if self._assembly.ranks is not None:
            self._assembly.ranks.on_failure(lambda error: self._inbox.put(("failed", error)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> ModelInfo:
        return self._assembly.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._assembly.tokenizer

    @property
    def model_dir(self) -> Path | None:
        return self._assembly.model_dir

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._death is None and not self._stopping

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """Submit a request and yield its events, the FinishEvent last. Leaving early aborts the request.

        Raises RequestError if the request is refused, EngineClosedError if the engine is not running."""
        events = await self._submit(submit)
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = isinstance(event, FinishEvent)
                yield event
        finally:
            self._leave(submit.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request early; its stream ends with an ABORT event."""
        compiling = self._compiling.get(request_id)
        if compiling is not None:
            _settle(compiling, None)
            return
        self._inbox.put(("abort", request_id))

    async def stats(self) -> dict[str, Any]:
        """A snapshot between two steps; after the engine has ended, its last one."""
        if not self.alive:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join)
            return self._core.stats()
        stats: dict[str, Any] = await self._asked("stats")
        return stats

    async def beat(self) -> None:
        """Wait until the engine's thread is between two steps, or has ended. If this doesn't return, a step is
        stuck."""
        if self.alive:
            await self._asked("beat")

    async def _asked(self, command: str) -> Any:
        assert self._asyncio is not None
        answer: asyncio.Future[Any] = self._asyncio.create_future()
        self._inbox.put((command, answer))
        return await answer

    async def ended(self) -> str | None:
        """Wait until the engine's thread has ended; returns the error it died of, or None after `close`."""
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join)
        return self._death

    async def close(self) -> None:
        """Stop the thread. Requests still running end with an ABORT event."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        self._inbox.put(("stop", None))
        await asyncio.to_thread(self._thread.join)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._assembly.close)

    async def _submit(self, submit: Submit) -> asyncio.Queue[Event]:
        self.check_alive()
        assert self._asyncio is not None
        events = self._streams.begin(submit.request_id)
        accepted: asyncio.Future[Request] = self._asyncio.create_future()
        try:
            constraint = None
            if submit.grammar is not None:
                constraint = await self._compile(submit, submit.grammar)
                if constraint is None:
                    usage = Usage(prompt_tokens=len(submit.prompt_ids))
                    self._hand_out([FinishEvent(request_id=submit.request_id, reason=FinishReason.ABORT, usage=usage)])
                    return events
                self.check_alive()
            self._inbox.put(("submit", (submit, constraint, accepted)))
            await accepted
        except asyncio.CancelledError:
            self._leave(submit.request_id)
            raise
        except BaseException:
            self._streams.drop(submit.request_id)
            raise
        return events

    async def _compile(self, submit: Submit, grammar: Grammar) -> Constraint | None:
        """The constraint of a request: at once if the grammar is cached; otherwise compiled outside the event loop and
        the engine's thread, flows taking turns. None if the request is aborted first. Raises OverloadedError if too
        many wait."""
        assert self._asyncio is not None
        if (known := self._assembly.constraints.known(grammar)) is not None:
            return known
        answer: asyncio.Future[Constraint | None] = self._asyncio.create_future()
        self._compiling[submit.request_id] = answer
        self._uncompiled.enqueue((grammar, answer), flow_of(submit))
        if len(self._uncompiled) > MAX_COMPILES:
            pushed_out = self._uncompiled.last_of_the_longest()
            self._uncompiled.remove(pushed_out)
            _refuse(
                pushed_out.item[1],
                OverloadedError(f"{MAX_COMPILES} grammars wait to be compiled, which is the limit", _RETRY_SECONDS),
            )
        self._start_compiles()
        try:
            return await answer
        finally:
            answer.cancel()
            del self._compiling[submit.request_id]

    def _start_compiles(self) -> None:
        while (
            self._num_compiling < COMPILE_THREADS
            and not self._stopping
            and (ticket := self._uncompiled.dequeue()) is not None
        ):
            grammar, answer = ticket.item
            if answer.done():
                continue
            if (known := self._assembly.constraints.known(grammar)) is not None:
                _settle(answer, known)
                continue
            self._num_compiling += 1
            self._compilers.submit(self._make, grammar, answer)

    def _make(self, grammar: Grammar, answer: asyncio.Future[Constraint | None]) -> None:
        """Compile one grammar, on a compiler thread."""
        self._respond(answer, self._assembly.constraints.make, grammar)
        self._call(self._end_compile)

    def _end_compile(self) -> None:
        self._num_compiling -= 1
        self._start_compiles()

    def _leave(self, request_id: str) -> None:
        if self._streams.leave(request_id) and self.alive:
            self._inbox.put(("leave", request_id))

    def check_alive(self) -> None:
        """Raises EngineClosedError unless the engine runs."""
        if not self.alive:
            raise EngineClosedError(f"the engine is not running{': ' + self._death if self._death else ''}")

    def _run(self) -> None:
        """The engine's thread: handle commands between steps, run steps while there is work."""
        try:
            while self._take_commands():
                if self._core.loop.has_work:
                    self._deliver(self._core.loop.run_once())
            self._core.loop.abort_all()
            while self._core.loop.has_work:
                self._deliver(self._core.loop.run_once())
            self._call(self._close_streams, "the engine was closed")
        except Exception as error:
            logger.exception("the engine's thread died")
            self._death = f"{type(error).__name__}: {error}"
            self._call(self._close_streams, self._death)

    def _take_commands(self) -> bool:
        """Handle the commands in the inbox, waiting for one if there is no work; False when told to stop."""
        loop, waits = self._core.loop, False
        while True:
            try:
                command, payload = self._inbox.get(block=waits and not loop.has_work)
            except queue.Empty:
                if loop.has_work:
                    return True
                waits = not loop.prepare()
                continue
            if command == "stop":
                return False
            if command == "failed":
                raise payload
            if command == "abort":
                self._core.loop.abort(payload)
            elif command == "leave":
                if self._core.loop.scheduler.knows(payload):
                    self._core.loop.abort(payload)
                else:
                    self._call(self._streams.free, payload)
            elif command == "stats":
                self._call(_settle, payload, self._core.stats())
            elif command == "beat":
                self._call(_settle, payload, None)
            else:
                submit, constraint, accepted = payload
                self._respond(accepted, self._core.submit, submit, constraint)

    def _respond(self, answer: asyncio.Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function off the event loop, and settle `answer` with its result or its error."""
        try:
            result = function(*arguments)
        except Exception as error:  # a grammar or submit that breaks its code must fail only its own request
            self._call(_refuse, answer, error)
        else:
            self._call(_settle, answer, result)

    def _deliver(self, events: list[Event]) -> None:
        if events:
            self._call(self._hand_out, events)

    def _hand_out(self, events: list[Event]) -> None:
        for event in events:
            self._streams.hand(event.request_id, event)

    def _close_streams(self, error: str) -> None:
        """End every stream, and answer the commands left in the inbox.

        Called on the event loop when the thread is about to end, so that no command can enter the inbox meanwhile."""
        self._streams.end_all(self._death)
        for compiling in self._compiling.values():
            _refuse(compiling, EngineClosedError(error))
        while not self._inbox.empty():
            command, payload = self._inbox.get()
            if command == "submit":
                _refuse(payload[-1], EngineClosedError(error))
            elif command in ("stats", "beat"):
                _settle(payload, self._core.stats())

    def _call(self, function: Any, *arguments: Any) -> None:
        assert self._asyncio is not None
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
