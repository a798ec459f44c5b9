"""Throughput and latency of the HTTP server without a model: `python -m benchmarks.server`.

A no-op engine sends prepared events, so only the server is measured: HTTP, JSON, prompt building with the bundled
tokenizer and template, parsing of the answer, chunks. There are three variants: the engine in its own process, as in
`serve`; the engine in the server's process; and a floor without an engine, a bare ASGI app behind the same uvicorn that
sends the same frames. The client is a minimal separate process. Before the measurement, the answers of all three are
checked.

Measures requests per second, whole and streamed, over 1 and 32 connections; and the time from a token in the engine's
thread to its byte at the client, for streams at the pace of a real engine. All processes read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.config import EngineConfig, ServerConfig
from agentspec.engine import bundled
from agentspec.engine.remote import EngineProcess, RemoteEngine
from agentspec.engine.remote_text import RemoteText, pipeline_of, text_process
from agentspec.server.app import create_app
from agentspec.server.door import Door
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import EngineClient
from benchmarks.no_op_engine import MODEL, PACE_SECONDS, STEP_TEXT, STEPS, TOKENS_A_STEP, NoOpEngine, Ticker

PATH = "/v1/chat/completions"
NO_OP_ENTRY = ("-m", "benchmarks.no_op_process")
IN_PROCESS = "/in-process"
TEXT_IN_PROCESS = "/text-in-process"
FLOOR = "/floor"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": "Looks up one record by its number, or several by what is known of them.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("number", "owner", "state")},
            },
        },
    }
    for index in range(6)
]


def body(number: int, *, stream: bool, paced: bool) -> dict[str, Any]:
    """A chat request in the middle of a session. `number` makes it unique; the seed sets the no-op engine's pace."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "tool_1", "arguments": json.dumps({"number": str(number)})},
    }
    messages = [
        {"role": "system", "content": "You are an agent that works with the tools below. Be exact."},
        {"role": "user", "content": f"What is the state of record {number}, and who owns it? " * 8},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": json.dumps({"number": number, "state": "open", "owner": "somebody"}) * 4,
        },
    ]
    return {
        "model": MODEL,
        "messages": messages,
        "tools": TOOLS,
        "stream": stream,
        "seed": int(paced),
        "chat_template_kwargs": {"enable_thinking": False},
    }


# The server's process.


class Ways:
    """Routes a request to one of the two apps, or to the floor: a minimal ASGI app that sends recorded answers."""

    def __init__(self, apps: dict[str, ASGIApp], ticker: Ticker, whole: bytes, frames: list[bytes]) -> None:
        """apps: by path prefix; the last one gets all other paths."""
        self._apps = apps
        self._ticker = ticker
        self._whole = whole
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(FLOOR):
            await self._floor(path, receive, send)
            return
        way, app = next((way, app) for way, app in self._apps.items() if path.startswith(way))
        await app({**scope, "path": path.removeprefix(way)}, receive, send)

    async def _floor(self, path: str, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        if path.endswith("/whole"):
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._whole)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._whole})
            return
        paced = path.endswith("/paced")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for frame in self._frames:
            if STEP_TEXT.encode() in frame:
                if paced:
                    frame = frame.replace(STEP_TEXT.encode(), b"@%d@" % await self._ticker.step())
                else:
                    await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def app_of(engine: EngineClient, text: TextPipeline | None) -> ASGIApp:
    """The app that `serve` puts in front of an engine."""
    app = create_app(engine, text)
    return Door(app, ServerConfig(), max_running=engine.info.max_running)


async def serve() -> None:
    """Record the app's own answers, then serve all variants until the end of stdin."""
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    text = RemoteText(text_process(30), 30)
    async with (
        NoOpEngine(tokenizer) as engine,
        await RemoteEngine.start(EngineConfig(), EngineProcess(NO_OP_ENTRY)) as remote,
    ):
        app = app_of(engine, TextPipeline.from_checkpoint(tokenizer, bundled.DIRECTORY))
        async with httpx.AsyncClient(transport=InProcessTransport(app), base_url="http://in-process") as client:
            whole = (await client.post(PATH, json=body(0, stream=False, paced=False))).content
            async with client.stream("POST", PATH, json=body(0, stream=True, paced=False)) as response:
                frames = [part async for part in response.aiter_raw()]
        apps = {
            IN_PROCESS: app,
            TEXT_IN_PROCESS: app_of(remote, TextPipeline.from_checkpoint(tokenizer, bundled.DIRECTORY)),
            "": app_of(remote, await pipeline_of(bundled.DIRECTORY, None, text)),
        }
        ways = Ways(apps, engine.ticker, whole, frames)
        server = uvicorn.Server(uvicorn.Config(ways, log_level="warning", access_log=False, lifespan="off"))
        # asyncio disables Nagle's algorithm only for sockets created with the TCP protocol; with it, small writes
        # wait 40 ms for an acknowledgement.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            gc.collect()
            gc.freeze()  # as `serve` does
            print(listener.getsockname()[1], flush=True)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await asyncio.to_thread(sys.stdin.read)
            server.should_exit = True
            await serving
    await text.close()


@contextmanager
def server_process() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.server", "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()


# The client's process.


class Connection(asyncio.Protocol):
    """One keep-alive connection: sends prepared requests, and parses the end of each answer and the times in it."""

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
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


def payload(response: bytes) -> bytes:
    """The body, joined from chunks where it is chunked. Raises ValueError unless the status is 200."""
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
    """One variant of a request."""

    path: str
    stream: bool
    paced: bool = False

    def request(self, number: int) -> bytes:
        return request_bytes(self.path, body(number, stream=self.stream, paced=self.paced))


