"""The frame of every attack: a server, honest clients that compare each answer with that of a quiet run, and the state
that must be restored afterwards.

Knows no attack. Nothing here judges times; `run.py` does, from a watch's measurements.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.asks import Ask, Said, is_error, make_ask, num_terminals, said, turned
from tests.chaos.connection import exchange
from tests.chaos.served import ROOT, Served

NUM_ASKS = 12
NUM_HONEST = 6
RSS_GROWTH = 1.10
STEP_SECONDS = 0.01
"""Step time of the light engine, and chunk interval of the control's streams."""
SPARE_FILES = 4
MOST_MIB = 4096.0
"""A server whose processes together exceed it is killed, since the machine has other users."""


@dataclass
class Outcome:
    """The result of one attack."""

    name: str
    size: int
    seed: int
    is_paced: bool = True
    """The engine keeps this pace under any load, so longer gaps between events are caused by the server."""
    seconds: float = 0.0
    num_compared: int = 0
    """Answers of honest clients that equal those of a quiet run."""
    failures: list[str] = field(default_factory=list)
    """Violations, in words."""
    refused: Counter[int] = field(default_factory=Counter)
    """Honest requests that were told to retry, by status."""
    rss_before: dict[str, float] = field(default_factory=dict)
    rss_after: dict[str, float] = field(default_factory=dict)
    rss_most: dict[str, float] = field(default_factory=dict)
    """MiB by process: before, after, and the maximum in between."""
    watched: dict[str, Any] = field(default_factory=dict)
    """The watch's measurements, if there was one."""
    notes: dict[str, Any] = field(default_factory=dict)

    def check(self, holds: bool, words: str) -> None:
        if not holds and len(self.failures) < 20:
            self.failures.append(words)

    def grown(self) -> dict[str, str]:
        """Processes whose memory grew by more than RSS_GROWTH."""
        return {
            name: f"{before:.0f} to {self.rss_after[name]:.0f} MiB"
            for name, before in self.rss_before.items()
            if self.rss_after.get(name, 0.0) > RSS_GROWTH * before
        }


class Honest:
    """Clients that repeat earlier requests and compare the answers."""

    def __init__(self, outcome: Outcome, asks: list[Ask], port: int) -> None:
        self.outcome, self.asks, self.port = outcome, asks, port
        self.quiet: dict[int, Said] = {}
        """By request number: the answer when nothing else ran."""

    async def learn(self) -> None:
        """The answers of a quiet run; whole and streamed ones agree."""
        for number, ask in enumerate(self.asks):
            first, second = [await exchange(self.port, one.wire()) for one in (ask, turned(ask))]
            assert first.status == second.status == 200, (
                f"a quiet server answers {first.status}, {second.status}: {first.body[:300]!r}"
            )
            self.quiet[number] = said(ask, first)
            assert said(turned(ask), second) == self.quiet[number], (
                f"a stream says something else than the whole answer: {ask}"
            )

    async def ask(self, number: int, *, may_fail: bool = False) -> bool:
        """Send one request; return whether the answer was right. may_fail: an error or a lost connection is no
        violation, because the server is being killed."""
        ask, outcome = self.asks[number], self.outcome
        answer = await exchange(self.port, ask.wire())
        if answer.status in (429, 503):
            outcome.refused[answer.status] += 1
            return False
        if may_fail and (not answer.is_whole or is_error(ask, answer)):
            return False
        if answer.status != 200 or not answer.is_whole:
            outcome.check(
                False, f"an honest request got {answer.status}, whole={answer.is_whole}: {answer.body[-300:]!r}"
            )
            return False
        if ask.body["stream"]:
            outcome.check(
                num_terminals(ask, answer.body) == 1,
                f"a stream has {num_terminals(ask, answer.body)} terminal events: {answer.body[-500:]!r}",
            )
        found, quiet = said(ask, answer), self.quiet[number]
        right = not is_error(ask, answer) and found == quiet
        if (
            may_fail and found.reason != quiet.reason and quiet.text.startswith(found.text)
        ):  # cut off by the drain, as its reason says
            return False
        outcome.check(right, f"a wrong answer to {ask}: {found}, not {quiet}")
        outcome.num_compared += right
        return right

    async def work(self, seed: int, stop: asyncio.Event, *, may_fail: bool = False) -> None:
        """Send requests one after the other until told to stop."""
        rng = random.Random(seed)
        while not stop.is_set():
            if not await self.ask(rng.randrange(len(self.asks)), may_fail=may_fail):
                await asyncio.sleep(0.05)

    async def all_at_once(self, count: int) -> None:
        """Send `count` requests at the same moment; each must be accepted: the attackers occupy no places any more."""
        before = sum(self.outcome.refused.values())
        await asyncio.gather(*(self.ask(number % len(self.asks)) for number in range(count)))
        refused = sum(self.outcome.refused.values()) - before
        self.outcome.check(not refused, f"{refused} of {count} requests are refused when the attack is over")


