"""Admission by session: keep the working sets of live sessions together in memory, and let new sessions wait.

Eviction can't save a cache that more sessions share than fit in it: each turn then evicts the path that the next turn needs. So a
request of a session that is already live goes ahead, and the first request of a new one waits until its working set fits
beside theirs. A session is live while a turn of it runs, and for `hold_seconds` after.

Knows bytes and session ids; knows nothing of pages, rows or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Session:
    private_bytes: int
    """What only this session needs of the cache, as of its last turn."""
    running: int = 0
    last_active: float = 0.0


class SessionGate:
    """Decides whether a request may be considered for admission now."""

    def __init__(self, *, budget_bytes: int, hold_seconds: float, clock: Callable[[], float]) -> None:
        self._budget_bytes = budget_bytes
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def allows(self, session_id: str | None, need_bytes: int) -> bool:
        """True when the session is live already, or when `need_bytes` more fit beside the live ones."""
        self._expire()
        if session_id is not None and session_id in self._sessions:
            return True
        used = sum(session.private_bytes for session in self._sessions.values())
        return used + need_bytes <= self._budget_bytes

    def enter(self, session_id: str | None, need_bytes: int) -> None:
        """A turn of this session was admitted."""
        if session_id is None:
            return
        session = self._sessions.setdefault(session_id, _Session(need_bytes))
        session.private_bytes = max(session.private_bytes, need_bytes)
        session.running += 1
        session.last_active = self._clock()

    def leave(self, session_id: str | None, private_bytes: int) -> None:
        """A turn of this session ended or was retracted; `private_bytes` is what its path holds now."""
        if session_id is None:
            return
        session = self._sessions[session_id]
        session.running -= 1
        session.private_bytes = private_bytes
        session.last_active = self._clock()

    @property
    def num_live(self) -> int:
        self._expire()
        return len(self._sessions)

    def _expire(self) -> None:
        limit = self._clock() - self._hold_seconds
        gone = [key for key, session in self._sessions.items() if not session.running and session.last_active <= limit]
        for key in gone:
            del self._sessions[key]
