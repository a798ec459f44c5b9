"""What the engine and the process that compiles grammars say to each other, one length-prefixed frame a message."""

from __future__ import annotations

from typing import IO, Literal, TypeVar

import msgspec

_LENGTH_BYTES = 8
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


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def read_frame(stream: IO[bytes], kind: type[_T]) -> _T | None:
    """None at the end of the stream, or when it ends inside a frame."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    return None if len(body) < length else msgspec.msgpack.decode(body, type=kind)
