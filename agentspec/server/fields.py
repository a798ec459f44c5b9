"""JSON bodies to structs: a field is known, or refused by name; a value is right, or refused with the place where it stands.

Knows no endpoint's fields. `null` means absent, as everywhere in OpenAI's API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from agentspec.errors import RequestError

Harmless = Mapping[str, tuple[Any, ...]]
"""Documented fields that an endpoint doesn't serve, with the values that ask for nothing. Any other value is refused."""

Checked = Mapping[str, tuple[Any, ...]]
"""Fields that a struct keeps as they come, with the types that they are held to nevertheless: any one of them. `name[]`: what a list there holds."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Value = TypeVar("_Value")


def read(body: Any, kind: type[_Struct], harmless: Harmless, *, required: tuple[str, ...]) -> _Struct:
    """A decoded body as `kind`. Raises RequestError with the first field that is unknown, not served, missing or wrong."""
    if not isinstance(body, dict):
        raise RequestError("body", body, "must be a JSON object")
    asked: dict[str, Any] = {}
    for name, value in body.items():
        if name not in harmless and name not in kind.__struct_encode_fields__:
            raise RequestError(name, value, "is not a field of this endpoint")
        if value is None:
            continue
        if name in kind.__struct_encode_fields__:
            asked[name] = value
        elif not any(type(value) is type(idle) and value == idle for idle in harmless[name]):
            raise RequestError(name, value, "is not supported" + _only(harmless[name]))
    for name in required:
        if name not in asked:
            raise RequestError(name, None, "is required")
    return check(asked, kind)


def check(value: Any, kind: type[_Value], name: str = "") -> _Value:
    """A value as `kind`, which may be any type that msgspec knows. Raises RequestError with the path under `name` and what stands there."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        raise _field_error(value, path.strip("`"), reason, name) from None


def _only(values: tuple[Any, ...]) -> str:
    return f" (only {' or '.join(map(repr, values))})" if values else ""


def _field_error(value: Any, path: str, reason: str, name: str) -> RequestError:
    """Name the field at msgspec's path (`$.messages[1].role`, under `name`) and the value that stands there."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            break
        name += (f".{key}" if name else key) if key else f"[{index}]"
        value = value[int(index) if index else key]
    return RequestError(name or "body", value, reason)
