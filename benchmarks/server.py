"""What the HTTP server costs, without a model: `python -m benchmarks.server`.

A no-op engine hands out prepared events, so all that is measured is the server: HTTP, JSON, prompt building with the bundled tokenizer and template,
splitting the answer, chunks. The floor is a bare ASGI app behind the same uvicorn, in the same process and the same run, that sends the very same
frames. The client is another process with as little in it as possible. Before anything is timed, the answers are checked.

Two questions: how many requests a second, whole and streamed, over 1 and 32 connections; and how long it takes from the moment when the engine has a
token to the moment when the client has its byte, for streams at the pace of a real engine. Both processes read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import uvicorn

from agentspec import bundled
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, ModelInfo, Submit, TokensEvent, Usage

STEPS = 32
TOKENS_A_STEP = 4
STEP_TEXT = " four words a step"
PACE_SECONDS = 0.02
MODEL = "no-op"
PATH = "/v1/chat/completions"
FLOOR = "/floor"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": "Looks up one record by its number, or several by what is known of them.",
            "parameters": {"type": "object", "properties": {name: {"type": "string"} for name in ("number", "owner", "state")}},
        },
    }
    for index in range(6)
]


def body(number: int, *, stream: bool, paced: bool) -> dict[str, Any]:
    """A chat request in the middle of a session. `number` makes it unlike the others; the seed tells the no-op engine its pace."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "tool_1", "arguments": json.dumps({"number": str(number)})}}
    messages = [
        {"role": "system", "content": "You are an agent that works with the tools below. Be exact."},
        {"role": "user", "content": f"What is the state of record {number}, and who owns it? " * 8},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"number": number, "state": "open", "owner": "somebody"}) * 4},
    ]
    return {
        "model": MODEL,
        "messages": messages,
        "tools": TOOLS,
        "stream": stream,
        "seed": int(paced),
        "chat_template_kwargs": {"enable_thinking": False},
    }


class Ticker:
    """The pace of an engine: all streams of a batch get their tokens at the same moment."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[int]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PACE_SECONDS)
            waiting, self._waiting = self._waiting, []
            now = time.monotonic_ns()
            for stream in waiting:
                if not stream.done():
                    stream.set_result(now)

    async def step(self) -> int:
        """Waits for the next step; its time in nanoseconds."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        return await self._waiting[-1]


class NoOpEngine:
    """An engine client whose answers are ready. Paced ones carry the time of each step in its text."""

    def __init__(self, tokenizer: Tokenizer, ticker: Ticker) -> None:
        self._ticker = ticker
        self._ids = tokenizer.encode(STEP_TEXT)[:TOKENS_A_STEP]
        self.info = ModelInfo(model_id=MODEL, vocab_size=tokenizer.vocab_size, max_context=1 << 20, stop_token_ids=(2,), max_draft_tokens=0)
        self.alive = True

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        paced = submit.sampling.seed == 1
        for _ in range(STEPS):
            text = STEP_TEXT
            if paced:
                text = f"@{await self._ticker.step()}@"
            else:
                await asyncio.sleep(0)
            yield TokensEvent(request_id=submit.request_id, token_ids=self._ids, text=text)
        usage = Usage(prompt_tokens=len(submit.prompt_ids), completion_tokens=STEPS * TOKENS_A_STEP + 1)
        yield FinishEvent(request_id=submit.request_id, reason=FinishReason.STOP, usage=usage, stop_match=2)

    async def stats(self) -> dict[str, Any]:
        return {}


# The server's process.


