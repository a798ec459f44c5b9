"""The replay file format `agentspec.replay/1`: its structs, and reading and writing with all rules checked.

JSON lines, plain or gzip: an optional `meta` line, then one session per line. docs/replay.md describes each field.
Unknown keys are errors, except keys that begin with `x_`: notes of other tools, which are dropped. Knows nothing about
HTTP, tokens or time.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from agentspec import files
from agentspec.errors import ReplayFileError
from agentspec.files import MAX_NESTING, is_too_deep, may_be_too_deep
from agentspec.replay.world import Goal, World
from agentspec.replay.world_check import check_goal, check_world

CLIENT_FIELDS = frozenset({"messages", "prompt", "model", "stream", "stream_options", "tools", "return_token_ids"})
"""Request fields that the client itself sets; not allowed in `defaults` or `extra`."""

DEFAULT_MAX_REQUESTS = 8

MAX_LINE_BYTES, MAX_FILE_BYTES = 2**28, 2**32
"""Limits on the decompressed bytes of a line and of a file."""

MAX_TOKENS = 2**24
"""Limit on a prompt or answer that is given by its length."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct of the format."""


class TextPart(_Strict, frozen=True, kw_only=True, tag="text", tag_field="type"):
    text: str


class FunctionCall(_Strict, frozen=True, kw_only=True):
    name: str
    arguments: str
    """A JSON object as text (OpenAI's form), or any other text that the model wrote."""


