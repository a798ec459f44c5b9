"""The nesting limit of JSON values, and the cheap test on their text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.files import is_too_deep, may_be_too_deep

DEEPEST = 101


def nested(levels: int, leaf: Any) -> Any:
    """Alternating arrays and objects, each with a flat value beside the nested one."""
    value = leaf
    for level in range(levels):
        value = ["[{", value] if level % 2 else {"flat": 1, "deep": value}
    return value


@pytest.mark.parametrize(
    ("levels", "leaf", "is_too"), [(0, 1, False), (DEEPEST, "[", False), (DEEPEST, [], True), (DEEPEST + 1, None, True)]
)
def test_nesting_levels_are_counted(levels: int, leaf: Any, is_too: bool) -> None:
    assert is_too_deep(nested(levels, leaf)) == is_too


@pytest.mark.parametrize("levels", [1, 50, 90, 100, DEEPEST, DEEPEST + 1, 200])
def test_the_text_test_never_misses_a_value_nested_too_deep(levels: int) -> None:
    for value in (nested(levels, {}), [] if levels == 1 else json.loads("[" * levels + "]" * levels)):
        assert may_be_too_deep(json.dumps(value).encode()) or not is_too_deep(value)


def test_many_ids_are_not_nested_too_deep() -> None:
    assert not may_be_too_deep(json.dumps({"prompt": [[1, 2]] * 98}).encode())
    assert not is_too_deep([[1, 2]] * 5000)
