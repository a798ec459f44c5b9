"""Predicts whether a session's next prompt will contain the generated tokens unchanged.

The checkpoint of a generated turn is worth its row only if the client sends exactly those tokens back. Clients that
drop reasoning, respell arguments or replay recorded answers don't; their next turn can only resume from the state at
the end of the *prompt*. So each session is judged by what its last prompt did, again at every turn.

A prompt with a new user message is no evidence: templates render earlier turns again by design, and the checkpoint at
the last user message covers that.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from agentspec.runtime.request import Request
from agentspec.types import Breakpoint, CheckpointKind

MAX_SESSIONS = 4096
"""Sessions remembered; the least recently used is forgotten first, and trusted again."""


@dataclass(slots=True)
class _Record:
    query_end: int | None
    length: int
    digest: bytes
    trusted: bool


class TurnTrust:
    """Remembers where each session's last turn ended."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def judge(self, request: Request) -> bool:
        """Whether the request's session is expected to send its turns back as they were generated. `request`: a turn
        whose output hasn't begun, or that was preempted."""
        session_id = request.submit.session_id
        record = None if session_id is None else self._records.get(session_id)
        if record is None:
            return True
        if record.query_end == _query_end(request.submit.breakpoints) and record.length < len(request.sequence):
            record.trusted = _digest(request.sequence, record.length) == record.digest
        return record.trusted

    def record_turn(self, request: Request, length: int) -> None:
        """Record an ended turn. `length`: its last block boundary, from which a next turn would resume."""
        submit = request.submit
        if submit.session_id is None:
            return
        self._records[submit.session_id] = _Record(
            _query_end(submit.breakpoints), length, _digest(request.sequence, length), request.turn_trusted
        )
        self._records.move_to_end(submit.session_id)
        if len(self._records) > self._max_sessions:
            self._records.popitem(last=False)


def _query_end(breakpoints: list[Breakpoint]) -> int | None:
    """Offset of the end of the last user message; None if there is none."""
    return next((point.offset for point in reversed(breakpoints) if point.kind is CheckpointKind.USER), None)


def _digest(ids: array[int], length: int) -> bytes:
    return hashlib.blake2b(memoryview(ids)[:length], digest_size=16).digest()
