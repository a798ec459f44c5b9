"""Processes that are killed, stopped and terminated, at random moments: each stream ends in one way, each server
reports how, and no process remains.

Most trials have an engine without torch, so that a server starts within a second; each one in REAL_EVERY has
tiny-agent.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.chaos.arena import Honest, Outcome, honest_clients
from tests.chaos.asks import endless, make_ask, num_terminals
from tests.chaos.connection import exchange
from tests.chaos.served import ROOT, Served, children, is_there, role

NUM_STREAMS = 3
REAL_EVERY = 25
LATEST_SECONDS = 0.4
"""The signal is sent within this time after the streams have begun."""
STOPPED_SECONDS = 0.6
"""A stopped process continues after at most this time."""
ORPHAN_SECONDS = 15.0
START_SECONDS = 60.0
"""Until a server's engine has a process, at most."""
ENGINE_ENDED, COULD_NOT_START, INTERRUPTED = 70, 2, 130
KILLED = -signal.SIGKILL
DRAIN = ("--drain", "0.3")

FATAL = {
    "the engine is killed": (ENGINE_ENDED,),
    "the server is killed": (KILLED,),
    "SIGTERM": (0,),
    "SIGINT, twice": (INTERRUPTED,),
    "SIGTERM to a stopped engine": (0,),
    "the engine is killed while it loads": (COULD_NOT_START, ENGINE_ENDED),
    "SIGTERM while it loads": (0,),
}
"""Signals that end a server, and its exit codes. Its streams end with one terminal event each, unless the server
process itself is killed."""
PASSING = (
    "the engine is stopped for a while",
    "the server is stopped for a while",
    "a helper is stopped for a while",
    "a helper is killed",
)
"""Signals that a server survives: every answer is right. A helper is a process beside the engine, if there is one."""
RESTARTED = "the engine is killed, with --restart"


