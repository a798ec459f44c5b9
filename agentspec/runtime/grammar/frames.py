"""What the engine and the process that compiles grammars say to each other, one frame (wire.py) a message."""

from __future__ import annotations

from typing import IO, Literal, TypeVar

import msgspec

from agentspec.wire import framed, read_frame

_T = TypeVar("_T")


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: what tokens there are."""

    token_bytes: list[bytes]
    """By id; empty for tokens that no text holds."""
    vocab_size: int
    """Of the masks; ids beyond `token_bytes` are never allowed."""
    stop_token_ids: list[int]
    job_seconds: float
    """How long a job may take before it ends the process."""


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """Every further message. One Verdict answers it, unless the process dies of it."""

    kind: Literal["ebnf", "structural_tag"]
    source: str
    lead: str = ""
    """A grammar in EBNF of what comes before; "" for nothing."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None
    """Why the grammar can't be served, for the client; None when the engine may compile it, too."""


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    stream.write(framed(msgspec.msgpack.encode(message)))
    stream.flush()


def read_message(stream: IO[bytes], kind: type[_T]) -> _T | None:
    """None at the end of the stream, or when it ends inside a frame."""
    body = read_frame(stream)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)
