"""The simulated world of a live session, as data: tables of records, the action of each tool, and the goals of user
turns.

In a session with a world, simulator.py executes the model's calls against these tables. The description is declarative,
so that a replay file is self-contained and new tools need no code. Knows nothing of HTTP, models or time.
"""

from __future__ import annotations

from typing import Any

import msgspec

Record = dict[str, Any]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct here. Part of the replay format: unknown keys are errors."""


class Table(_Strict, frozen=True, kw_only=True):
    """A table: records with the same columns."""

    key: str
    """The column that identifies a record."""
    records: list[Record]
    next_key: str | None = None
    """Key of the next created record: text that ends in a number, which is incremented. None: the call gives the
    key."""


class Fails(_Strict, frozen=True, kw_only=True):
    """The first `times` calls of a tool fail without any effect, like those of a busy service."""

    times: int
    error: str


class Locked(_Strict, frozen=True, kw_only=True):
    """A record whose `column` has one of `values` can't be changed; `error` may hold `{key}` and `{value}`."""

    column: str
    values: list[Any]
    error: str


class _Tool(_Strict, frozen=True, kw_only=True, tag_field="do"):
    fails: Fails | None = None


class Get(_Tool, frozen=True, kw_only=True, tag="get"):
    """Return the one record whose columns equal the arguments; an error without exactly one."""

    table: str
    match: dict[str, str]
    """Parameter -> column. Text is compared without case."""
    show: list[str] = []
    """Columns of the result; empty: all."""


class Find(_Tool, frozen=True, kw_only=True, tag="find"):
    """Return the list of records that match the given arguments, in table order; without arguments the whole table."""

    table: str
    match: dict[str, str] = {}
    contains: dict[str, str] = {}
    """Parameter -> column whose text contains the argument, ignoring case; a list column must contain it as an item."""
    limit: str | None = None
    """Parameter that limits the number of results."""
    show: list[str] = []


class Create(_Tool, frozen=True, kw_only=True, tag="create"):
    """Create a record from the given arguments and return it; an error when its key exists."""

    table: str
    set: dict[str, str]
    """Parameter -> column."""
    fixed: Record = {}
    """Further columns of every new record, such as a status."""
    show: list[str] = []


class Update(_Tool, frozen=True, kw_only=True, tag="update"):
    """Change the one record that matches and return it; an error when there is none or it is locked."""

    table: str
    match: dict[str, str]
    set: dict[str, str] = {}
    fixed: Record = {}
    locked: Locked | None = None
    show: list[str] = []


class Delete(_Tool, frozen=True, kw_only=True, tag="delete"):
    """Remove the one record that matches and return `{"deleted": key}`."""

    table: str
    match: dict[str, str]
    locked: Locked | None = None


class Replace(_Tool, frozen=True, kw_only=True, tag="replace"):
    """Replace text in one column of the one record that matches; an error unless `old` occurs in it exactly once."""

    table: str
    match: dict[str, str]
    column: str
    old: str
    """Parameter with the text to replace."""
    new: str
    """Parameter with the new text."""
    show: list[str] = []


class Calculate(_Tool, frozen=True, kw_only=True, tag="calculate"):
    """Evaluate an arithmetic expression of numbers, + - * / and brackets; return `{"result": number}`."""

    expression: str
    """Parameter with the expression."""


ToolAction = Get | Find | Create | Update | Delete | Replace | Calculate


class World(_Strict, frozen=True, kw_only=True):
    """The tables and actions of a session's tools."""

    tables: dict[str, Table]
    actions: dict[str, ToolAction]
    """Tool name -> action. Each tool of the session has one."""


class Goal(_Strict, frozen=True, kw_only=True):
    """The goal of a user turn. It is reached when the turn ends with a text answer and all of these conditions hold."""

    says: list[str] = []
    """Texts that must occur in the answer, ignoring case."""
    changes: dict[str, dict[str, Record | None]] = {}
    """Table -> key (as text) -> columns that the record must have after the turn; None: the record is removed. Nothing
    else may change in the turn."""
    max_calls: int | None = None
    """Greatest number of calls; 0: the turn must be answered without tools."""
