"""The connections of one server: how many there may be, which one makes room for a new one, and how long each may keep
still.

Owns the listening socket's `accept` and uvicorn's protocol, of which it reads how far a connection's request is. Knows
no request. A new connection always finds a descriptor: where accept() fails for want of one, asyncio would take nobody
for a second.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from agentspec.server.bodies import LEAST_RATE

MAX_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 32
"""For what else a server opens, and for connections that are just being closed."""
FOR_PROBES = 8
"""Connections that requests that generate leave to others."""

HEADER_SECONDS = 20.0
"""From a connection's first second, or from a later request's first byte, to the end of the request's headers."""
STALLED_SECONDS = 60.0
"""How long a client may leave an answer waiting, beside the time that what waits takes at LEAST_RATE."""
SWEEP_SECONDS = 1.0


class Connections:
    """Every open connection, those that were silent for longest first."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: how many there may be."""
        self.limit = limit
        self.clock = clock
        self._open: OrderedDict[_Connection, None] = OrderedDict()
        self._num_accepted = 0
        """Sockets that have no protocol yet."""

    def protocol(self, **settings: Any) -> H11Protocol:
        """A new connection's: what uvicorn's Config takes as its `http`. One parser for all installations, so that it
        is the one that is tested."""
        return _Connection(self, **settings)

    async def watch(self) -> None:
        """Close what has been still for too long, until this is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        for connection in list(self._open):
            connection.end_if_overdue(self.clock())

    def close_unfinished(self) -> None:
        """For the server's end: nobody waits for the rest of a body."""
        for connection in list(self._open):
            if connection.is_idle and not connection.awaits_headers:
                connection.transport.close()

    @property
    def is_full(self) -> bool:
        return len(self._open) + self._num_accepted >= self.limit

    def evict(self) -> bool:
        """End the connection that was silent for longest, of those whose request isn't complete; says whether there was
        one."""
        for connection in self._open:
            if connection.is_idle and not connection.is_ended:
                connection.end()
                return True
        return False

    def accepted(self) -> None:
        self._num_accepted += 1

    def add(self, connection: _Connection) -> None:
        self._num_accepted -= 1
        self._open[connection] = None

    def heard_of(self, connection: _Connection) -> None:
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: _Connection) -> None:
        self._open.pop(connection, None)


class Listener(socket.socket):
    """A listening socket that takes no more connections than there may be. asyncio takes BlockingIOError for "nobody
    there", and asks again."""

    def __init__(self, connections: Connections, family: socket.AddressFamily) -> None:
        # asyncio switches Nagle's algorithm off only for sockets that say that they speak TCP; with it, small writes
        # wait 40 ms for an acknowledgement.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = connections
        self._kept = os.open(os.devnull, os.O_RDONLY)
        """A descriptor for whoever can't be taken in."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Of a full house the longest idle goes; its descriptor is free in the event loop's next round. Where nobody is
        idle, the newcomer goes."""
        if self.connections.is_full and self.connections.evict():
            raise BlockingIOError
        try:
            newcomer, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if not self.connections.evict():
                self._turn_away()
            raise BlockingIOError from None
        if self.connections.is_full:
            newcomer.close()
            raise BlockingIOError
        self.connections.accepted()
        return newcomer, address

    def close(self) -> None:
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1
        super().close()

    def _turn_away(self) -> None:
        """Whoever is left waiting would be offered again without a pause."""
        os.close(self._kept)
        super().accept()[0].close()
        self._kept = os.open(os.devnull, os.O_RDONLY)


class _Connection(H11Protocol):
    is_ended = False
    """Aborted; its descriptor is about to be freed."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._crowd = connections
        self._headers_began: float | None = connections.clock()
        """When the wait for a request's headers began; None: nothing of the next one has come yet, or all of it."""
        self._unsent_due: float | None = None
        """When the client must have taken what waits for it; None: nothing does, or nothing that somebody waits for."""

    @property
    def is_idle(self) -> bool:
        """No complete request is being answered."""
        return self.awaits_headers or self.cycle.more_body

    @property
    def awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._crowd.add(self)
        super().connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, error: Exception | None) -> None:
        self._crowd.remove(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._crowd.heard_of(self)
        if self.awaits_headers and self._headers_began is None:
            self._headers_began = self._crowd.clock()
        super().data_received(data)
        if not self.awaits_headers:
            self._headers_began = None

    def on_response_complete(self) -> None:
        self._crowd.heard_of(self)
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unsent_due = None
        super().resume_writing()

    def end_if_overdue(self, now: float) -> None:
        """Silence between two requests has a timer of uvicorn's own."""
        if self.awaits_headers and self._headers_began is not None and now - self._headers_began > HEADER_SECONDS:
            self.end()
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent or not (self.flow.write_paused or self.transport.is_closing()):
            self._unsent_due = None
        elif self._unsent_due is None:
            self._unsent_due = now + STALLED_SECONDS + unsent / LEAST_RATE
        elif now > self._unsent_due:
            self.end()

    def end(self) -> None:
        """At once, whatever still waits to be sent."""
        self.is_ended = True
        self.transport.abort()


def room_for_connections() -> int:
    """How many connections this process's descriptors allow, after the limit of these was raised as far as it is needed
    and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(FOR_PROBES, min(soft, wanted) - SPARE_DESCRIPTORS)
