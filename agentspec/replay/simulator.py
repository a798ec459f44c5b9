"""Execute the tools of a simulated world deterministically: from a call to the text of its result.

A call that a real service would refuse (unknown tool, arguments that violate the schema, no such record) returns an
error as its result. Knows nothing of HTTP, models or time.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from agentspec.replay.world import (
    Calculate,
    Create,
    Delete,
    Find,
    Get,
    Goal,
    Locked,
    Record,
    Replace,
    Table,
    Update,
    World,
)

Tables = dict[str, dict[str, Record]]
"""Table name -> key as text -> record, in table order."""


class ToolError(Exception):
    """The tool refuses the call; the model gets the message as the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a call."""

    text: str
    """Content of the tool message: JSON."""
    problem: str | None = None
    """Why the call itself is invalid (no such tool, not a JSON object, schema violated); None for a valid call, even if
    its result is an error."""
    kind: str | None = None
    """The problem without names and values, for counting."""


_Problem = tuple[str, str]
"""(kind, text)."""


class Simulator:
    """The running world of one session. Use `call` for each tool call in order, `snapshot` before a turn and `misses`
    after it."""

    def __init__(self, world: World, tools: list[dict[str, Any]]) -> None:
        """`tools`: OpenAI function tools; calls are validated against their schemas."""
        self._actions = world.actions
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools
        }
        self._specs = world.tables
        self._tables: Tables = {
            name: {str(r[table.key]): dict(r) for r in table.records} for name, table in world.tables.items()
        }
        self._next = {name: table.next_key for name, table in world.tables.items()}
        self._num_calls = dict.fromkeys(world.actions, 0)

    def call(self, name: str, arguments: str) -> Outcome:
        """Execute one call; `arguments`: the JSON text that the model wrote."""
        values = self._values(name, arguments)
        if isinstance(values, tuple):
            kind, problem = values
            return Outcome(text=_json({"error": problem}), problem=problem, kind=kind)
        try:
            result = self._execute(name, values)
        except ToolError as error:
            result = {"error": str(error)}
        return Outcome(text=_json(result))

    def problem(self, name: str, arguments: str) -> tuple[str, str] | None:
        """Return (kind, text) of the problem of a call, without executing it; None for a valid call."""
        values = self._values(name, arguments)
        return values if isinstance(values, tuple) else None

    def snapshot(self) -> Tables:
        """Return a copy of all current records."""
        # Calls replace the values of a record, but change none of them in place.
        return {name: {key: dict(record) for key, record in records.items()} for name, records in self._tables.items()}

    def misses(self, goal: Goal, before: Tables, *, answer: str | None, num_calls: int) -> list[str]:
        """Return the unmet requirements of a turn's goal as text; empty when the goal is reached.

        `before`: the tables when the turn began. `answer` None: the turn ended without an answer, which the caller
        reports itself."""
        missed = []
        if answer is not None:
            said = answer.casefold()
            if not said.strip():
                missed.append("no answer in words")
            missed += [f"the answer does not say {text!r}" for text in goal.says if text.casefold() not in said]
        if goal.max_calls is not None and num_calls > goal.max_calls:
            missed.append(f"{num_calls} calls, at most {goal.max_calls} were allowed")
        return missed + _differences(expected(before, goal), self._tables)

    def _values(self, name: str, arguments: str) -> Record | _Problem:
        """Return the arguments of a valid call, else its problem."""
        if name not in self._actions:
            return "unknown tool", f"there is no tool named {name!r}"
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return "invalid JSON", "the arguments are not valid JSON"
        if not isinstance(values, dict):
            return "no object", "the arguments must be an object"
        schema = self._schemas[name]
        unknown = sorted(values.keys() - schema.get("properties", {}).keys())
        if unknown:
            return "unknown parameter", f"unknown parameter {unknown[0]!r}"
        import jsonschema  # late: as in world_check

        error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(values))
        if error is not None:
            where = f"{'.'.join(str(part) for part in error.absolute_path)}: " if error.absolute_path else ""
            return f"schema: {error.validator}", where + error.message
        return values

    def _execute(self, name: str, values: Record) -> Any:
        action = self._actions[name]
        self._num_calls[name] += 1
        if action.fails is not None and self._num_calls[name] <= action.fails.times:
            raise ToolError(action.fails.error)
        match action:
            case Get():
                return _shown(self._one(action.table, action.match, values), action.show)
            case Find():
                return self._find(action, values)
            case Create():
                return self._create(action, values)
            case Update():
                record = self._one(action.table, action.match, values, action.locked)
                record.update(
                    {column: values[name] for name, column in action.set.items() if name in values} | action.fixed
                )
                return _shown(record, action.show)
            case Delete():
                key = str(self._one(action.table, action.match, values, action.locked)[self._specs[action.table].key])
                del self._tables[action.table][key]
                return {"deleted": key}
            case Replace():
                return self._replace(action, values)
            case Calculate():
                return {"result": calculate(values[action.expression])}

    def _one(self, table: str, match: dict[str, str], values: Record, locked: Locked | None = None) -> Record:
        given = ", ".join(f"{name} {values[name]!r}" for name in match if name in values)
        if not given:
            raise ToolError(f"{' or '.join(match)} must be given")
        found = [record for record in self._tables[table].values() if _matches(record, match, values)]
        if not found:
            raise ToolError(f"not found: {given}")
        if len(found) > 1:
            raise ToolError(f"{len(found)} records match {given}")
        record = found[0]
        if locked is not None and record.get(locked.column) in locked.values:
            raise ToolError(locked.error.format(key=record[self._specs[table].key], value=record[locked.column]))
        return record

    def _find(self, action: Find, values: Record) -> list[Record]:
        found = [
            record
            for record in self._tables[action.table].values()
            if _matches(record, action.match, values)
            and all(
                _contains(record.get(column), values[name])
                for name, column in action.contains.items()
                if name in values
            )
        ]
        limit = int(values.get(action.limit, len(found))) if action.limit is not None else len(found)
        if limit < 0:
            raise ToolError(f"{action.limit}: {limit} must not be negative")
        return [_shown(record, action.show) for record in found[:limit]]

    def _create(self, action: Create, values: Record) -> Record:
        table: Table = self._specs[action.table]
        record = {column: values[name] for name, column in action.set.items() if name in values} | action.fixed
        if table.key not in record:
            key = self._next[action.table]
            if key is None:
                raise ToolError(f"{table.key} is missing")
            record = {table.key: key, **record}
            self._next[action.table] = next_key(key)
        key = str(record[table.key])
        if key in self._tables[action.table]:
            raise ToolError(f"{table.key} {key!r} exists already")
        self._tables[action.table][key] = record
        return _shown(record, action.show)

    def _replace(self, action: Replace, values: Record) -> Record:
        record = self._one(action.table, action.match, values)
        text, old = str(record.get(action.column, "")), values[action.old]
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolError(f"{old!r} occurs {count} times, not once")
        record[action.column] = text.replace(old, values[action.new])
        return _shown(record, action.show)


def expected(before: Tables, goal: Goal) -> Tables:
    """Return the tables that a turn with this goal must result in."""
    tables = {name: dict(records) for name, records in before.items()}
    for name, changes in goal.changes.items():
        for key, record in changes.items():
            if record is None:
                tables[name].pop(key, None)
            else:
                tables[name][key] = {**tables[name].get(key, {}), **record}
    return tables


def _differences(wanted: Tables, found: Tables) -> list[str]:
    """Return the differences between the tables as text."""
    differences = []
    for name in wanted:
        for key in sorted(wanted[name].keys() | found[name].keys()):
            want, have = wanted[name].get(key), found[name].get(key)
            if want is None:
                differences.append(f"{name} {key!r} should not be there")
            elif have is None:
                differences.append(f"{name} {key!r} is not there")
            else:
                columns = sorted(
                    column
                    for column in want.keys() | have.keys()
                    if column not in want or column not in have or want[column] != have[column]
                )
                differences += [
                    f"{name} {key!r}: {column} is {have.get(column)!r}, not {want.get(column)!r}" for column in columns
                ]
    return differences


def changes(before: Tables, after: Tables) -> dict[str, dict[str, Record | None]]:
    """Return the `Goal.changes` that lead from one state to the other."""
    found: dict[str, dict[str, Record | None]] = {}
    for name, records in after.items():
        old = before[name]
        changed: dict[str, Record | None] = {key: record for key, record in records.items() if old.get(key) != record}
        changed |= dict.fromkeys(key for key in old if key not in records)
        if changed:
            found[name] = changed
    return found


def next_key(key: str) -> str:
    """Return the next key: the number at its end is incremented and keeps its width. Raises ValueError without a
    number."""
    match = re.search(r"\d+$", key)
    if match is None:
        raise ValueError(f"key {key!r} doesn't end in a number")
    return key[: match.start()] + str(int(match[0]) + 1).zfill(len(match[0]))


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_EXPRESSION = 200


def calculate(expression: str) -> int | float:
    """Evaluate an expression of numbers, + - * / and brackets, rounded to 6 decimals. Raises ToolError for anything
    else."""
    try:
        if len(expression) > _MAX_EXPRESSION:
            raise ValueError
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (ValueError, SyntaxError, OverflowError, RecursionError):
        raise ToolError(f"can't evaluate {expression[:_MAX_EXPRESSION]!r}") from None
    rounded = round(value, 6)
    return int(rounded) if rounded == int(rounded) else rounded


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value: int | float = _OPERATORS[type(op)](_value(left), _value(right))
            return value
        case _:
            raise ValueError


def _matches(record: Record, match: dict[str, str], values: Record) -> bool:
    return all(_plain(record.get(column)) == _plain(values[name]) for name, column in match.items() if name in values)


def _contains(held: Any, wanted: Any) -> bool:
    if held is None:
        return False
    if isinstance(held, list):
        return any(_plain(item) == _plain(wanted) for item in held)
    return str(_plain(wanted)) in str(_plain(held))


def _plain(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


def _shown(record: Record, columns: list[str]) -> Record:
    return {name: record[name] for name in columns if name in record} if columns else dict(record)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
