"""The socket that `serve` listens on."""

from __future__ import annotations

import asyncio
import socket

from agentspec.commands import serve as serve_command
from agentspec.server.connections import Connections


def test_small_writes_are_sent_at_once() -> None:
    """With Nagle's algorithm an answer in two writes waits for the client's delayed acknowledgement, 40 ms on Linux."""
    accepted: list[int] = []

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with serve_command._bind(Connections(9), "127.0.0.1", 0) as listener:
            async with await asyncio.start_server(answer, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                await reader.read()
                writer.close()
                await writer.wait_closed()

    asyncio.run(run())
    assert accepted == [1]
