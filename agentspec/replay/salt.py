"""Salts: texts at the start of a session that prevent prefix cache hits from earlier runs or other sessions.

They depend only on the seed and the session id, so runs with the same seed send the same prompts. Knows nothing of
servers or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from agentspec.errors import ConfigError
from agentspec.replay.options import ReplayOptions
from agentspec.replay.schema import InputMessage, ReplayFile, Session, TextPart
from agentspec.replay.subagents import kept_sessions

_SYSTEM_BYTES = 2
"""Four hex digits, as in MLPerf Endpoints."""
_USER_BYTES = 8


def salted(file: ReplayFile, options: ReplayOptions) -> ReplayFile:
    """Insert the salts of the options into the sessions that they select. Raises ConfigError for a session that has no
    place for them.

    system: `[salt: ....]` before the system prompt, equal in all sessions of a run, and one after it, unique to the
    session, as in MLPerf Endpoints. Text that the template puts before the system prompt stays shared by all runs, the
    prompt is shared within a run, and the rest is never shared. first-user: one before the first user message, unique
    to the session; tools and system prompt stay shared by all runs. Subagents have the salts of their agent, as in
    aiperf. Forks continue salted messages already."""
    if options.salt == "none":
        return file
    salt = _salt_system if options.salt == "system" else _salt_user
    by_id = {session.session_id: session for session in file.sessions}
    sessions = []
    for session in kept_sessions(file.sessions, options.sessions, options.max_turns):
        try:
            sessions.append(
                session if session.is_fork else _salted(session, options.seed, _agent(session, by_id), salt)
            )
        except ValueError as error:
            raise ConfigError("salt", options.salt, f"session {session.session_id!r}: {error}") from None
    return msgspec.structs.replace(file, sessions=sessions)


def _agent(session: Session, by_id: dict[str, Session]) -> str:
    """Return the id of the session's agent: its root ancestor, or itself."""
    while session.parent is not None:
        session = by_id[session.parent.session_id]
    return session.session_id


_Salt = Callable[[list[InputMessage], int, str], list[InputMessage]]
"""(messages of a first turn, seed, agent) -> salted messages. Raises ValueError when there is no place for the
salts."""


def _salted(session: Session, seed: int, agent: str, salt: _Salt) -> Session:
    first, *others = session.turns
    if first.messages is None:
        raise ValueError("a prompt of token runs has no text to salt; its tokens are another --seed's own")
    messages = salt(first.messages, seed, agent)
    return msgspec.structs.replace(session, turns=[msgspec.structs.replace(first, messages=messages), *others])


def _salt_system(messages: list[InputMessage], seed: int, agent: str) -> list[InputMessage]:
    opening, *others = messages
    if opening.role not in ("system", "developer"):
        raise ValueError("it has no system message")
    before, after = _marker(_SYSTEM_BYTES, seed), _marker(_SYSTEM_BYTES, seed, agent)
    return [_around(opening, f"{before}\n\n", f"\n\n{after}"), *others]


def _salt_user(messages: list[InputMessage], seed: int, agent: str) -> list[InputMessage]:
    place = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if place is None:
        raise ValueError("its first turn has no user message")
    marked = _around(messages[place], f"{_marker(_USER_BYTES, seed, agent)}\n\n", "")
    return [*messages[:place], marked, *messages[place + 1 :]]


def _around(message: InputMessage, before: str, after: str) -> InputMessage:
    content = message.content
    if isinstance(content, str):
        return msgspec.structs.replace(message, content=before + content + after)
    parts = [TextPart(text=before), *content, TextPart(text=after)]
    return msgspec.structs.replace(message, content=[part for part in parts if part.text])


def _marker(num_bytes: int, *of: object) -> str:
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=num_bytes)
    return f"[salt: {digest.hexdigest()}]"
