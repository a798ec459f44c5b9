"""Import agentic conversations of MLPerf Endpoints: flat rows, one per message, in the order of each conversation.

A conversation is split before every assistant row, which becomes the recorded answer; consecutive client rows are one
turn. The benchmark's schema allows additional fields; its client sends none of them, so they are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.importers.documents import Toolsets, convert
from agentspec.replay.schema import (
    AssistantMessage,
    Expect,
    FunctionCall,
    InputMessage,
    Meta,
    ReplayFile,
    Session,
    ToolCall,
    Turn,
    check_session,
    decoded,
    errors_at,
    read_lines,
)

_REQUEST_FIELDS = (
    *("temperature", "top_p", "top_k", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("stop", "n", "logit_bias", "user", "tool_choice", "chat_template_kwargs"),
)
"""Fields of a client row that are sent with its request, unchanged."""

_METADATA = "dataset_metadata"
"""`_type` of rows about the file."""


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any]


class _Call(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: _Function


class _Result(msgspec.Struct, frozen=True):
    tool_call_id: str
    content: str


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    conversation_id: str
    turn: int
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    system: str | None = None
    """System prompt of the conversation; may be in any row."""
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_results: list[_Result] | None = None
    reasoning_content: str | None = None
    delay_seconds: float | None = None
    """Wait before the row is sent, in seconds."""
    max_new_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    chat_template: None = None

    @property
    def limit(self) -> int | None:
        return self.max_new_tokens or self.max_completion_tokens or self.max_tokens

    @property
    def messages(self) -> list[InputMessage]:
        """Messages of a client row."""
        if self.role == "tool":
            return [
                InputMessage(role="tool", tool_call_id=result.tool_call_id, content=result.content)
                for result in self.tool_results or []
            ]
        return [InputMessage(role="user", content=self.content or "", name=self.name)]

    @property
    def answer(self) -> AssistantMessage:
        """The answer in an assistant row."""
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.function.name, arguments=_text(call)))
            for call in self.tool_calls or []
        ]
        return AssistantMessage(
            role="assistant", content=self.content, tool_calls=calls, reasoning_content=self.reasoning_content
        )


def read(path: str | Path) -> ReplayFile:
    """Read the conversations as sessions, in the order of the file. Raises ReplayFileError naming line and field."""
    conversations: dict[str, _Conversation] = {}
    toolsets = Toolsets()
    for number, line in read_lines(path):
        with errors_at(path, number):
            item = decoded(line)
            if isinstance(item, dict) and item.get("_type") == _METADATA:
                continue
            row = convert("", item, _Row)
            fields = {name: item[name] for name in _REQUEST_FIELDS if item.get(name) is not None}
            conversations.setdefault(row.conversation_id, _Conversation(toolsets)).add_row(row, fields)
    if not conversations:
        raise ReplayFileError(str(path), 1, "the file has no conversations")
    meta = Meta(toolsets=toolsets.by_name, source={"importer": "mlperf-agentic", "file": Path(path).name})
    sessions = []
    for number, (name, conversation) in enumerate(conversations.items(), start=1):
        with errors_at(path, number, f"conversation {name!r}: "):
            sessions.append(conversation.session(name))
            check_session(sessions[-1], meta)
    return ReplayFile(path=str(path), meta=meta, sessions=sessions)


class _Conversation:
    """Collects the rows of one conversation as turns."""

    def __init__(self, toolsets: Toolsets) -> None:
        self._toolsets = toolsets
        self._num_rows = 0
        self._system: str | None = None
        self._toolset: str | None = None
        self._limit: int | None = None
        """Output limit of the first row that has one; the default for other rows."""
        self._turns: list[Turn] = []
        self._is_answered = True

    def add_row(self, row: _Row, fields: dict[str, Any]) -> None:
        """Add a row; `fields`: its request fields. Raises ValueError for a row that is out of order."""
        self._num_rows += 1
        if row.turn != self._num_rows:
            raise ValueError(
                f"turn: {row.turn} must be {self._num_rows}, the next of conversation {row.conversation_id!r}"
            )
        self._system = self._system or row.system
        self._toolset = self._toolset or self._toolsets.name_of(row.tools)
        if row.role == "assistant":
            self._add_answer(row)
        else:
            self._add_request(row, fields)

    def session(self, name: str) -> Session:
        first, *others = self._turns
        if self._system:
            opening = InputMessage(role="system", content=self._system)
            first = msgspec.structs.replace(first, messages=[opening, *(first.messages or [])])
        return Session(session_id=name, toolset=self._toolset, turns=[first, *others])

    def _add_answer(self, row: _Row) -> None:
        if self._is_answered:
            raise ValueError("role: an answer needs a row of the client before it")
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], expect=Expect(message=row.answer))
        self._is_answered = True

    def _add_request(self, row: _Row, fields: dict[str, Any]) -> None:
        if row.role == "tool":
            self._check_results(row.tool_results or [])
        elif row.content is None:
            raise ValueError("content: a row of the role user needs some")
        self._limit = self._limit or row.limit
        delay_ms = round((row.delay_seconds or 0.0) * 1000, 3)
        if not self._is_answered:
            before = self._turns[-1]
            self._turns[-1] = msgspec.structs.replace(
                before,
                messages=[*(before.messages or []), *row.messages],
                delay_ms=before.delay_ms + delay_ms,
                max_tokens=row.limit or before.max_tokens,
                extra=before.extra | fields,
            )
            return
        kind: Literal["start", "tool", "user"] = (
            "start" if not self._turns else "tool" if row.role == "tool" else "user"
        )
        self._turns.append(
            Turn(
                messages=row.messages,
                delay_ms=delay_ms,
                delay_kind=kind,
                max_tokens=row.limit or self._limit,
                extra=fields,
            )
        )
        self._is_answered = False

    def _check_results(self, results: list[_Result]) -> None:
        """Check that results refer to calls of the previous answer: chat templates can't render others."""
        answer = self._turns[-1].recorded_message if self._turns and self._is_answered else None
        called = [call.id for call in answer.tool_calls] if answer is not None else []
        if not results:
            raise ValueError("tool_results: a row of the role tool needs some")
        for index, result in enumerate(results):
            if result.tool_call_id not in called:
                raise ValueError(
                    f"tool_results[{index}].tool_call_id: {result.tool_call_id!r} is no call of the row before"
                )


def _text(call: _Call) -> str:
    arguments = call.function.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
