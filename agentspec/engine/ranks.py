"""The processes of an engine's other ranks: started, watched and ended by the engine's own process, which is rank 0.

A rank that dies, stops or differs ends the engine: one error that names the rank, for every request. Ranks never
outlive the engine's process. What they compute is runtime/ranks' and the models' business.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import distributed

from agentspec.config import EngineConfig
from agentspec.engine.rank_link import Broken, Built, FromRank, Here, Planned, RankBuild, RankMemory, RankStart, ToRank
from agentspec.engine.settings import Settings
from agentspec.errors import RankError
from agentspec.kernels import Group, RankGroup, group_of
from agentspec.models.shards import Rank
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.host_copies import HostCopies
from agentspec.runtime.memory_plan import AUTO_MAX_RUNNING, MemoryPlan
from agentspec.runtime.ranks.leader import Channel, LedCopies, LedExecutor
from agentspec.runtime.ranks.ring import Ring, pauses
from agentspec.types import Progress, tokens
from agentspec.wire import FrameReader, framed

logger = logging.getLogger("agentspec")

RANK_ENTRY: Sequence[str] = ("-m", "agentspec.engine.rank_process")
"""Python's arguments for a follower."""

_TICK_SECONDS = 0.05
_GRACE_SECONDS = 0.2
"""After a rank's end: how long others may still report theirs before the cause is chosen."""
_EXPLAIN_SECONDS = 2.0
"""How long the error of a sum may precede the news of the death that caused it."""
_CLOSE_SECONDS = 2.0
_JOIN_SECONDS = 60.0
_STEP_SECONDS = 3600.0
"""Limit of gloo's own waits. The watch ends a rank that waits in vain long before."""
_RECEIVE_BYTES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """How the ranks run, besides the engine's settings."""

    entry: Sequence[str] = RANK_ENTRY
    check_every: int = 64
    """Steps between two comparisons of all ranks' outcomes."""
    silent_seconds: float = 5.0
    """A rank whose process doesn't run for this long is stuck."""
    start_silent_seconds: float = 60.0
    """The same until all ranks are ready."""
    late_seconds: float = 300.0
    """A rank is stuck if it hasn't finished a step after this long, and after 50 times the longest step."""
    shares_device: bool = False
    """All ranks on the first GPU, where they take turns: slow, for tests. False: every rank has a GPU of its own."""


DEFAULTS = RankOptions()


