"""Admission by session: keep the working sets of live sessions together in memory, and let the others wait.

Eviction can't save a cache that more sessions share than fit in it: each turn then evicts the path that the next turn
needs. So sessions stand in order of their arrival, and a turn may run if its session fits beside the working sets of
all the older live ones. When they grow out of the memory, the youngest wait until an older one ends. A session is live
while a turn of it runs or waits, and for `hold_seconds` after. A request without a session is one of its own.

Who has waited for longer than a fair share explains (fairness.py) goes before all others for a turn: others that don't
fit beside it wait when their turns end. A turn is the least that it keeps its place for; then it stands again where it
arrived.

Nobody says when a session has ended for good. Where all that came back lately did so much sooner than `hold_seconds`,
one that has been away for longer than any of them keeps nobody out: its state may be evicted, and it has its place in
the order should it come back all the same. One slow tool among the last few hundred turns, and everybody is waited for
again: a session whose state went in the meantime computes its whole prompt anew.

Rows and pages are two pools, and free bytes of one are of no use to a session that needs the other: it must fit into
both.

Knows bytes and session ids; knows nothing of the cache or of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

_RETURNS = 256
"""Waits between two turns that are kept, of all sessions; and names of sessions that were given up."""
_ENOUGH_RETURNS = 32
"""Fewer say nothing."""
_PATIENCE = 4.0
"""So many times the longest of them, and a session is taken for ended."""
_LEAST_PATIENCE = 0.25
"""Seconds. Networks and clients have pauses of their own."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Bytes that only one session needs of the cache."""

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
        """Neither runs nor waits."""
        return not (self.running or self.waiting)


def rows_of_sessions(num_rows: int, max_running: int) -> int:
    """Rows by which the gate goes, out of `num_rows` for checkpoints: one a slot at least, so that no slot stays empty
    where nobody comes back."""
    return max(num_rows, max_running)


class SessionGate:
    """Decides whether a turn may be considered for admission now."""

    def __init__(
        self,
        *,
        row_bytes: int,
        page_bytes: int,
        budget_bytes: int | None = None,
        hold_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`row_bytes`: of all checkpoint rows; those in which running requests write are not part of it. `page_bytes`:
        of all pages.
        `budget_bytes`: what both may take together; None: whatever there is of each."""
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
        """Seconds that a session which is away keeps others out."""

    def arrive(self, session_id: str) -> None:
        """A turn of this session waits to be admitted."""
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
        """True when the working set of this waiting turn's session fits beside those of the live sessions that go
        before it.

        `need`: what the turn would add. A session that was evicted needs at least what it had. The oldest is always
        allowed."""
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
        """Let these sessions, each of which has a waiting turn, go before all but those that were preferred when their
        turns began: `singles`, which have no other turn, and so many that at most `most[True]` that have had none, and
        at most `most[False]` others, are preferred in all."""
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
        """It goes before those that arrived earlier."""
        return session_id in self._preferred

    def has_run(self, session_id: str) -> bool:
        """True when a turn of this session has ended lately."""
        return self._sessions[session_id].last_active > float("-inf")

    def _in_order(self) -> Iterator[_Session]:
        yield from (self._sessions[key] for key in self._preferred)
        yield from (session for key, session in self._sessions.items() if key not in self._preferred)

    def is_next(self, session_id: str) -> bool:
        """True for the first of the sessions that have a waiting turn."""
        return next(session for session in self._in_order() if session.waiting) is self._sessions[session_id]

    def enter(self, session_id: str) -> None:
        """A waiting turn of this session was admitted."""
        session = self._sessions[session_id]
        session.waiting -= 1
        session.running += 1

    def leave(self, session_id: str, working_set: WorkingSet, *, waits_again: bool, comes_back: bool = True) -> None:
        """A turn of this session ended, or was retracted and waits again; `working_set` is what its path takes now.

        comes_back: False for a session that can't have another turn; it isn't live any more once this one has ended."""
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
