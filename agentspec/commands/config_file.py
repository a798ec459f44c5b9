"""Read a command's flags from a TOML file. Its keys are the flags' long names without the leading dashes.

Names, types and choices come from the command's parser; this module knows no flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from agentspec.config import read_toml
from agentspec.errors import ConfigError

_OWN_NAMES = ("--config", "--help")
_SECRET = "api_key"


def read_flags(
    name: str, parser: argparse.ArgumentParser, *, command: str, beside: argparse.ArgumentParser | None = None
) -> dict[str, Any]:
    """Read the flags that the file sets, by their argparse destinations in `parser`.

    command: its name, for errors. beside: another command's parser; its flags are allowed in the file, checked and
    ignored. Raises ConfigError with file, key and value for a key that is no flag, is repeated, or has a value of the
    wrong type."""
    own = _flags_of(parser)
    known = own if beside is None else _flags_of(beside) | own
    found: dict[str, Any] = {}
    for key, value in read_toml("config", name).items():
        flag = "--" + key.replace("_", "-")
        action = known.get(flag)
        shown = "(hidden)" if action is not None and action.dest == _SECRET else value
        if action is None:
            raise ConfigError(f"{name}: {key}", shown, f"is not a flag of agentspec {command}")
        if action.dest in found:
            raise ConfigError(f"{name}: {key}", shown, "is given twice, with - and with _")
        try:
            found[action.dest] = _value(action, value)
        except ValueError as error:
            raise ConfigError(f"{name}: {key}", shown, str(error)) from None
    ours = {action.dest for action in own.values()}
    return {dest: value for dest, value in found.items() if dest in ours}


def given_flags(args: argparse.Namespace, defaultless: argparse.Namespace) -> Collection[str]:
    """The destinations of the flags given on the command line, including a positional model.

    defaultless: the same command line, parsed without defaults."""
    given = set(vars(defaultless))
    if getattr(args, "checkpoint", None) is not None:
        given.add("model")
    return given


def without_defaults(parser: argparse.ArgumentParser) -> None:
    """Change `parser` so that it stores only flags given on the command line."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS


def _flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        flag: action
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag not in _OWN_NAMES
    }


def _value(action: argparse.Action, value: object) -> Any:
    """Convert a TOML value as the flag would. Raises ValueError for a value of the wrong type."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        values = value if isinstance(value, list) else [value]
        return [_scalar(action, one) for one in values]
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: object) -> Any:
    if action.type is None:
        if not isinstance(value, str):
            raise ValueError("must be a text, in quotes")
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"must be one of {', '.join(action.choices)}")
        return value
    names = {int: "a whole number", float: "a number"}
    wanted = names.get(action.type, "a number, or a word in quotes")  # type: ignore[call-overload]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be {wanted}")
    assert callable(action.type)
    try:
        taken = action.type(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        raise ValueError(f"must be {wanted}") from None
    if isinstance(value, str) != isinstance(taken, str):  # "8" in quotes is a string, not a number
        raise ValueError(f"must be {wanted}")
    return taken
