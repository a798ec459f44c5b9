"""Agentic conversations as MLPerf Endpoints keeps them: flat rows, one a message, in the order of a conversation's
turns.

A conversation is cut before every row of the assistant, which becomes the recorded answer; rows of the client that
follow one another are one turn. The benchmark's schema allows fields beyond its own; its client sends none of them, so
they are read over here, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.importers.documents import convert
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
    check_meta,
    check_session,
    decoded,
    read_lines,
)

_REQUEST_FIELDS = (
    *("temperature", "top_p", "top_k", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("stop", "n", "logit_bias", "user", "tool_choice", "chat_template_kwargs"),
)
"""Fields of a client's row that go with its request, as they stand."""

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
    """Opens the conversation, whichever row has it."""
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_results: list[_Result] | None = None
    reasoning_content: str | None = None
    delay_seconds: float | None = None
    """Wait before the row is sent."""
    max_new_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    chat_template: None = None

    @property
    def limit(self) -> int | None:
        return self.max_new_tokens or self.max_completion_tokens or self.max_tokens

    @property
    def messages(self) -> list[InputMessage]:
        """What a row of the client adds."""
        if self.role == "tool":
            return [
                InputMessage(role="tool", tool_call_id=result.tool_call_id, content=result.content)
                for result in self.tool_results or []
            ]
        return [InputMessage(role="user", content=self.content or "", name=self.name)]

    @property
    def answer(self) -> AssistantMessage:
        """What a row of the assistant says."""
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.function.name, arguments=_text(call)))
            for call in self.tool_calls or []
        ]
        return AssistantMessage(
            role="assistant", content=self.content, tool_calls=calls, reasoning_content=self.reasoning_content
        )


def read(path: str | Path) -> ReplayFile:
    """The conversations as sessions, in the order of the file. Raises ReplayFileError naming line and field."""
    conversations: dict[str, _Conversation] = {}
    toolsets: dict[str, list[dict[str, Any]]] = {}
    for number, line in read_lines(path):
        try:
            item = decoded(line)
            if isinstance(item, dict) and item.get("_type") == _METADATA:
                continue
            row = convert("", item, _Row)
            fields = {name: item[name] for name in _REQUEST_FIELDS if item.get(name) is not None}
            conversations.setdefault(row.conversation_id, _Conversation(toolsets)).add(row, fields)
        except ValueError as error:  # also msgspec's own errors
            raise ReplayFileError(str(path), number, str(error)) from None
    if not conversations:
        raise ReplayFileError(str(path), 1, "the file has no conversations")
    meta = Meta(toolsets=toolsets, source={"importer": "mlperf-agentic", "file": Path(path).name})
    sessions = []
    for number, (name, conversation) in enumerate(conversations.items(), start=1):
        try:
            sessions.append(conversation.session(name))
            check_session(sessions[-1], meta)
        except ValueError as error:
            raise ReplayFileError(str(path), number, f"conversation {name!r}: {error}") from None
    return ReplayFile(path=str(path), meta=meta, sessions=sessions)


class _Conversation:
    """The rows of one conversation so far, as turns."""

    def __init__(self, toolsets: dict[str, list[dict[str, Any]]]) -> None:
        self._toolsets = toolsets
        self._num_rows = 0
        self._system: str | None = None
        self._toolset: str | None = None
        self._limit: int | None = None
        """As the first row says; for every row that says nothing."""
        self._turns: list[Turn] = []
        self._is_answered = True

    def add(self, row: _Row, fields: dict[str, Any]) -> None:
        """`fields`: those of the request that the row is sent with. Raises ValueError for a row that can't follow what
        is there."""
        self._num_rows += 1
        if row.turn != self._num_rows:
            raise ValueError(
                f"turn: {row.turn} must be {self._num_rows}, the next of conversation {row.conversation_id!r}"
            )
        self._system = self._system or row.system
        if row.tools and self._toolset is None:
            self._toolset = self._name(row.tools)
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
        """Results belong to the calls of the answer before them: a server could not show others."""
        answer = self._turns[-1].recorded_message if self._turns and self._is_answered else None
        called = [call.id for call in answer.tool_calls] if answer is not None else []
        if not results:
            raise ValueError("tool_results: a row of the role tool needs some")
        for index, result in enumerate(results):
            if result.tool_call_id not in called:
                raise ValueError(
                    f"tool_results[{index}].tool_call_id: {result.tool_call_id!r} is no call of the row before"
                )

    def _name(self, tools: list[dict[str, Any]]) -> str:
        """The name of a list of tools; equal lists have one."""
        name = next((name for name, known in self._toolsets.items() if json.dumps(known) == json.dumps(tools)), None)
        if name is None:
            name = f"tools-{len(self._toolsets) + 1}"
            check_meta(Meta(toolsets={name: tools}))
            self._toolsets[name] = tools
        return name


def _text(call: _Call) -> str:
    arguments = call.function.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
