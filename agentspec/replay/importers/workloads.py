"""Import workload files of other benchmark tools: SGLang's agentic traces, EvalScope's workload traces and aiperf's
multi-turn files."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentspec.replay.importers.documents import convert, read_documents, read_sessions
from agentspec.replay.importers.openai_messages import Transcripts
from agentspec.replay.schema import (
    Expect,
    InputMessage,
    RecordedUsage,
    ReplayFile,
    Session,
    Turn,
    decoded,
    errors_at,
)


class _AgenticTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[InputMessage]
    """New messages, without the model's."""
    prompt_tokens: int | None = None


class _Agentic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    conversations: list[list[_AgenticTurn]]
    metadata: Any = None


def read_sglang_agentic(path: str | Path) -> ReplayFile:
    """Read SGLang's agentic traces: the new messages of each turn. No answers are recorded, so history is live."""
    indices = itertools.count(1)

    def convert_item(item: Any, number: int) -> Iterator[Session]:
        for conversation in convert("", item, _Agentic).conversations:
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
            yield Session(session_id=f"conversation-{next(indices)}", turns=turns)

    return read_sessions(path, "sglang-agentic", convert_item)


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
    """Read aiperf's multi-turn files: user texts with delays or timestamps in milliseconds. No answers are recorded, so
    history is live."""

    def convert_item(item: Any, number: int) -> Iterator[Session]:
        asked = convert("", item, _AiperfSession)
        turns: list[Turn] = []
        before: float | None = None
        for index, turn in enumerate(asked.turns):
            texts = [*([] if turn.text is None else [turn.text]), *(turn.texts or ())]
            if len(texts) != 1 or (turn.text is not None and turn.texts is not None):
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
        yield Session(session_id=asked.session_id or f"session-{number}", start_ms=start_ms, turns=turns)

    return read_sessions(path, "aiperf-multi-turn", convert_item)


class _TracedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: dict[str, Any] | str
    timestamp: float | str
    """Seconds, or an ISO 8601 time."""
    headers: dict[str, str] | None = None
    request_id: str | None = None
    completion_tokens: int | None = None


def read_evalscope_workload(path: str | Path) -> ReplayFile:
    """Read EvalScope's workload traces: whole chat requests with their arrivals.

    A request that continues the messages of an earlier one is the next turn of its session; the answer between them is
    the recorded one. Waits are gaps between arrivals and include the time of the answer."""
    requests = []
    for number, item in read_documents(path):
        with errors_at(path, number):
            traced = convert("", item, _TracedRequest)
            body = decoded(traced.body.encode()) if isinstance(traced.body, str) else traced.body
            if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
                raise ValueError("body: must be a chat request, with messages")
            requests.append((_seconds(traced.timestamp), number, body, traced))
    requests.sort(key=lambda request: request[:2])
    conversations = Transcripts()
    for at, number, body, traced in requests:
        with errors_at(path, number):
            conversations.add_request(
                body, number, at_ms=(at - requests[0][0]) * 1000, output_tokens=traced.completion_tokens
            )
    return conversations.file(path, "evalscope-workload")


def _seconds(timestamp: float | str) -> float:
    if isinstance(timestamp, str):
        try:
            return datetime.datetime.fromisoformat(timestamp).timestamp()
        except ValueError:
            raise ValueError(f"timestamp: {timestamp!r} is neither seconds nor an ISO time") from None
    return timestamp
