"""What others made or named: files, read within bounds and only where they are regular; how deep JSON is nested.

Opening a pipe waits for its other end, and a device may have none: neither is a checkpoint, a trace or a setting. Links
to regular files are fine. JSON that is deeper than any real request would only exhaust the stack of whatever walks it.
Knows no other format.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from agentspec.errors import CheckpointError, ConfigError

MAX_NESTING = 100
"""Levels of arrays and objects."""

MAX_BYTES = 64 * 2**20
"""Of a file that is read whole: twice as much as the largest published tokenizers have."""

_PANIC_MODULE = "pyo3_runtime"
"""Where the class of a Rust library's panics says that it is; it can't be imported, and is no Exception."""

_Parsed = TypeVar("_Parsed")


def open_regular(path: str | Path) -> BinaryIO:
    """Raises OSError, whose `strerror` says why, for what is no regular file, too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError:  # a null byte, or a lone surrogate
        raise OSError(errno.EINVAL, "is no name of a file", repr(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, *, most: int = MAX_BYTES) -> bytes:
    """Raises OSError like `open_regular`, and for a file of more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def parsed(path: Path, parse: Callable[[bytes], _Parsed], what: str) -> _Parsed:
    """What `parse` makes of a checkpoint's file. Raises CheckpointError naming the file for all that it raises, a panic
    of a library included.

    what: the file as it should be."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from None
    try:
        return parse(data)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CheckpointError(f"{path}: {what}: {error}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up."""
    return type(error).__module__ == _PANIC_MODULE


def read_text(path: Path) -> str:
    """A checkpoint's file. Raises CheckpointError naming it."""
    return parsed(path, lambda data: data.decode("utf-8"), "not UTF-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises CheckpointError naming it."""
    value = parsed(path, json.loads, "unreadable JSON")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def is_there(path: Path) -> bool:
    """Whether a file that may be absent is there: whatever has its name, so that reading it says what is wrong with
    it."""
    return os.path.lexists(path)


def write(path: str | Path, data: bytes, *, field: str) -> None:
    """Write a result to where a flag says. Raises ConfigError naming the flag, `field`, and the file."""
    try:
        # A pipe that nobody reads must be an error, too, instead of a wait.
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
            os.set_blocking(file.fileno(), True)
            file.write(data)
    except (OSError, ValueError) as error:
        raise ConfigError(field, str(path), f"can't be written: {getattr(error, 'strerror', None) or error}") from None


def may_be_too_deep(text: bytes | bytearray) -> bool:
    """JSON text has brackets enough to be nested too deep. Most has not, and a long prompt's ids need no look at each
    of them."""
    return text.count(b"[") + text.count(b"{") > MAX_NESTING


def is_too_deep(value: Any) -> bool:
    """Arrays and objects, as JSON is decoded, lie in each other more than MAX_NESTING levels deep."""
    level: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 2):
        level = [item for part in level for item in _values(part) if type(item) is list or type(item) is dict]
        if not level:
            return False
    return True


def _values(part: Any) -> Any:
    return part.values() if type(part) is dict else part
