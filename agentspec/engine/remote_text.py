"""Text work in a process of its own, as its server sees it: one job at a time, flows taking turns, each job with its
deadline.

A process that hangs is killed and replaced. A process that died is replaced too, and its job is tried once more. A lost
process loses only its memory of turns, which costs cache hits. Implements server/text_work.TextWork.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.engine.link import ids_of, to_error
from agentspec.engine.remote import EngineProcess, Wire
from agentspec.engine.text_link import (
    BUFFER_BYTES,
    Build,
    Built,
    Compile,
    Compiled,
    Encode,
    Encoded,
    Read,
    Reader,
    Refused,
    Remember,
    ToServer,
    begun_of,
    encoded,
    frame,
    prompt_of,
)
from agentspec.errors import (
    AgentspecError,
    CheckpointError,
    ConfigError,
    RequestError,
    TextProcessError,
)
from agentspec.fair_queue import FairQueue, Flow
from agentspec.server.pipeline import NO_USE_FOR_A_TEMPLATE, TextPipeline, tokenizer_settings
from agentspec.text.events import AssistantTurn
from agentspec.text.prompt import BuiltPrompt, PromptAsk
from agentspec.text.token_limit import TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import DIALECTS, Dialect, detect_dialect
from agentspec.types import tokens

logger = logging.getLogger("agentspec")

_QUANTUM_BYTES = 1 << 16
"""Job bytes that a flow may have done in each of its turns."""
_LEAST_BYTES = 4096
"""What even an empty job counts as."""
_LARGE_BYTES = 256 << 10
"""A job with more bytes that takes too long is the sender's fault; with fewer, the chat template's."""
_TRIES = 2


def text_process(seconds: float) -> EngineProcess:
    """Start a text process, which waits for what to load."""
    return EngineProcess(("-P", "-m", "agentspec.engine.text_process", str(seconds)))


@dataclass(slots=True)
class RemotePrompts:
    """text_work.PromptFacts of the other process."""

    dialect: Dialect | None
    template_reads: frozenset[str]
    tag_ids: dict[str, int]
    source: str
    num_spliced: int = 0
    num_mismatched: int = 0


class _DiedError(Exception):
    """The process ended before it answered."""


class _Link:
    """One text process, from start to end. It answers one message after another."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._wire = Wire(process, self._take, self._lose)
        self._reader = Reader(ToServer)
        self._answer: asyncio.Future[ToServer] | None = None

    async def connect(self) -> None:
        self._process.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        await self._wire.connect()

    def _take(self, body: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._reader(body))

    def _lose(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_DiedError())

    @property
    def alive(self) -> bool:
        return self._wire.is_open

    def tell(self, data: bytes) -> None:
        self._wire.write(data)

    async def ask(self, body: bytes, seconds: float | None) -> ToServer:
        """Send an encoded message and wait for its answer. Raises TimeoutError, after which the process is unusable, or
        _DiedError. Never call it twice at the same time."""
        if not self._wire.is_open:
            raise _DiedError
        self._answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(seconds):
            await self._wire.send(body)
            return await self._answer

    async def close(self) -> None:
        self._process.kill()
        self._wire.close()
        await asyncio.to_thread(self._process.process.wait)