@functools.cache
def serve_flags() -> str:
    """As documented by `agentspec serve --help`."""
    return subprocess.run(
        [sys.executable, "-m", "agentspec", "serve", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


async def run(
    size: int, seed: int, *, with_watch: bool = False, real_every: int = REAL_EVERY, log: Path | None = None
) -> Outcome:
    """size: signals. with_watch has no effect: a stopped server is late."""
    outcome = Outcome("kills and stops", size, seed)
    rng = random.Random(seed)
    kinds = [*FATAL, *PASSING, *([RESTARTED] if "--restart" in serve_flags() else [])]
    done: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    began = loop.time()
    known: dict[bool, Honest] = {}
    passing = []
    for number in range(size):
        kind = kinds[number % len(kinds)]
        if kind in PASSING:
            passing.append(kind)
            continue
        light = (number + 1) % real_every != 0
        started = loop.time()
        await _fatal(outcome, kind, random.Random(rng.randrange(2**32)), known, light=light, log=log)
        longest[kind] = max(longest[kind], round(loop.time() - started))
        done[kind] += 1
    if passing:
        await _pass(outcome, passing, rng, done, log)
    outcome.seconds = loop.time() - began
    outcome.notes = {"blows": dict(done), "seconds of the longest, with its start": dict(longest)}
    return outcome


async def _fatal(
    outcome: Outcome, kind: str, rng: random.Random, known: dict[bool, Honest], *, light: bool, log: Path | None
) -> None:
    """One server, from its start to its end."""
    words = f"{kind} ({'light' if light else 'tiny-agent'})"
    if "loads" in kind:
        await _signal_while_loading(outcome, kind, rng, light=light)
        return
    flags = (*DRAIN, "--restart") if kind == RESTARTED else DRAIN
    async with await Served.start(*flags, light=light, log=log) as served:
        honest = await _honest(outcome, served, known, light=light)
        asks = [endless(served.model, f"Go on, {number}.") for number in range(NUM_STREAMS)]
        streams = [asyncio.create_task(exchange(served.port, ask.wire())) for ask in asks]
        async with honest_clients(honest, rng.randrange(2**32), 2, may_fail=True):
            await asyncio.sleep(0.2 + rng.random() * LATEST_SECONDS)
            pids, engine = served.all_pids(), served.engine()
            _strike(served, kind)
            if kind == RESTARTED:
                await _check_survival(outcome, served, honest, engine, words)
            else:
                code = await served.ended()
                outcome.check(code in FATAL[kind], f"{words}: exit code {code}, not {FATAL[kind]}")
        for ask, stream in zip(asks, streams, strict=True):
            answer = await stream
            if answer.status == 200 and kind != "the server is killed":
                count = num_terminals(ask, answer.body)
                outcome.check(
                    count == 1 and answer.is_whole,
                    f"{words}: a stream with {count} terminal events, whole={answer.is_whole}",
                )
        if kind == RESTARTED:
            left = await served.quiet()
            outcome.check(not left, f"{words}: not as in an idle server: {', '.join(left)}")
        else:
            await _check_no_process_left(outcome, pids, words)


async def _signal_while_loading(outcome: Outcome, kind: str, rng: random.Random, *, light: bool) -> None:
    served = await _started(light)
    try:
        await asyncio.sleep(0.1 + rng.random() * (0.3 if light else 2.0))
        pids = served.all_pids()
        _strike(served, kind)
        code = await served.ended()
        outcome.check(code in FATAL[kind], f"{kind}: exit code {code}, not {FATAL[kind]}")
        await _check_no_process_left(outcome, pids, kind)
    finally:
        served.kill()


async def _started(light: bool) -> Served:
    """A server that is starting: its engine process exists, and it has not reported that it serves."""
    served = Served.launch(light=light)
    try:
        async with asyncio.timeout(START_SECONDS):
            while served.engine() is None and served.process.poll() is None:
                await asyncio.sleep(0.01)
    except BaseException:
        served.kill()
        raise
    return served


def _strike(served: Served, kind: str) -> None:
    engine = served.engine()
    if "engine is killed" in kind:
        _signal(engine, signal.SIGKILL)
    elif kind == "the server is killed":
        _signal(served.pid, signal.SIGKILL)
    elif "SIGTERM" in kind:
        if "stopped" in kind:
            _signal(engine, signal.SIGSTOP)
        _signal(served.pid, signal.SIGTERM)
    else:
        _signal(served.pid, signal.SIGINT)
        _signal(served.pid, signal.SIGINT)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _check_survival(outcome: Outcome, served: Served, honest: Honest, dead: int | None, words: str) -> None:
    """With --restart: new answers are right, from an engine in a new process."""
    with suppress(TimeoutError):
        async with asyncio.timeout(30):
            while served.engine() in (dead, None) or (await served.get("/health")).status != 200:
                await asyncio.sleep(0.05)
    outcome.check(served.process.poll() is None, f"{words}: the server ended")
    outcome.check(await honest.ask(0), f"{words}: no right answer afterwards")


async def _check_no_process_left(outcome: Outcome, pids: list[int], words: str) -> None:
    left = pids
    with suppress(TimeoutError):
        async with asyncio.timeout(ORPHAN_SECONDS):
            while left := [pid for pid in pids if is_there(pid)]:
                await asyncio.sleep(0.02)
    outcome.check(not left, f"{words}: processes are left: {[role(pid) for pid in left]}")
    for pid in left:
        _signal(pid, signal.SIGKILL)


async def _honest(outcome: Outcome, served: Served, known: dict[bool, Honest], *, light: bool) -> Honest:
    """Clients that know the quiet answers of this kind of server; the first server of a kind provides them."""
    if light not in known:
        rng = random.Random(outcome.seed)
        known[light] = Honest(outcome, [make_ask(rng, served.model) for _ in range(6)], served.port)
        await known[light].learn()
    known[light].port = served.port
    return known[light]


async def _pass(outcome: Outcome, kinds: list[str], rng: random.Random, done: Counter[str], log: Path | None) -> None:
    """Signals to one server, one after the other, while honest clients continue. Only the work of a killed helper may
    fail."""
    async with await Served.start(log=log) as served:
        honest = await _honest(outcome, served, {}, light=True)
        for kills in (False, True):
            async with honest_clients(honest, rng.randrange(2**32), 4, may_fail=kills):
                for kind in (kind for kind in kinds if ("killed" in kind) == kills):
                    await asyncio.sleep(rng.random() * LATEST_SECONDS)
                    done[kind] += await _survived(served, kind, rng)
            left = await served.quiet()
            outcome.check(not left, f"not as in an idle server: {', '.join(left)}")
            outcome.check(await honest.ask(0), f"no right answer behind {kinds}")


async def _survived(served: Served, kind: str, rng: random.Random) -> bool:
    """Send one signal; False if there is no such process."""
    helpers = [pid for pid in children(served.pid) if pid != served.engine()]
    pid = {PASSING[0]: served.engine(), PASSING[1]: served.pid}.get(kind, rng.choice(helpers) if helpers else None)
    if "killed" in kind:
        _signal(pid, signal.SIGKILL)
        return pid is not None
    _signal(pid, signal.SIGSTOP)
    await asyncio.sleep(rng.random() * STOPPED_SECONDS)
    _signal(pid, signal.SIGCONT)
    return pid is not None
