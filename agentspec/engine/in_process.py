"""The embedding API: an engine in this process, driven by its caller (`Engine`) or by its own thread (`AsyncEngine`).

Speaks wire messages. An AsyncEngine also offers its HTTP app and SDK clients, whose behaviour is the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastapi import FastAPI

from agentspec.config import EngineConfig
from agentspec.engine import sdk_clients
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.streams import Streams
from agentspec.engine.thread import EngineCore, EngineThread
from agentspec.errors import EngineClosedError, RankError, RequestError
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import Event, FinishEvent, ModelInfo, Submit

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


class Engine:
    """An engine that runs when its caller asks for events: for scripts, notebooks and tests.

        with Engine(EngineConfig(model="path/to/checkpoint")) as engine:
            for event in engine.stream(Submit(request_id="a", prompt_ids=[1, 2, 3])):
                ...

    Several requests submitted with `submit` run together, batched. Not thread-safe."""

    def __init__(self, config: EngineConfig | Assembly) -> None:
        self._assembly = config if isinstance(config, Assembly) else assemble(config)
        self._core = EngineCore(self._assembly)
        self._streams: Streams[SimpleQueue[Event]] = Streams(SimpleQueue)
        self._submitted: dict[str, SimpleQueue[Event]] = {}
        """Requests that have no EventStream yet."""
        self._closed = False
        self._death: str | None = None
        """The error of the ranks that has ended the engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        return self._assembly.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._assembly.tokenizer

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError if it is refused. Read it with `events`."""
        self._check_open()
        inbox = self._streams.begin(submit.request_id)
        try:
            self._core.submit(
                submit, None if submit.grammar is None else self._assembly.constraints.make(submit.grammar)
            )
        except BaseException:
            self._streams.drop(submit.request_id)
            raise
        self._submitted[submit.request_id] = inbox

    def step(self) -> bool:
        """Run one step for all requests; False if there was nothing to do."""
        self._check_open()
        if not self._core.loop.has_work:
            return False
        try:
            events = self._core.loop.run_once()
        except RankError as error:
            self._death = str(error)
            self._streams.end_all(self._death)
            return True
        for event in events:
            self._streams.hand(event.request_id, event)
        return True

    def events(self, request_id: str) -> EventStream:
        """The events of a submitted request; reading them runs the engine as needed."""
        if request_id not in self._submitted:
            raise RequestError("request_id", request_id, "was not submitted, or is read already")
        return EventStream(self, request_id, self._submitted.pop(request_id))

    def stream(self, submit: Submit) -> EventStream:
        """Submit a request and read its events, the FinishEvent last. Raises RequestError if it is refused."""
        self.submit(submit)
        return self.events(submit.request_id)

    def next_event(self, inbox: SimpleQueue[Event]) -> Event:
        """The next event of a request that has not ended, running the engine until there is one."""
        if self._death is None:
            self._check_open()
        while inbox.empty():
            self.step()
        return inbox.get_nowait()

    def leave(self, request_id: str, *, wait: bool) -> None:
        """The request has no reader any more: abort it if it still runs. `wait`: run the engine until the request has
        released everything."""
        if self._streams.leave(request_id) and not self._closed and self._death is None:
            self.abort(request_id)
            while wait and self._streams.is_running(request_id):
                self.step()

    def generate(self, submit: Submit) -> tuple[list[int], FinishEvent]:
        """Run one request to its end: the emitted ids and the terminal event. Raises RequestError if it is refused, at
        submit or later."""
        emitted: list[int] = []
        for event in self.stream(submit):
            if isinstance(event, FinishEvent):
                if (refusal := event.refusal(submit)) is not None:
                    raise refusal
                return emitted, event
            emitted.extend(event.token_ids)
        raise AssertionError("a stream ends with its FinishEvent")

    def abort(self, request_id: str) -> None:
        """End a request early; its FinishEvent says abort. Unknown and ended ids are ignored: an abort may cross the
        end."""
        self._check_open()
        self._core.loop.abort(request_id)

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def close(self) -> None:
        self._closed = True
        self._assembly.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._death is not None:
            raise EngineClosedError(f"the engine is not running: {self._death}")


class EventStream(Iterator[Event]):
    """The events of one request of an Engine. Closing it early, or dropping it, aborts the request."""

    def __init__(self, engine: Engine, request_id: str, inbox: SimpleQueue[Event]) -> None:
        self._engine = engine
        self._request_id = request_id
        self._inbox = inbox
        self._ended = False

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        event = self._engine.next_event(self._inbox)
        if isinstance(event, FinishEvent):
            self._leave(wait=False)
        return event

    def close(self) -> None:
        """Abort the request and wait until it has released everything. No-op after the terminal event."""
        self._leave(wait=True)

    def __del__(self) -> None:
        self._leave(wait=False)

    def _leave(self, *, wait: bool) -> None:
        if not self._ended:
            self._ended = True
            self._engine.leave(self._request_id, wait=wait)


class AsyncEngine(EngineThread):
    """An engine on its own thread, for asyncio callers: the server, agent frameworks. Implements wire.EngineClient.

        async with AsyncEngine(EngineConfig(model="path/to/checkpoint")) as engine:
            async for event in engine.stream(Submit(request_id="a", prompt_ids=[1, 2, 3])):
                ...

    If the engine's thread dies, every open stream ends with an ERROR event and later submits raise
    EngineClosedError."""

    @cached_property
    def app(self) -> FastAPI:
        """The HTTP API of this engine, as an ASGI app."""
        return create_app(self, TextPipeline.from_checkpoint(self.tokenizer, self.model_dir))

    def openai_client(self, **options: Any) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` that talks to this engine without a socket, as agent frameworks expect. See
        engine/sdk_clients.py."""
        return sdk_clients.openai_client(self.app, **options)

    def anthropic_client(self, **options: Any) -> AsyncAnthropic:
        """The same as an `anthropic.AsyncAnthropic`."""
        return sdk_clients.anthropic_client(self.app, **options)