@dataclass(slots=True)
class _Process:
    """A follower's process, as the leader sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)
    replies: SimpleQueue[FromRank] = field(default_factory=SimpleQueue)
    broken: Broken | None = None
    is_gone: bool = False
    beat: int = 0
    beat_at: float = 0.0
    """When `beat` last changed."""

    def describe_end(self) -> tuple[int, str]:
        """(precedence among the ends of several ranks, smallest first; description)."""
        try:
            status = self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return 3, f"rank {self.rank} closed its connection"
        if status < 0:
            return 0, f"rank {self.rank} was killed by {signal.Signals(-status).name}"
        if self.broken is not None:
            return 4 if self.broken.by_peer else 1, f"rank {self.rank} failed: {self.broken.text}"
        return 2, f"rank {self.rank} ended with exit status {status}"


ReplyT = TypeVar("ReplyT", Here, Planned, Built)


class Ranks:
    """The other ranks of one engine. Implements runtime.ranks.leader.Watch."""

    def __init__(self, config: EngineConfig, model_dir: Path | None, options: RankOptions = DEFAULTS) -> None:
        """Start the processes. They load their parts of the model while this one loads its own."""
        self.rank = Rank(0, config.tensor_parallel)
        self._options = options
        self._error: RankError | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._turn = threading.Lock()
        self._callbacks: list[Callable[[RankError], object]] = []
        self._is_started = False
        self._group: RankGroup | None = None
        self._threads_before = torch.get_num_threads()
        num_threads = max(1, self._threads_before // self.rank.count)
        torch.set_num_threads(num_threads)
        self._meeting = tempfile.mkdtemp(prefix="agentspec-")
        slots = AUTO_MAX_RUNNING if config.max_running == "auto" else config.max_running
        self._ring = Ring.create(num_readers=self.rank.count - 1, num_slots=slots)
        self.channel = Channel(self._ring, self, check_every=options.check_every)
        self._processes: list[_Process] = []
        self._progress: tuple[int, ...] = ()
        self._moved_at = time.monotonic()
        self._longest = 0.0
        self._watcher = threading.Thread(target=self._watch, name="agentspec-ranks", daemon=True)
        try:
            for index in range(1, self.rank.count):
                self._processes.append(self._start(index))
            for process in self._processes:
                start = RankStart(
                    config=config,
                    model_dir=None if model_dir is None else str(model_dir),
                    index=process.rank,
                    count=self.rank.count,
                    meeting=os.path.join(self._meeting, "store"),
                    num_slots=slots,
                    num_threads=num_threads,
                    check_every=options.check_every,
                    shares_device=options.shares_device,
                )
                self._send(process, start)
            self._watcher.start()
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", *self._options.entry, str(theirs.fileno()), str(self._ring.fd)]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self._ring.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return _Process(index, process, ours, beat_at=time.monotonic())

    def join(self, device: torch.device) -> Group:
        """Meet the other ranks; blocks until all are there. device: of this rank. Returns the group of their sums.
        Raises RankError, and ConfigError if their GPUs can't reach each other."""
        self._receive(Here)
        found: Future[RankGroup] = Future()

        def attempt() -> None:
            try:
                process_group = meet(os.path.join(self._meeting, "store"), self.rank)
                found.set_result(group_of(process_group, device, shares_device=self._options.shares_device))
            except Exception as error:
                found.set_exception(error)

        # Meeting can't be interrupted: where a rank has died it waits for _JOIN_SECONDS.
        threading.Thread(target=attempt, name="agentspec-meeting", daemon=True).start()
        for _ in pauses():
            self.check()
            if found.done():
                break
        try:
            self._group = group = found.result()
        except RuntimeError as error:
            raise self.explain(error) or RankError(f"the ranks did not meet: {error}") from error
        if self._error is not None:
            group.abort()  # `fail` came before the group
        return group

    def build(
        self,
        settings: Settings,
        draft_ids: Sequence[int] | None,
        *,
        most_riders: int,
        early: bool,
        given: MemoryPlan | None,
    ) -> None:
        """Have the other ranks limit their drafts and plan their memory, as this rank does next. The other
        arguments are as in RankBuild."""
        ids = None if draft_ids is None else tokens(draft_ids).tobytes()
        self._send_all(
            RankBuild(
                max_running=settings.max_running,
                max_copies=settings.max_copies,
                draft_ids=ids,
                most_riders=most_riders,
                early=early,
                given=given,
            )
        )

    def plan(self, own: Callable[[], MemoryPlan]) -> MemoryPlan:
        """What fits on all ranks, this one by `own`. Raises RankError."""
        memory = own()
        for planned in self._receive(Planned):
            memory = least(memory, planned.memory)
        shutil.rmtree(self._meeting, ignore_errors=True)  # not sooner: the others may still read it to meet
        return memory

    def allocate(self, memory: MemoryPlan, progress: Progress) -> Progress:
        """Have the other ranks allocate what `plan` has returned, and capture, as this rank does next. Call when the
        kernels are compiled, or every rank compiles them. Returns `progress`, which raises RankError from now on once a
        rank has died or is stuck."""
        self._send_all(RankMemory(memory))

        def watched(stage: str, done: int, total: int) -> None:
            self.check()
            progress(stage, done, total)

        return watched

    def lead(self, executor: ModelExecutor, copies: HostCopies | None) -> tuple[LedExecutor, LedCopies | None]:
        """An executor and copies of all ranks, from this rank's own. Waits until every rank is ready for plans. Raises
        RankError."""
        self._receive(Built)
        self._is_started = True
        led = None if copies is None else LedCopies(copies, self.channel, copies.close)
        return LedExecutor(executor, self.channel), led

    def on_failure(self, callback: Callable[[RankError], object]) -> None:
        """Call `callback` once from another thread when the ranks have failed; at once if they have."""
        with self._turn:
            if self._error is None:
                self._callbacks.append(callback)
                return
        callback(self._error)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def explain(self, error: Exception) -> RankError | None:
        if self._error is None and isinstance(error, RuntimeError):  # gloo's, which precedes the news of its cause
            self._failed.wait(_EXPLAIN_SECONDS)
        return self._error

    def fail(self, error: RankError) -> None:
        with self._turn:
            if self._error is not None or self._closing.is_set():
                return
            self._error = error
            callbacks, self._callbacks = self._callbacks, []
        self._free()
        self._kill()
        self._failed.set()
        for callback in callbacks:
            callback(error)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes, rank 1 first."""
        return [process.process.pid for process in self._processes]

    def close(self) -> None:
        """End the processes, and release the shared memory. Call when no step runs any more."""
        with self._turn:
            if self._closing.is_set():
                return
            self._closing.set()
        for process in self._processes:
            with suppress(OSError):
                process.socket.shutdown(socket.SHUT_RDWR)  # a follower ends when it reads this
        self._free()  # a step that only this rank has launched
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self._processes:
            process.socket.close()
        if self._group is not None:
            self._group.close()
        self._ring.close()
        shutil.rmtree(self._meeting, ignore_errors=True)
        torch.set_num_threads(self._threads_before)

    def _free(self) -> None:
        """End what this rank's device waits for. Its results are wrong from now on: `_error` or `_closing` is set."""
        if self._group is not None:
            self._group.abort()

    def _kill(self) -> None:
        """SIGKILL, because a stopped process ignores anything else; and wait for the end."""
        for process in self._processes:
            process.process.kill()
        for process in self._processes:
            process.process.wait()

    def _send_all(self, message: ToRank) -> None:
        for process in self._processes:
            self._send(process, message)

    def _send(self, process: _Process, message: ToRank) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the watch reports the end
            process.socket.sendall(framed(msgspec.msgpack.encode(message)))

    def _receive(self, kind: type[ReplyT]) -> list[ReplyT]:
        """One reply of each follower."""
        replies: list[ReplyT] = []
        for process in self._processes:
            for _ in pauses():
                self.check()
                if not process.replies.empty():
                    break
            reply = process.replies.get()
            assert isinstance(reply, kind), f"rank {process.rank} sent {reply} instead of {kind.__name__}"
            replies.append(reply)
        return replies

    def _watch(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for process in self._processes:
                    selector.register(process.socket, selectors.EVENT_READ, process)
                self._watch_all(selector)
        except Exception as error:
            logger.exception("the watch over the ranks broke")
            self.fail(RankError(f"the ranks are not watched any more: {error}"))

    def _watch_all(self, selector: selectors.BaseSelector) -> None:
        ticked = time.monotonic()
        while not self._closing.is_set() and self._error is None:
            self._hear(selector, _TICK_SECONDS)
            if any(process.is_gone or process.broken for process in self._processes):
                self._bury(selector)
                return
            now = time.monotonic()
            late = max(0.0, now - ticked - 4 * _TICK_SECONDS)  # this process itself was stopped: that doesn't count
            ticked = now
            self._moved_at += late
            for process in self._processes:
                process.beat_at += late
            stuck = self._find_stuck(now)
            if stuck is not None:
                self.fail(RankError(stuck))

    def _hear(self, selector: selectors.BaseSelector, seconds: float) -> None:
        for key, _ in selector.select(seconds):
            process: _Process = key.data
            try:
                data = process.socket.recv(_RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                process.is_gone = True
                selector.unregister(process.socket)
            for body in process.frames.feed(data):
                message = _from_rank.decode(body)
                if isinstance(message, Broken):
                    process.broken = message
                else:
                    process.replies.put(message)

    def _bury(self, selector: selectors.BaseSelector) -> None:
        """A rank has ended, or is about to: find out which was first, and why."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and selector.get_map():
            self._hear(selector, left)
        if self._closing.is_set():
            return
        ends = [process.describe_end() for process in self._processes if process.is_gone or process.broken]
        self.fail(RankError(min(ends)[1]))

    def _find_stuck(self, now: float) -> str | None:
        """Which rank doesn't respond, in words; None: all do."""
        options, sent = self._options, self.channel.num_plans
        reports = [self._ring.report(process.rank - 1) for process in self._processes]
        limit = options.silent_seconds if self._is_started else options.start_silent_seconds
        for process, report in zip(self._processes, reports, strict=True):
            if report.beat != process.beat:
                process.beat, process.beat_at = report.beat, now
            elif now - process.beat_at > limit:
                what = f"it has finished {report.done} of {sent} steps" if self._is_started else "it is starting"
                return f"rank {process.rank} is stuck: it has not responded for {limit:g} seconds ({what})"
        progress = (sent, *(report.done for report in reports))
        if progress != self._progress:
            if self._progress and self._is_busy:
                self._longest = max(self._longest, now - self._moved_at)
            self._progress, self._moved_at = progress, now
        if self._is_busy and now - self._moved_at > max(options.late_seconds, 50 * self._longest):
            last = min(reports, key=lambda report: report.done)
            rank = reports.index(last) + 1
            return (
                f"rank {rank} is stuck: it has not finished step {last.done + 1} in {now - self._moved_at:.0f} seconds"
            )
        return None

    @property
    def _is_busy(self) -> bool:
        sent, *done = self._progress
        return min(done) < sent


def meet(store_path: str, rank: Rank) -> distributed.ProcessGroup:
    """A process group of all ranks, over gloo on the loopback interface. Blocks until all ranks are there.

    It is no default group, so a program that embeds an engine keeps its own."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=_JOIN_SECONDS)
    options._threads = 1
    store = distributed.FileStore(store_path, rank.count)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=_JOIN_SECONDS))
    group = gloo(store, rank.index, rank.count, options)
    group._set_default_timeout(timedelta(seconds=_STEP_SECONDS))
    return cast(distributed.ProcessGroup, group)


def least(one: MemoryPlan, other: MemoryPlan) -> MemoryPlan:
    """What fits where either plan fits."""
    host = None
    if one.host is not None and other.host is not None:
        host = replace(
            one.host,
            num_rows=min(one.host.num_rows, other.host.num_rows),
            num_pages=min(one.host.num_pages, other.host.num_pages),
        )
    return MemoryPlan(
        num_rows=min(one.num_rows, other.num_rows),
        num_pages=min(one.num_pages, other.num_pages),
        max_length=min(one.max_length, other.max_length),
        host=host,
    )


_from_rank = msgspec.msgpack.Decoder(FromRank)
