"""OpenAI message transcripts: each line a list of messages, or an object with `messages` and any other fields of the request.

A conversation is cut before every assistant message, which becomes the turn's recorded answer. Lists of tools that are equal are shared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import AssistantMessage, Expect, InputMessage, Meta, ReplayFile, Session, Turn, check_meta, check_session, read_lines

_NOT_REPLAYED = ("stream", "stream_options")
"""Fields that say how an answer was delivered, which is the client's business."""


def read(path: str | Path) -> ReplayFile:
    """The transcript as sessions, one a line. Raises ReplayFileError naming line and field."""
    reader = _Reader()
    for number, line in read_lines(path):
        try:
            reader.add(_decode(line), number)
        except ValueError as error:  # also msgspec's own errors
            raise ReplayFileError(str(path), number, str(error)) from None
    if not reader.sessions:
        raise ReplayFileError(str(path), 1, "the transcript has no conversations")
    source: dict[str, Any] = {"importer": "openai-messages", "file": Path(path).name}
    if reader.models:
        source["models"] = sorted(reader.models)
    meta = Meta(toolsets=reader.toolsets, source=source)
    return ReplayFile(path=str(path), meta=meta, sessions=list(reader.sessions.values()))


class _Reader:
    """What the lines so far have given."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.toolsets: dict[str, list[dict[str, Any]]] = {}
        self.models: set[str] = set()
        self._names: dict[str, str] = {}
        """JSON of a list of tools -> its name."""

    def add(self, item: dict[str, Any], number: int) -> None:
        """One conversation. Every field of the object beside the ones named here goes with each request, as it stands."""
        fields = dict(item)
        messages, tools = fields.pop("messages"), fields.pop("tools", None)
        name = str(fields.pop("id", f"conversation-{number}"))
        if (model := fields.pop("model", None)) is not None:
            self.models.add(str(model))
        for field in _NOT_REPLAYED:
            fields.pop(field, None)
        limit = _convert("max_tokens", fields.pop("max_tokens", None), int | None)
        turns = [
            Turn(messages=new, delay_kind=_kind(new, place), max_tokens=limit, extra=dict(fields), expect=Expect(message=answer) if answer else None)
            for place, (new, answer) in enumerate(_cut(messages))
        ]
        session = Session(session_id=name, toolset=self._toolset(tools), turns=turns)
        check_session(session, Meta(toolsets=self.toolsets))
        if name in self.sessions:
            raise ValueError(f"id: {name!r} occurs twice")
        self.sessions[name] = session

    def _toolset(self, tools: Any) -> str | None:
        if not tools:
            return None
        key = json.dumps(tools, ensure_ascii=False)
        if key not in self._names:
            named = {f"tools-{len(self._names) + 1}": msgspec.convert(tools, list[dict[str, Any]])}
            check_meta(Meta(toolsets=named))
            self._names[key] = next(iter(named))
            self.toolsets |= named
        return self._names[key]


def _decode(line: bytes) -> dict[str, Any]:
    item = msgspec.json.decode(line)
    if isinstance(item, list):
        item = {"messages": item}
    if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
        raise ValueError("must be a list of messages, or an object with `messages`")
    return item


def _cut(messages: list[Any]) -> list[tuple[list[InputMessage], AssistantMessage | None]]:
    """(new messages, the answer to them) of each turn; a last turn without an answer is kept."""
    turns: list[tuple[list[InputMessage], AssistantMessage | None]] = []
    new: list[InputMessage] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, dict) and message.get("role") == "assistant":
            if not new:
                raise ValueError(f"{where}: an assistant message needs another message before it")
            turns.append((new, _convert(where, {"content": None} | message, AssistantMessage)))
            new = []
        else:
            new.append(_convert(where, message, InputMessage))
    if new:
        turns.append((new, None))
    return turns


def _convert(where: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def _kind(new: list[InputMessage], place: int) -> Literal["start", "tool", "user"]:
    if place == 0:
        return "start"
    return "tool" if all(message.role == "tool" for message in new) else "user"
