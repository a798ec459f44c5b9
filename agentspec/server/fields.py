"""Converts JSON bodies to structs, by a table that says how each field is treated.

A field works; or it is refused, because it would change the answer and isn't supported; or it is accepted without
effect. Unknown fields are left out and noted, so that a client's own fields don't make its requests fail. `null` means
absent, everywhere. Knows no endpoint's fields.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

import msgspec

from agentspec.errors import RequestError


class Treatment(Enum):
    WORKS = auto()
    """A field of the endpoint's struct, which defines its type."""
    REFUSED = auto()
    """It would change the answer, and isn't supported. Accepted with a value that has no effect."""
    ACCEPTED = auto()
    """The answer is the same for every value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    treatment: Treatment
    words: str = ""
    """Its description for docs/api.md, in Markdown: what it does, or why it is refused."""
    idle: tuple[Any, ...] = ()
    """Values of a refused field that have no effect."""


FieldTable = Mapping[str, Field]
"""Every known field of a body, by name."""

Checked = Mapping[str, tuple[Any, ...]]
"""Fields that a struct keeps as sent, with the types they are checked against: any one of them. `name[]`: types of the
elements of a list."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Value = TypeVar("_Value")

_MOST_ROUNDS = 64
"""Each round converts the whole value and removes one unknown field, or the nulls of one name. A body that needs more
rounds is refused."""

_ELEMENTS_READ = 400_000
"""Elements of the longest list read over all rounds: a very long list gets fewer rounds."""

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_NULL = re.compile(r"Expected `.*`, got `null`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
"""One step of msgspec's paths, such as `$.messages[1].role`."""


def works(words: str) -> Field:
    return Field(treatment=Treatment.WORKS, words=words)


def refused(words: str, *idle: Any) -> Field:
    return Field(treatment=Treatment.REFUSED, words=words, idle=idle)


def accepted(words: str = "") -> Field:
    return Field(treatment=Treatment.ACCEPTED, words=words)


def named(treatment: Treatment, table: FieldTable) -> list[str]:
    """The fields with this treatment, in the table's order."""
    return [name for name, known in table.items() if known.treatment is treatment]


@dataclass(slots=True)
class Notes:
    """The unknown fields of one request."""

    strict: bool = False
    """Refuse unknown fields instead of leaving them out."""
    _unknown: dict[str, None] = field(default_factory=dict)

    @property
    def unknown(self) -> list[str]:
        """Names of the fields that were left out, without duplicates."""
        return list(self._unknown)

    def leave_out(self, name: str, value: Any, reason: str = "is not a field of this endpoint") -> None:
        """Note a field that is left out. Raises RequestError if notes are strict."""
        if self.strict:
            raise RequestError(name, value, reason)
        self._unknown[name] = None


def read(body: Any, kind: type[_Struct], table: FieldTable, notes: Notes, *, required: tuple[str, ...]) -> _Struct:
    """Convert a decoded body to `kind`. Raises RequestError for the first field that is refused, missing or wrong."""
    if not isinstance(body, dict):
        raise RequestError("body", body, "must be a JSON object")
    asked: dict[str, Any] = {}
    for name, value in body.items():
        known = table.get(name)
        if known is None:
            notes.leave_out(name, value)
        elif value is None or known.treatment is Treatment.ACCEPTED:
            continue
        elif known.treatment is Treatment.WORKS:
            asked[name] = value
        elif not any(type(value) is type(idle) and value == idle for idle in known.idle):
            only = f" (only {' or '.join(map(repr, known.idle))})" if known.idle else ""
            raise RequestError(name, value, f"is not supported{only}")
    for name in required:
        if name not in asked:
            raise RequestError(name, None, "is required")
    return check(asked, kind, notes=notes)


def check(value: Any, kind: type[_Value], name: str = "", *, notes: Notes | None = None) -> _Value:
    """Convert a value to `kind`, any type that msgspec supports. Raises RequestError with the path under `name` and the
    value there.

    notes: unknown fields and nulls inside of the value are left out, too. None: they are refused like other wrong
    values."""
    whole = value
    for round_left in reversed(range(_num_rounds(value))):
        try:
            return msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at ")
            shorter = (
                None if notes is None or not round_left else _left_out(value, path.strip("`"), reason, name, notes)
            )
            if shorter is None:
                raise _field_error(whole, path.strip("`"), reason, name) from None
            value = shorter
    raise AssertionError("the last round returns or raises")


def _num_rounds(value: Any) -> int:
    lengths = [len(one) for one in value.values() if isinstance(one, list)] if isinstance(value, dict) else []
    return max(4, min(_MOST_ROUNDS, _ELEMENTS_READ // max([1, *lengths])))


def _left_out(value: Any, path: str, reason: str, name: str, notes: Notes) -> Any:
    """The value without the unknown field at the path; or without the null there, and without those at the same place
    in other elements of the lists on the path. None: the error has another cause."""
    steps = _steps(path)
    unknown = _UNKNOWN.fullmatch(reason)
    if unknown:
        steps.append(unknown[1])
    elif not _NULL.match(reason):
        return None
    if not steps or "..." in steps or not isinstance(steps[-1], str):
        return None
    if not unknown:
        return _without_nulls(value, steps)
    shorter = copy.copy(value)
    inner = shorter
    for step in steps[:-1]:
        inner[step] = copy.copy(inner[step])
        inner = inner[step]
    notes.leave_out(_spelled(name, steps), inner.pop(steps[-1]))
    return shorter


def _without_nulls(value: Any, steps: Sequence[str | int]) -> Any:
    """A copy without these nulls. Elements of a list may be of different kinds: those without such a place are kept."""
    step, *rest = steps
    if isinstance(step, int):
        return [_without_nulls(one, rest) for one in value] if isinstance(value, list) else value
    if not isinstance(value, dict) or step not in value:
        return value
    if rest:
        return {**value, step: _without_nulls(value[step], rest)}
    return {name: one for name, one in value.items() if name != step} if value[step] is None else value


def _steps(path: str) -> list[str | int]:
    """Keys and indices; "..." for any key of a dict."""
    return [int(index) if index.isdigit() else index or key for key, index in _STEP.findall(path)]


def _spelled(name: str, steps: list[str | int]) -> str:
    for step in steps:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _field_error(value: Any, path: str, reason: str, name: str) -> RequestError:
    """The error with the field at msgspec's path, under `name`, and the value there."""
    for step in _steps(path):
        if step == "...":
            break
        name = _spelled(name, [step])
        value = value[step]
    return RequestError(name or "body", value, reason)
