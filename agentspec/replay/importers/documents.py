"""Files of other tools that are one JSON object, a list of them, or one a line. Knows no format's fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import decoded, read_lines

_Value = TypeVar("_Value")


def read_documents(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line, or place in the list from 1; value) of each. Raises ReplayFileError for what isn't JSON, and for a file
    without any."""
    lines = list(read_lines(path))
    if not lines:
        raise ReplayFileError(str(path), 1, "the file is empty")
    try:
        whole = decoded(b"\n".join(line for _, line in lines))
    except ValueError:
        for number, line in lines:
            try:
                yield number, decoded(line)
            except ValueError as error:
                raise ReplayFileError(str(path), number, str(error)) from None
        return
    items = whole if isinstance(whole, list) else [whole]
    if not items:
        raise ReplayFileError(str(path), 1, "the list is empty")
    yield from enumerate(items, start=1)


def convert(where: str, value: Any, kind: type[_Value]) -> _Value:
    """A value as `kind`. Raises ValueError with the path of what is wrong under `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
