"""Admission by session: keep the working sets of live sessions together in memory, and let the others wait.

Eviction can't save a cache that more sessions share than fit in it: each turn then evicts the path that the next turn needs. So sessions
stand in order of their arrival, and a turn may run if its session fits beside the working sets of all the older live ones. When
they grow out of the memory, the youngest wait until an older one ends. A session is live while a turn of it runs or waits, and for
`hold_seconds` after. A request without a session is one of its own.

Knows bytes and session ids; knows nothing of pages, rows or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Session:
    working_set: int = 0
    """Bytes that only this session needs of the cache."""
    running: int = 0
    waiting: int = 0
    last_active: float = float("-inf")


class SessionGate:
    """Decides whether a turn may be considered for admission now."""

    def __init__(self, *, budget_bytes: int, hold_seconds: float, clock: Callable[[], float]) -> None:
        """`budget_bytes`: what checkpoints and pages may take; the rows in which running requests write are not part of it."""
        self._budget_bytes = budget_bytes
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        """In order of arrival."""

    def arrive(self, session_id: str) -> None:
        """A turn of this session waits to be admitted."""
        self._expire()
        self._sessions.setdefault(session_id, _Session()).waiting += 1

    def allows(self, session_id: str, need_bytes: int) -> bool:
        """True when the working set of this waiting turn's session fits beside those of the older live sessions.

        `need_bytes`: what the turn would add. A session that was evicted needs at least what it had. The oldest is always allowed."""
        self._expire()
        session = self._sessions[session_id]
        session.working_set = max(session.working_set, need_bytes)
        older_bytes = 0
        for other in self._sessions.values():
            if other is session:
                break
            older_bytes += other.working_set
        return not older_bytes or older_bytes + session.working_set <= self._budget_bytes

    def enter(self, session_id: str) -> None:
        """A waiting turn of this session was admitted."""
        session = self._sessions[session_id]
        session.waiting -= 1
        session.running += 1

    def leave(self, session_id: str, working_set: int, *, waits_again: bool, comes_back: bool = True) -> None:
        """A turn of this session ended, or was retracted and waits again; `working_set` is what its path takes now.

        comes_back: False for a session that can't have another turn; it isn't live any more once this one has ended."""
        session = self._sessions[session_id]
        session.running -= 1
        session.waiting += waits_again
        session.working_set = working_set
        session.last_active = self._clock()
        if not (comes_back or session.running or session.waiting):
            del self._sessions[session_id]

    def withdraw(self, session_id: str) -> None:
        """A waiting turn of this session was aborted."""
        self._sessions[session_id].waiting -= 1

    @property
    def num_live(self) -> int:
        self._expire()
        return len(self._sessions)

    def _expire(self) -> None:
        limit = self._clock() - self._hold_seconds
        gone = [key for key, session in self._sessions.items() if not (session.running or session.waiting) and session.last_active <= limit]
        for key in gone:
            del self._sessions[key]
