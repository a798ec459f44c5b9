"""JSON bodies to structs, by a table of what each field is to this server.

A field works, or is known and refused because it would change the answer and can't be done, or is accepted because it
says nothing to this server. What no table knows is left out and noted: a client's own fields must not end its work.
Knows no endpoint's fields. `null` means absent, everywhere.
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
    """A field of the endpoint's struct, which holds its type."""
    REFUSED = auto()
    """It would change the answer, and can't be done. Taken with a value that asks for nothing."""
    ACCEPTED = auto()
    """Whatever it says, the answer is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    treatment: Treatment
    words: str = ""
    """For docs/api.md, in Markdown: what it does, or why not."""
    idle: tuple[Any, ...] = ()
    """Values with which a refused field asks for nothing."""


FieldTable = Mapping[str, Field]
"""Every field of a body that anybody here knows, by name."""

Checked = Mapping[str, tuple[Any, ...]]
"""Fields that a struct keeps as they come, with the types that they are held to nevertheless: any one of them.
`name[]`: what a list there holds."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Value = TypeVar("_Value")

_MOST_ROUNDS = 64
"""Each round reads the whole value and leaves out one unknown field, or one name's nulls: what has more of them is
refused."""

_ELEMENTS_READ = 400_000
"""Of the longest list, in all rounds together: where it is very long there are fewer of them."""

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_NULL = re.compile(r"Expected `.*`, got `null`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
"""Of msgspec's paths, such as `$.messages[1].role`."""


def works(words: str) -> Field:
    return Field(treatment=Treatment.WORKS, words=words)


def refused(words: str, *idle: Any) -> Field:
    return Field(treatment=Treatment.REFUSED, words=words, idle=idle)


def accepted(words: str = "") -> Field:
    return Field(treatment=Treatment.ACCEPTED, words=words)


def named(treatment: Treatment, table: FieldTable) -> list[str]:
    """The fields of a table that are treated so, in its order."""
    return [name for name, known in table.items() if known.treatment is treatment]


@dataclass(slots=True)
class Notes:
    """What a request asked for that nobody here knows."""

    strict: bool = False
    """Refuse it instead."""
    _unknown: dict[str, None] = field(default_factory=dict)

    @property
    def unknown(self) -> list[str]:
        """Fields that were left out, each once."""
        return list(self._unknown)

    def leave_out(self, name: str, value: Any, reason: str = "is not a field of this endpoint") -> None:
        """Raises RequestError where notes are strict."""
        if self.strict:
            raise RequestError(name, value, reason)
        self._unknown[name] = None


def read(body: Any, kind: type[_Struct], table: FieldTable, notes: Notes, *, required: tuple[str, ...]) -> _Struct:
    """A decoded body as `kind`. Raises RequestError with the first field that is not served, missing or wrong."""
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
            raise RequestError(name, value, "is not supported" + _only(known.idle))
    for name in required:
        if name not in asked:
            raise RequestError(name, None, "is required")
    return check(asked, kind, notes=notes)


def check(value: Any, kind: type[_Value], name: str = "", *, notes: Notes | None = None) -> _Value:
    """A value as `kind`, which may be any type that msgspec knows. Raises RequestError with the path under `name` and
    what stands there.

    notes: inside of the value, too, what no struct knows is left out, and a null is as good as nothing. None: refused
    like all that is wrong."""
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
    """The value without what is unknown at the path, or without what is null there and in the same place of other
    elements of the lists on the path. None: that is not what is wrong."""
    steps: list[str | int] = [int(index) if index.isdigit() else index or key for key, index in _STEP.findall(path)]
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
    """A copy of what is changed. Elements of a list may be of different kinds: those that have no such place stay."""
    step, *rest = steps
    if isinstance(step, int):
        return [_without_nulls(one, rest) for one in value] if isinstance(value, list) else value
    if not isinstance(value, dict) or step not in value:
        return value
    if rest:
        return {**value, step: _without_nulls(value[step], rest)}
    return {name: one for name, one in value.items() if name != step} if value[step] is None else value


def _spelled(name: str, steps: list[str | int]) -> str:
    for step in steps:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _only(values: tuple[Any, ...]) -> str:
    return f" (only {' or '.join(map(repr, values))})" if values else ""


def _field_error(value: Any, path: str, reason: str, name: str) -> RequestError:
    """Name the field at msgspec's path, under `name`, and the value that stands there."""
    for key, index in _STEP.findall(path):
        if index == "...":
            break
        name += (f".{key}" if name else key) if key else f"[{index}]"
        value = value[int(index) if index else key]
    return RequestError(name or "body", value, reason)
