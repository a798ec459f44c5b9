"""Whether a session's next prompt continues the tokens that were generated, or writes the turn anew.

The checkpoint of a generated turn is worth its row only if the client sends those very tokens back. Clients that drop
reasoning, respell arguments or replay recorded answers don't; for their sessions the state at the end of the *prompt*
is the one that the next turn can resume from. So each session is judged by what its last prompt did, and judged again
with every turn.

A prompt with a new user message says nothing: templates render the turns before it anew by design, and the checkpoint
at the last user message stands for them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from agentspec.types import Breakpoint, CheckpointKind

MAX_SESSIONS = 4096
"""Sessions remembered; the least recently used goes first, and is trusted again."""


@dataclass(slots=True)
class _Record:
    query_end: int | None
    length: int
    digest: bytes
    trusted: bool


class TurnTrust:
    """Remembers, by session, where the last turn ended."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def judge(self, session_id: str | None, breakpoints: list[Breakpoint], prompt: array[int]) -> bool:
        """Whether this session's turns come back as they were generated, as far as is known. `prompt`: this turn's."""
        record = None if session_id is None else self._records.get(session_id)
        if record is None:
            return True
        if record.query_end == _query_end(breakpoints) and record.length < len(prompt):
            record.trusted = _digest(prompt, record.length) == record.digest
        return record.trusted

    def ended(
        self, session_id: str | None, breakpoints: list[Breakpoint], sequence: array[int], length: int, *, trusted: bool
    ) -> None:
        """A turn ended with `sequence` (prompt and output); `length` is its last block boundary, behind which a next
        turn would resume."""
        if session_id is None:
            return
        self._records[session_id] = _Record(_query_end(breakpoints), length, _digest(sequence, length), trusted)
        self._records.move_to_end(session_id)
        if len(self._records) > self._max_sessions:
            self._records.popitem(last=False)


def _query_end(breakpoints: list[Breakpoint]) -> int | None:
    """Where the last user message ends."""
    return next((point.offset for point in reversed(breakpoints) if point.kind is CheckpointKind.USER), None)


def _digest(ids: array[int], length: int) -> bytes:
    return hashlib.blake2b(memoryview(ids)[:length], digest_size=16).digest()
