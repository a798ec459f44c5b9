"""One HTTP/1.1 connection, written by hand for things that no client library does: leaving in the middle of the
headers, resets, half-closing.

Knows nothing of requests' contents.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

_LIMIT = 2**26
_RESET = struct.pack("ii", 1, 0)
GONE = (ConnectionError, asyncio.IncompleteReadError, OSError)
"""Exceptions of a connection that the other side has closed."""


@dataclass(slots=True)
class Answer:
    """An answer, as far as it arrived."""

    status: int | None = None
    """None: the connection ended before the status."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    """The body is complete."""

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "",
    version: str = "1.1",
) -> bytes:
    """Head and body. Content-Length is added unless `headers` contain it or an alternative."""
    given = {"host": "127.0.0.1", **(headers or {})}
    if body is not None:
        given.setdefault("content-type", "application/json")
        if "transfer-encoding" not in given:
            given.setdefault("content-length", str(len(body)))
    lines = [
        f"{method or ('GET' if body is None else 'POST')} {path} HTTP/{version}",
        *(f"{name}: {value}" for name, value in given.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


class Connection:
    """A context manager: the connection is closed at the end of its context."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.answer = Answer()

    @classmethod
    async def open(cls, port: int, *, receive_bytes: int | None = None) -> Self:
        """receive_bytes: size of the socket's buffer; small, so that the server notices a client that doesn't read."""
        raw = socket.socket()
        raw.setblocking(False)
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
            return cls(
                *await asyncio.open_connection(sock=raw, limit=_LIMIT if receive_bytes is None else receive_bytes)
            )
        except BaseException:
            raw.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()
        with suppress(*GONE):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Reset the connection, as when a process with unread data is killed."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()

    def close_sending(self) -> None:
        """Half-close: send nothing more, but keep reading."""
        self.writer.write_eof()

    async def head(self) -> None:
        """Read status and headers of the next answer; skip `100 Continue`."""
        status = 100
        while status == 100:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.answer = Answer(status, {name.lower(): value.strip() for name, _, value in pairs})

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in pieces, as they arrive."""
        answer = self.answer
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                part = (await self.reader.readexactly(size + 2))[:-2]
                answer.body += part
                yield part
            await self.reader.readuntil(b"\r\n")
        elif "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            yield answer.body
        else:
            while part := await self.reader.read(2**16):
                answer.body += part
                yield part
        answer.is_whole = True

    async def read(self) -> Answer:
        """The next answer, as far as it arrives."""
        self.answer = Answer()
        with suppress(*GONE):
            await self.head()
            async for _ in self.parts():
                pass
        return self.answer


async def exchange(port: int, data: bytes) -> Answer:
    """Send a request on a new connection, and read the answer. A server may answer before it has read everything."""
    try:
        connection = await Connection.open(port)
    except OSError:
        return Answer()
    async with connection:
        sending = asyncio.create_task(connection.send(data))
        answer = await connection.read()
        sending.cancel()
        with suppress(asyncio.CancelledError, *GONE):
            await sending
        return answer
