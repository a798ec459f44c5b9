"""Clients that ask for more than their share, and new clients beside them: the number of other turns that start before
a new client's first token.

Turns are counted by the engine's own counter of first tokens, so a slow machine changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.chaos.arena import Arena, Outcome, opened
from tests.chaos.asks import CHAT, COMPLETIONS, WORDS, Ask
from tests.chaos.connection import Connection, exchange
from tests.chaos.kills import serve_flags

MAX_RUNNING = 4
MAX_QUEUE = 200
NUM_FLOOD = 60
"""Concurrent requests of one flood."""
TURN = {"max_tokens": 96, "ignore_eos": True}
"""Every turn has the same length: 24 steps of 10 ms. A request is late after 0.1 s at least, and twice its fair share;
so a bound in turns holds only where turns last longer, also on a busy machine. Choices of one prompt that all ended
after a token or two gave up to 46 turns, turns of 12 steps up to 11."""
NUM_SESSIONS = 12
"""Old sessions that share a memory too small for all of them."""
TIGHT = {"CHAOS_GATE_BYTES": "6000", "CHAOS_PAGES": "120"}
"""Memory for the working sets of a few sessions of OLD_WORDS."""
OLD_WORDS = 400


def bound(num_flows: int) -> int:
    """Other turns that may start before a new client's first token: two per running flow, and two full rounds of
    slots."""
    return 2 * num_flows + 2 * MAX_RUNNING


ENOUGH = 20 * MAX_RUNNING
"""Stop counting after this many."""

Flood = Callable[[Arena, asyncio.Event], Coroutine[Any, Any, None]]


async def run(size: int, seed: int, *, with_watch: bool = False, log: Path | None = None) -> Outcome:
    """size: new clients, over all floods, or over `size` floods if there are fewer clients than floods.

    with_watch has no effect: the flood determines the times."""
    outcome = Outcome("noisy neighbours", size, seed)
    began = asyncio.get_running_loop().time()
    chosen = random.Random(seed).sample(list(FLOODS), min(size, len(FLOODS)))
    each = size // len(chosen)
    for name in chosen:
        tight = FLOODS[name] is _old_sessions
        async with opened(
            outcome, max_running=MAX_RUNNING, max_queue=MAX_QUEUE, log=log, variables=TIGHT if tight else {}
        ) as arena:
            await _count(arena, name, FLOODS[name], each, NUM_SESSIONS if tight else 1)
    if len(chosen) == len(FLOODS) and "--keys" in serve_flags() and log is not None:
        await _with_keys(outcome, each, log)
    outcome.seconds = asyncio.get_running_loop().time() - began
    return outcome


async def _count(arena: Arena, name: str, flood: Flood, num_newcomers: int, num_flows: int) -> None:
    """New clients, one after the other, beside a flood."""
    outcome, stop = arena.outcome, asyncio.Event()
    flooding = asyncio.create_task(flood(arena, stop))
    turns, refused = [], 0
    try:
        while (await arena.served.stats())["waiting"] < MAX_RUNNING:
            assert not flooding.done(), flooding.exception()
            await asyncio.sleep(0.02)
        for number in range(num_newcomers):
            count = await _turns_before(arena, f"newcomer {number}")
            if count is None:
                refused += 1
            else:
                turns.append(count)
    finally:
        stop.set()
        await flooding
    outcome.check(not refused, f"{name}: {refused} of {num_newcomers} newcomers are refused")
    most = bound(num_flows)
    outcome.check(
        max(turns, default=0) <= most,
        f"{name}: up to {max(turns, default=0)} turns of others start before a newcomer's, more than {most}",
    )
    if turns:
        outcome.notes[name] = {"median": statistics.median(turns), "most": max(turns), "bound": most}


async def _turns_before(arena: Arena, session: str) -> int | None:
    """Other turns that start between a new client's arrival and its first token, ENOUGH at most; None if it is
    refused."""
    ask = Ask(CHAT, _body(arena, arena.rng, stream=True), session, arena.served.key)
    before = (await arena.served.stats())["engine"]["first_slots"]

    async def others() -> int:
        return int((await arena.served.stats())["engine"]["first_slots"] - before)

    async with await Connection.open(arena.served.port) as connection:
        await connection.send(ask.wire())
        first = asyncio.create_task(_first_token(connection))
        while not first.done() and await others() <= ENOUGH:
            await asyncio.wait((first,), timeout=0.05)
        if not first.done():
            first.cancel()
            return ENOUGH
        return await others() - 1 if first.result() else None


async def _first_token(connection: Connection) -> bool:
    """Wait for the first token; False if the request is refused."""
    await connection.head()
    if connection.answer.status == 200:
        async for part in connection.parts():
            if b"reasoning_content" in part:
                return True
    return False


def _body(arena: Arena, rng: random.Random, *, stream: bool = False, num_words: int = 20) -> dict[str, Any]:
    text = " ".join(rng.choices(WORDS, k=num_words))
    return {
        "model": arena.served.model,
        "messages": [{"role": "user", "content": text}],
        **TURN,
        "stream": stream,
        "temperature": 0,
    }


async def _many(arena: Arena, stop: asyncio.Event, make: Callable[[random.Random, int], Ask]) -> None:
    """NUM_FLOOD clients that repeat their requests."""

    async def work(rng: random.Random, client: int) -> None:
        while not stop.is_set():
            await exchange(arena.served.port, make(rng, client).wire())

    await asyncio.gather(*(work(random.Random(arena.rng.randrange(2**32)), client) for client in range(NUM_FLOOD)))


async def _one_session(arena: Arena, stop: asyncio.Event) -> None:
    await _many(arena, stop, lambda rng, _: Ask(CHAT, _body(arena, rng), "flood"))


async def _no_session(arena: Arena, stop: asyncio.Event) -> None:
    await _many(arena, stop, lambda rng, _: Ask(CHAT, _body(arena, rng)))


async def _many_prompts(arena: Arena, stop: asyncio.Event) -> None:
    """One request with hundreds of prompts, repeated."""
    body = {
        "model": arena.served.model,
        "prompt": [f"{number} {WORDS[number % len(WORDS)]}" for number in range(NUM_FLOOD)],
        **TURN,
    }
    while not stop.is_set():
        answer = await exchange(arena.served.port, Ask(COMPLETIONS, body).wire())
        assert answer.status == 200, answer.body[:300]


async def _many_choices(arena: Arena, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await exchange(arena.served.port, Ask(CHAT, _body(arena, arena.rng) | {"n": NUM_FLOOD}).wire())


async def _old_sessions(arena: Arena, stop: asyncio.Event) -> None:
    """Agents that continue directly after each answer, in a memory too small for all of them."""

    async def work(rng: random.Random, number: int) -> None:
        messages: list[dict[str, str]] = _body(arena, rng, num_words=OLD_WORDS)["messages"]
        while not stop.is_set():
            body = _body(arena, rng) | {"messages": messages}
            answer = await exchange(arena.served.port, Ask(CHAT, body, f"old {number}").wire())
            if answer.status == 200:
                messages = [
                    *messages,
                    {"role": "assistant", "content": "yes"},
                    {"role": "user", "content": rng.choice(WORDS)},
                ]

    await asyncio.gather(*(work(random.Random(arena.rng.randrange(2**32)), number) for number in range(NUM_SESSIONS)))


FLOODS: dict[str, Flood] = {
    "one session": _one_session,
    "requests without a session": _no_session,
    "one request of many prompts": _many_prompts,
    "one request of many choices": _many_choices,
    "old sessions in a tight memory": _old_sessions,
}


async def _with_keys(outcome: Outcome, each: int, log: Path) -> None:
    """A key that floods, each request in a session of its own, and another key."""
    keys = {"noisy": "noisy-key", "quiet": "quiet-key"}
    lines = [f'[{name}]\nhash = "{hashlib.sha256(key.encode()).hexdigest()}"\n' for name, key in keys.items()]
    file = log.with_suffix(".keys")
    file.write_text("".join(lines))

    async def flood(arena: Arena, stop: asyncio.Event) -> None:
        await _many(
            arena, stop, lambda rng, client: Ask(CHAT, _body(arena, rng), f"{client} {rng.random()}", keys["noisy"])
        )

    flags = ("--keys", str(file))
    async with opened(
        outcome, *flags, max_running=MAX_RUNNING, max_queue=MAX_QUEUE, log=log, key=keys["quiet"]
    ) as arena:
        await _count(arena, "one key, ever new sessions", flood, each, 1)
