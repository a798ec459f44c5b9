"""The simulated world of a live session, as data: tables of records, what each tool does to them, and the goals of the
user's turns.

A session with a world is no script: the calls that the model makes are executed by simulator.py against these tables.
Declarative, so that a replay file holds everything and tools that nobody has seen before need no code. Knows nothing of
HTTP, models or time.
"""

from __future__ import annotations

from typing import Any

import msgspec

Record = dict[str, Any]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct here; part of the replay format, where unknown keys are errors."""


class Table(_Strict, frozen=True, kw_only=True):
    """Records that share their columns."""

    key: str
    """The column that names a record."""
    records: list[Record]
    next_key: str | None = None
    """Key of the next created record: text that ends in a number, which counts up. None: the call itself gives the
    key."""


class Fails(_Strict, frozen=True, kw_only=True):
    """The first calls of a tool fail, as a busy service does. They change nothing."""

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
    """The one record whose columns equal the arguments, as an object; an error when there is none."""

    table: str
    match: dict[str, str]
    """Parameter -> column. Text is compared without case."""
    show: list[str] = []
    """Columns of the result; empty: all."""


class Find(_Tool, frozen=True, kw_only=True, tag="find"):
    """All records that match the arguments given, as a list in table order; without arguments the whole table."""

    table: str
    match: dict[str, str] = {}
    contains: dict[str, str] = {}
    """Parameter -> column whose text contains the argument, without case; a column with a list contains it as an
    item."""
    limit: str | None = None
    """Parameter with the greatest number of results."""
    show: list[str] = []


class Create(_Tool, frozen=True, kw_only=True, tag="create"):
    """A new record from the arguments given; the result is the record. An error when its key exists."""

    table: str
    set: dict[str, str]
    """Parameter -> column."""
    fixed: Record = {}
    """Columns that every new record has beside them, such as its status."""
    show: list[str] = []


class Update(_Tool, frozen=True, kw_only=True, tag="update"):
    """Changes the one record that matches; the result is the record afterwards. An error when there is none or it is
    locked."""

    table: str
    match: dict[str, str]
    set: dict[str, str] = {}
    fixed: Record = {}
    locked: Locked | None = None
    show: list[str] = []


class Delete(_Tool, frozen=True, kw_only=True, tag="delete"):
    """Removes the one record that matches; the result is `{"deleted": key}`."""

    table: str
    match: dict[str, str]
    locked: Locked | None = None


class Replace(_Tool, frozen=True, kw_only=True, tag="replace"):
    """Replaces text in one column of the one record that matches; an error when `old` doesn't occur in it exactly
    once."""

    table: str
    match: dict[str, str]
    column: str
    old: str
    """Parameter with the text to replace."""
    new: str
    """Parameter with the text that takes its place."""
    show: list[str] = []


class Calculate(_Tool, frozen=True, kw_only=True, tag="calculate"):
    """The value of an arithmetic expression: numbers, + - * / and brackets. The result is `{"result": number}`."""

    expression: str
    """Parameter with the expression."""


ToolAction = Get | Find | Create | Update | Delete | Replace | Calculate


class World(_Strict, frozen=True, kw_only=True):
    """What the tools of a session work on."""

    tables: dict[str, Table]
    actions: dict[str, ToolAction]
    """By the tool's name; each tool of the session has one."""


class Goal(_Strict, frozen=True, kw_only=True):
    """What a user's turn is to achieve. It is reached when the turn ends with an answer in words and all of this
    holds."""

    says: list[str] = []
    """Each of these occurs in the answer, without regard to case."""
    changes: dict[str, dict[str, Record | None]] = {}
    """Table -> key (as text) -> the columns that the turn must leave in that record; None: removed. Nothing else may
    have changed in the turn."""
    max_calls: int | None = None
    """The turn may make at most this many calls; 0: it is to be answered without tools."""
