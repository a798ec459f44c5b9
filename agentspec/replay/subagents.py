"""Subagents: select the sessions of a run, start subagents, and wait for them. Knows nothing of HTTP.

An agent is a session without a parent, with its direct and indirect subagents. All of them share the agent's lane.
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
    """Return the first `num_agents` agents and the subagents that start within `max_turns` turns, in the given
    order."""
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
    """Index of subagents by parent session and turn."""

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
        """Return all direct and indirect subagents that never start when `session` ends after `num_ended` turns."""
        lost = [child for link, child in self._of(session) if link.turn >= num_ended]
        return lost + [below for child in lost for below in self.not_started(child, 0)]

    def num_inherited(self, session: Session) -> int:
        """Return the number of turns of `session` whose answers its forks inherit."""
        return max((link.turn + 1 for link, child in self._of(session) if child.is_fork), default=0)

    def _of(self, session: Session) -> list[tuple[Parent, Session]]:
        return self._children.get(session.session_id, [])


RunSession = Callable[["AgentRun", Session, float, Conversation], Coroutine[Any, Any, float]]
"""(agent, session, start of its first wait, conversation to continue) -> runs the session; returns when its last turn
ended."""


class AgentRun:
    """A running agent: its lane, and the subagents that it has started."""

    def __init__(self, lane: Lane, subagents: Subagents, group: asyncio.TaskGroup, run: RunSession) -> None:
        """Subagents run as tasks of `group`, which therefore ends after the last of them."""
        self.lane = lane
        self._subagents = subagents
        self._group = group
        self._run = run
        self._tasks: dict[str, asyncio.Task[float]] = {}

    def start_subagents(self, session: Session, turn: int, time: float, conversation: Conversation) -> None:
        """Start the subagents of a turn that ended at `time`; forks continue `conversation`."""
        for child in self._subagents.started_by(session, turn):
            begin = conversation.fork() if child.is_fork else Conversation()
            self._tasks[child.session_id] = self._group.create_task(self._run(self, child, time, begin))

    async def join_subagents(self, session: Session, turn: int) -> float:
        """Wait for the subagents that a turn joins. Returns the time at which the last one ended; 0 without any."""
        return max(
            [await self._tasks[child.session_id] for child in self._subagents.joined_by(session, turn)], default=0.0
        )
