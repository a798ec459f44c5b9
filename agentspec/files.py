"""Bounded reads of untrusted files, and the nesting limit for JSON. Knows no other format.

Only regular files and links to them are read: opening a pipe or a device may block forever. JSON that is nested deeper
than any real request would overflow the stack of a recursive reader.
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
"""Limit of a file that is read whole: twice the size of the largest published tokenizers."""

_PANIC_MODULE = "pyo3_runtime"
"""Module name of PyO3's panic class, which can't be imported and derives from BaseException."""

_Parsed = TypeVar("_Parsed")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, with the reason in `strerror`, also for any other kind of
    file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError:  # a null byte, or a lone surrogate
        raise OSError(errno.EINVAL, "is no name of a file", repr(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, *, most: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises OSError like `open_regular`, and for a file of more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def parsed(path: Path, parse: Callable[[bytes], _Parsed], what: str) -> _Parsed:
    """Read a checkpoint's file and parse it. Raises CheckpointError naming the file for every error, including a panic
    of a Rust library.

    what: the fault to name when `parse` fails, such as "not UTF-8"."""
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
    """Whether an exception is a panic of a Rust library."""
    return type(error).__module__ == _PANIC_MODULE


def read_text(path: Path) -> str:
    """Read a checkpoint's file as UTF-8. Raises CheckpointError naming it."""
    return parsed(path, lambda data: data.decode("utf-8"), "not UTF-8")


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a checkpoint's file. Raises CheckpointError naming it."""
    value = parsed(path, json.loads, "unreadable JSON")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def is_there(path: Path) -> bool:
    """Whether an optional file exists. Counts anything with that name, a dangling link too, so that reading it reports
    the fault."""
    return os.path.lexists(path)


def write(path: str | Path, data: bytes, *, field: str) -> None:
    """Write a result to the file that a flag names. Raises ConfigError naming the flag, `field`, and the file."""
    try:
        # O_NONBLOCK: a pipe without a reader must fail instead of blocking.
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
            os.set_blocking(file.fileno(), True)
            file.write(data)
    except (OSError, ValueError) as error:
        raise ConfigError(field, str(path), f"can't be written: {getattr(error, 'strerror', None) or error}") from None


def may_be_too_deep(text: bytes | bytearray) -> bool:
    """Whether JSON text has more than MAX_NESTING opening brackets. A cheap test before `is_too_deep`, which visits
    each of a long prompt's ids."""
    return text.count(b"[") + text.count(b"{") > MAX_NESTING


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON nests arrays and objects more than MAX_NESTING levels deep."""
    level: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 2):
        level = [
            item
            for part in level
            for item in (part.values() if type(part) is dict else part)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return False
    return True
