"""Connections over real sockets: their limit, eviction, and idle timeouts. The tests control sweeps and their clock."""

from __future__ import annotations

import asyncio
import errno
import socket
from asyncio import constants as asyncio_constants
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agentspec.commands import serve as serve_command
from agentspec.config import ServerConfig
from agentspec.server.app import create_app
from agentspec.server.connections import HEADER_SECONDS, STALLED_SECONDS, Connections, Listener, room_for_connections
from agentspec.server.door import Door
from tests.fakes.engine_client import ScriptedEngine, ended, said

PROBE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"model": "scripted", "prompt": [1, 2], "max_tokens": 5, "stream": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(BODY)

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """A server with room for a few connections, on a stopped clock."""

    def __init__(self, limit: int) -> None:
        self.now = 0.0
        self.connections = Connections(limit, lambda: self.now)
        self.peers: list[Peer] = []
        self.listener: Listener

    async def connect(self, sent: bytes = b"") -> Peer:
        peer = await asyncio.open_connection(*self.listener.getsockname())
        self.peers.append(peer)
        peer[1].write(sent)
        await peer[1].drain()
        return peer

    async def probe(self) -> bytes:
        """The status line of the answer to a new connection."""
        reader, _ = await self.connect(PROBE)
        return await reader.readline()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0)

    def sweep(self, seconds: float) -> None:
        self.now += seconds
        self.connections.sweep()

    @property
    def num_open(self) -> int:
        return len(self.connections._open)


@asynccontextmanager
async def house(app: Any, *, limit: int = 9) -> AsyncIterator[House]:
    opened = House(limit)
    with serve_command._bind(opened.connections, "127.0.0.1", 0) as listener:
        opened.listener = listener
        async with serve_command._listening(app, listener):
            try:
                yield opened
            finally:
                for _, writer in opened.peers:
                    writer.close()
                    with suppress(ConnectionError):
                        await writer.wait_closed()


def app_of(*script: Any, **config: Any) -> Door:
    return Door(
        create_app(ScriptedEngine([*script] or [*said("well"), ended()]), None), ServerConfig(**config), max_running=8
    )


async def is_closed(peer: Peer) -> bool:
    with suppress(ConnectionError):
        return await peer[0].read() == b""
    return True


def test_idle_connections_do_not_block_probes() -> None:
    """100 idle sockets and few descriptors: the longest idle one is closed."""

    async def main() -> None:
        async with house(app_of()) as opened:
            idle = [await opened.connect() for _ in range(100)]
            for _ in range(3):
                assert await opened.probe() == b"HTTP/1.1 200 OK\r\n"
            assert opened.num_open <= 9
            assert all([await is_closed(peer) for peer in idle[: 100 - 9]])

    asyncio.run(main())


def test_incomplete_requests_are_evicted_and_complete_ones_stay() -> None:
    async def main() -> None:
        go_on = asyncio.Event()
        async with house(app_of(*said("first"), go_on, ended())) as opened:
            running = [await opened.connect(POST + b"\r\n" + BODY) for _ in range(3)]
            for reader, _ in running:
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            for number in range(30):
                await opened.connect((POST + b"\r\n" + BODY)[: 20 + number * 3])
            assert await opened.probe() == b"HTTP/1.1 200 OK\r\n"
            go_on.set()
            for reader, _ in running:
                assert b"[DONE]" in await reader.readuntil(b"[DONE]")

    asyncio.run(main())


def test_new_connection_is_closed_when_none_is_idle() -> None:
    async def main() -> None:
        go_on = asyncio.Event()
        async with house(app_of(*said("first"), go_on, ended()), limit=3) as opened:
            running = [await opened.connect(POST + b"\r\n" + BODY) for _ in range(3)]
            for reader, _ in running:
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            assert await is_closed(await opened.connect())
            go_on.set()
            for reader, _ in running:
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
            assert await opened.probe() == b"HTTP/1.1 200 OK\r\n", "answered connections are idle"

    asyncio.run(main())


