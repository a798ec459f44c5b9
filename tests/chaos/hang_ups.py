"""Clients that disconnect, at every stage of a request, in every way that a connection can end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.chaos.arena import Arena, Outcome, attacked, opened
from tests.chaos.asks import Ask, make_ask
from tests.chaos.connection import GONE, Connection

STAGES = (
    "connected",
    "amid the request line",
    "amid the headers",
    "before the body",
    "amid the body",
    "behind the body",
    "before the answer",
    "behind the head of the answer",
    "amid the stream",
    "behind the last event",
)
WAYS = ("close", "reset", "half-close")
AT_ONCE = 24
NUM_ASKS = 64
"""Number of different requests. Prompt caches are full of them before memory is measured, so that later growth is a
leak."""
WARM_UP = 1.0
"""Share of the size that runs before memory is measured: allocator fragmentation adds a tenth over the first 20,000,
and nothing after that."""


async def run(
    size: int, seed: int, *, with_watch: bool = False, log: Path | None = None, light: bool = True
) -> Outcome:
    """size: disconnects. light: against the engine without torch."""
    outcome = Outcome("hang-ups" if light else "hang-ups, tiny-agent", size, seed, is_paced=light)
    done: Counter[str] = Counter()
    async with opened(outcome, light=light, log=log) as arena:
        asks = [
            make_ask(arena.rng, arena.served.model, num_words=200, max_tokens=60, stream=True) for _ in range(NUM_ASKS)
        ]
        await _disconnect_often(arena, asks, int(WARM_UP * size), Counter())
        async with attacked(arena, with_watch=with_watch):
            await _disconnect_often(arena, asks, size, done)
    outcome.notes = {"stages": len({key.partition(",")[0] for key in done}), "stages and ways": len(done)}
    return outcome


async def _disconnect_often(arena: Arena, asks: list[Ask], count: int, done: Counter[str]) -> None:
    """`count` disconnects, AT_ONCE at the same time."""
    left = iter(range(count))

    async def work(rng: random.Random) -> None:
        for number in left:
            stage, way = STAGES[number % len(STAGES)], rng.choice(WAYS)
            await _disconnect(arena.served.port, rng.choice(asks), rng, stage, way)
            done[f"{stage}, {way}"] += 1

    await asyncio.gather(*(work(random.Random(arena.rng.randrange(2**32))) for _ in range(AT_ONCE)))


async def _disconnect(port: int, ask: Ask, rng: random.Random, stage: str, way: str) -> None:
    """Send one request up to `stage`, then disconnect. The server may close the connection first."""
    content, whole = ask.content(), ask.wire()
    head = len(whole) - len(content)
    line = whole.index(b"\r\n")
    ends = {
        "connected": 0,
        "amid the request line": rng.randint(1, line),
        "amid the headers": rng.randint(line + 2, head - 1),
        "before the body": head,
        "amid the body": rng.randint(head + 1, len(whole) - 1),
    }
    with suppress(*GONE):
        async with await Connection.open(port) as connection:
            await connection.send(whole[: ends.get(stage, len(whole))])
            if stage == "before the answer":
                await asyncio.sleep(rng.random() * 0.03)
            elif stage in STAGES[-3:]:
                await connection.head()
                await _read_events(connection, {STAGES[-3]: 0, STAGES[-2]: rng.randint(1, 12)}.get(stage, 10**9))
            if way == "reset":
                connection.reset()
            elif way == "half-close":
                connection.close_sending()
                if stage in STAGES[5:] and rng.random() < 0.5:
                    await connection.reader.read()


async def _read_events(connection: Connection, count: int) -> None:
    if count:
        async for _ in connection.parts():
            count -= 1
            if not count:
                return
