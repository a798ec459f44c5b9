"""The connections of one server: their maximum number, which one is closed to make room, and their idle timeouts.

Owns the listening socket's `accept` and uvicorn's protocol, from which it reads how far a connection's request has
come. Knows nothing of requests' contents. A file descriptor is always kept for a new connection: when accept() fails
for lack of one, asyncio accepts nothing for a second.
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
"""Reserved for other files of the server, and for connections that are just being closed."""
FOR_PROBES = 8
"""Connections that generating requests leave free, so that health probes get through."""

HEADER_SECONDS = 20.0
"""Timeout for a request's headers: from a connection's start, or from the first byte of a later request."""
STALLED_SECONDS = 60.0
"""How long a client may leave an answer unread, in addition to the time that the unread part takes at LEAST_RATE."""
SWEEP_SECONDS = 1.0


class Connections:
    """Every open connection, ordered by last activity: the longest idle first."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: maximum number of connections."""
        self.limit = limit
        self.clock = clock
        self._open: OrderedDict[_Connection, None] = OrderedDict()
        self._num_accepted = 0
        """Accepted sockets without a protocol yet."""

    def protocol(self, **settings: Any) -> H11Protocol:
        """Create the protocol of a new connection; passed to uvicorn's Config as `http`. Every installation uses the
        same parser, the tested one."""
        return _Connection(self, **settings)

    async def watch(self) -> None:
        """Close overdue connections periodically, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        for connection in list(self._open):
            connection.end_if_overdue(self.clock())

    def close_unfinished(self) -> None:
        """At server shutdown: close the connections whose request body is incomplete."""
        for connection in list(self._open):
            if connection.is_idle and not connection.awaits_headers:
                connection.transport.close()

    @property
    def is_full(self) -> bool:
        return len(self._open) + self._num_accepted >= self.limit

    def evict(self) -> bool:
        """Close the longest idle connection without a complete request; return whether there was one."""
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

    def note_activity(self, connection: _Connection) -> None:
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: _Connection) -> None:
        self._open.pop(connection, None)


class Listener(socket.socket):
    """A listening socket that accepts no more connections than the limit. asyncio takes BlockingIOError for "no client
    is waiting", and retries."""

    def __init__(self, connections: Connections, family: socket.AddressFamily) -> None:
        # asyncio switches Nagle's algorithm off only for sockets that say that they speak TCP; with it, small writes
        # wait 40 ms for an acknowledgement.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = connections
        self._kept = os.open(os.devnull, os.O_RDONLY)
        """A reserved descriptor, to accept and close a connection when no other descriptor is free."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. At the limit, close the longest idle one; its descriptor becomes free in the event
        loop's next iteration. If no connection is idle, close the new one."""
        if self.connections.is_full and self.connections.evict():
            raise BlockingIOError
        try:
            newcomer, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if not self.connections.evict():
                self._reject_one()
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

    def _reject_one(self) -> None:
        """Accept and close the waiting connection: left in the queue it would make accept() busy-loop."""
        os.close(self._kept)
        super().accept()[0].close()
        self._kept = os.open(os.devnull, os.O_RDONLY)


class _Connection(H11Protocol):
    is_ended = False
    """Aborted; its descriptor is about to be freed."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._connections = connections
        self._headers_began: float | None = connections.clock()
        """When the wait for a request's headers began; None: nothing of the next request has arrived, or all its
        headers have."""
        self._unsent_due: float | None = None
        """Deadline for the client to read what is buffered; None: nothing is buffered, or nothing waits for the buffer
        to drain."""

    @property
    def is_idle(self) -> bool:
        """No complete request is being answered."""
        return self.awaits_headers or self.cycle.more_body

    @property
    def awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._connections.note_activity(self)
        if self.awaits_headers and self._headers_began is None:
            self._headers_began = self._connections.clock()
        super().data_received(data)
        if not self.awaits_headers:
            self._headers_began = None

    def on_response_complete(self) -> None:
        self._connections.note_activity(self)
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unsent_due = None
        super().resume_writing()

    def end_if_overdue(self, now: float) -> None:
        """Close the connection if it is overdue. uvicorn has its own timer for the silence between two requests."""
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
        """Abort at once and discard unsent data."""
        self.is_ended = True
        self.transport.abort()


def room_for_connections() -> int:
    """The number of connections that this process's file descriptors allow. Raises the soft limit as far as needed and
    allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(FOR_PROBES, min(soft, wanted) - SPARE_DESCRIPTORS)
