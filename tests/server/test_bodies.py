"""Reading bodies: time limits, memory limits, and answers before a body is complete. On a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from agentspec.config import ServerConfig
from agentspec.server import bodies
from agentspec.server.app import create_app
from agentspec.server.bodies import LEAST_RATE, LINGER_BYTES, LINGER_SECONDS, SMALL_BYTES, WINDOW_SECONDS, Bodies
from agentspec.server.door import Door
from agentspec.server.errors import ApiError
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.replay.fakes import run

WHOLE = b'{"model": "scripted", "prompt": [1, 2]}'


def scope_of(path: str = "/v1/completions", **headers: str) -> dict[str, Any]:
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": encoded}


class Client:
    """A client's request whose body parts arrive at given times."""

    def __init__(self, **headers: str) -> None:
        self.scope = scope_of(**({"content_length": "1000"} | headers))
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.num_taken = 0
        self.sent: list[dict[str, Any]] = []

    def send(self, part: bytes, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def receive(self) -> dict[str, Any]:
        message = await self.messages.get()
        self.num_taken += 1
        return message

    async def take(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, app: Any) -> int:
        """Status of the answer."""
        await app(self.scope, self.receive, self.take)
        status: int = self.sent[0]["status"]
        return status


def door_of(**config: Any) -> Door:
    return Door(create_app(ScriptedEngine([*said("well"), ended()]), None), ServerConfig(**config), max_running=8)


async def settled(*tasks: asyncio.Task[Any]) -> None:
    """Run all callbacks that are due, without advancing the clock."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_unfinished_bodies_do_not_block_other_requests() -> None:
    """Regression: 264 clients that sent all of a body but its end occupied every place for good."""

    async def main() -> None:
        door = door_of()
        clients = [Client() for _ in range(264 + 10)]
        asking = [asyncio.create_task(client.ask(door)) for client in clients]
        for client in clients:
            client.send(WHOLE[:-1])
        await settled()
        honest = Client()
        honest.send(WHOLE, more=False)
        assert await honest.ask(door) == 200
        assert not any(task.done() for task in asking)
        assert await asyncio.gather(*asking) == [408] * len(asking)
        assert WINDOW_SECONDS <= asyncio.get_running_loop().time() <= WINDOW_SECONDS + LINGER_SECONDS + 1

    run(main())


def test_request_counts_from_its_complete_body() -> None:
    """Requests admitted early are refused if others have filled the places meanwhile."""

    async def main() -> None:
        go_on = asyncio.Event()
        door = Door(
            create_app(ScriptedEngine([*said("well"), go_on, ended()]), None), ServerConfig(max_queue=0), max_running=1
        )
        clients = [Client(), Client()]
        slow, fast = (asyncio.create_task(client.ask(door)) for client in clients)
        await settled()
        clients[1].send(WHOLE, more=False)
        await settled()
        clients[0].send(WHOLE, more=False)
        assert await slow == 429
        go_on.set()
        assert await fast == 200

    run(main())


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_401_is_sent_before_the_body_is_read(headers: dict[str, str]) -> None:
    async def main() -> None:
        client = Client(**headers)
        asking = asyncio.create_task(client.ask(door_of(api_keys=("key",))))
        await settled()
        assert (client.num_taken, client.sent[0]["status"]) == (0, 401)
        assert (b"connection", b"close") in client.sent[0]["headers"]
        assert client.sent[1]["body"].startswith(b'{"error"'), (
            "the answer is sent before the client has finished sending"
        )
        for _ in range(100):
            client.send(b" " * 2**16)
        assert await asking == 401
        assert client.num_taken == LINGER_BYTES / 2**16
        assert client.sent[-1].get("more_body", False) is False

    run(main())


def test_keyless_requests_on_open_paths_are_answered_before_the_body_is_read() -> None:
    async def main() -> None:
        for path in ("/health", "/", "/static/main.js"):
            client = Client()
            client.scope["path"] = path
            assert (await client.ask(door_of(api_keys=("key",))), client.num_taken) == (405, 0)

    run(main())


def test_connection_closes_soon_after_an_early_answer() -> None:
    async def main() -> None:
        assert await Client().ask(door_of(api_keys=("key",))) == 401
        assert asyncio.get_running_loop().time() == LINGER_SECONDS

    run(main())


def test_refusal_without_a_body_keeps_the_connection_open() -> None:
    async def main() -> None:
        client = Client(content_length="0")
        assert await client.ask(door_of(api_keys=("key",))) == 401
        assert (b"connection", b"close") not in client.sent[0]["headers"]
        assert client.num_taken == 0

    run(main())


async def sent_in_parts(size: int, gap: float, num_parts: int) -> tuple[int, float]:
    """Status and time of the answer to a body that arrives in parts."""
    client = Client(content_length=str(size * num_parts + len(WHOLE)))
    asking = asyncio.create_task(client.ask(door_of()))
    for _ in range(num_parts):
        client.send(b" " * size)
        await asyncio.sleep(gap)
        if asking.done():
            break
    client.send(WHOLE, more=False)
    return await asking, asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("size", "gap", "status"),
    [
        (LEAST_RATE, 1.0, 200),
        (10 * LEAST_RATE, 10.0, 200),
        (10 * LEAST_RATE, WINDOW_SECONDS + 1, 408),
        (1, 1.0, 408),
        (LEAST_RATE // 2, 1.0, 408),
    ],
)
def test_slow_body_is_408(size: int, gap: float, status: int) -> None:
    found, seconds = run(sent_in_parts(size, gap, 60))
    assert found == status
    assert status == 200 or seconds < 3 * WINDOW_SECONDS


def test_fast_start_does_not_extend_the_body_timeout() -> None:
    """Without the limit, a large first part would buy two hours."""

    async def main() -> None:
        client = Client(content_length=str(2**26))
        asking = asyncio.create_task(client.ask(door_of()))
        client.send(b" " * 60 * 2**20)
        assert await asking == 408
        assert asyncio.get_running_loop().time() <= WINDOW_SECONDS + LINGER_SECONDS

    run(main())


def test_too_large_content_length_is_refused_at_once() -> None:
    async def main() -> None:
        client = Client(content_length=str(2**20 + 1))
        asking = asyncio.create_task(client.ask(door_of(max_body_mib=1)))
        await settled()
        assert (client.num_taken, client.sent[0]["status"]) == (0, 413)
        client.send(b"", more=False)
        await asking

    run(main())


def test_total_size_of_large_unfinished_bodies_is_bounded() -> None:
    """The oldest large body is dropped; small bodies are always accepted."""

    async def main() -> None:
        read = Bodies(max_bytes=2**20)
        clients = [Client(content_length=str(2**20)) for _ in range(bodies.LARGE_BODIES + 1)]
        reading = [asyncio.create_task(read.read(client.scope, client.receive)) for client in clients]
        small = Client()
        reading.append(asyncio.create_task(read.read(small.scope, small.receive)))
        small.send(b" " * SMALL_BYTES)
        for client in clients:
            client.send(b" " * 2**20)
            await settled()
        assert [task.done() for task in reading] == [True] + [False] * (len(reading) - 1)
        with pytest.raises(ApiError) as refused:
            await reading[0]
        assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "1"})
        for client in (*clients[1:], small):
            client.send(b"", more=False)
        assert [len((await task)["body"]) for task in reading[1:]] == [2**20] * bodies.LARGE_BODIES + [SMALL_BYTES]
        assert (read._large, read._large_bytes) == ({}, 0)

    run(main())


def test_disconnect_within_a_body_releases_everything() -> None:
    async def main() -> None:
        read, client = Bodies(max_bytes=2**20), Client()
        reading = asyncio.create_task(read.read(client.scope, client.receive))
        client.send(b" " * 2**19)
        await settled()
        assert read._large_bytes == 2**19
        client.messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientDisconnect):
            await reading
        assert read._large_bytes == 0

    run(main())


def test_single_part_body_is_not_copied() -> None:
    async def main() -> None:
        client = Client()
        client.send(WHOLE, more=False)
        message = await Bodies(max_bytes=1000).read(client.scope, client.receive)
        assert message["body"] is WHOLE
        receive = bodies.replayed(message, client.receive)
        assert (await receive()) is message
        client.messages.put_nowait({"type": "http.disconnect"})
        assert (await receive()) == {"type": "http.disconnect"}

    run(main())
