"""Read files with one JSON object, a list of objects, or one object per line.

Knows no format's fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import (
    Meta,
    ReplayFile,
    Session,
    check_meta,
    check_session,
    decoded,
    errors_at,
    read_lines,
)

_Value = TypeVar("_Value")


def read_documents(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, or list index from 1; value) of each object. Raises ReplayFileError for invalid JSON and empty
    files."""
    lines = list(read_lines(path))
    if not lines:
        raise ReplayFileError(str(path), 1, "the file is empty")
    try:
        whole = decoded(b"\n".join(line for _, line in lines))
    except ValueError:
        for number, line in lines:
            with errors_at(path, number):
                value = decoded(line)
            yield number, value
        return
    items = whole if isinstance(whole, list) else [whole]
    if not items:
        raise ReplayFileError(str(path), 1, "the list is empty")
    yield from enumerate(items, start=1)


def read_sessions(path: str | Path, importer: str, convert_item: Callable[[Any, int], Iterable[Session]]) -> ReplayFile:
    """Read a file whose objects are converted one by one, by (object, line or list index) -> sessions.

    Raises ReplayFileError for the first invalid object, for repeated session ids, and for a file without sessions."""
    sessions: dict[str, Session] = {}
    for number, item in read_documents(path):
        with errors_at(path, number):
            for session in convert_item(item, number):
                check_session(session, Meta())
                if session.session_id in sessions:
                    raise ValueError(f"session {session.session_id!r} occurs twice")
                sessions[session.session_id] = session
    if not sessions:
        raise ReplayFileError(str(path), 1, "the file has no sessions")
    source = {"importer": importer, "file": Path(path).name}
    return ReplayFile(path=str(path), meta=Meta(source=source), sessions=list(sessions.values()))


class Toolsets:
    """Lists of tools by name. Equal lists share a name."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[dict[str, Any]]] = {}
        self._names: dict[str, str] = {}
        """JSON of a list of tools -> its name."""

    def name_of(self, tools: Any) -> str | None:
        """Return the name of a list of tools, new or known; None without tools. Raises ValueError for invalid tools."""
        if not tools:
            return None
        key = json.dumps(tools, ensure_ascii=False)
        if key not in self._names:
            name = f"tools-{len(self._names) + 1}"
            named = {name: msgspec.convert(tools, list[dict[str, Any]])}
            check_meta(Meta(toolsets=named))
            self._names[key] = name
            self.by_name |= named
        return self._names[key]


def convert(where: str, value: Any, kind: type[_Value]) -> _Value:
    """Convert a value to `kind`. Raises ValueError with the path of the invalid field, under `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