def routes(whole: str, stream: str, paced: str) -> dict[str, Route]:
    return {"whole": Route(whole, False), "stream": Route(stream, True), "paced": Route(paced, True, True)}


WAYS = {
    "serve": routes(PATH, PATH, PATH),
    "in_process": routes(IN_PROCESS + PATH, IN_PROCESS + PATH, IN_PROCESS + PATH),
    "floor": routes(f"{FLOOR}/whole", f"{FLOOR}/stream", f"{FLOOR}/paced"),
}


@dataclass
class Load:
    """The results of connections that send requests without pauses for some time."""

    num_requests: int = 0
    seconds: float = 0.0
    delays_ns: list[int] = field(default_factory=list)


async def run_load(port: int, route: Route, *, num_connections: int, seconds: float) -> Load:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(num_connections)]
    # Prepared and reused in turn, so that the client is idle while it waits. Each is sent once before the clock starts.
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
    """Check that the answers are correct and equal in all variants. Return the bytes of one streamed answer."""
    loop = asyncio.get_running_loop()
    connection = (await loop.create_connection(Connection, "127.0.0.1", port))[1]
    answers = {
        way: {kind: payload(await connection.ask(route.request(0))) for kind, route in kinds.items()}
        for way, kinds in WAYS.items()
    }
    connection.transport.close()
    served = answers["serve"]
    whole = json.loads(served["whole"])
    text = STEP_TEXT * STEPS
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == STEPS * TOKENS_A_STEP + 1
    assert whole["usage"]["prompt_tokens"] > 400
    *chunks, last = [frame.removeprefix("data: ") for frame in served["stream"].decode().split("\n\n") if frame]
    assert last == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert sum(bool(delta.get("content")) for delta in deltas) == STEPS, "one chunk a step"
    for way, kinds in answers.items():
        for kind, answer in kinds.items():
            assert _unnamed(answer) == _unnamed(served[kind]), f"the {kind} answer of {way} differs"
    return len(served["stream"])


def _unnamed(content: bytes) -> bytes:
    """The answer without ids and times, which differ in each answer."""
    content = re.sub(rb'"id":"chatcmpl-\w+"', b"", content)
    content = re.sub(rb'"created":\d+', b"", content)
    return re.sub(rb"@\d+@", b"@", content)


def throughput(port: int, *, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Measure the variants alternately, so that other load on the machine affects all equally."""
    rows = []
    for kind in ("whole", "stream"):
        for num_connections in (1, 32):
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(repeats):
                for way, kinds in WAYS.items():
                    load = asyncio.run(run_load(port, kinds[kind], num_connections=num_connections, seconds=seconds))
                    rates[way].append(load.num_requests / load.seconds)
            row: dict[str, Any] = {"answer": kind, "connections": num_connections}
            for way, found in rates.items():
                row |= {way: statistics.median(found), f"{way}_spread": max(found) / min(found)}
            rows.append(row)
    return rows


def latency(port: int, *, seconds: float, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for num_connections in (1, 32):
        delays: dict[str, list[int]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, kinds in WAYS.items():
                delays[way] += asyncio.run(
                    run_load(port, kinds["paced"], num_connections=num_connections, seconds=seconds)
                ).delays_ns
        row: dict[str, Any] = {"streams": num_connections, "steps": len(delays["serve"])}
        for way, found in delays.items():
            cuts = statistics.quantiles(found, n=100)
            row |= {f"{way}_median_us": cuts[49] / 1e3, f"{way}_p99_us": cuts[98] / 1e3}
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
            f"{self.machine}; load average before the run {self.load_before:.2f}. An answer: {STEPS} steps of "
            f"{TOKENS_A_STEP} tokens,"
            f" streamed {self.answer_bytes:,} bytes.",
            "",
            "Requests a second (streams: steps a second), and the largest of the runs behind the median over their "
            "smallest:",
            "",
            "| answer | connections | serve | engine in the process | floor | serve's share of the floor | spread |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.throughput:
            steps = f" ({row['serve'] * STEPS:,.0f})" if row["answer"] == "stream" else ""
            rates = (
                f"{row['serve']:,.0f}{steps} | {row['in_process']:,.0f} | {row['floor']:,.0f} | "
                f"{100 * row['serve'] / row['floor']:.0f} %"
            )
            lines.append(
                f"| {row['answer']} | {row['connections']} | {rates} | "
                f"{max(row[f'{way}_spread'] for way in WAYS):.2f} |"
            )
        lines += [
            "",
            f"Engine token to client byte, all streams stepping together each {PACE_SECONDS * 1e3:g} ms, median and "
            f"p99:",
            "",
            "| streams | serve | engine in the process | floor |",
            "|---|---|---|---|",
        ]
        for row in self.latency:
            shown = [f"{row[f'{way}_median_us']:,.0f} µs, {row[f'{way}_p99_us']:,.0f} µs" for way in WAYS]
            lines.append(f"| {row['streams']} | {' | '.join(shown)} |")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="length of each of the timed runs, of which there are 18 for each repeat",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs behind each figure; rates are their median")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(serve())
        return
    machine = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}, uvicorn "
        f"{uvicorn.__version__}"
    )
    load_before = os.getloadavg()[0]
    with server_process() as port:
        answer_bytes = asyncio.run(check(port))
        timed = {"seconds": options.seconds, "repeats": options.repeats}
        report = Report(machine, load_before, answer_bytes, throughput(port, **timed), latency(port, **timed))
    print(json.dumps(asdict(report)) if options.json else report.markdown())


if __name__ == "__main__":
    main()
