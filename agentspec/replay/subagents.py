"""Subagents: which sessions of a file a run keeps, and while it runs who starts whom and who waits for whom. Knows
nothing of HTTP.

An agent is a session without a parent, together with its subagents, theirs, and so on. All of them share the agent's
lane.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from agentspec.replay.conversation import Conversation
from agentspec.replay.schema import Parent, Session
from agentspec.replay.warmup import Lane


def kept_sessions(sessions: Sequence[Session], num_agents: int | None, max_turns: int | None) -> list[Session]:
    """The first `num_agents` agents with the subagents that they come to start in their first `max_turns` turns, in the
    order given."""
    by_id = {session.session_id: session for session in sessions}
    agents = {
        session.session_id for session in itertools.islice((one for one in sessions if one.parent is None), num_agents)
    }

    def is_kept(session: Session) -> bool:
        if session.parent is None:
            return session.session_id in agents
        is_started = max_turns is None or session.parent.turn < max_turns
        return is_started and is_kept(by_id[session.parent.session_id])

    return [session for session in sessions if is_kept(session)]


class Subagents:
    """The subagents of sessions, by the session and its turns."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._children: dict[str, list[tuple[Parent, Session]]] = {}
        for session in sessions:
            if session.parent is not None:
                self._children.setdefault(session.parent.session_id, []).append((session.parent, session))

    def started_by(self, session: Session, turn: int) -> list[Session]:
        return [child for link, child in self._of(session) if link.turn == turn]

    def joined_by(self, session: Session, turn: int) -> list[Session]:
        return [child for link, child in self._of(session) if link.join_turn == turn]

    def not_started(self, session: Session, num_ended: int) -> list[Session]:
        """All that never start when `session` ends after `num_ended` of its turns, subagents of subagents included."""
        lost = [child for link, child in self._of(session) if link.turn >= num_ended]
        return lost + [below for child in lost for below in self.not_started(child, 0)]

    def num_inherited(self, session: Session) -> int:
        """Turns of `session` whose answers its forks go on from."""
        return max((link.turn + 1 for link, child in self._of(session) if child.is_fork), default=0)

    def _of(self, session: Session) -> list[tuple[Parent, Session]]:
        return self._children.get(session.session_id, [])


RunSession = Callable[["AgentRun", Session, float, Conversation], Coroutine[Any, Any, float]]
"""Runs a session of an agent: its first wait begins at a time, its messages go on from a conversation. Returns when its
last turn ended."""


class AgentRun:
    """One agent while it runs: its lane, and the subagents that it has started."""

    def __init__(self, lane: Lane, subagents: Subagents, group: asyncio.TaskGroup, run: RunSession) -> None:
        """Subagents run as tasks of `group`, which so ends with the last of them."""
        self.lane = lane
        self._subagents = subagents
        self._group = group
        self._run = run
        self._tasks: dict[str, asyncio.Task[float]] = {}

    def start(self, session: Session, turn: int, time: float, conversation: Conversation) -> None:
        """Start the subagents of a turn that ended at `time`; forks go on from `conversation`."""
        for child in self._subagents.started_by(session, turn):
            begin = conversation.fork() if child.is_fork else Conversation()
            self._tasks[child.session_id] = self._group.create_task(self._run(self, child, time, begin))

    async def join(self, session: Session, turn: int) -> float:
        """Wait for the subagents that a turn joins. Returns when the last of them ended, 0 when there are none."""
        return max(
            [await self._tasks[child.session_id] for child in self._subagents.joined_by(session, turn)], default=0.0
        )
