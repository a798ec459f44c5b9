"""A queue that is fair by flow: owners take turns, and so do the sessions of an owner, weighed by what their items
cost. Not thread-safe.

Deficit round robin at both levels (Shreedhar and Varghese, 1995): who is next in turn may have as much done as it has
saved up, or saves up more and lets the next one go first. So a large item waits for many small ones of others, and
nobody waits for ever. Knows nothing of what an item is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Flow(NamedTuple):
    """What shares with its like."""

    owner: str = ""
    """Who may not take from others: an API key. Empty: nobody in particular."""
    session: str = ""
    """One of the owner's sessions. Empty: all that the owner asks without one."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Item]):
    """An item in the queue."""

    item: Item
    flow: Flow
    weight: int


@dataclass(slots=True)
class _Session(Generic[Item]):
    """First come, first served."""

    saved: int
    tickets: deque[Ticket[Item]] = field(default_factory=deque)


@dataclass(slots=True)
class _Owner(Generic[Item]):
    saved: int
    weight: int = 0
    """Of all its tickets."""
    sessions: OrderedDict[str, _Session[Item]] = field(default_factory=OrderedDict)
    """Whose turn it is stands first. None is empty."""


class FairQueue(Generic[Item]):
    """Holds who waits, and nobody else: a flow that has nothing in it any more loses what it saved."""

    def __init__(self, quantum: int = 1) -> None:
        """quantum: the weight that a flow has for each of its turns."""
        self._quantum = quantum
        self._owners: OrderedDict[str, _Owner[Item]] = OrderedDict()
        """Whose turn it is stands first. None is empty."""
        self._tickets: set[Ticket[Item]] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def weight(self) -> int:
        """Of all that waits."""
        return sum(owner.weight for owner in self._owners.values())

    def weight_of(self, owner: str) -> int:
        """Of all that waits of one owner."""
        return self._owners[owner].weight if owner in self._owners else 0

    def put(self, item: Item, flow: Flow, weight: int = 1) -> Ticket[Item]:
        ticket = Ticket(item, flow, weight)
        owner = self._owners.setdefault(flow.owner, _Owner(self._quantum))
        owner.sessions.setdefault(flow.session, _Session(self._quantum)).tickets.append(ticket)
        owner.weight += weight
        self._tickets.add(ticket)
        return ticket

    def take(self) -> Ticket[Item] | None:
        """The next item; None when nothing waits."""
        if not self._owners:
            return None
        while True:
            name, owner = next(iter(self._owners.items()))
            session = self._session_in_turn(owner)
            ticket = session.tickets[0]
            if ticket.weight <= owner.saved:
                owner.saved -= ticket.weight
                session.saved -= ticket.weight
                self.remove(ticket)
                return ticket
            owner.saved += self._quantum
            self._owners.move_to_end(name)

    def remove(self, ticket: Ticket[Item]) -> None:
        """Drop an item that nobody waits for any more; one that was taken is left alone."""
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
        """The last item of the longest session of the owner whose items weigh the most; of equals, of those whose turn
        comes last."""
        owner = max(reversed(self._owners.values()), key=lambda owner: owner.weight)
        return max(reversed(owner.sessions.values()), key=lambda session: len(session.tickets)).tickets[-1]

    def _session_in_turn(self, owner: _Owner[Item]) -> _Session[Item]:
        """The same one until it gets what it asks for."""
        while True:
            name, session = next(iter(owner.sessions.items()))
            if session.tickets[0].weight <= session.saved:
                return session
            session.saved += self._quantum
            owner.sessions.move_to_end(name)
