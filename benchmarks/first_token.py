"""Time to the first token of a prompt without a model: `python -m benchmarks.first_token`.

The server is that of benchmarks/server.py, over a socket, with an engine in its own process that answers at once. So
the time is that of the prompt's path from the client to the engine and of the first token's path back. There are three
prompts: a short one; 24,000 token ids over /v1/completions; and a turn of an agent's chat session, with some 100 KB of
messages of which 4 KB are new. The session runs turn by turn: the engine sends thinking and calls as forced output, and
the client sends them back with their results.

Before the measurement, the ids of a whole session are compared with those of the template and the tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import agentspec
from agentspec.engine import bundled
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.messages import normalise
from agentspec.text.tokenizer import Tokenizer
from benchmarks.no_op_engine import MODEL
from benchmarks.server import FLOOR, PATH, TEXT_IN_PROCESS, TOOLS, Connection, payload, request_bytes, server_process

COMPLETIONS = "/v1/completions"
MESSAGE_BYTES = 100_000
"""Minimum size of a session's messages as JSON; timing starts there."""
NEW_BYTES = 4_000
TIMED_TURNS = 3
"""Timed turns of each session, in sequence."""
NUM_IDS = 24_000
WAYS = {"": PATH, ", text in the server's process": TEXT_IN_PROCESS + PATH}
"""As in `serve`, and without the text process."""

_TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(agentspec.__path__[0]).rglob("*.py"))).replace(
    "<", "("
)
"""Text that the agent reads: the sources of this package, without tags, which would end its thinking."""


def source_text(rng: random.Random, size: int) -> str:
    start = rng.randrange(len(_TEXT) - size)
    return _TEXT[start : start + size]


class TimedConnection(Connection):
    """Records the time of an answer's first frame."""

    first_ns = 0

    def data_received(self, data: bytes) -> None:
        if not self.first_ns and b"data: " in data:
            self.first_ns = time.monotonic_ns()
        super().data_received(data)

    async def timed(self, request: bytes) -> tuple[float, bytes]:
        """Milliseconds to the first frame, and the whole answer."""
        self.first_ns = 0
        began = time.monotonic_ns()
        answer = await self.ask(request)
        return (self.first_ns - began) / 1e6, payload(answer)


class Session:
    """An agent's session: the client's messages, and the next request."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._name = f"session-{seed}"
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are agent {seed} and work with the tools below. " + self._words(2_000)},
            {"role": "user", "content": self._words(500)},
        ]

    def request(self, path: str = PATH, **extra: Any) -> bytes:
        body = {
            "model": MODEL,
            "messages": self.messages,
            "tools": TOOLS,
            "stream": True,
            "prompt_cache_key": self._name,
            "forced_output": self._next_output(),
            **extra,
        }
        return request_bytes(path, body)

    def take(self, answer: bytes) -> None:
        """Add the answer and the result of its call."""
        chunks = [
            json.loads(frame.removeprefix("data: "))
            for frame in answer.decode().split("\n\n")
            if frame and frame != "data: [DONE]"
        ]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        called = {
            "id": calls[0]["id"],
            "type": "function",
            "function": {"name": calls[0]["function"]["name"], "arguments": arguments},
        }
        self.messages += [
            {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": self._words(NEW_BYTES - 500)},
        ]

    def _next_output(self) -> list[int]:
        value = self._random.randrange(10**6)
        call = f"<tool_call>\n<function=tool_1>\n<parameter=number>\n{value}\n</parameter>\n</function>\n</tool_call>"
        return self._tokenizer.encode(f"{self._words(200)}\n</think>\n\n{call}<|im_end|>")

    def _words(self, size: int) -> str:
        return source_text(self._random, size)


async def held(connection: TimedConnection, session: Session, path: str) -> list[tuple[float, float]]:
    """Milliseconds to the first token of the session's timed turns, and to the first frame of an app that only reads
    the same bytes."""
    times: list[tuple[float, float]] = []
    while len(times) < TIMED_TURNS:
        is_long = len(json.dumps(session.messages)) >= MESSAGE_BYTES
        request = session.request(path)
        took, answer = await connection.timed(request)
        session.take(answer)
        if is_long:
            times.append(
                (took, (await connection.timed(request.replace(path.encode(), f"{FLOOR}/stream".encode(), 1)))[0])
            )
    return times


async def check(connection: TimedConnection, tokenizer: Tokenizer, path: str = PATH) -> int:
    """Check that every prompt of a session equals the template's output, encoded as a whole. Return the last one's
    tokens."""
    template = ChatTemplate.from_directory(bundled.DIRECTORY)
    assert template is not None
    session = Session(0, tokenizer)
    ids: list[int] = []
    while len(json.dumps(session.messages)) < MESSAGE_BYTES + NEW_BYTES:
        rendered = template.render(normalise(session.messages), TOOLS).text
        _, answer = await connection.timed(session.request(path, return_token_ids=True))
        ids = json.loads(answer[len("data: ") : answer.index(b"\n\n")])["prompt_token_ids"]
        assert ids == tokenizer.encode(rendered), f"the prompt of turn {len(session.messages) // 2} is another one"
        session.take(answer)
    return len(ids)


async def repeated(connection: TimedConnection, request: Callable[[int], bytes], times: int) -> list[float]:
    return [(await connection.timed(request(number)))[0] for number in range(times)]


def short(number: int, path: str = PATH) -> bytes:
    return request_bytes(
        path, {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}."}], "stream": True}
    )


def ids_request(number: int) -> bytes:
    ids = random.Random(number).choices(range(100, 4000), k=NUM_IDS)
    return request_bytes(COMPLETIONS, {"model": MODEL, "prompt": ids, "stream": True, "max_tokens": 1})


async def measured(port: int, num_sessions: int) -> dict[str, list[float]]:
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    connection = (await asyncio.get_running_loop().create_connection(TimedConnection, "127.0.0.1", port))[1]
    num_tokens = 0
    for path in WAYS.values():
        num_tokens = await check(connection, tokenizer, path)
    times = TIMED_TURNS * num_sessions
    found = {
        f"a short prompt, chat{way}": await repeated(connection, partial(short, path=path), times)
        for way, path in WAYS.items()
    }
    found[f"{NUM_IDS:,} ids, completions"] = await repeated(connection, ids_request, times)
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(1, num_sessions + 1):
        for way, path in WAYS.items():  # alternately, so that other load on the machine affects all equally
            turns[way] += await held(connection, Session(seed, tokenizer), path)
    for way, timed in turns.items():
        chat = (
            f"{MESSAGE_BYTES // 1000} KB of messages ({num_tokens:,} tokens), {NEW_BYTES // 1000} KB of them "
            f"new, chat{way}"
        )
        found[chat] = [took for took, _ in timed]
    found["the same bytes, to an app that only reads them"] = [floor for _, floor in turns[""]]
    connection.transport.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sessions",
        type=int,
        default=20,
        help=f"of each, {TIMED_TURNS} turns are timed; as many requests of each other kind",
    )
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with server_process() as port:
        found = asyncio.run(measured(port, options.sessions))
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}; load average before the run {load_before:.2f}.\n"
    )
    print("| ms to the first token | least | median | p90 |\n|---|---|---|---|")
    for name, times in found.items():
        print(
            f"| {name} | {min(times):.2f} | {statistics.median(times):.2f} | "
            f"{statistics.quantiles(times, n=10)[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
