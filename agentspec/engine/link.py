"""Messages between a server's process and its engine's process beside those of wire.py, and errors as data.

A frame (wire.py) holds a msgpack list of messages. The server sends `Start` first; the engine answers with any number
of `Loading`, then with `Ready` or `Failed`. After that it sends a `Beat` now and then, and answers each `Submit` with
any number of `TokensEvent` and exactly one of `FinishEvent`, `Refused` and `Gone`, the last only after an `Abort`. A
`Failed` after `Ready` is the last message of an engine that died. Knows neither processes nor sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentspec.config import EngineConfig
from agentspec.errors import (
    AgentspecError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    OverloadedError,
    RequestError,
    UnsupportedModelError,
)
from agentspec.types import tokens
from agentspec.wire import Abort, FinishEvent, ModelInfo, Submit, TokensEvent, framed


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the engine chose for itself, for people to read."""

    model_dir: str | None
    """The checkpoint's directory, after a download."""
    device: str
    dtype: str
    num_rows: int
    row_bytes: int
    num_pages: int
    page_bytes: int
    host_bytes: int
    """Of the host tier's rows and pages; 0: no host tier."""
    block_tokens: int
    graphs: str
    """The CUDA graphs of its steps, or why there are none."""
    draft_vocabulary: str
    """The draft vocabulary, in words."""
    weights: str = ""
    """How the weights are stored, in words; of several ranks those of the first."""
    num_ranks: int = 1
    """Processes that hold the model together. Rows and pages have these numbers, and bytes, on each."""


class ErrorData(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of errors.py as a message."""

    kind: str
    text: str
    field: str | None = None
    value: Any = None
    reason: str = ""
    retry_after: int | None = None


class Start(msgspec.Struct, frozen=True, tag="start"):
    config: EngineConfig


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """A Submit with its prompt as bytes. A list would be decoded to one number per id: for 24,000 ids that took 0.4 ms,
    in which no other thread of the engine's process could run."""

    submit: Submit
    prompt: bytes
    """The bytes of a types.tokens array. Both ends are one machine."""


class StatsQuery(msgspec.Struct, frozen=True, tag="stats"):
    number: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End the running requests, then the process."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the engine's start. Any number of them come before `Ready`."""

    stage: str
    done: int
    total: int
    """0: unknown."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo
    setup: EngineSetup


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat: the engine's own thread has just been between two steps."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be loaded, or it died."""

    error: ErrorData


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request's stream raises this."""

    request_id: str
    error: ErrorData


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """An aborted request has released everything, and its id is free."""

    request_id: str


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    number: int
    stats: dict[str, Any]


ToEngine = Start | Submit | Packed | Abort | StatsQuery | Close
ToServer = Loading | Ready | Beat | Failed | TokensEvent | FinishEvent | Refused | Gone | StatsReply

_FIELD_KINDS = {kind.__name__: kind for kind in (ConfigError, RequestError, ContextLengthError)}
_KINDS = {kind.__name__: kind for kind in (AgentspecError, CheckpointError, UnsupportedModelError, EngineClosedError)}
_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[ToEngine] | Sequence[ToServer]) -> bytes:
    """Encode messages as one frame. Raises OverflowError or UnicodeEncodeError for a number or text that msgpack can't
    hold."""
    return framed(_encoder.encode(messages))


def packed(submit: Submit) -> Packed | Submit:
    """The submit as it is sent. A prompt that can't be packed stays a list, so that the engine reports what is wrong
    with it."""
    if not submit.prompt_ids:
        return submit
    ids = submit.prompt_ids
    try:
        prompt = (ids if isinstance(ids, array) and ids.typecode == "i" else tokens(ids)).tobytes()
    except (TypeError, OverflowError):
        return submit
    return Packed(msgspec.structs.replace(submit, prompt_ids=[]), prompt)


def unpacked(message: Packed) -> Submit:
    return msgspec.structs.replace(message.submit, prompt_ids=ids_of(message.prompt))


def ids_of(data: bytes) -> array[int]:
    """Token ids from the bytes of a types.tokens array. Both ends are one machine."""
    ids = tokens()
    ids.frombytes(data)
    return ids


def error_data(error: AgentspecError) -> ErrorData:
    text = _unicode(str(error))
    if isinstance(error, ConfigError | RequestError):
        field, reason = _unicode(error.field), _unicode(error.reason)
        return ErrorData(
            kind=_known(error, _FIELD_KINDS), text=text, field=field, value=_portable(error.value), reason=reason
        )
    if isinstance(error, OverloadedError):
        return ErrorData(kind=OverloadedError.__name__, text=text, retry_after=error.retry_after)
    return ErrorData(kind=_known(error, _KINDS), text=text)


def to_error(data: ErrorData) -> AgentspecError:
    """Rebuild the exception: same type, text, field, value and reason."""
    if data.retry_after is not None:
        return OverloadedError(data.text, data.retry_after)
    error = (
        _KINDS[data.kind](data.text)
        if data.field is None
        else _FIELD_KINDS[data.kind](data.field, data.value, data.reason)
    )
    error.args = (data.text,)
    return error


def _known(error: AgentspecError, kinds: Mapping[str, type[AgentspecError]]) -> str:
    """The name of the error's nearest base class that can be rebuilt."""
    return next(base.__name__ for base in type(error).__mro__ if base.__name__ in kinds)


def _unicode(text: str) -> str:
    """Escape lone surrogates, which JSON files can contain and msgpack can't."""
    return text.encode("utf-8", "backslashreplace").decode()


def _portable(value: object) -> object:
    """The value itself, or its repr if msgpack can't encode it."""
    try:
        _encoder.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError):
        return _unicode(repr(value))
    return value