class FloorApp:
    """Sends recorded answers: as little as an ASGI app can do for the same bytes. Everything else goes to the real app."""

    def __init__(self, app: Callable[..., Any], ticker: Ticker, whole: bytes, frames: list[bytes]) -> None:
        self._app = app
        self._ticker = ticker
        self._whole = whole
        self._frames = frames

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].startswith(FLOOR):
            await self._app(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        if scope["path"].endswith("/whole"):
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._whole)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._whole})
            return
        paced = scope["path"].endswith("/paced")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for frame in self._frames:
            if STEP_TEXT.encode() in frame:
                if paced:
                    frame = frame.replace(STEP_TEXT.encode(), b"@%d@" % await self._ticker.step())
                else:
                    await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def serve() -> None:
    """Record the app's own answers, then serve app and floor until the standard input ends."""
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    ticker = Ticker()
    app = create_app(NoOpEngine(tokenizer, ticker), TextPipeline.from_checkpoint(tokenizer, bundled.DIRECTORY))
    async with httpx.AsyncClient(transport=InProcessTransport(app), base_url="http://in-process") as client:
        whole = (await client.post(PATH, json=body(0, stream=False, paced=False))).content
        async with client.stream("POST", PATH, json=body(0, stream=True, paced=False)) as response:
            frames = [part async for part in response.aiter_raw()]
    settings = uvicorn.Config(FloorApp(app, ticker, whole, frames), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(settings)
    # asyncio switches Nagle's algorithm off only for sockets that say that they speak TCP; with it, small writes wait 40 ms for an acknowledgement.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        print(listener.getsockname()[1], flush=True)
        serving, ticking = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(ticker.run())
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving
        ticking.cancel()


@contextmanager
def server_process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.server", "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()


# The client's process.


class Connection(asyncio.Protocol):
    """One keep-alive connection: sends prepared requests, and finds the end of each answer and the times in it."""

    STAMP = re.compile(rb"@(\d+)@")
    LENGTH = re.compile(rb"content-length: (\d+)\r\n", re.IGNORECASE)

    def __init__(self) -> None:
        self.delays_ns: list[int] = []
        self._received = bytearray()
        self._scanned = 0
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self._received += data
        for stamp in self.STAMP.finditer(self._received, self._scanned):
            self.delays_ns.append(now - int(stamp[1]))
            self._scanned = stamp.end()
        if self._is_complete() and self._done is not None:
            done, self._done = self._done, None
            done.set_result(bytes(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None:
            self._done.set_exception(error or ConnectionError("closed half-way"))

    async def ask(self, request: bytes) -> bytes:
        """The whole response, head included."""
        self._received.clear()
        self._scanned = 0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    def _is_complete(self) -> bool:
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return False
        length = self.LENGTH.search(self._received, 0, head_end + 2)
        if length is not None:
            return len(self._received) >= head_end + 4 + int(length[1])
        return self._received.endswith(b"\r\n0\r\n\r\n")


def request_bytes(path: str, content: dict[str, Any]) -> bytes:
    encoded = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


def payload(response: bytes) -> bytes:
    """The body, out of its chunks where it came in chunks. Raises ValueError unless the status is 200."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError(response[:500].decode(errors="replace"))
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


@dataclass(frozen=True)
class Route:
    """One way to ask: of the app or of the floor."""

    path: str
    stream: bool
    paced: bool = False

    def request(self, number: int) -> bytes:
        return request_bytes(self.path, body(number, stream=self.stream, paced=self.paced))


APP = {"whole": Route(PATH, False), "stream": Route(PATH, True), "paced": Route(PATH, True, True)}
BARE = {"whole": Route(f"{FLOOR}/whole", False), "stream": Route(f"{FLOOR}/stream", True), "paced": Route(f"{FLOOR}/paced", True, True)}


@dataclass
class Load:
    """What some connections came to that asked without a pause for a while."""

    num_requests: int = 0
    seconds: float = 0.0
    delays_ns: list[int] = field(default_factory=list)


async def run_load(port: int, route: Route, *, num_connections: int, seconds: float) -> Load:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(num_connections)]
    # Prepared and used round and round: the client is to be idle while it waits. Each is asked once before the clock starts.
    requests = [route.request(number) for number in range(1, 65)]
    for request in requests:
        payload(await connections[0].ask(request))
        if route.paced:
            break
    for connection in connections:
        connection.delays_ns.clear()
    load = Load()
    start = time.perf_counter()

    async def keep_asking(connection: Connection, number: int) -> None:
        while time.perf_counter() - start < seconds:
            response = await connection.ask(requests[number % len(requests)])
            assert response.startswith(b"HTTP/1.1 200 "), response[:300]
            number += num_connections
            load.num_requests += 1

    await asyncio.gather(*(keep_asking(connection, index) for index, connection in enumerate(connections)))
    load.seconds = time.perf_counter() - start
    for connection in connections:
        load.delays_ns += connection.delays_ns
        connection.transport.close()
    assert len(load.delays_ns) == (load.num_requests * STEPS if route.paced else 0), "steps were lost"
    return load


async def check(port: int) -> int:
    """The answers are right, and the floor sends what the app sends. Returns the bytes of one streamed answer."""
    loop = asyncio.get_running_loop()
    connection = (await loop.create_connection(Connection, "127.0.0.1", port))[1]
    answers = {name: payload(await connection.ask(route.request(0))) for name, route in APP.items()}
    floors = {name: payload(await connection.ask(route.request(0))) for name, route in BARE.items()}
    connection.transport.close()
    whole = json.loads(answers["whole"])
    text = STEP_TEXT * STEPS
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == STEPS * TOKENS_A_STEP + 1
    assert whole["usage"]["prompt_tokens"] > 400
    *chunks, last = [frame.removeprefix("data: ") for frame in answers["stream"].decode().split("\n\n") if frame]
    assert last == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert sum(bool(delta.get("content")) for delta in deltas) == STEPS, "one chunk a step"
    for name in answers:
        assert _unnamed(answers[name]) == _unnamed(floors[name]), f"the floor's {name} answer differs"
    return len(answers["stream"])


def _unnamed(content: bytes) -> bytes:
    """Without what differs from one answer to the next: ids and times."""
    content = re.sub(rb'"id":"chatcmpl-\w+"', b"", content)
    content = re.sub(rb'"created":\d+', b"", content)
    return re.sub(rb"@\d+@", b"@", content)


def throughput(port: int, *, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """App and floor by turns, so that what else the machine does falls on both."""
    rows = []
    for kind in ("whole", "stream"):
        for num_connections in (1, 32):
            rates: dict[str, list[float]] = {"app": [], "floor": []}
            for _ in range(repeats):
                for name, route in (("app", APP[kind]), ("floor", BARE[kind])):
                    load = asyncio.run(run_load(port, route, num_connections=num_connections, seconds=seconds))
                    rates[name].append(load.num_requests / load.seconds)
            app, floor = (statistics.median(rates[name]) for name in ("app", "floor"))
            rows.append({"answer": kind, "connections": num_connections, "app": app, "floor": floor, "spread": max(rates["app"]) / min(rates["app"])})
    return rows


def latency(port: int, *, seconds: float, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for num_connections in (1, 32):
        delays: dict[str, list[int]] = {"app": [], "floor": []}
        for _ in range(repeats):
            for name, route in (("app", APP["paced"]), ("floor", BARE["paced"])):
                delays[name] += asyncio.run(run_load(port, route, num_connections=num_connections, seconds=seconds)).delays_ns
        row: dict[str, Any] = {"streams": num_connections, "steps": len(delays["app"])}
        for name, found in delays.items():
            cuts = statistics.quantiles(found, n=100)
            row |= {f"{name}_median_us": cuts[49] / 1e3, f"{name}_p99_us": cuts[98] / 1e3}
        rows.append(row)
    return rows


@dataclass
class Report:
    machine: str
    load_before: float
    answer_bytes: int
    throughput: list[dict[str, Any]]
    latency: list[dict[str, Any]]

    def markdown(self) -> str:
        lines = [
            f"{self.machine}; load average before the run {self.load_before:.2f}. An answer: {STEPS} steps of {TOKENS_A_STEP} tokens,"
            f" streamed {self.answer_bytes:,} bytes.",
            "",
            "| answer | connections | requests/s | floor | share of the floor | steps/s |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.throughput:
            steps = f"{row['app'] * STEPS:,.0f}" if row["answer"] == "stream" else ""
            share = f"{100 * row['app'] / row['floor']:.0f} %"
            lines.append(f"| {row['answer']} | {row['connections']} | {row['app']:,.0f} | {row['floor']:,.0f} | {share} | {steps} |")
        lines += [
            "",
            f"Engine token to client byte, all streams stepping together each {PACE_SECONDS * 1e3:g} ms:",
            "",
            "| streams | median | p99 | floor median | floor p99 | median over floor |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.latency:
            shown = [f"{row[name]:,.0f} µs" for name in ("app_median_us", "app_p99_us", "floor_median_us", "floor_p99_us")]
            ratio = row["app_median_us"] / row["floor_median_us"]
            lines.append(f"| {row['streams']} | {' | '.join(shown)} | {ratio:.2f} |")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each of the 36 timed runs")
    parser.add_argument("--repeats", type=int, default=3, help="runs behind each figure; rates are their median")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(serve())
        return
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}, uvicorn {uvicorn.__version__}"
    load_before = os.getloadavg()[0]
    with server_process() as port:
        answer_bytes = asyncio.run(check(port))
        timed = {"seconds": options.seconds, "repeats": options.repeats}
        report = Report(machine, load_before, answer_bytes, throughput(port, **timed), latency(port, **timed))
    print(json.dumps(asdict(report)) if options.json else report.markdown())


if __name__ == "__main__":
    main()
