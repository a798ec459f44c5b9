"""Messages between the engine and its grammar trial process, one per frame (wire.py)."""

from __future__ import annotations

from typing import IO, Literal, TypeVar

import msgspec

from agentspec.wire import framed, read_frame

_T = TypeVar("_T")


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: the tokens."""

    token_bytes: list[bytes]
    """By id; empty for tokens that never appear in text."""
    vocab_size: int
    """Width of the masks; ids beyond `token_bytes` are never allowed."""
    stop_token_ids: list[int]
    job_seconds: float
    """How long a job may take before the process is killed."""


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """Every further message. Answered by one Verdict, unless the process dies."""

    kind: Literal["ebnf", "structural_tag"]
    source: str
    lead: str = ""
    """An EBNF grammar of the text before the main one; "" for none."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None
    """Why the grammar can't be served, for the client; None if the engine may compile it too."""


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    stream.write(framed(msgspec.msgpack.encode(message)))
    stream.flush()


def read_message(stream: IO[bytes], kind: type[_T]) -> _T | None:
    """Read one message; None at the end of the stream, or if it ends inside a frame."""
    body = read_frame(stream)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)
