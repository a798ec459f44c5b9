"""Clients that keep a request open: headers or bodies that never end or drip, and readers that don't read.

One kind at a time: more connections stay open than requests are admitted, while honest clients continue.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from tests.chaos.arena import Arena, Outcome, attacked, opened
from tests.chaos.asks import CHAT, WORDS, endless
from tests.chaos.connection import GONE, Connection, request_bytes

KINDS = (
    "idle",
    "amid the headers",
    "before the body",
    "amid the body",
    "amid a chunked body",
    "drips headers",
    "drips a body",
)
DRIP_SECONDS = 0.25
PATIENCE_SECONDS = 90.0
"""How long the server may take to close such connections, where that is checked."""
NUM_HONEST = 12
"""Minimum number of honest answers per kind."""
SMALL_BUFFER = 2048
FEW_FILES, FEW_FILES_SECONDS = 64, 15.0
NUM_UNREAD = 20
NUM_CHOICES = 128
UNREAD_ROOM = 6
"""Requests that the server admits while answers are not read, of NUM_CHOICES choices each, which count separately; each
answer is megabytes large."""


async def run(size: int, seed: int, *, with_watch: bool = False, log: Path | None = None) -> Outcome:
    """size: connections, over all kinds. With a watch it also waits until the server has closed all of them."""
    outcome = Outcome("slow and half-open", size, seed)
    each = max(1, size // len(KINDS))
    async with opened(outcome, max_running=4, max_queue=max(2, each // 4), log=log) as arena:
        if with_watch:
            for kind in KINDS:  # the heap keeps what many connections needed at once, which is no leak
                await _hold(arena, kind, each, waits=False)
        async with attacked(arena, with_watch=with_watch):
            for kind in KINDS:
                outcome.notes[kind] = await _hold(arena, kind, each, waits=with_watch)
    if with_watch:
        await _leave_unread(outcome)
    return outcome


async def _hold(arena: Arena, kind: str, count: int, *, waits: bool) -> dict[str, Any]:
    """Keep `count` connections of a kind open while honest clients send requests; return the results of both."""
    outcome = arena.outcome
    before, refused = outcome.num_compared, sum(outcome.refused.values())
    dropped = 0
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        held = []
        for _ in range(count):
            with suppress(*GONE):
                connection = await stack.enter_async_context(
                    await Connection.open(arena.served.port, receive_bytes=SMALL_BUFFER)
                )
                pieces = _pieces(random.Random(arena.rng.randrange(2**32)), arena.served.model, kind)
                await connection.send(next(pieces))
                held.append((connection, pieces))
        drips = [tasks.create_task(_drip(connection, pieces)) for connection, pieces in held]
        began = asyncio.get_running_loop().time()
        asked = 0
        while asked < NUM_HONEST or (
            waits and not all(map(_is_over, held)) and asyncio.get_running_loop().time() - began < PATIENCE_SECONDS
        ):
            await arena.honest.ask(asked % len(arena.honest.asks))
            asked += 1
            await asyncio.sleep(0.05)
        seconds = asyncio.get_running_loop().time() - began
        dropped = sum(map(_is_over, held))
        for task in drips:
            task.cancel()
    refused = sum(outcome.refused.values()) - refused
    outcome.check(not refused, f"{kind}: {refused} honest requests are refused while {count} such connections are open")
    outcome.check(
        outcome.num_compared > before, f"{kind}: no honest request is answered while {count} such connections are open"
    )
    return {"open": len(held), "given up": dropped, "seconds": round(seconds, 1), "refused": refused}


async def _leave_unread(outcome: Outcome) -> None:
    """Unread answers, larger than a connection's buffers. The engine finishes them soon; then other requests must be
    served."""
    async with (
        opened(outcome, max_running=2, max_queue=UNREAD_ROOM * NUM_CHOICES - 2) as arena,
        AsyncExitStack() as stack,
    ):
        for _ in range(NUM_UNREAD):
            connection = await stack.enter_async_context(
                await Connection.open(arena.served.port, receive_bytes=SMALL_BUFFER)
            )
            await connection.send(_large_answer(arena.rng, arena.served.model))
        loop = asyncio.get_running_loop()
        began, num_done = loop.time(), 0
        while num_done < NUM_CHOICES * UNREAD_ROOM and loop.time() - began < PATIENCE_SECONDS:
            num_done = sum((await arena.served.stats())["engine"]["finished"].values())
            await asyncio.sleep(0.1)
        outcome.check(
            num_done >= NUM_CHOICES * UNREAD_ROOM,
            f"{num_done} unread answers are finished after {PATIENCE_SECONDS:g} s",
        )
        began, answered = loop.time(), False
        while not answered and loop.time() - began < PATIENCE_SECONDS:
            answered = await arena.honest.ask(0)
            await asyncio.sleep(0.1)
        outcome.check(answered, f"unread answers block other requests for {PATIENCE_SECONDS:g} s")
        outcome.notes["does not read"] = {
            "open": NUM_UNREAD,
            "others served after, s": round(loop.time() - began, 1),
            "MiB": arena.served.rss(),
        }


def _is_over(held: tuple[Connection, Any]) -> bool:
    """Whether the server has closed the connection, or answered."""
    reader = held[0].reader
    return reader.at_eof() or bool(reader._buffer) or reader.exception() is not None  # type: ignore[attr-defined]


async def _drip(connection: Connection, pieces: Iterator[bytes]) -> None:
    with suppress(*GONE):
        for piece in pieces:
            await asyncio.sleep(DRIP_SECONDS)
            await connection.send(piece)


def _pieces(rng: random.Random, model: str, kind: str) -> Iterator[bytes]:
    """The pieces that such a client sends: the first at once, each further one after DRIP_SECONDS."""
    content = endless(model, " ".join(rng.choices(WORDS, k=100))).content()
    whole = request_bytes(CHAT, content)
    head = len(whole) - len(content)
    if kind == "idle":
        yield b""
    elif kind == "amid the headers":
        yield whole[: rng.randint(1, head - 1)]
    elif kind == "before the body":
        yield whole[:head]
    elif kind == "amid the body":
        yield whole[: rng.randint(head + 1, len(whole) - 1)]
    elif kind == "amid a chunked body":
        yield request_bytes(CHAT, b"%x\r\n%s\r\n" % (len(content) - 9, content[:-9]), {"transfer-encoding": "chunked"})
    elif kind == "drips headers":
        yield whole[:20]
        yield from (b"x-header-%d: x\r\n" % number for number in range(10**6))
    else:
        yield whole[: head + 1]
        yield from (whole[place : place + 1] for place in range(head + 1, len(whole) - 1))


def _large_answer(rng: random.Random, model: str) -> bytes:
    """A stream whose first event is larger than a connection's buffers, and which continues after it."""
    prompt = " ".join(rng.choices(WORDS, k=3500))
    body = {"model": model, "prompt": prompt, "echo": True, "stream": True, "max_tokens": 8, "n": NUM_CHOICES}
    return request_bytes("/v1/completions", json.dumps(body).encode())


async def few_files(size: int, seed: int, *, with_watch: bool = False, log: Path | None = None) -> Outcome:
    """A server with fewer file descriptors than idle connections keeps answering. size: idle connections."""
    outcome = Outcome("few open files", size, seed)
    async with opened(outcome, files=FEW_FILES, log=log) as arena, AsyncExitStack() as stack:
        for _ in range(size):
            await stack.enter_async_context(await Connection.open(arena.served.port))
        for path in ("/health", "/stats"):
            try:
                async with asyncio.timeout(FEW_FILES_SECONDS):
                    status = (await arena.served.get(path)).status
            except TimeoutError:
                status = None
            outcome.check(
                status == 200, f"{path}: {status} beside {size} idle connections, with at most {FEW_FILES} open files"
            )
            if status != 200:
                break
    return outcome
