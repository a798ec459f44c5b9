"""Plays held-out sessions live against a server and records the outcomes with all messages.

Independent of the criteria and of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import unquote

import httpx
import msgspec

from agentspec.replay.measure import Summary
from agentspec.replay.options import ReplayOptions
from agentspec.replay.outcomes import SessionOutcome
from agentspec.replay.run import run_replay
from agentspec.replay.schema import Meta, ReplayFile, Session, check_session
from scripts.tiny_agent.domain import Example
from scripts.tiny_agent.sessions import make, replay_line

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How answers are chosen."""

    name: str
    fields: dict[str, float] = field(default_factory=dict)
    """Fields of every OpenAI request, without the seed."""
    seed: int | None = None
    """Seed of the first session; later sessions have the following seeds. None: greedy."""


GREEDY = Sampling(name="greedy", fields={"temperature": 0.0})

_UNSEEN_EVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A session to play."""

    example: Example
    tasks: tuple[str, ...] = ()
    """Names of the tasks that made its turns, in order; a task may make more than one turn."""

    @property
    def group(self) -> str:
        return "unseen" if self.example.unseen else "known"


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A session that was played."""

    held_out: HeldOut
    outcome: SessionOutcome
    messages: list[Message]
    """Messages of the session's last request, without its answer."""

    @property
    def example(self) -> Example:
        return self.held_out.example


def draw(seed: int, num: int) -> list[HeldOut]:
    """`num` sessions: four of known tools to each one of unseen tools, the mix of workloads/agentic.jsonl."""
    sessions = []
    for index in range(num):
        example, tasks = make(seed, index, split="held_out", unseen=index % _UNSEEN_EVERY == _UNSEEN_EVERY - 1)
        sessions.append(HeldOut(example=example, tasks=tuple(tasks)))
    return sessions


def replay_file(sessions: Sequence[HeldOut], sampling: Sampling) -> ReplayFile:
    """The sessions as a replay file in memory. Raises ValueError for a session that breaks the format's rules."""
    meta = Meta(defaults=sampling.fields)
    lines = []
    for number, held_out in enumerate(sessions):
        line = replay_line(held_out.example)
        if sampling.seed is not None:
            for turn in line["turns"]:
                turn["extra"] = {**turn.get("extra", {}), "seed": sampling.seed + number}
        session = msgspec.convert(line, Session)
        check_session(session, meta)
        lines.append(session)
    return ReplayFile(path="held-out sessions", meta=meta, sessions=lines)


async def play(
    sessions: Sequence[HeldOut],
    client: httpx.AsyncClient,
    *,
    sampling: Sampling = GREEDY,
    concurrency: int,
    progress: TextIO | None = None,
) -> tuple[list[Played], Summary]:
    """Play the sessions, `concurrency` at a time, against the server at the client's base URL."""
    last_requests: dict[str, bytes] = {}

    async def keep(request: httpx.Request) -> None:
        if "x-session-id" in request.headers:
            last_requests[unquote(request.headers["x-session-id"])] = request.content

    client.event_hooks = {"request": [keep]}
    options = ReplayOptions(concurrency=concurrency, delay_scale=0.0)
    report = await run_replay(replay_file(sessions, sampling), options, client, None, progress=progress)
    played = []
    for held_out, record in zip(sessions, report.sessions, strict=True):
        assert record.outcome is not None
        played.append(
            Played(
                held_out=held_out,
                outcome=record.outcome,
                messages=json.loads(last_requests[record.session_id])["messages"],
            )
        )
    return played, report.summary