@dataclass(slots=True, eq=False)
class _Job:
    data: bytes
    field: str
    answer: asyncio.Future[Any]

    def fail(self, error: AgentspecError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class RemoteText:
    """Text work in another process. Call `load` first, `close` last. Every job that can't be done ends with an error of
    errors.py."""

    prompts: RemotePrompts | None = None

    def __init__(self, process: EngineProcess, seconds: float, *, trusts_client_text: bool = False) -> None:
        """process: owned from now on. seconds: limit for one job, and for checking a chat template when it is loaded.
        trusts_client_text: see PromptBuilder."""
        self._first: EngineProcess | None = process
        self._seconds = seconds
        self._trusts = trusts_client_text
        self._link: _Link | None = None
        self._loads: Compile | None = None
        self._waiting: FairQueue[_Job] = FairQueue(_QUANTUM_BYTES)
        self._arrived = asyncio.Event()
        self._running: _Job | None = None
        self._worker: asyncio.Task[None] | None = None
        self._ends: list[asyncio.Future[None]] = []
        self._closed = False

    async def check(self, template: Path) -> None:
        """Raises CheckpointError for a template file that can't be used."""
        await self._compile(await self._connected(), Compile(None, str(template)))

    async def load(self, directory: Path, template: Path | None) -> None:
        """Load a checkpoint's tokenizer and chat template, and start doing jobs. `template`: a file in place of the
        checkpoint's. Raises CheckpointError if they can't be used."""
        self._loads = Compile(str(directory), None if template is None else str(template), self._trusts)
        await self._start()
        self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End the process. Jobs that wait or run end with a TextProcessError."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait((self._worker,))
        for job in [self._running, *iter(self._take, None)]:
            if job is not None:
                job.fail(TextProcessError("the server is about to stop"))
        if self._first is not None:
            self._link, self._first = _Link(self._first), None
        await self._lose()
        await asyncio.gather(*self._ends)

    async def build(self, asked: PromptAsk, flow: Flow) -> BuiltPrompt:
        answer = await self._done(Build(asked), "messages", flow)
        assert isinstance(answer, Built)
        assert self.prompts is not None
        self.prompts.num_spliced, self.prompts.num_mismatched = answer.num_spliced, answer.num_mismatched
        return prompt_of(
            answer.ids,
            answer.begun,
            breakpoints=answer.breakpoints,
            marked_end=answer.marked_end,
            reasoning_open=answer.reasoning_open,
            applied=answer.applied,
        )

    def remember(
        self,
        prompt: BuiltPrompt,
        turn: AssistantTurn,
        token_ids: Sequence[int],
        *,
        is_cut: bool,
        skip_special_tokens: bool,
    ) -> None:
        message = Remember(begun_of(prompt), turn, tokens(token_ids).tobytes(), is_cut, skip_special_tokens)
        if self._link is not None:
            self._link.tell(frame(message))

    async def encode(self, texts: list[str], limit: TokenLimit, flow: Flow) -> list[array[int]]:
        answer = await self._done(Encode(texts, limit), "prompt", flow)
        assert isinstance(answer, Encoded)
        return [ids_of(data) for data in answer.ids]

    async def _done(self, message: Build | Encode, field: str, flow: Flow) -> ToServer:
        """Queue a job and wait for its answer. A caller that is cancelled gives up its place."""
        if self._closed:
            raise TextProcessError("the server is about to stop")
        try:
            data = encoded(message)
        except UnicodeEncodeError as error:
            raise RequestError(
                field, error.object[max(0, error.start - 20) : error.end], f"is not valid Unicode: {error.reason}"
            ) from None
        job = _Job(data, field, asyncio.get_running_loop().create_future())
        weight = max(len(data), _LEAST_BYTES)
        self._waiting.check_room(flow, weight, "rendered and tokenised")
        ticket = self._waiting.enqueue(job, flow, weight)
        self._arrived.set()
        try:
            answer: ToServer = await job.answer
        finally:
            self._waiting.remove(ticket)
        if isinstance(answer, Refused):
            raise to_error(answer.error)
        return answer

    def _take(self) -> _Job | None:
        ticket = self._waiting.dequeue()
        return None if ticket is None else ticket.item

    async def _work(self) -> None:
        """Do one job after another, as long as the server runs."""
        while True:
            if self._link is None:
                with suppress(AgentspecError):  # the next job tries again, and reports the error
                    await self._ready()
            while (job := self._take()) is None:
                self._arrived.clear()
                await self._arrived.wait()
            self._running = job
            try:
                await self._answer(job)
            except AgentspecError as error:
                job.fail(error)
            except Exception:
                logger.exception("a text job failed")
                job.fail(AgentspecError("internal error"))
            self._running = None

    async def _answer(self, job: _Job) -> None:
        for _ in range(_TRIES):
            link = await self._ready()
            try:
                answer = await link.ask(job.data, self._seconds)
            except TimeoutError:
                logger.error(
                    "a text job of %s bytes took more than %g seconds: its process is killed",
                    f"{len(job.data):,}",
                    self._seconds,
                )
                job.fail(self._too_slow(job))
                return await self._lose()
            except _DiedError:
                continue
            if not job.answer.done():
                job.answer.set_result(answer)
            return None
        raise TextProcessError(f"the process that renders and tokenises ended {_TRIES} times at this request")

    def _too_slow(self, job: _Job) -> AgentspecError:
        took = f"took longer to render and tokenise than the {self._seconds:g} seconds that it may (--text-timeout)"
        if len(job.data) > _LARGE_BYTES:
            return RequestError(job.field, f"{len(job.data):,} bytes", took)
        return TextProcessError(f"{job.field}: the request {took}: does the chat template end?")

    async def _ready(self) -> _Link:
        """The running process, or a new one if it has ended. Raises TextProcessError."""
        if self._link is not None and not self._link.alive:
            logger.error("the text process ended by itself")
            await self._lose()
        try:
            return self._link or await self._start()
        except AgentspecError as error:
            raise TextProcessError(f"the process that renders and tokenises can't be started: {error}") from error

    async def _start(self) -> _Link:
        """Start a process and load tokenizer and template. Raises CheckpointError, and then no process is left."""
        assert self._loads is not None
        assert self._loads.directory is not None
        link = self._link or await self._connected()
        try:
            await _asked(link, Read(self._loads.directory), None)
            found = await self._compile(link, self._loads)
        except BaseException:
            await self._lose()
            raise
        if self.prompts is None and found.source is not None:
            dialect = detect_dialect(found.source)
            self.prompts = RemotePrompts(
                None if dialect is None else DIALECTS[dialect], found.reads, found.tag_ids, found.source
            )
        return link

    async def _connected(self) -> _Link:
        process, self._first = self._first or text_process(self._seconds), None
        self._link = _Link(process)
        await self._link.connect()
        return self._link

    async def _compile(self, link: _Link, asked: Compile) -> Compiled:
        try:
            answer = await _asked(link, asked, self._seconds)
        except TimeoutError:
            origin = asked.instead or asked.directory
            raise CheckpointError(
                f"{origin}: the chat template did not end within {self._seconds:g} seconds (--text-timeout)"
            ) from None
        assert isinstance(answer, Compiled)
        return answer

    async def _lose(self) -> None:
        """Kill the process. The caller may be cancelled meanwhile, so `close` also waits for the process's end."""
        link, self._link = self._link, None
        if link is not None:
            self._ends.append(asyncio.ensure_future(link.close()))
            await asyncio.shield(self._ends[-1])
        self._ends = [end for end in self._ends if not end.done()]


async def _asked(link: _Link, message: Read | Compile, seconds: float | None) -> ToServer:
    try:
        answer = await link.ask(encoded(message), seconds)
    except _DiedError:
        raise AgentspecError("the text process ended while it loaded") from None
    if isinstance(answer, Refused):
        raise to_error(answer.error)
    return answer


async def pipeline_of(directory: Path, template: Path | None, remote: RemoteText) -> TextPipeline | None:
    """The server's own part of a checkpoint's text pipeline; the text process, which loads it now, does the rest. None
    without a tokenizer.

    Raises CheckpointError if they can't be used, ConfigError for a `template` that can't be applied."""
    tokenizer, _ = await asyncio.gather(
        asyncio.to_thread(Tokenizer.from_directory, directory), remote.load(directory, template)
    )
    if tokenizer is None:
        if template is not None:
            raise ConfigError("chat_template", str(template), NO_USE_FOR_A_TEMPLATE)
        return None
    prompts = remote.prompts
    return TextPipeline(
        tokenizer, prompts, remote, settings=tokenizer_settings(directory, None if prompts is None else prompts.source)
    )
