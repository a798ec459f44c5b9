"""Jobs that wait for one worker: by turns for their owners, and within an owner for its sessions, weighed by bytes and bounded in bytes.

Deficit round robin at both levels: who is next in turn may have as many bytes done as it has saved up, or saves up more and lets the next one go
first. So a large job waits for many small ones of others, and nobody waits for ever. Knows nothing of what a job is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentspec.errors import OverloadedError

RETRY_SECONDS = 2
QUANTUM_BYTES = 1 << 16
"""What a flow has for each of its turns, and saves up where it isn't enough."""

_LEAST_BYTES = 4096
"""What even an empty job counts as."""


class Flow(NamedTuple):
    """For whom a job is done."""

    owner: str = ""
    """Who may not take from others: an API key. Empty: nobody in particular."""
    session: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A job in the queue."""

    job: Any
    flow: Flow
    num_bytes: int


@dataclass(slots=True)
class _Line:
    """A session's jobs, first come first served."""

    tickets: deque[Ticket] = field(default_factory=deque)
    saved: int = QUANTUM_BYTES

    def next(self) -> Ticket:
        return self.tickets[0]

    def drop(self, ticket: Ticket) -> bool:
        """Says whether any are left."""
        self.tickets.remove(ticket)
        return bool(self.tickets)


@dataclass(slots=True)
class _Ring:
    """Flows that take turns: owners, or an owner's sessions. None of them is empty."""

    level: int
    """Of the flows in it: the place of their name in a Flow."""
    flows: OrderedDict[str, _Ring | _Line] = field(default_factory=OrderedDict)
    saved: int = QUANTUM_BYTES
    num_bytes: int = 0

    def add(self, ticket: Ticket) -> None:
        name = ticket.flow[self.level]
        flow = self.flows.get(name)
        if flow is None:
            flow = self.flows[name] = _Line() if self.level else _Ring(1)
        if isinstance(flow, _Ring):
            flow.add(ticket)
        else:
            flow.tickets.append(ticket)
        self.num_bytes += ticket.num_bytes

    def next(self) -> Ticket:
        """Whose turn it is. The same one until it is dropped."""
        while True:
            name, flow = next(iter(self.flows.items()))
            ticket = flow.next()
            if ticket.num_bytes <= flow.saved:
                return ticket
            flow.saved += QUANTUM_BYTES
            self.flows.move_to_end(name)

    def charge(self, ticket: Ticket) -> None:
        """The ticket's flows have had it done."""
        flow = self.flows[ticket.flow[self.level]]
        flow.saved -= ticket.num_bytes
        if isinstance(flow, _Ring):
            flow.charge(ticket)

    def drop(self, ticket: Ticket) -> bool:
        """Says whether any are left. A flow that has none loses what it saved."""
        name = ticket.flow[self.level]
        self.num_bytes -= ticket.num_bytes
        if not self.flows[name].drop(ticket):
            del self.flows[name]
        return bool(self.flows)


class FairQueue:
    """Holds who waits, and nobody else."""

    def __init__(self, *, max_bytes: int, max_owner_bytes: int) -> None:
        """max_bytes: of all waiting jobs. max_owner_bytes: of one owner's. One job may always wait, whatever its size."""
        self._max_bytes, self._max_owner_bytes = max_bytes, max_owner_bytes
        self._owners = _Ring(0)
        self._tickets: set[Ticket] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_bytes(self) -> int:
        return self._owners.num_bytes

    def put(self, job: Any, flow: Flow, num_bytes: int) -> Ticket:
        """Raises OverloadedError where too many bytes wait already."""
        ticket = Ticket(job, flow, max(num_bytes, _LEAST_BYTES))
        owner = self._owners.flows.get(flow.owner)
        if isinstance(owner, _Ring):
            _check("of this client", owner.num_bytes, ticket.num_bytes, self._max_owner_bytes)
        if self._tickets:
            _check("of all clients", self.num_bytes, ticket.num_bytes, self._max_bytes)
        self._owners.add(ticket)
        self._tickets.add(ticket)
        return ticket

    def take(self) -> Ticket | None:
        """The next job; None when nobody waits."""
        if not self._tickets:
            return None
        ticket = self._owners.next()
        self._owners.charge(ticket)
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Drop a job that nobody waits for any more; one that was taken is left alone."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._owners.drop(ticket)


def _check(whose: str, waiting: int, more: int, bound: int) -> None:
    if waiting + more > bound:
        reason = f"{waiting:,} bytes {whose} wait to be rendered and tokenised here, and {more:,} more would exceed {bound:,}"
        raise OverloadedError(reason, RETRY_SECONDS)
