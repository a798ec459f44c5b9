"""Every exception that agentspec raises at a user, in one tree.

    AgentspecError
    ├── ConfigError          a flag or an engine setting is wrong            (field, value)
    ├── CheckpointError      a model directory can't be loaded as it stands  (names what is wrong)
    │   └── UnsupportedModelError   a model type or a layer type that we don't run
    ├── RequestError         a request can't be served as asked              (field, value)
    │   └── ContextLengthError      prompt, or prompt + max_tokens, over the context limit
    ├── ReplayFileError      a replay file or trace is malformed             (path, line)
    ├── OverloadedError      too many requests wait already; try again later
    ├── TextProcessError     the process that renders and tokenises can't do it; others' requests, or this one later, may be done
    └── EngineClosedError    the engine was closed while the caller still used it
        └── EngineStalledError   it has given no answer for too long; it may come back

User errors carry the field and the value; `assert` is for our own bugs.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """A text that a client or a file may have had a hand in, on one line."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


class AgentspecError(Exception):
    """Base of every error that a user of agentspec can cause or must handle."""


class _FieldError(AgentspecError):
    """An error that one field's value caused. The message always names both."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:200] + "..."
        super().__init__(f"{field}={shown}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class ConfigError(_FieldError):
    """A flag or an engine setting is wrong."""


class CheckpointError(AgentspecError):
    """A model directory can't be loaded as it stands."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint names an architecture or a layer type that agentspec doesn't run."""


class RequestError(_FieldError):
    """A request can't be served as asked. The server answers 400 with the field."""


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
    """More requests wait than the server was told to queue."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        """Seconds."""


class TextProcessError(AgentspecError):
    """A prompt couldn't be built though nothing is known to be wrong with it: the server answers 503."""


class EngineClosedError(AgentspecError):
    """The engine was closed, or its loop died, while a caller still used it."""


class EngineStalledError(EngineClosedError):
    """The engine has given no answer for too long. Nobody knows whether it comes back."""
