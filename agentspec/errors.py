"""The tree of exceptions that agentspec raises for its users.

    AgentspecError
    ├── ConfigError          a flag or an engine setting is wrong            (field, value)
    ├── CheckpointError      a model directory can't be loaded               (the message names the fault)
    │   └── UnsupportedModelError   a model type or a layer type that agentspec doesn't run
    ├── RequestError         a request is invalid                            (field, value)
    │   └── ContextLengthError      prompt, or prompt + max_tokens, over the context limit
    ├── ReplayFileError      a replay file or trace is malformed             (path, line)
    ├── OverloadedError      the queue is full; try again later
    ├── TextProcessError     rendering or tokenising failed; a retry or other requests may succeed
    └── EngineClosedError    the engine was closed while the caller still used it
        ├── EngineStalledError   the engine doesn't respond; it may recover
        └── RankError            a rank of the engine died, is stuck, or differs from the others

User errors carry the field and the value; `assert` is for internal bugs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


def printable(text: str) -> str:
    """Escape the non-printable characters of a text from a client or a file, so that it stays on one line."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


def cut_repr(value: object, length: int = 200) -> str:
    """The repr of a value from a client or a file, cut. Looks at no more of the value than is shown."""
    shown = beginning(value, length)
    return shown if len(shown) <= length else shown[:length] + "..."


def beginning(value: object, room: int) -> str:
    """A value's repr, or a text of more than `room` characters that begins like it."""
    if isinstance(value, str | bytes):
        return repr(value[: room + 1])
    if type(value) is dict:
        pairs = value.items()
        return _listed("{}", (f"{beginning(key, room)}: {beginning(item, room)}" for key, item in pairs), room)
    if type(value) is list or isinstance(value, array):
        return _listed("[]", (beginning(item, room) for item in value), room)
    return repr(value)


def _listed(brackets: str, parts: Iterable[str], room: int) -> str:
    shown = brackets[0]
    for number, part in enumerate(parts):
        shown += ", " * (number > 0) + part
        if len(shown) > room:
            return shown
    return shown + brackets[1]


class AgentspecError(Exception):
    """Base of every error that a user of agentspec can cause or must handle."""


class _FieldError(AgentspecError):
    """An error caused by the value of one field. The message names both; the value is cut after 200 characters."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={cut_repr(value)}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class ConfigError(_FieldError):
    """A flag or an engine setting is wrong."""


class CheckpointError(AgentspecError):
    """A model directory can't be loaded. The message names the fault."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint names an architecture or a layer type that agentspec doesn't run."""


class RequestError(_FieldError):
    """A request is invalid. The server answers 400 with the field."""


class ContextLengthError(RequestError):
    """The prompt, or prompt and `max_tokens` together, exceed the model's context."""


class ReplayFileError(AgentspecError):
    """A replay file or a trace is malformed."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class OverloadedError(AgentspecError):
    """The queue is full."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        """Seconds until a retry may succeed."""


class TextProcessError(AgentspecError):
    """A prompt couldn't be rendered or tokenised, though the request may be valid. The server answers 503."""


class EngineClosedError(AgentspecError):
    """The engine was closed, or its loop ended with an error, while a caller still used it."""


class EngineStalledError(EngineClosedError):
    """The engine has sent no heartbeat for too long. It may recover."""


class RankError(EngineClosedError):
    """One of the processes that hold a model together died, is stuck, or computed something else than the others. The
    engine has ended; the message names the rank."""
