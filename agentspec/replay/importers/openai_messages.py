"""Import OpenAI message transcripts: each line is a list of messages, or an object with `messages` and other request
fields.

A conversation is split before every assistant message, which becomes the turn's recorded answer. Equal lists of tools
are shared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.importers.documents import Toolsets, convert
from agentspec.replay.schema import (
    AssistantMessage,
    Expect,
    InputMessage,
    Meta,
    ReplayFile,
    Session,
    Turn,
    check_session,
    decoded,
    errors_at,
    read_lines,
)

_NOT_REPLAYED = ("stream", "stream_options")
"""Request fields about the delivery of the answer, which the replay client sets itself."""


def read(path: str | Path) -> ReplayFile:
    """Read the transcript as sessions, one per line. Raises ReplayFileError naming line and field."""
    conversations = Transcripts()
    for number, line in read_lines(path):
        with errors_at(path, number):
            conversations.add_conversation(_decode(line), number)
    return conversations.file(path, "openai-messages")


class Transcripts:
    """Collects conversations and requests as sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._toolsets = Toolsets()
        self._models: set[str] = set()
        self._ending: dict[bytes, str] = {}
        """Digest of the messages of a session's last request -> session id."""
        self._arrivals: dict[str, float] = {}
        """Session id -> arrival of its last request, in milliseconds."""

    def file(self, path: str | Path, importer: str) -> ReplayFile:
        """Return the replay file. Raises ReplayFileError without any conversation."""
        if not self._sessions:
            raise ReplayFileError(str(path), 1, "the transcript has no conversations")
        source: dict[str, Any] = {"importer": importer, "file": Path(path).name}
        if self._models:
            source["models"] = sorted(self._models)
        return ReplayFile(
            path=str(path),
            meta=Meta(toolsets=self._toolsets.by_name, source=source),
            sessions=list(self._sessions.values()),
        )

    def add_conversation(self, item: dict[str, Any], number: int) -> None:
        """Add one conversation. Other fields of the object are sent with each request, unchanged."""
        name, toolset, turns = self._turns(item, f"conversation-{number}")
        self._put(Session(session_id=name, toolset=toolset, turns=turns), is_new=True)

    def add_request(self, body: dict[str, Any], number: int, *, at_ms: float, output_tokens: int | None) -> None:
        """Add one request. It continues the session whose last request's messages are a prefix of its own, followed by
        an answer; otherwise it opens a session.

        `at_ms`: its arrival; requests must be added in this order. `output_tokens`: length of its answer."""
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
        """Extend a session by the new turns of a request. `num_known`: number of the request's turns that the session
        has."""
        answered, added = turns[num_known - 1], turns[num_known:]
        last = before.turns[-1]
        expect = msgspec.structs.replace(last.expect or Expect(), message=answered.recorded_message)
        gap = max(0.0, at_ms - self._arrivals[before.session_id])
        added[0] = msgspec.structs.replace(added[0], delay_ms=gap)
        return msgspec.structs.replace(
            before, turns=[*before.turns[:-1], msgspec.structs.replace(last, expect=expect), *added]
        )

    def _turns(self, item: dict[str, Any], name: str) -> tuple[str, str | None, list[Turn]]:
        """Return (name, toolset, turns) of a conversation."""
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
        return name, self._toolsets.name_of(tools), turns

    def _put(self, session: Session, *, is_new: bool) -> None:
        check_session(session, Meta(toolsets=self._toolsets.by_name))
        if is_new and session.session_id in self._sessions:
            raise ValueError(f"id: {session.session_id!r} occurs twice")
        self._sessions[session.session_id] = session


def _decode(line: bytes) -> dict[str, Any]:
    item = decoded(line)
    if isinstance(item, list):
        item = {"messages": item}
    if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
        raise ValueError("must be a list of messages, or an object with `messages`")
    return item


def _digests(toolset: str | None, messages: list[Any]) -> list[bytes]:
    """Return the digests of all prefixes of the messages, from the empty one on, with these tools."""
    digest = hashlib.sha256(str(toolset).encode())
    digests = [digest.digest()]
    for message in messages:
        digest.update(msgspec.json.encode(message, order="sorted") + b"\n")
        digests.append(digest.digest())
    return digests


def _cut(messages: list[Any]) -> list[tuple[list[InputMessage], AssistantMessage | None]]:
    """Return (new messages, answer) of each turn; a last turn without an answer is kept."""
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
