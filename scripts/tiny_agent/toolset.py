"""Builds the tools of one table of records: what the model sees (JSON schema), what the simulator does, and what each
parameter stands for.

Used by the hand-written domains and by those made up by seed, so the shape of a tool is written once. Knows nothing of
sessions, tasks or phrases.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentspec.replay.simulator import next_key
from agentspec.replay.world import (
    Calculate,
    Create,
    Delete,
    Find,
    Get,
    Locked,
    Record,
    Replace,
    Table,
    ToolAction,
    Update,
)
from scripts.tiny_agent import values
from scripts.tiny_agent.domain import Column, Operation, Split, Verb

Names = Sequence[str] | Mapping[str, str]
"""Parameters by name: each a column's own name, or parameter -> column."""

_FORMATS = {"date": ", YYYY-MM-DD", "time": ", HH:MM"}
_REPEATED = ("person", "city", "word", "date", "time", "count", "people", "tags")
_REPEAT_RATE = 0.3


def schema(column: Column, description: str | None = None) -> Record:
    """JSON schema of a parameter that holds a value of the column."""
    text = (
        description
        if description is not None
        else column.description or column.label.capitalize() + _FORMATS.get(column.kind, "")
    )
    extra: Record = {}
    match column.kind:
        case "people" | "tags":
            extra = {"type": "array", "items": {"type": "string"}}
        case "choice":
            extra = {"type": "string", "enum": list(column.choices)}
        case "flag":
            extra = {"type": "boolean"}
        case "count":
            extra = {"type": "integer", "minimum": 1}
        case "amount":
            extra = {"type": "number"}
        case _:
            extra = {"type": "string"}
    return {**extra, "description": text}


