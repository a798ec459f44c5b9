"""When sessions start and how many run at once; each session's turns follow one another on their own.

Closed loop: a fixed number of lanes, each takes the next session when it is free. Open loop: every session has an
arrival time, whether or not the server keeps up; a limit on running sessions then delays starts, and the records show
that as lag.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from agentspec.replay.options import ReplayOptions
from agentspec.replay.schema import Session
from agentspec.replay.warmup import Lane, Warmup

RunSession = Callable[[Session, float, Lane], Awaitable[None]]
"""Runs a session, and its subagents, whose first turn is due at a time (seconds on the run's clock), in a lane."""


def arrivals(sessions: Sequence[Session], options: ReplayOptions) -> list[float]:
    """Seconds from the start of the run at which each session arrives (trace and poisson).

    Raises ValueError for a session without `start_ms` in a trace. A trace begins with its first session."""
    if options.arrival == "trace":
        starts: list[float] = []
        for session in sessions:
            if session.start_ms is None:
                raise ValueError(f"session {session.session_id!r} has no start_ms, which --arrival trace needs")
            starts.append(session.start_ms / 1000)
        return [(start - min(starts)) / options.speed for start in starts]
    assert options.arrival_rate is not None
    rng, time, times = random.Random(options.seed), 0.0, []
    for _ in sessions:
        times.append(time)
        time += rng.expovariate(options.arrival_rate) / options.speed
    return times


async def run_all(
    sessions: Sequence[Session], options: ReplayOptions, run: RunSession, now: Callable[[], float], warmup: Warmup
) -> None:
    """Run every session as the options say; returns when the last has ended. `sessions` are those without a parent:
    others start with theirs."""
    if options.arrival == "closed":
        await _closed_loop(sessions, [warmup.lane() for _ in range(num_lanes(sessions, options))], run, now)
    else:
        await _open_loop(sessions, arrivals(sessions, options), options.lanes, run, now, warmup)


def num_lanes(sessions: Sequence[Session], options: ReplayOptions) -> int:
    """Lanes that a closed loop of these sessions has."""
    return min(options.lanes or len(sessions), len(sessions))


async def _closed_loop(
    sessions: Sequence[Session], lanes: Sequence[Lane], run: RunSession, now: Callable[[], float]
) -> None:
    waiting = iter(sessions)

    async def work(lane: Lane) -> None:
        for session in waiting:  # shared: every lane takes the next one
            await run(session, now(), lane)
        lane.close()

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(work(lane))


async def _open_loop(
    sessions: Sequence[Session],
    times: Sequence[float],
    limit: int | None,
    run: RunSession,
    now: Callable[[], float],
    warmup: Warmup,
) -> None:
    places = asyncio.Semaphore(limit) if limit is not None else None

    async def start(session: Session, time: float) -> None:
        await asyncio.sleep(max(0.0, time - now()))
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            await run(session, time, warmup.lane())

    async with asyncio.TaskGroup() as group:
        for session, time in sorted(zip(sessions, times, strict=True), key=lambda pair: pair[1]):
            group.create_task(start(session, time))
