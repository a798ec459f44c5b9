"""Sends the same requests to a server and to the control process, and measures the server's delay: `python -m
tests.chaos.watch ...`.

A process of its own, so that the attackers' work doesn't delay its clock. It repeatedly asks both for `/health` at the
same moment, each time on a new connection, and reads streams of both. The server's times are compared with the
control's at the same moment. It ends with its standard input, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from bisect import bisect
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.asks import endless
from tests.chaos.connection import GONE, Answer, Connection, exchange, request_bytes

PROBE_SECONDS = 0.05
NUM_STREAMS = 2
NUM_WORST = 40


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of the server and of the control."""

    num: int
    median: float
    p99: float
    worst: float
    control_p99: float
    control_worst: float
    behind: float
    """The maximum by which the server took longer than the control at the same moment."""


class Watch:
    def __init__(self, server: int, control: int, model: str, key: str | None) -> None:
        self._server, self._control, self._model = server, control, model
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._probes: list[tuple[float, float, float]] = []
        """Seconds of the server's and the control's answers, and when both had arrived."""
        self._gaps: list[list[tuple[float, float]]] = [[], []]
        """(end, seconds) between two parts of a stream, of the server and of the control."""
        self.num_failed = 0
        """Probes without a 200."""
        self.num_broken = 0
        """Streams that were cut off."""

    async def run(self) -> dict[str, Any]:
        """Watch until the standard input ends."""
        asks = [endless(self._model, f"Stream {number}.") for number in range(NUM_STREAMS)]
        heads = [request_bytes(ask.path, ask.content(), self._headers) for ask in asks]
        tasks = [asyncio.create_task(self._probe())]
        tasks += [asyncio.create_task(self._follow(self._server, head, self._gaps[0])) for head in heads]
        tasks += [asyncio.create_task(self._follow(self._control, request_bytes("/stream"), self._gaps[1]))]
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        ours, theirs = [[probe[place] for probe in self._probes] for place in range(2)]
        behind = [(end, one - other) for one, other, end in self._probes]
        health = _figures(ours, theirs, [seconds for _, seconds in behind])
        ours, theirs = [[gap for _, gap in gaps] for gaps in self._gaps]
        late = _behind(*self._gaps)
        figures = {"health": asdict(health), "gaps": asdict(_figures(ours, theirs, [seconds for _, seconds in late]))}
        worst = {
            "health": sorted(behind, key=lambda pair: -pair[1])[:NUM_WORST],
            "gaps": sorted(late, key=lambda pair: -pair[1])[:NUM_WORST],
        }
        return figures | {"worst": worst, "num_failed": self.num_failed, "num_broken": self.num_broken}

    async def _probe(self) -> None:
        while True:
            ours, theirs = await asyncio.gather(self._timed(self._server), self._timed(self._control))
            self._probes.append((ours, theirs, time.perf_counter()))
            await asyncio.sleep(PROBE_SECONDS)

    async def _timed(self, port: int) -> float:
        began = time.perf_counter()
        answer = await exchange(port, request_bytes("/health", headers={"connection": "close"}))
        self.num_failed += answer.status != 200
        return time.perf_counter() - began

    async def _follow(self, port: int, request: bytes, gaps: list[tuple[float, float]]) -> None:
        while True:
            with suppress(*GONE):
                async with await Connection.open(port) as connection:
                    await connection.send(request)
                    await connection.head()
                    last = None
                    async for _ in connection.parts():
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append((now, now - last))
                        last = now
                        connection.answer.body = b""
                    self.num_broken += not _is_right(connection.answer)
                    continue
            self.num_broken += 1
            await asyncio.sleep(PROBE_SECONDS)


def _is_right(answer: Answer) -> bool:
    return answer.status == 200 and answer.is_whole


def _behind(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(end, seconds) for each gap of the server: its excess over the longest gap of the control that overlaps it."""
    ends = [end for end, _ in theirs]
    late = []
    for end, gap in ours:
        first, last = bisect(ends, end - gap), bisect(ends, end)
        late.append((end, gap - max((other for _, other in theirs[first : last + 1]), default=0.0)))
    return late


def _figures(ours: list[float], theirs: list[float], behind: list[float]) -> Figures:
    if not ours or not theirs:
        return Figures(len(ours), *[float("inf")] * 6)
    ours, theirs = sorted(ours), sorted(theirs)
    p99, control_p99 = ours[int(0.99 * (len(ours) - 1))], theirs[int(0.99 * (len(theirs) - 1))]
    values = (ours[len(ours) // 2], p99, ours[-1], control_p99, theirs[-1], max(behind))
    return Figures(len(ours), *(round(1000 * value, 1) for value in values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", type=int)
    parser.add_argument("control", type=int)
    parser.add_argument("model")
    parser.add_argument("--key")
    options = parser.parse_args()
    watch = Watch(options.server, options.control, options.model, options.key)
    print(json.dumps(asyncio.run(watch.run())))
