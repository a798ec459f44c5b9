"""OpenAI message transcripts: each line a list of messages, or an object with `messages` and any other fields of the
request.

A conversation is cut before every assistant message, which becomes the turn's recorded answer. Lists of tools that are
equal are shared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.importers.documents import convert
from agentspec.replay.schema import (
    AssistantMessage,
    Expect,
    InputMessage,
    Meta,
    ReplayFile,
    Session,
    Turn,
    check_meta,
    check_session,
    decoded,
    read_lines,
)

_NOT_REPLAYED = ("stream", "stream_options")
"""Fields that say how an answer was delivered, which is the client's business."""


def read(path: str | Path) -> ReplayFile:
    """The transcript as sessions, one a line. Raises ReplayFileError naming line and field."""
    conversations = Transcripts()
    for number, line in read_lines(path):
        try:
            conversations.add(_decode(line), number)
        except ValueError as error:  # also msgspec's own errors
            raise ReplayFileError(str(path), number, str(error)) from None
    return conversations.file(path, "openai-messages")


class Transcripts:
    """What the conversations so far have given."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._toolsets: dict[str, list[dict[str, Any]]] = {}
        self._models: set[str] = set()
        self._names: dict[str, str] = {}
        """JSON of a list of tools -> its name."""
        self._ending: dict[bytes, str] = {}
        """Digest of the messages of the last request of a session -> the session."""
        self._arrivals: dict[str, float] = {}
        """Session -> arrival of its last request, in milliseconds."""

    def file(self, path: str | Path, importer: str) -> ReplayFile:
        """All of them. Raises ReplayFileError when there are none."""
        if not self._sessions:
            raise ReplayFileError(str(path), 1, "the transcript has no conversations")
        source: dict[str, Any] = {"importer": importer, "file": Path(path).name}
        if self._models:
            source["models"] = sorted(self._models)
        return ReplayFile(
            path=str(path), meta=Meta(toolsets=self._toolsets, source=source), sessions=list(self._sessions.values())
        )

    def add(self, item: dict[str, Any], number: int) -> None:
        """One conversation. Every field of the object beside the ones named here goes with each request, as it
        stands."""
        name, toolset, turns = self._turns(item, f"conversation-{number}")
        self._put(Session(session_id=name, toolset=toolset, turns=turns), is_new=True)

    def add_request(self, body: dict[str, Any], number: int, *, at_ms: float, output_tokens: int | None) -> None:
        """One request. It is the next turn of the session whose last request's messages it begins with, before an
        answer, or opens a session.

        at_ms: its arrival; requests come in that order. output_tokens: length of its answer."""
        name, toolset, turns = self._turns(body, f"request-{number}")
        if turns and turns[-1].recorded_message is not None:
            raise ValueError("messages: the last one is the model's own")
        if output_tokens is not None:
            turns[-1] = msgspec.structs.replace(turns[-1], expect=Expect(output_tokens=output_tokens))
        digests = _digests(toolset, body["messages"])
        answers = [
            index for index, message in enumerate(body["messages"]) if index and message.get("role") == "assistant"
        ]
        known = next((digests[index] for index in reversed(answers) if digests[index] in self._ending), None)
        if known is None:
            session = Session(session_id=name, toolset=toolset, start_ms=at_ms, turns=turns)
        else:
            before = self._sessions[self._ending.pop(known)]
            session = self._continued(
                before, turns, num_known=sum(digests.index(known) >= index for index in answers), at_ms=at_ms
            )
        self._put(session, is_new=known is None)
        self._ending[digests[-1]] = session.session_id
        self._arrivals[session.session_id] = at_ms

    def _continued(self, before: Session, turns: list[Turn], *, num_known: int, at_ms: float) -> Session:
        """A session with what a request adds to it. num_known: turns of the request that end with the session's last
        answer."""
        answered, added = turns[num_known - 1], turns[num_known:]
        last = before.turns[-1]
        expect = msgspec.structs.replace(last.expect or Expect(), message=answered.recorded_message)
        gap = max(0.0, at_ms - self._arrivals[before.session_id])
        added[0] = msgspec.structs.replace(added[0], delay_ms=gap)
        return msgspec.structs.replace(
            before, turns=[*before.turns[:-1], msgspec.structs.replace(last, expect=expect), *added]
        )

    def _turns(self, item: dict[str, Any], name: str) -> tuple[str, str | None, list[Turn]]:
        """Name, tools and turns of a conversation."""
        fields = dict(item)
        messages, tools = fields.pop("messages"), fields.pop("tools", None)
        name = str(fields.pop("id", name))
        if (model := fields.pop("model", None)) is not None:
            self._models.add(str(model))
        for field in _NOT_REPLAYED:
            fields.pop(field, None)
        limit = fields.pop("max_tokens", None)
        if limit is not None:
            limit = convert("max_tokens", limit, int)
        turns = [
            Turn(
                messages=new,
                delay_kind=_kind(new, place),
                max_tokens=limit,
                extra=dict(fields),
                expect=Expect(message=answer) if answer else None,
            )
            for place, (new, answer) in enumerate(_cut(messages))
        ]
        return name, self._toolset(tools), turns

    def _put(self, session: Session, *, is_new: bool) -> None:
        check_session(session, Meta(toolsets=self._toolsets))
        if is_new and session.session_id in self._sessions:
            raise ValueError(f"id: {session.session_id!r} occurs twice")
        self._sessions[session.session_id] = session

    def _toolset(self, tools: Any) -> str | None:
        if not tools:
            return None
        key = json.dumps(tools, ensure_ascii=False)
        if key not in self._names:
            named = {f"tools-{len(self._names) + 1}": msgspec.convert(tools, list[dict[str, Any]])}
            check_meta(Meta(toolsets=named))
            self._names[key] = next(iter(named))
            self._toolsets |= named
        return self._names[key]


def _decode(line: bytes) -> dict[str, Any]:
    item = decoded(line)
    if isinstance(item, list):
        item = {"messages": item}
    if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
        raise ValueError("must be a list of messages, or an object with `messages`")
    return item


def _digests(toolset: str | None, messages: list[Any]) -> list[bytes]:
    """For each number of leading messages, what tells them, under these tools, from all others."""
    digest = hashlib.sha256(str(toolset).encode())
    digests = [digest.digest()]
    for message in messages:
        digest.update(msgspec.json.encode(message, order="sorted") + b"\n")
        digests.append(digest.digest())
    return digests


def _cut(messages: list[Any]) -> list[tuple[list[InputMessage], AssistantMessage | None]]:
    """(new messages, the answer to them) of each turn; a last turn without an answer is kept."""
    turns: list[tuple[list[InputMessage], AssistantMessage | None]] = []
    new: list[InputMessage] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, dict) and message.get("role") == "assistant":
            if not new:
                raise ValueError(f"{where}: an assistant message needs another message before it")
            turns.append((new, convert(where, {"content": None} | message, AssistantMessage)))
            new = []
        else:
            new.append(convert(where, message, InputMessage))
    if new:
        turns.append((new, None))
    return turns


def _kind(new: list[InputMessage], place: int) -> Literal["start", "tool", "user"]:
    if place == 0:
        return "start"
    return "tool" if all(message.role == "tool" for message in new) else "user"
