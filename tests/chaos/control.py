"""A server that only sleeps and answers: `python -m tests.chaos.control SECONDS`. Its delays are those of the machine.

`GET /health` is answered at once; `GET /stream` sends a chunk every SECONDS, without an end. The first line on stdout
is its port. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

HEALTH = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"status":"ok"}'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"6\r\ndata:\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        streams = b" /stream " in head
        writer.write(HEAD if streams else HEALTH)
        while streams:
            await asyncio.sleep(seconds)
            writer.write(CHUNK)
            await writer.drain()
    writer.close()


async def main(seconds: float) -> None:
    server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, seconds), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with suppress(asyncio.CancelledError):
        asyncio.run(main(float(sys.argv[1])))
