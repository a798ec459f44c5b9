"""Schedule the sessions: when they start, and how many run at once.

Closed loop: a fixed number of lanes; a free lane takes the next session. Open loop: every session has an arrival time,
independent of the server. A concurrency limit then delays starts, which the records show as lag.
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
"""(session, due time of its first turn in seconds on the run's clock, lane) -> runs the session and its subagents."""


def arrivals(sessions: Sequence[Session], options: ReplayOptions) -> list[float]:
    """Return the arrival of each session, in seconds from the start of the run (trace and poisson).

    A trace starts at its first session. Raises ValueError for a session without `start_ms` in a trace."""
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
    """Run all sessions; returns when the last has ended. `sessions`: those without a parent, which start their
    subagents."""
    if options.arrival == "closed":
        await _closed_loop(sessions, [warmup.new_lane() for _ in range(num_lanes(sessions, options))], run, now)
    else:
        await _open_loop(sessions, arrivals(sessions, options), options.lanes, run, now, warmup)


def num_lanes(sessions: Sequence[Session], options: ReplayOptions) -> int:
    """Return the number of lanes of a closed loop."""
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
            await run(session, time, warmup.new_lane())

    async with asyncio.TaskGroup() as group:
        for session, time in sorted(zip(sessions, times, strict=True), key=lambda pair: pair[1]):
            group.create_task(start(session, time))
