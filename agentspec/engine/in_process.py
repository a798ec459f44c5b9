"""The embedding API: an engine in this process, driven by the caller (`Engine`) or by its own thread (`AsyncEngine`).

Speaks wire messages. An AsyncEngine can also be asked for its HTTP app and for SDK clients; what they do is the server's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastapi import FastAPI

from agentspec.config import EngineConfig
from agentspec.engine import sdk_clients
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.thread import EngineCore, EngineThread
from agentspec.errors import EngineClosedError, RequestError
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
        self._events: dict[str, deque[Event]] = {}
        """Of submitted requests: what was not read yet."""
        self._read: set[str] = set()
        """Those of them that have their EventStream."""
        self._left: set[str] = set()
        """Requests whose reader has gone, until their terminal event."""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        return self._assembly.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._assembly.tokenizer

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError when it is refused. Read it with `events`."""
        self._check_open()
        if submit.request_id in self._events or submit.request_id in self._left:
            raise RequestError("request_id", submit.request_id, "is in use by a request that is running or was not read to its end")
        self._core.submit(submit, None if submit.grammar is None else self._assembly.constraints.make(submit.grammar))
        self._events[submit.request_id] = deque()

    def step(self) -> bool:
        """Run one step for everyone; False when there was nothing to do."""
        self._check_open()
        if not self._core.loop.has_work:
            return False
        for event in self._core.loop.run_once():
            if event.request_id in self._events:
                self._events[event.request_id].append(event)
            elif isinstance(event, FinishEvent):
                self._left.remove(event.request_id)
        return True

    def events(self, request_id: str) -> EventStream:
        """The events of a submitted request; reading them runs the engine as needed."""
        if request_id not in self._events or request_id in self._read:
            raise RequestError("request_id", request_id, "was not submitted, or is read already")
        self._read.add(request_id)
        return EventStream(self, request_id)

    def stream(self, submit: Submit) -> EventStream:
        """Submit and read this request's events, the FinishEvent last. Raises RequestError when it is refused."""
        self.submit(submit)
        return self.events(submit.request_id)

    def next_event(self, request_id: str) -> Event:
        """The next event of a submitted request that has not ended, running the engine until there is one."""
        self._check_open()
        unread = self._events[request_id]
        while not unread:
            self.step()
        event = unread.popleft()
        if isinstance(event, FinishEvent):
            del self._events[request_id]
            self._read.remove(request_id)
        return event

    def leave(self, request_id: str, *, wait: bool) -> None:
        """Abort a request whose events nobody will read; `wait`: run the engine until it has let go of everything."""
        unread = self._events.pop(request_id)
        self._read.remove(request_id)
        if not self._closed and not any(isinstance(event, FinishEvent) for event in unread):
            self._left.add(request_id)
            self.abort(request_id)
            while wait and request_id in self._left:
                self.step()

    def generate(self, submit: Submit) -> tuple[list[int], FinishEvent]:
        """Run one request to its end: the emitted ids and the terminal event. Raises RequestError when it is refused, now or half-way."""
        emitted: list[int] = []
        for event in self.stream(submit):
            if isinstance(event, FinishEvent):
                if (refusal := event.refusal(submit)) is not None:
                    raise refusal
                return emitted, event
            emitted.extend(event.token_ids)
        raise AssertionError("a stream ends with its FinishEvent")

    def abort(self, request_id: str) -> None:
        """End a request early; its FinishEvent says abort. Unknown and ended ids are ignored: an abort may cross the end."""
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


class EventStream(Iterator[Event]):
    """The events of one request of an Engine. Closing it early, or losing it, aborts the request."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._ended = False

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        event = self._engine.next_event(self._request_id)
        self._ended = isinstance(event, FinishEvent)
        return event

    def close(self) -> None:
        """Returns when the request holds nothing any more. No-op after the terminal event."""
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

    If the engine's thread dies, every open stream ends with an ERROR event and later submits raise EngineClosedError."""

    @cached_property
    def app(self) -> FastAPI:
        """The HTTP API of this engine, as an ASGI app."""
        return create_app(self, TextPipeline.from_checkpoint(self.tokenizer, self.model_dir))

    def openai_client(self, **options: Any) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` that talks to this engine without a socket: what agent frameworks take. See engine/sdk_clients.py."""
        return sdk_clients.openai_client(self.app, **options)

    def anthropic_client(self, **options: Any) -> AsyncAnthropic:
        """The same as an `anthropic.AsyncAnthropic`."""
        return sdk_clients.anthropic_client(self.app, **options)