@pytest.mark.parametrize("num_idle", [0, 3])
def test_accept_without_a_free_descriptor_does_not_pause_the_server(
    num_idle: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would log the error and pause for a second."""
    monkeypatch.setattr(asyncio_constants, "ACCEPT_RETRY_DELAY", 10**6)

    async def main() -> None:
        async with house(app_of()) as opened:
            idle = [await opened.connect() for _ in range(num_idle)]
            await opened.until(lambda: opened.num_open == num_idle)
            answers = [OSError(errno.EMFILE, "too many open files")]
            accept = socket.socket.accept

            def failing(listener: socket.socket) -> Any:
                if answers:
                    raise answers.pop()
                return accept(listener)

            monkeypatch.setattr(socket.socket, "accept", failing)
            first = await opened.connect(PROBE)
            if num_idle:
                assert await first[0].readline() == b"HTTP/1.1 200 OK\r\n"
                assert await is_closed(idle[0])
            else:
                assert await is_closed(first)
            assert await opened.probe() == b"HTTP/1.1 200 OK\r\n"

    asyncio.run(main())
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"GET", PROBE[:-2], PROBE[:-2] + b"x-filler: " + b"a" * 5000])
def test_slow_headers_close_the_connection(sent: bytes) -> None:
    async def main() -> None:
        async with house(app_of()) as opened:
            peer = await opened.connect(sent)
            await opened.until(lambda: opened.num_open == 1)
            opened.sweep(HEADER_SECONDS)
            assert opened.num_open == 1
            peer[1].write(b"x")
            await peer[1].drain()
            opened.sweep(1)
            assert await is_closed(peer)

    asyncio.run(main())


def test_slow_headers_of_a_later_request_close_the_connection() -> None:
    async def main() -> None:
        async with house(app_of()) as opened:
            reader, writer = await opened.connect(PROBE)
            await reader.readuntil(b"}")
            opened.sweep(HEADER_SECONDS + 1)
            writer.write(PROBE)
            await reader.readuntil(b"}")
            (connection,) = opened.connections._open
            writer.write(PROBE[:20])
            await opened.until(lambda: connection._headers_began is not None)
            opened.sweep(HEADER_SECONDS)
            assert opened.num_open == 1
            opened.sweep(1)
            assert await is_closed((reader, writer))

    asyncio.run(main())


def test_client_that_does_not_read_is_closed_after_the_stall_timeout() -> None:
    """A request counts until its answer is sent; regression: 264 of them locked everyone out."""
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b" " * 2**16, "more_body": True})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        left.set()

    async def main() -> None:
        async with house(endless) as opened:
            reader, _ = await opened.connect(PROBE)
            await reader.readline()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await opened.until(lambda: any(connection.flow.write_paused for connection in opened.connections._open))
            for _ in range(3):
                await asyncio.sleep(0)
            opened.sweep(1)
            opened.sweep(STALLED_SECONDS)
            assert opened.num_open == 1
            opened.sweep(10 * STALLED_SECONDS)
            await left.wait()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("key", "statuses"),
    [(b"", [b"HTTP/1.1 401 Unauthorized\r\n"]), (b"key", [b"HTTP/1.1 100 \r\n", b"HTTP/1.1 200 OK\r\n"])],
)
def test_expect_100_continue_is_answered(key: bytes, statuses: list[bytes]) -> None:
    """A client that asks before it sends gets 100 Continue, or an error."""

    async def main() -> None:
        async with house(app_of(api_keys=("key",))) as opened:
            reader, writer = await opened.connect(POST + b"expect: 100-continue\r\nx-api-key: " + key + b"\r\n\r\n")
            found = [await reader.readline()]
            if found[0].startswith(b"HTTP/1.1 100"):
                assert await reader.readline() == b"\r\n"
                writer.write(BODY)
                found.append(await reader.readline())
            assert [line.split()[1] for line in found] == [line.split()[1] for line in statuses]

    asyncio.run(main())


def test_client_still_sending_a_refused_body_gets_the_answer() -> None:
    async def main() -> None:
        async with house(app_of(api_keys=("key",))) as opened:
            reader, writer = await opened.connect(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500000\r\n\r\n"
            )
            writer.write(b" " * 500_000)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in answer
            assert b"invalid_api_key" in answer

    asyncio.run(main())


def test_unfinished_body_does_not_block_shutdown(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        connections = Connections(9)
        with serve_command._bind(connections, "127.0.0.1", 0) as listener:
            async with serve_command._listening(app_of(), listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(POST + b"\r\n" + BODY[:-1])
                while not any(connection.cycle for connection in connections._open):
                    await asyncio.sleep(0)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    asyncio.run(main())
    assert "Cancel" not in capfd.readouterr().err


def test_descriptor_limit_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(room_for_connections.__globals__["resource"], "setrlimit", lambda _, pair: limits.append(pair))
    for soft, hard, room, raised in (
        (1024, 2**20, 4096, [(4128, 2**20)]),
        (64, 64, 32, [(64, 64)]),
        (1024, 2048, 2016, [(2048, 2048)]),
        (2**20, 2**20, 4096, []),
        (-1, -1, 4096, []),
        (20, 20, 8, [(20, 20)]),
    ):
        limits.clear()
        monkeypatch.setattr(
            room_for_connections.__globals__["resource"], "getrlimit", lambda _, pair=(soft, hard): pair
        )
        assert (room_for_connections(), limits) == (room, raised)
