"""The server's end of the socket to one of its processes: bodies of any size, without copies and without long holds of
the event loop."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import cast

import pytest

from agentspec.engine.link import frame
from agentspec.engine.remote import PIECE_BYTES, EngineProcess, Wire
from agentspec.wire import Abort, FrameReader


class OneEnd:
    """Stands for a process: one end of a socket pair."""

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair()
        self.other.setblocking(False)


def test_a_large_body_is_sent_in_pieces_before_frames_that_are_written_meanwhile() -> None:
    body = random.Random(6).randbytes(10 * PIECE_BYTES + 1)
    behind = [frame([Abort("a")]), frame([Abort("b")])]

    async def main() -> None:
        process, loop, lost = OneEnd(), asyncio.get_running_loop(), asyncio.Event()
        wire = Wire(cast(EngineProcess, process), lambda _: None, lost.set)
        await wire.connect()
        sending = asyncio.create_task(wire.send(body))
        reader, found, num_bytes = FrameReader(), list[bytes](), 0
        while len(found) < 4:
            data = await loop.sock_recv(process.other, 2**16)
            num_bytes += len(data)
            if behind and num_bytes > 2**20:
                assert not sending.done()
                wire.write(behind.pop(0))
            held = cast(asyncio.WriteTransport, wire._transport).get_write_buffer_size()
            assert held <= PIECE_BYTES + 2**17, "what the other end has not read stays with the sender"
            found += reader.feed(data)
            if len(found) == 3:
                wire.write(frame([Abort("c")]))
        await sending
        assert found == [body, *(frame([Abort(name)])[4:] for name in "abc")]
        process.other.close()
        wire.close()
        await lost.wait()

    asyncio.run(main())


@pytest.mark.parametrize("reads", [False, True])
def test_sending_to_a_process_that_ends_returns(*, reads: bool) -> None:
    async def main() -> None:
        process, loop, lost = OneEnd(), asyncio.get_running_loop(), asyncio.Event()
        wire = Wire(cast(EngineProcess, process), lambda _: None, lost.set)
        await wire.connect()
        sending = asyncio.create_task(wire.send(bytes(2**24)))
        if reads:
            assert await loop.sock_recv(process.other, 2**16)
        process.other.close()
        await sending
        await lost.wait()
        assert not wire.is_open

    asyncio.run(main())
