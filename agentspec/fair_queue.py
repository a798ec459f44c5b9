"""A fair queue: weighted round robin over owners, and over the sessions of each owner. Not thread-safe.

Deficit round robin at both levels (Shreedhar and Varghese, 1995). Each turn adds a quantum to a flow's credit. A flow's
next item is served when its weight fits into the credit; otherwise the next flow gets its turn. So a large item waits
for many small items of other flows, but no item waits forever. The queue doesn't look into its items.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from agentspec.errors import OverloadedError

MAX_WAITING_BYTES = 256 << 20
MAX_OWNER_BYTES = 128 << 20
"""Most bytes that wait in a queue whose weights are bytes: of all, and of one API key."""

_RETRY_SECONDS = 2

Item = TypeVar("Item")


class Flow(NamedTuple):
    """The unit of fairness: a session of an owner."""

    owner: str = ""
    """The name of an API key. Empty: no key is asked for."""
    session: str = ""
    """One of the owner's sessions. Empty: all of the owner's requests without a session."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Item]):
    """An item in the queue."""

    item: Item
    flow: Flow
    weight: int


@dataclass(slots=True)
class _Session(Generic[Item]):
    """The tickets of one session, in order of arrival."""

    credit: int
    tickets: deque[Ticket[Item]] = field(default_factory=deque)


@dataclass(slots=True)
class _Owner(Generic[Item]):
    credit: int
    weight: int = 0
    """The sum over all its tickets."""
    sessions: OrderedDict[str, _Session[Item]] = field(default_factory=OrderedDict)
    """In round-robin order, the current one first. Holds no empty session."""


class FairQueue(Generic[Item]):
    """Keeps state for waiting flows only: a flow whose last item leaves loses its credit."""

    def __init__(self, quantum: int = 1) -> None:
        """quantum: the weight that each turn adds to a flow's credit."""
        self._quantum = quantum
        self._owners: OrderedDict[str, _Owner[Item]] = OrderedDict()
        """In round-robin order, the current one first. Holds no empty owner."""
        self._tickets: set[Ticket[Item]] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def weight(self) -> int:
        """The sum over all waiting items."""
        return sum(owner.weight for owner in self._owners.values())

    def weight_of(self, owner: str) -> int:
        """The sum over the owner's waiting items."""
        return self._owners[owner].weight if owner in self._owners else 0

    def check_room(self, flow: Flow, num_bytes: int, purpose: str) -> None:
        """Raise OverloadedError if too many bytes wait, of the owner or of all, for another item of so many. A single
        item may always wait, whatever its size. purpose: what they wait for, after "to be"."""
        of_owner = ("this client", self.weight_of(flow.owner), MAX_OWNER_BYTES)
        of_all = ("all clients", self.weight, MAX_WAITING_BYTES)
        for whose, waits, bound in (of_owner, of_all):
            if waits and waits + num_bytes > bound:
                raise OverloadedError(
                    f"{waits:,} bytes of {whose} wait to be {purpose} here, "
                    f"and {num_bytes:,} more would exceed {bound:,}",
                    _RETRY_SECONDS,
                )

    def enqueue(self, item: Item, flow: Flow, weight: int = 1) -> Ticket[Item]:
        ticket = Ticket(item, flow, weight)
        owner = self._owners.setdefault(flow.owner, _Owner(self._quantum))
        owner.sessions.setdefault(flow.session, _Session(self._quantum)).tickets.append(ticket)
        owner.weight += weight
        self._tickets.add(ticket)
        return ticket

    def dequeue(self) -> Ticket[Item] | None:
        """Remove and return the next item; None when the queue is empty."""
        if not self._owners:
            return None
        while True:
            name, owner = next(iter(self._owners.items()))
            session = self._session_in_turn(owner)
            ticket = session.tickets[0]
            if ticket.weight <= owner.credit:
                owner.credit -= ticket.weight
                session.credit -= ticket.weight
                self.remove(ticket)
                return ticket
            owner.credit += self._quantum
            self._owners.move_to_end(name)

    def remove(self, ticket: Ticket[Item]) -> None:
        """Remove an item; does nothing if it has already left the queue."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        owner = self._owners[ticket.flow.owner]
        owner.weight -= ticket.weight
        session = owner.sessions[ticket.flow.session]
        session.tickets.remove(ticket)
        if not session.tickets:
            del owner.sessions[ticket.flow.session]
        if not owner.sessions:
            del self._owners[ticket.flow.owner]

    def last_of_the_longest(self) -> Ticket[Item]:
        """The last item of the longest session of the owner with the largest weight; ties go to the flow whose turn
        comes last."""
        owner = max(reversed(self._owners.values()), key=lambda owner: owner.weight)
        return max(reversed(owner.sessions.values()), key=lambda session: len(session.tickets)).tickets[-1]

    def _session_in_turn(self, owner: _Owner[Item]) -> _Session[Item]:
        """The owner's next session. Stays the same until its first item is served."""
        while True:
            name, session = next(iter(owner.sessions.items()))
            if session.tickets[0].weight <= session.credit:
                return session
            session.credit += self._quantum
            owner.sessions.move_to_end(name)
