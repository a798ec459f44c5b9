"""Validate worlds and goals: table keys, actions against their tools and tables, and the tables that goals name.

Finds everything that would make the simulator fail, before any request is sent. Raises ValueError naming field and
value. The rules of the sessions themselves are in schema.py.
"""

from __future__ import annotations

import json
from typing import Any

from agentspec.replay.simulator import next_key
from agentspec.replay.world import (
    Calculate,
    Create,
    Delete,
    Find,
    Goal,
    Locked,
    Replace,
    Table,
    ToolAction,
    Update,
    World,
)


def check_world(world: World, tools: list[dict[str, Any]]) -> None:
    """Raise ValueError for the first rule that a session's world violates. `tools`: well-formed OpenAI function
    tools."""
    if not tools:
        raise ValueError("world: needs tools or a toolset, which its actions carry out")
    functions: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool["function"]
        if function["name"] in functions:
            raise ValueError(f"tools: {function['name']!r} occurs twice")
        functions[function["name"]] = _parameters(function)
    for name, table in world.tables.items():
        _check_table(f"world.tables.{name}", table)
    for name in functions:
        if name not in world.actions:
            raise ValueError(f"world.actions: tool {name!r} has none")
    for name, action in world.actions.items():
        if name not in functions:
            raise ValueError(f"world.actions.{name}: there is no such tool")
        _check_action(f"world.actions.{name}", action, functions[name], world)


def check_goal(where: str, goal: Goal, world: World) -> None:
    """Raise ValueError for the first rule that a turn's goal violates; `where` names the field."""
    if goal.max_calls is not None and goal.max_calls < 0:
        raise ValueError(f"{where}.max_calls: {goal.max_calls} must not be negative")
    for index, text in enumerate(goal.says):
        if not text.strip():
            raise ValueError(f"{where}.says[{index}]: is empty")
    for table in goal.changes:
        if table not in world.tables:
            raise ValueError(f"{where}.changes: there is no table {table!r}")


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the checked schema of a tool's arguments."""
    where = f"tools: {function['name']!r}: parameters"
    parameters = function.get("parameters") or {"type": "object"}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise ValueError(f"{where}: is no JSON schema of an object")
    import jsonschema  # late: every command imports this module, and few read a world

    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{where}: {error.message}") from None
    if '"$ref"' in json.dumps(parameters):
        raise ValueError(f"{where}: a world can't judge calls by a schema with $ref")
    return parameters


def _check_table(where: str, table: Table) -> None:
    keys: set[str] = set()
    for index, record in enumerate(table.records):
        if not isinstance(record.get(table.key), str | int):
            raise ValueError(
                f"{where}.records[{index}].{table.key}: the key is missing, or neither text nor an integer"
            )
        key = str(record[table.key])
        if key in keys:
            raise ValueError(f"{where}.records[{index}].{table.key}: {key!r} occurs twice")
        keys.add(key)
    if table.next_key is not None:
        try:
            next_key(table.next_key)
        except ValueError as error:
            raise ValueError(f"{where}.next_key: {error}") from None


def _check_action(where: str, action: ToolAction, schema: dict[str, Any], world: World) -> None:
    if action.fails is not None and action.fails.times < 1:
        raise ValueError(f"{where}.fails.times: {action.fails.times} must be at least 1")
    if isinstance(action, Calculate):
        _check_required(f"{where}.expression", action.expression, schema, "string")
        return
    if action.table not in world.tables:
        raise ValueError(f"{where}.table: there is no table {action.table!r}")
    columns, key = _columns(action.table, world), world.tables[action.table].key
    if isinstance(action, Create):
        _check_named(f"{where}.set", action.set, schema, None)
        if key not in action.set.values() and key not in action.fixed and world.tables[action.table].next_key is None:
            raise ValueError(f"{where}.set: nothing gives column {key!r}, the key, and the table has no next_key")
    else:
        _check_named(f"{where}.match", action.match, schema, columns)
        if not action.match and not isinstance(action, Find):
            raise ValueError(f"{where}.match: needs at least one parameter")
    if isinstance(action, Find):
        _check_named(f"{where}.contains", action.contains, schema, columns)
        if action.limit is not None:
            _check_type(f"{where}.limit", action.limit, schema, "integer")
    if isinstance(action, Update):
        _check_named(f"{where}.set", action.set, schema, None)
        for field, changed in (("set", list(action.set.values())), ("fixed", list(action.fixed))):
            if key in changed:
                raise ValueError(f"{where}.{field}: column {key!r} is the key and can't be changed")
    if isinstance(action, Update | Delete) and action.locked is not None:
        _check_locked(f"{where}.locked", action.locked, columns)
    if isinstance(action, Replace):
        _check_replace(where, action, schema, columns, key)
    if not isinstance(action, Delete):
        for column in action.show:
            _check_column(f"{where}.show", column, columns)


def _check_replace(where: str, action: Replace, schema: dict[str, Any], columns: set[str], key: str) -> None:
    _check_column(f"{where}.column", action.column, columns)
    if action.column == key:
        raise ValueError(f"{where}.column: {key!r} is the key and can't be changed")
    _check_required(f"{where}.old", action.old, schema, "string")
    _check_required(f"{where}.new", action.new, schema, "string")


def _columns(table: str, world: World) -> set[str]:
    """Return the columns of a table's records, initial ones and those that tools write."""
    columns = {world.tables[table].key}.union(*world.tables[table].records)
    for action in world.actions.values():
        if isinstance(action, Create | Update) and action.table == table:
            columns |= {*action.set.values(), *action.fixed}
    return columns


def _check_named(where: str, parameters: dict[str, str], schema: dict[str, Any], columns: set[str] | None) -> None:
    """Check parameters and their columns. `columns` None: any column is allowed, as for actions that write it."""
    for parameter, column in parameters.items():
        _check_parameter(where, parameter, schema)
        if columns is not None:
            _check_column(f"{where}.{parameter}", column, columns)


def _check_column(where: str, column: str, columns: set[str]) -> None:
    if column not in columns:
        raise ValueError(f"{where}: no record has a column {column!r}")


def _check_parameter(where: str, parameter: str, schema: dict[str, Any]) -> None:
    if parameter not in schema.get("properties", {}):
        raise ValueError(f"{where}: the tool has no parameter {parameter!r}")


def _check_type(where: str, parameter: str, schema: dict[str, Any], kind: str) -> None:
    _check_parameter(where, parameter, schema)
    value = schema["properties"][parameter]
    if not isinstance(value, dict) or value.get("type") != kind:
        raise ValueError(f"{where}: parameter {parameter!r} must have type {kind}")


def _check_required(where: str, parameter: str, schema: dict[str, Any], kind: str) -> None:
    _check_type(where, parameter, schema, kind)
    if parameter not in schema.get("required", ()):
        raise ValueError(f"{where}: parameter {parameter!r} must be required")


def _check_locked(where: str, locked: Locked, columns: set[str]) -> None:
    _check_column(f"{where}.column", locked.column, columns)
    try:
        locked.error.format(key="", value="")
    except (LookupError, ValueError, AttributeError):
        raise ValueError(
            f"{where}.error: {locked.error!r} may hold {{key}} and {{value}} and no other brackets"
        ) from None
