"""A server that ends and starts again at the same address, while clients retry: every answer that they get is right."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from pathlib import Path

from tests.chaos.arena import Honest, Outcome, honest_clients
from tests.chaos.asks import make_ask
from tests.chaos.served import Served

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
SERVED_SECONDS = 0.5
NUM_CLIENTS = 4


async def run(size: int, seed: int, *, with_watch: bool = False, log: Path | None = None) -> Outcome:
    """size: starts. with_watch has no effect: between two servers nothing answers."""
    outcome = Outcome("restarts", size, seed)
    rng = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = asyncio.get_running_loop().time()
    honest: Honest | None = None
    for number in range(size):
        async with await Served.start("--drain", "0.2", port=port, log=log) as served:
            if honest is None:
                honest = Honest(outcome, [make_ask(rng, served.model) for _ in range(8)], port)
                await honest.learn()
            async with honest_clients(honest, rng.randrange(2**32), NUM_CLIENTS, may_fail=True):
                await asyncio.sleep(rng.random() * SERVED_SECONDS)
                served.process.send_signal(ENDS[number % len(ENDS)])
                outcome.check(await served.ended() is not None, f"start {number}: the server doesn't end")
    outcome.seconds = asyncio.get_running_loop().time() - began
    return outcome