def function(name: str, description: str, properties: Record, required: Sequence[str]) -> Record:
    """A tool in OpenAI's shape."""
    parameters: Record = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(required)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class Toolset:
    """Tools that work on one table. Each method builds one; `word` is the verb as people say it, `texts` overrides
    descriptions of parameters."""

    table: str
    key: Column
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column:
        """The key or the column of this name."""
        return next(column for column in (self.key, *self.columns) if column.name == name)

    def get(
        self,
        name: str,
        word: str,
        description: str,
        *,
        by: Names = (),
        show: Sequence[str] = (),
        verb: Verb = "get",
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Reads one record by its key, or by the parameters in `by`. `verb` is get or read."""
        match = self._names(by or (self.key.name,))
        action = Get(table=self.table, match=match, show=list(show))
        return self._operation(verb, word, name, description, action, self._params(match), tuple(match), texts)

    def find(
        self,
        name: str,
        word: str,
        description: str,
        match: Names = (),
        *,
        contains: Names = (),
        limit: str | None = None,
        required: Sequence[str] = (),
        show: Sequence[str] = (),
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Finds records: parameters that equal a column, parameters that occur in a column, and the greatest number of
        results."""
        equal, inside = self._names(match), self._names(contains)
        params = self._params(equal)
        for param, column_name in inside.items():
            params[param] = _part(self.column(column_name))
        if limit is not None:
            params[limit] = Column(
                name=limit, label="number of results", kind="count", description="Greatest number of results"
            )
        action = Find(table=self.table, match=equal, contains=inside, limit=limit, show=list(show))
        return self._operation("find", word, name, description, action, params, tuple(required), texts)

    def create(
        self,
        name: str,
        word: str,
        description: str,
        names: Names,
        *,
        required: Sequence[str],
        fixed: Record | None = None,
        show: Sequence[str] = (),
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Makes a record. The key is among the parameters when the table doesn't count its own keys."""
        given = self._names(names)
        action = Create(table=self.table, set=given, fixed=fixed or {}, show=list(show))
        return self._operation("create", word, name, description, action, self._params(given), tuple(required), texts)

    def update(
        self,
        name: str,
        word: str,
        description: str,
        names: Names,
        *,
        by: Names = (),
        required: Sequence[str] = (),
        fixed: Record | None = None,
        locked: Locked | None = None,
        show: Sequence[str] = (),
        verb: Verb = "update",
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Changes columns of the record with this key, which is required. `verb` is update or close."""
        match, given = self._names(by or (self.key.name,)), self._names(names)
        action = Update(table=self.table, match=match, set=given, fixed=fixed or {}, locked=locked, show=list(show))
        params = self._params(match) | self._params(given)
        return self._operation(verb, word, name, description, action, params, (*match, *required), texts)

    def close(
        self,
        name: str,
        word: str,
        description: str,
        state: Mapping[str, Any],
        names: Names = (),
        *,
        by: Names = (),
        required: Sequence[str] = (),
        locked: Locked | None = None,
        show: Sequence[str] = (),
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Sets a state for good. Without `locked`, a record that is in this state already is refused."""
        ((column, value),) = state.items()
        refused = locked or Locked(column=column, values=[value], error=f"{{key}} is {value} already")
        return self.update(
            name,
            word,
            description,
            names,
            by=by,
            required=required,
            fixed=dict(state),
            locked=refused,
            show=show,
            verb="close",
            texts=texts,
        )

    def delete(
        self,
        name: str,
        word: str,
        description: str,
        *,
        by: Names = (),
        locked: Locked | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Removes the record with this key."""
        match = self._names(by or (self.key.name,))
        action = Delete(table=self.table, match=match, locked=locked)
        return self._operation("delete", word, name, description, action, self._params(match), tuple(match), texts)

    def replace(
        self,
        name: str,
        word: str,
        description: str,
        column: str,
        *,
        old: str,
        new: str,
        by: Names = (),
        show: Sequence[str] = (),
        texts: Mapping[str, str] | None = None,
    ) -> Operation:
        """Replaces text in one column of the record with this key."""
        match = self._names(by or (self.key.name,))
        action = Replace(table=self.table, match=match, column=column, old=old, new=new, show=list(show))
        params = self._params(match)
        params[old] = Column(
            name=column, label="old text", kind="text", description="Text to replace; it must occur exactly once"
        )
        params[new] = Column(name=column, label="new text", kind="text", description="Text that takes its place")
        return self._operation("replace", word, name, description, action, params, tuple(params), texts)

    def _names(self, names: Names) -> dict[str, str]:
        return dict(names) if isinstance(names, Mapping) else {name: name for name in names}

    def _params(self, names: Mapping[str, str]) -> dict[str, Column]:
        return {param: self.column(column) for param, column in names.items()}

    def _operation(
        self,
        verb: Verb,
        word: str,
        name: str,
        description: str,
        action: ToolAction,
        params: dict[str, Column],
        required: tuple[str, ...],
        texts: Mapping[str, str] | None,
    ) -> Operation:
        properties = {param: schema(column, (texts or {}).get(param)) for param, column in params.items()}
        needed = tuple(param for param in params if param in required)
        return Operation(
            verb=verb,
            word=word,
            tool=function(name, description, properties, needed),
            action=action,
            params=params,
            required=needed,
        )


def calculator(name: str, word: str, description: str, expression: str) -> Operation:
    """The tool of a domain without records."""
    column = Column(
        name=expression, label="expression", kind="text", description="Arithmetic expression with + - * / and brackets"
    )
    tool = function(name, description, {expression: schema(column)}, (expression,))
    return Operation(
        verb="calculate",
        word=word,
        tool=tool,
        action=Calculate(expression=expression),
        params={expression: column},
        required=(expression,),
    )


def _part(column: Column) -> Column:
    """What a parameter holds that is looked for inside a column: one item of a list, a word of a text."""
    match column.kind:
        case "people":
            return replace(
                column, kind="person", label=_singular(column.label), description=f"One of the {column.label}"
            )
        case "tags":
            return replace(column, kind="word", label=_singular(column.label), description=f"One of the {column.label}")
        case _:
            return replace(column, kind="word", description=f"Text in the {column.label}")


def _singular(label: str) -> str:
    for plural, singular in (("ies", "y"), ("sses", "ss"), ("s", "")):
        if label.endswith(plural):
            return label.removesuffix(plural) + singular
    return label


def records(rng: random.Random, split: Split, key: Column, columns: Sequence[Column], num_records: int) -> list[Record]:
    """Records with unique keys. Persons, cities and the like recur now and then, so that a search has one hit or
    two."""
    made: list[Record] = []
    seen: set[str] = set()
    while len(made) < num_records:
        name = values.draw(key, rng, split)
        if str(name).casefold() in seen:
            continue
        seen.add(str(name).casefold())
        record = {key.name: name}
        for column in columns:
            if made and column.kind in _REPEATED and rng.random() < _REPEAT_RATE:
                record[column.name] = rng.choice(made)[column.name]
            else:
                record[column.name] = values.draw(column, rng, split)
        made.append(record)
    return made


def table(key: Column, rows: list[Record]) -> Table:
    """The table of these records; a code that ends in a digit counts its own keys."""
    if key.kind != "code" or not key.form.endswith("#"):
        return Table(key=key.name, records=rows)
    highest = max((str(row[key.name]) for row in rows), key=lambda text: int(text[len(text) - _num_digits(key.form) :]))
    return Table(key=key.name, records=rows, next_key=next_key(highest))


def _num_digits(form: str) -> int:
    return len(form) - len(form.rstrip("#"))