class ToolCall(_Strict, frozen=True, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class InputMessage(_Strict, frozen=True, kw_only=True):
    """A message that the client adds: any but the model's own."""

    role: Literal["system", "developer", "user", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    """Of a tool result. Absent: results are matched to calls by position."""


class AssistantMessage(_Strict, frozen=True, kw_only=True):
    """A recorded answer."""

    content: str | None
    role: Literal["assistant"]
    tool_calls: list[ToolCall] = []
    reasoning_content: str | None = None


class RecordedUsage(_Strict, frozen=True, kw_only=True):
    """Token counts of the recording server, with its own tokenizer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Expect(_Strict, frozen=True, kw_only=True):
    """Recorded data of a turn. History and output lengths may be taken from it; answers are never compared with it."""

    message: AssistantMessage | None = None
    finish_reason: str | None = None
    output_tokens: int | None = None
    hash_ids: list[int] | None = None
    """Of a token-run turn: the blocks of its `output_tokens`, if later prompts contain them."""
    usage: RecordedUsage | None = None
    latency_ms: float | None = None


class Turn(_Strict, frozen=True, kw_only=True):
    """One request. It has exactly one prompt form: `messages`, or `input_length` with `block_size` and `hash_ids`."""

    messages: list[InputMessage] | None = None
    """New messages only: the answers between turns come from `expect` or from the model."""
    input_length: int | None = None
    """Length of the whole prompt in tokens, including history (token_runs.py)."""
    block_size: int | None = None
    hash_ids: list[int] | None = None
    """One id per block; equal ids mean equal tokens. The last, partial block has its own id."""
    delay_ms: float = 0.0
    """Wait after the last token of the previous turn and of the subagents that the turn joins. A subagent's first wait
    begins after the last token of the turn that starts it."""
    delay_kind: Literal["start", "tool", "user", "none"] = "none"
    max_tokens: int | None = None
    extra: dict[str, Any] = {}
    """OpenAI request fields of this turn, sent unchanged."""
    expect: Expect | None = None
    goal: Goal | None = None
    """Goal of this turn, in a session with a world."""
    max_requests: int = DEFAULT_MAX_REQUESTS
    """In a session with a world: greatest number of requests of this user turn."""

    @property
    def recorded_message(self) -> AssistantMessage | None:
        return self.expect.message if self.expect is not None else None

    @property
    def recorded_output_tokens(self) -> int | None:
        """Length of the recorded answer: `expect.output_tokens`, else from the recorded usage; None when unknown."""
        if self.expect is None:
            return None
        if self.expect.output_tokens is not None:
            return self.expect.output_tokens
        return self.expect.usage.completion_tokens if self.expect.usage is not None else None


class Parent(_Strict, frozen=True, kw_only=True):
    """The parent of a subagent, which starts when `turn` of the parent has ended. In a live session these are user
    turns."""

    session_id: str
    turn: int
    """From 0."""
    mode: Literal["spawn", "fork"] = "spawn"
    """fork: the session continues the parent's messages, including the answer to `turn`, with the parent's tools.
    Token-run prompts are complete, so they contain the inherited part themselves."""
    join_turn: int | None = None
    """The parent's turn that waits until this session has ended. None: no turn waits."""


class Session(_Strict, frozen=True, kw_only=True, tag="session", tag_field="type"):
    session_id: str
    turns: list[Turn]
    group: str | None = None
    """Sessions that repeat the same task share a group."""
    start_ms: float | None = None
    """Arrival on the trace's clock, in milliseconds."""
    toolset: str | None = None
    """Name in `meta.toolsets`."""
    tools: list[dict[str, Any]] | None = None
    parent: Parent | None = None
    """Of a subagent."""
    world: World | None = None
    """The data that the tools operate on. The session is live: the model's calls are executed, and each turn is a user
    turn."""

    @property
    def is_fork(self) -> bool:
        """Whether the session's prompts begin with its parent's messages."""
        return self.parent is not None and self.parent.mode == "fork" and self.turns[0].messages is not None


class Meta(_Strict, frozen=True, kw_only=True, tag="meta", tag_field="type"):
    schema: Literal["agentspec.replay/1"] = "agentspec.replay/1"
    toolsets: dict[str, list[dict[str, Any]]] = {}
    """Lists of OpenAI tools, shared by reference."""
    defaults: dict[str, Any] = {}
    """OpenAI request fields of every turn; a turn's own fields take precedence."""
    source: dict[str, Any] = {}
    """Free text: where the file comes from, and its licence."""


class ReplayFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    meta: Meta
    sessions: list[Session]

    def tools(self, session: Session) -> list[dict[str, Any]]:
        """The tools of a session, in the order and with the key order of the file (both are part of the prompt's
        prefix)."""
        while session.is_fork:
            session = self._parent(session)
        if session.toolset is not None:
            return self.meta.toolsets[session.toolset]
        return session.tools or []

    def inherited(self, session: Session) -> list[Turn]:
        """Return the ancestors' turns with which a fork's prompts begin; empty for other sessions."""
        if session.parent is None or not session.is_fork:
            return []
        parent = self._parent(session)
        return [*self.inherited(parent), *parent.turns[: session.parent.turn + 1]]

    def _parent(self, session: Session) -> Session:
        assert session.parent is not None
        return next(other for other in self.sessions if other.session_id == session.parent.session_id)


@contextmanager
def errors_at(path: str | Path, line: int, prefix: str = "") -> Iterator[None]:
    """Raise the block's ValueError, msgspec's included, as a ReplayFileError at a line."""
    try:
        yield
    except ValueError as error:
        raise ReplayFileError(str(path), line, f"{prefix}{error}") from None


def load(path: str | Path) -> ReplayFile:
    """Read a replay file. Raises ReplayFileError with line and field of the first problem."""
    meta: Meta | None = None
    sessions: dict[str, Session] = {}
    lines: dict[str, int] = {}
    for number, line in read_lines(path):
        with errors_at(path, number):
            item = parse_line(line)
            if isinstance(item, Session):
                check_session(item, meta or Meta())
                if item.session_id in sessions:
                    raise ValueError(f"session_id: {item.session_id!r} occurs twice")
                sessions[item.session_id], lines[item.session_id] = item, number
            else:
                if meta is not None or sessions:
                    raise ValueError("type: the meta line must be the first line, and the only one")
                check_meta(item)
                meta = item
    if not sessions:
        raise ReplayFileError(str(path), 1, "the file has no sessions")
    for name, session in sessions.items():
        with errors_at(path, lines[name], f"session {name!r}: "):
            check_parent(session, sessions)
    return ReplayFile(path=str(path), meta=meta or Meta(), sessions=list(sessions.values()))


def save(file: ReplayFile, path: str | Path) -> None:
    """Write a replay file, gzipped when the name ends in `.gz`. Output is deterministic."""
    data = b"".join(msgspec.json.encode(item) + b"\n" for item in (file.meta, *file.sessions))
    files.write(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data, field="output")


def read_lines(
    path: str | Path, *, line_bytes: int = MAX_LINE_BYTES, file_bytes: int = MAX_FILE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of each non-blank line. Gzip is detected by its magic bytes and read as a stream,
    since it may decompress to much more.

    `line_bytes`, `file_bytes`: limits after decompression. Raises ReplayFileError beyond them, and for a file that is
    not regular."""
    number = size = 0
    try:
        with files.open_regular(path) as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            lines: BinaryIO = gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[assignment]
            while line := lines.readline(line_bytes + 1):
                number, size = number + 1, size + len(line)
                if len(line) > line_bytes:
                    raise ReplayFileError(str(path), number, f"the line has more than {line_bytes:,} bytes")
                if size > file_bytes:
                    raise ReplayFileError(str(path), number, f"the file has more than {file_bytes:,} bytes")
                if line.strip():
                    yield number, line.rstrip(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise ReplayFileError(
            str(path), number, f"can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def decoded(line: bytes) -> Any:
    """Decode a JSON value. Raises ValueError when it is invalid or nested too deep."""
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        value = None
    else:
        if not may_be_too_deep(line) or not is_too_deep(value):
            return value
    raise ValueError(f"the JSON is nested deeper than {MAX_NESTING} levels")


def parse_line(line: bytes) -> Meta | Session:
    """Decode one line to a struct. Checks shape and types, but not the rules between fields (see check_session).

    Raises ValueError naming the field of a missing or unknown key or a wrong type."""
    return msgspec.convert(_without_notes(decoded(line)), type=Meta | Session)


_MAX_MILLISECONDS = 1e15
"""Milliseconds; above any real clock of a trace."""

_NESTED = frozenset(
    ("turns", "messages", "expect", "message", "usage", "parent", "tool_calls", "function", "content", "world", "goal")
)
"""Keys whose values are structs of the format. Other objects (tools, extra, arguments) are not the format's own."""


def _without_notes(value: Any) -> Any:
    """Return the value without the `x_*` keys of the format's own objects."""
    if isinstance(value, list):
        return [_without_notes(item) for item in value]
    if isinstance(value, dict):
        return {
            key: _without_notes(item) if key in _NESTED else item
            for key, item in value.items()
            if not key.startswith("x_")
        }
    return value


def check_meta(meta: Meta) -> None:
    """Raise ValueError for the first rule that the meta line violates."""
    _check_request_fields("defaults", meta.defaults)
    for name, tools in meta.toolsets.items():
        _check_tools(f"toolsets.{name}", tools)


def check_session(session: Session, meta: Meta) -> None:
    """Raise ValueError naming the field for the first rule that a session violates."""
    if not session.session_id:
        raise ValueError("session_id: must not be empty")
    if session.toolset is not None and session.tools is not None:
        raise ValueError("tools: the session has a toolset already; give one of the two")
    if session.toolset is not None and session.toolset not in meta.toolsets:
        raise ValueError(f"toolset: {session.toolset!r} is not in meta.toolsets")
    _check_tools("tools", session.tools or [])
    _check_not_negative("start_ms", session.start_ms)
    if not session.turns:
        raise ValueError("turns: a session needs at least one turn")
    for index, turn in enumerate(session.turns):
        _check_turn(f"turns[{index}]", turn, is_first=index == 0 and not session.is_fork)
    if len({turn.messages is None for turn in session.turns}) > 1:
        raise ValueError("turns: messages and token runs can't be mixed in one session")
    if session.world is not None:
        check_world(
            session.world, meta.toolsets[session.toolset] if session.toolset is not None else session.tools or []
        )
    for index, turn in enumerate(session.turns):
        _check_live(f"turns[{index}]", turn, session.world)


def check_parent(session: Session, sessions: Mapping[str, Session]) -> None:
    """Raise ValueError naming the field for the first rule that a subagent violates. `sessions`: all sessions by id."""
    link = session.parent
    if link is None:
        return
    parent = sessions.get(link.session_id)
    if parent is None:
        raise ValueError(f"parent.session_id: {link.session_id!r} is no session of this file")
    ancestors = [session.session_id]
    above: Session | None = parent
    while above is not None:
        if above.session_id in ancestors:
            raise ValueError(
                f"parent.session_id: the parents go round in a circle: {' -> '.join([*ancestors, above.session_id])}"
            )
        ancestors.append(above.session_id)
        above = sessions.get(above.parent.session_id) if above.parent is not None else None
    for field, turn in (("turn", link.turn), ("join_turn", link.join_turn)):
        if turn is not None and not 0 <= turn < len(parent.turns):
            raise ValueError(
                f"parent.{field}: {turn} is no turn of session {parent.session_id!r}, "
                f"which has {len(parent.turns)}, from 0"
            )
    if link.join_turn is not None and link.join_turn <= link.turn:
        raise ValueError(
            f"parent.join_turn: {link.join_turn} must come after the turn that starts the session, {link.turn}"
        )
    if link.mode == "fork":
        _check_fork(session, parent)


def _check_fork(session: Session, parent: Session) -> None:
    if session.world is not None or parent.world is not None:
        raise ValueError("parent.mode: a fork goes on from recorded turns; neither it nor its parent may have a world")
    if (session.turns[0].messages is None) != (parent.turns[0].messages is None):
        raise ValueError("parent.mode: a fork's turns have the form of its parent's, messages or token runs")
    if session.toolset is not None or session.tools is not None:
        raise ValueError(f"{'tools' if session.toolset is None else 'toolset'}: a fork has its parent's tools")


def _check_turn(where: str, turn: Turn, *, is_first: bool) -> None:
    runs = (turn.input_length, turn.block_size, turn.hash_ids)
    if turn.messages is not None:
        if any(field is not None for field in runs):
            raise ValueError(f"{where}: has both messages and a token-run prompt; give exactly one")
        _check_messages(f"{where}.messages", turn.messages, is_first=is_first)
    else:
        _check_token_runs(where, turn)
    _check_not_negative(f"{where}.delay_ms", turn.delay_ms)
    if turn.max_tokens is not None and turn.max_tokens < 1:
        raise ValueError(f"{where}.max_tokens: {turn.max_tokens} must be at least 1")
    if turn.max_tokens is not None and "max_tokens" in turn.extra:
        raise ValueError(f"{where}.extra: max_tokens is a field of the turn itself")
    _check_request_fields(f"{where}.extra", turn.extra)
    if turn.expect is not None:
        _check_expect(f"{where}.expect", turn.expect)
        if turn.expect.hash_ids is not None:
            _check_answer_blocks(f"{where}.expect.hash_ids", turn, turn.expect.hash_ids)


def _check_live(where: str, turn: Turn, world: World | None) -> None:
    """Check the rules of turns in a session with a world, or without one."""
    if turn.max_requests < 1:
        raise ValueError(f"{where}.max_requests: {turn.max_requests} must be at least 1")
    if world is None:
        if turn.goal is not None:
            raise ValueError(f"{where}.goal: only a session with a world has goals")
        if turn.max_requests != DEFAULT_MAX_REQUESTS:
            raise ValueError(f"{where}.max_requests: only a session with a world makes several requests a turn")
        return
    if turn.messages is None:
        raise ValueError(f"{where}: a session with a world needs messages, not token runs")
    if turn.expect is not None:
        raise ValueError(f"{where}.expect: nothing is recorded in a session with a world")
    for index, message in enumerate(turn.messages):
        if message.role == "tool":
            raise ValueError(
                f"{where}.messages[{index}].role: results come from the session's world, not from a tool message"
            )
    if turn.messages[-1].role != "user":
        raise ValueError(f"{where}.messages: the last one must be the user's in a session with a world")
    if turn.goal is not None:
        check_goal(f"{where}.goal", turn.goal, world)


def _check_messages(where: str, messages: list[InputMessage], *, is_first: bool) -> None:
    if not messages:
        raise ValueError(f"{where}: needs at least one message")
    for index, message in enumerate(messages):
        if message.role in ("system", "developer") and not (is_first and index == 0):
            raise ValueError(f"{where}[{index}].role: a {message.role} message can only open the session")
        if message.role != "tool" and message.tool_call_id is not None:
            raise ValueError(f"{where}[{index}].tool_call_id: only a tool message has one")
        if message.role == "tool" and is_first:
            raise ValueError(f"{where}[{index}].role: a tool message needs an assistant message before it")


def _check_token_runs(where: str, turn: Turn) -> None:
    if turn.input_length is None or turn.block_size is None or turn.hash_ids is None:
        raise ValueError(f"{where}: needs messages, or all of input_length, block_size and hash_ids")
    if not (1 <= turn.input_length <= MAX_TOKENS and 1 <= turn.block_size <= MAX_TOKENS):
        raise ValueError(
            f"{where}: input_length {turn.input_length} and block_size {turn.block_size} must be 1 to {MAX_TOKENS}"
        )
    _check_blocks(f"{where}.hash_ids", turn.hash_ids, turn.block_size, "input_length", turn.input_length)


def _check_answer_blocks(where: str, turn: Turn, hash_ids: list[int]) -> None:
    num_tokens = turn.expect.output_tokens if turn.expect is not None else None
    if turn.block_size is None or num_tokens is None:
        raise ValueError(f"{where}: needs a token-run prompt with its block_size, and output_tokens")
    _check_blocks(where, hash_ids, turn.block_size, "output_tokens", num_tokens)


def _check_blocks(where: str, hash_ids: list[int], block_size: int, name: str, num_tokens: int) -> None:
    num_blocks = -(-num_tokens // block_size)
    if len(hash_ids) != num_blocks:
        raise ValueError(f"{where}: has {len(hash_ids)} ids; {name} {num_tokens} makes {num_blocks} blocks")
    if any(not 0 <= block_id < 2**63 for block_id in hash_ids):
        raise ValueError(f"{where}: ids must be between 0 and 2**63 - 1")


def _check_expect(where: str, expect: Expect) -> None:
    _check_not_negative(f"{where}.latency_ms", expect.latency_ms)
    if expect.output_tokens is not None and not 1 <= expect.output_tokens <= MAX_TOKENS:
        raise ValueError(f"{where}.output_tokens: {expect.output_tokens} must be 1 to {MAX_TOKENS}")


def _check_request_fields(where: str, fields: dict[str, Any]) -> None:
    taken = sorted(CLIENT_FIELDS & fields.keys())
    if taken:
        raise ValueError(f"{where}: {taken[0]} is written by the client and can't be set here")


def _check_tools(where: str, tools: list[dict[str, Any]]) -> None:
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ValueError(f"{where}[{index}]: is not an OpenAI function tool (type, function.name)")


def _check_not_negative(where: str, value: float | None) -> None:
    if value is not None and not 0 <= value < _MAX_MILLISECONDS:
        raise ValueError(f"{where}: {value} must not be negative, nor {_MAX_MILLISECONDS:g} or more")
