"""Names of modules in the configs of quantised checkpoints: spellings, wildcards, regular expressions, and fields.

The expressions come from a file: those whose search could take exponential time are refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentspec.errors import CheckpointError, UnsupportedModelError, cut_repr

_ROOTS = ("model.language_model.", "language_model.model.")
_EXPERT_STACK = re.compile(r"(.*\.mlp\.experts)\.\d+\.\w+")
_MOST_LETTERS = 1000
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_NEEDS_ITS_OWN = re.compile(r"\(\?(?!:|=|!|<=|<!)|\\\d")
"""Flags, and names and numbers of groups: among other expressions they would mean something else."""


def canonical_module(name: str) -> str:
    """The canonical name of a module that a config spells in any of the known ways."""
    for root in _ROOTS:
        if name.startswith(root):
            return "model." + name.removeprefix(root)
    return name.removeprefix("language_model.")


def spellings(module: str) -> tuple[str, ...]:
    """Names that a config may mean a module by; the canonical one is first."""
    rest = module.removeprefix("model.")
    if rest == module:
        return (module, f"language_model.{module}")
    return (module, _ROOTS[0] + rest, _ROOTS[1] + rest)


def expert_stack(module: str) -> str | None:
    """The name of the stack that a part of a routed expert belongs to; None for other modules."""
    found = _EXPERT_STACK.fullmatch(module)
    return None if found is None else found[1]


@functools.lru_cache(maxsize=1024)
def expression(pattern: str, where: str) -> re.Pattern[str]:
    """A compiled regular expression. Raises CheckpointError naming one that isn't valid, too long, or that repeats a
    group."""
    if len(pattern) > _MOST_LETTERS or _REPEATED_GROUP.search(pattern):
        raise CheckpointError(
            f"{where}: expression {cut_repr(pattern)} has more than {_MOST_LETTERS} letters or repeats a group"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {cut_repr(pattern)} is no regular expression: {error}") from None


def alternatives(patterns: Iterable[str], where: str) -> tuple[re.Pattern[str], ...]:
    """Expressions that match where one of the given ones does: as few as possible, because a mixture has some 100,000
    modules. Raises as `expression` does."""
    alone, together = [], []
    for pattern in patterns:
        compiled = expression(pattern, where)
        if _NEEDS_ITS_OWN.search(pattern):
            alone.append(compiled)
        else:
            together.append(f"(?:{pattern})")
    return (re.compile("|".join(together)), *alone) if together else tuple(alone)


def matches(expressions: Iterable[re.Pattern[str]], names: Iterable[str]) -> bool:
    """Whether an expression matches the beginning of a name."""
    return any(one.match(name) for one in expressions for name in names)


def refuse(where: str, name: str, value: object, allowed: Iterable[object] = ()) -> UnsupportedModelError:
    """The error for a field with a value that isn't supported."""
    only = ", ".join(map(repr, allowed))
    return UnsupportedModelError(
        f"{where}: {name}={cut_repr(value)} is not supported" + (f" (only {only})" if only else "")
    )


def require(raw: Mapping[str, Any], where: str, name: str, allowed: tuple[object, ...], default: object = None) -> Any:
    """The value of a field, which must be one of `allowed`. default: of an absent or null field."""
    value = raw.get(name)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refuse(where, name, value, allowed)
    return value


def refuse_unknown(raw: Mapping[str, Any], where: str, known: Iterable[str]) -> None:
    """Refuse a field that isn't known and switches something on."""
    for name, value in raw.items():
        if name not in known and value:
            raise refuse(where, name, value)


def name_list(raw: Mapping[str, Any], where: str, name: str) -> list[str]:
    """A field with a list of names, or nothing."""
    value = raw.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{where}: {name} must be a list of names")
    return value


def mapping(raw: Mapping[str, Any], where: str, name: str) -> Mapping[str, Any]:
    """A field with an object, or nothing."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {name} must be an object")
    return value