@asynccontextmanager
async def honest_clients(
    honest: Honest, seed: int, num: int = NUM_HONEST, *, may_fail: bool = False
) -> AsyncIterator[None]:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(honest.work(seed + number, stop, may_fail=may_fail)) for number in range(num)]
    try:
        yield
    finally:
        stop.set()
        for task in tasks:
            await task


@asynccontextmanager
async def watched(outcome: Outcome, served: Served) -> AsyncIterator[None]:
    """A control process, and a watch on it and the server."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-m", "tests.chaos.control", str(STEP_SECONDS)], **pipes) as control:
        assert control.stdout is not None
        port = control.stdout.readline().strip()
        with subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.watch", str(served.port), port, served.model], **pipes
        ) as watch:
            try:
                yield
            finally:
                told, _ = await asyncio.to_thread(watch.communicate, "")
                control.communicate("")
        outcome.watched = json.loads(told)


@dataclass
class Arena:
    """A server under attack."""

    served: Served
    honest: Honest
    outcome: Outcome
    rng: random.Random
    room: int
    """Requests that the server accepts at the same time."""


@asynccontextmanager
async def opened(
    outcome: Outcome, *flags: str, max_running: int = 8, max_queue: int = 40, key: str | None = None, **settings: Any
) -> AsyncIterator[Arena]:
    """A server whose quiet answers are known. At the end everything must be as in an idle server. settings: see
    Served.launch."""
    rng = random.Random(outcome.seed)
    limits = ("--max-running", str(max_running), "--max-queue", str(max_queue))
    async with await Served.start(*limits, *flags, **settings) as served:
        served.key = key
        honest = Honest(outcome, [replace(make_ask(rng, served.model), key=key) for _ in range(NUM_ASKS)], served.port)
        await honest.learn()
        yield Arena(served, honest, outcome, rng, max_running + max_queue)
        left = await served.quiet()
        outcome.check(not left, f"not as in an idle server: {', '.join(left)}")
        outcome.check(served.process.poll() is None, "the server ended")


@asynccontextmanager
async def attacked(arena: Arena, *, with_watch: bool) -> AsyncIterator[None]:
    """Run honest clients, and a watch if wanted, during the attack in the context's body. Compare memory and open files
    before and after."""
    served, outcome = arena.served, arena.outcome
    await served.quiet()
    num_files = served.num_files()
    outcome.rss_before = served.rss()
    began = asyncio.get_running_loop().time()
    guard = asyncio.create_task(_guarded(served, outcome))
    async with honest_clients(arena.honest, arena.rng.randrange(2**32)):
        if with_watch:
            async with watched(outcome, served):
                yield
        else:
            yield
    guard.cancel()
    outcome.seconds = asyncio.get_running_loop().time() - began
    await arena.honest.all_at_once(arena.room)
    await served.quiet()
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            while served.num_files() > num_files + SPARE_FILES:
                await asyncio.sleep(0.1)
    outcome.check(
        served.num_files() <= num_files + SPARE_FILES, f"open files: {num_files} before, {served.num_files()} after"
    )
    outcome.rss_after = served.rss()


async def _guarded(served: Served, outcome: Outcome) -> None:
    """Record each process's maximum memory, and kill a server over the limit."""
    while True:
        rss = served.rss()
        outcome.rss_most = {name: max(mib, outcome.rss_most.get(name, 0.0)) for name, mib in rss.items()}
        if sum(rss.values()) > MOST_MIB:
            outcome.check(False, f"killed, for its processes hold {sum(rss.values()):,.0f} MiB: {rss}")
            served.kill()
            return
        await asyncio.sleep(0.5)
