"""Workload files of other benchmark tools: SGLang's agentic traces, EvalScope's workload traces and aiperf's multi-turn
files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.importers.documents import convert, read_documents
from agentspec.replay.importers.openai_messages import Transcripts
from agentspec.replay.schema import (
    Expect,
    InputMessage,
    Meta,
    RecordedUsage,
    ReplayFile,
    Session,
    Turn,
    check_session,
    decoded,
)


class _AgenticTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[InputMessage]
    """New ones, none of the model's."""
    prompt_tokens: int | None = None


class _Agentic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    conversations: list[list[_AgenticTurn]]
    metadata: Any = None


def read_sglang_agentic(path: str | Path) -> ReplayFile:
    """SGLang's agentic traces: new messages of each turn. No answers are recorded, so history is live."""
    sessions: list[Session] = []
    for number, item in read_documents(path):
        try:
            for index, conversation in enumerate(convert("", item, _Agentic).conversations, start=len(sessions) + 1):
                turns = [
                    Turn(
                        messages=turn.messages,
                        delay_kind="start"
                        if not place
                        else "tool"
                        if turn.messages and turn.messages[-1].role == "tool"
                        else "user",
                        expect=None
                        if turn.prompt_tokens is None
                        else Expect(usage=RecordedUsage(prompt_tokens=turn.prompt_tokens)),
                    )
                    for place, turn in enumerate(conversation)
                ]
                sessions.append(_checked(Session(session_id=f"conversation-{index}", turns=turns)))
        except ValueError as error:
            raise ReplayFileError(str(path), number, str(error)) from None
    return _file(path, "sglang-agentic", sessions)


class _AiperfTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str | None = None
    texts: list[str] | None = None
    timestamp: float | None = None
    delay: float | None = None
    role: str | None = None
    type: str | None = None


class _AiperfSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    turns: list[_AiperfTurn]
    session_id: str | None = None
    type: str | None = None


def read_aiperf_multi_turn(path: str | Path) -> ReplayFile:
    """aiperf's multi-turn files: a user's texts, with delays or timestamps in milliseconds. No answers are recorded, so
    history is live."""
    sessions = []
    for number, item in read_documents(path):
        try:
            asked = convert("", item, _AiperfSession)
            turns: list[Turn] = []
            before: float | None = None
            for index, turn in enumerate(asked.turns):
                texts = (
                    [turn.text]
                    if turn.texts is None and turn.text is not None
                    else turn.texts
                    if turn.text is None
                    else None
                )
                if texts is None or len(texts) != 1:
                    raise ValueError(f"turns[{index}]: needs one text")
                delay = turn.delay or 0.0
                if turn.timestamp is not None and before is not None:
                    delay = turn.timestamp - before
                message = convert(f"turns[{index}]", {"role": turn.role or "user", "content": texts[0]}, InputMessage)
                turns.append(
                    Turn(
                        messages=[message],
                        delay_ms=max(0.0, delay) if turns else 0.0,
                        delay_kind="user" if turns else "start",
                    )
                )
                before = turn.timestamp
            start_ms = asked.turns[0].timestamp if asked.turns else None
            sessions.append(
                _checked(Session(session_id=asked.session_id or f"session-{number}", start_ms=start_ms, turns=turns))
            )
        except ValueError as error:
            raise ReplayFileError(str(path), number, str(error)) from None
    return _file(path, "aiperf-multi-turn", sessions)


class _TracedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: dict[str, Any] | str
    timestamp: float | str
    """Seconds, or an ISO time."""
    headers: dict[str, str] | None = None
    request_id: str | None = None
    completion_tokens: int | None = None


def read_evalscope_workload(path: str | Path) -> ReplayFile:
    """EvalScope's workload traces: whole chat requests with their arrivals.

    A request whose messages go on where an earlier one's ended is the next turn of its session, and the answer between
    them the recorded one. Waits are gaps between arrivals and include the answer's own time."""
    requests = []
    for number, item in read_documents(path):
        try:
            traced = convert("", item, _TracedRequest)
            body = decoded(traced.body.encode()) if isinstance(traced.body, str) else traced.body
            if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
                raise ValueError("body: must be a chat request, with messages")
            requests.append((_seconds(traced.timestamp), number, body, traced))
        except ValueError as error:  # also msgspec's own
            raise ReplayFileError(str(path), number, str(error)) from None
    requests.sort(key=lambda request: request[:2])
    conversations = Transcripts()
    for at, number, body, traced in requests:
        try:
            conversations.add_request(
                body, number, at_ms=(at - requests[0][0]) * 1000, output_tokens=traced.completion_tokens
            )
        except ValueError as error:
            raise ReplayFileError(str(path), number, str(error)) from None
    return conversations.file(path, "evalscope-workload")


def _seconds(timestamp: float | str) -> float:
    if isinstance(timestamp, str):
        try:
            return datetime.datetime.fromisoformat(timestamp).timestamp()
        except ValueError:
            raise ValueError(f"timestamp: {timestamp!r} is neither seconds nor an ISO time") from None
    return timestamp


def _checked(session: Session) -> Session:
    check_session(session, Meta())
    return session


def _file(path: str | Path, importer: str, sessions: list[Session]) -> ReplayFile:
    if not sessions:
        raise ReplayFileError(str(path), 1, "the file has no sessions")
    return ReplayFile(
        path=str(path), meta=Meta(source={"importer": importer, "file": Path(path).name}), sessions=sessions
    )
