"""What crosses between a server's process and its engine's process: messages beside those of wire.py, and errors as
data.

A frame (wire.py) holds a msgpack list of messages. The server sends `Start` first, and the engine answers with any
number of `Loading`, then with `Ready` or with `Failed`. From then on it sends a `Beat` now and then, and each `Submit`
is answered with any number of `TokensEvent` and exactly one of `FinishEvent`, `Refused` and `Gone`, the last one only
after an `Abort`. A `Failed` after `Ready` is the last word of an engine that died. Knows neither processes nor sockets.
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
    """What the engine chose for itself, for people to read."""

    model_dir: str | None
    """The checkpoint's directory, after a download."""
    device: str
    dtype: str
    num_rows: int
    row_bytes: int
    num_pages: int
    page_bytes: int
    host_bytes: int
    """Of the host tier's rows and pages; 0: there is none."""
    block_tokens: int
    graphs: str
    """The CUDA graphs of its steps, or why there are none."""
    draft_vocabulary: str
    """What drafts are chosen from, in words."""


class ErrorData(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of errors.py on its way."""

    kind: str
    text: str
    field: str | None = None
    value: Any = None
    reason: str = ""
    retry_after: int | None = None


class Start(msgspec.Struct, frozen=True, tag="start"):
    config: EngineConfig


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """A Submit with its prompt beside it. From a list, the engine's process makes a number of each id, and 24,000 of
    them took it 0.4 ms in which no other thread of it could run."""

    submit: Submit
    prompt: bytes
    """Of the array of types.tokens. Both ends are one machine."""


class StatsQuery(msgspec.Struct, frozen=True, tag="stats"):
    number: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End what runs, then the process."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What the engine's start is at. Any number of them come before `Ready`."""

    stage: str
    done: int
    total: int
    """0: nobody can say."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo
    setup: EngineSetup


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The engine's own thread came round just now."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be loaded, or it died."""

    error: ErrorData


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request's stream raises this."""

    request_id: str
    error: ErrorData


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """An aborted request holds nothing any more, and its id is free."""

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
    """Raises OverflowError or UnicodeEncodeError for a number or a text that msgpack can't hold."""
    return framed(_encoder.encode(messages))


def packed(submit: Submit) -> Packed | Submit:
    """The submit as it travels: itself if its prompt can't be packed, so that the engine says what is wrong with it."""
    if not submit.prompt_ids:
        return submit
    try:
        prompt = tokens(submit.prompt_ids).tobytes()
    except (TypeError, OverflowError):
        return submit
    return Packed(msgspec.structs.replace(submit, prompt_ids=[]), prompt)


def unpacked(message: Packed) -> Submit:
    return msgspec.structs.replace(message.submit, prompt_ids=ids_of(message.prompt))


def ids_of(data: bytes) -> array[int]:
    """Token ids from the bytes of an array of types.tokens. Both ends are one machine."""
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
    """The exception again: same type, same text, and its field, value and reason."""
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
    """The nearest class above the error's that can be built again."""
    return next(base.__name__ for base in type(error).__mro__ if base.__name__ in kinds)


def _unicode(text: str) -> str:
    """Without lone surrogates, which a file's JSON can spell and msgpack can't."""
    return text.encode("utf-8", "backslashreplace").decode()


def _portable(value: object) -> object:
    """The value itself, or its repr where msgpack has no such thing."""
    try:
        _encoder.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError):
        return _unicode(repr(value))
    return value
