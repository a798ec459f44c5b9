"""Admission by session: keep the working sets of live sessions in memory, and let the others wait.

When more sessions share a cache than fit, eviction can't help: each turn evicts the state that the next turn needs. So
sessions are ordered by arrival, and a turn may run if its session fits beside the working sets of all older live ones.
When working sets outgrow the memory, the youngest sessions wait until an older one ends. A session is live while a turn
of it runs or waits, and for `hold_seconds` after. A request without a session counts as a session of its own.

A late session (fairness.py) goes before all others for one turn: others that don't fit beside it wait when their turns
end. It keeps that place for at least the turn, then returns to its place by arrival.

The engine isn't told when a session has ended for good. If all recent sessions came back much sooner than
`hold_seconds`, a session that is away for longer than any of them no longer makes others wait: its state may be
evicted, but it keeps its place in the order. A single slow tool call among the last few hundred turns makes everyone
wait for the full hold again; a session whose state was evicted meanwhile computes its whole prompt again.

Rows and pages are two pools, and free bytes of one are useless to a session that needs the other: a session must fit
into both.

Knows bytes and session ids; knows nothing of the cache or of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

_RETURNS = 256
"""How many waits between two turns are kept, over all sessions; also how many names of expired sessions."""
_ENOUGH_RETURNS = 32
"""With fewer waits than this, every session gets the full hold."""
_PATIENCE = 4.0
"""A session that is away for this many times the longest recent wait is taken for ended."""
_LEAST_PATIENCE = 0.25
"""Seconds. Covers ordinary delays of networks and clients."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Bytes of the cache that only one session uses."""

    row_bytes: int = 0
    page_bytes: int = 0


NOTHING = WorkingSet()


@dataclass(slots=True)
class _Session:
    working_set: WorkingSet = NOTHING
    running: int = 0
    waiting: int = 0
    last_active: float = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Whether no turn of it runs or waits."""
        return not (self.running or self.waiting)


def rows_of_sessions(num_rows: int, max_running: int) -> int:
    """Checkpoint rows that the gate counts with, out of `num_rows`: at least one per slot, so that no slot stays empty
    where sessions have only one turn."""
    return max(num_rows, max_running)


class SessionGate:
    """Decides which waiting turns may be considered for admission."""

    def __init__(
        self,
        *,
        row_bytes: int,
        page_bytes: int,
        budget_bytes: int | None = None,
        hold_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`row_bytes`: of all checkpoint rows, without the rows in which running requests write. `page_bytes`: of all
        pages. `budget_bytes`: bound on both together; None: each pool is its own bound."""
        self._row_bytes = row_bytes
        self._page_bytes = page_bytes
        self._budget_bytes = row_bytes + page_bytes if budget_bytes is None else budget_bytes
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        """In order of arrival."""
        self._preferred: dict[str, None] = {}
        """Sessions that go before all others, in this order."""
        self._returns: deque[float] = deque(maxlen=_RETURNS)
        """Seconds that sessions were away between two turns; `hold_seconds` for those that came back later."""
        self._given_up: dict[str, None] = {}
        """Sessions that didn't come back within `hold_seconds`, oldest first."""
        self._patience = hold_seconds
        """Seconds for which a session that is away makes others wait."""

    def arrive(self, session_id: str) -> None:
        """A turn of this session starts to wait for admission."""
        self._expire()
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session()
            if session_id in self._given_up:
                del self._given_up[session_id]
                self._came_back(self._hold_seconds)
        elif session.is_idle:
            self._came_back(self._clock() - session.last_active)
        session.waiting += 1

    def allows(self, session_id: str, need: WorkingSet) -> bool:
        """Whether this waiting turn's session fits beside the live sessions that go before it. The first in order is
        always allowed.

        `need`: what the turn would add. A session that was evicted needs at least what it had."""
        self._expire()
        session = self._sessions[session_id]
        had = session.working_set
        session.working_set = WorkingSet(max(had.row_bytes, need.row_bytes), max(had.page_bytes, need.page_bytes))
        row_bytes, page_bytes = session.working_set.row_bytes, session.working_set.page_bytes
        seen_since = self._clock() - self._patience
        for other in self._in_order():
            if other is session:
                break
            if other.working_set == NOTHING or (other.is_idle and other.last_active < seen_since):
                continue
            row_bytes += other.working_set.row_bytes
            page_bytes += other.working_set.page_bytes
            if (
                row_bytes > self._row_bytes
                or page_bytes > self._page_bytes
                or row_bytes + page_bytes > self._budget_bytes
            ):
                return False
        return True

    def prefer(self, session_ids: Iterable[str], *, singles: Collection[str], most: Mapping[bool, int]) -> None:
        """Let late sessions, each of which has a waiting turn, go before all others, after those that were preferred
        when their turns began. `singles`, which will have no other turn, are always preferred; of sessions without an
        ended turn at most `most[True]` are preferred in all, of others at most `most[False]`."""
        kept = [key for key in self._preferred if self._sessions[key].running]
        places = dict(most)
        for key in kept:
            places[not self.has_run(key)] -= 1
        for key in dict.fromkeys(session_ids):
            is_first = not self.has_run(key)
            if key not in kept and (key in singles or places[is_first] > 0):
                places[is_first] -= 1
                kept.append(key)
        self._preferred = dict.fromkeys(kept)

    def is_preferred(self, session_id: str) -> bool:
        """Whether the session goes before those that arrived earlier."""
        return session_id in self._preferred

    def has_run(self, session_id: str) -> bool:
        """Whether a turn of this session has ended while it was live."""
        return self._sessions[session_id].last_active > float("-inf")

    def _in_order(self) -> Iterator[_Session]:
        yield from (self._sessions[key] for key in self._preferred)
        yield from (session for key, session in self._sessions.items() if key not in self._preferred)

    def is_next(self, session_id: str) -> bool:
        """Whether this is the first session in order that has a waiting turn."""
        return next(session for session in self._in_order() if session.waiting) is self._sessions[session_id]

    def enter(self, session_id: str) -> None:
        """A waiting turn of this session was admitted."""
        session = self._sessions[session_id]
        session.waiting -= 1
        session.running += 1

    def leave(self, session_id: str, working_set: WorkingSet, *, waits_again: bool, comes_back: bool = True) -> None:
        """A turn of this session ended, or was retracted and waits again; `working_set` is what its path occupies now.

        comes_back: False for a session that can't have another turn; it stops being live when this one has ended."""
        session = self._sessions[session_id]
        session.running -= 1
        session.waiting += waits_again
        session.working_set = working_set
        session.last_active = self._clock()
        if not session.running:
            self._preferred.pop(session_id, None)
        if session.is_idle and not comes_back:
            del self._sessions[session_id]

    def withdraw(self, session_id: str) -> None:
        """A waiting turn of this session was aborted."""
        self._sessions[session_id].waiting -= 1
        self._preferred.pop(session_id, None)

    @property
    def num_live(self) -> int:
        self._expire()
        return len(self._sessions)

    def _came_back(self, seconds: float) -> None:
        self._returns.append(seconds)
        if len(self._returns) >= _ENOUGH_RETURNS:
            self._patience = min(self._hold_seconds, max(_LEAST_PATIENCE, _PATIENCE * max(self._returns)))

    def _expire(self) -> None:
        limit = self._clock() - self._hold_seconds
        gone = [key for key, session in self._sessions.items() if session.is_idle and session.last_active <= limit]
        for key in gone:
            del self._sessions[key]
            self._given_up[key] = None
        for key in list(self._given_up)[:-_RETURNS]:
            del self._given_up[key]
