"""Errors show the beginning of a value, and look at no more than it."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from agentspec.errors import RequestError, beginning


def some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return rng.choice(("", "a", '"', "é\n", "x" * 30, "\ud800")) * rng.randrange(3)
    if kind == 1:
        return rng.choice((1, -2.5, True, None, 10**30))
    if kind == 2:
        return rng.randbytes(rng.randrange(9))
    if kind == 3:
        return [rng.randrange(9) for _ in range(rng.randrange(30))]
    size = rng.randrange(5)
    if kind == 4:
        return {rng.choice("ab") * number: some_value(rng, depth - 1) for number in range(size)}
    values = [some_value(rng, depth - 1) for _ in range(size)]
    return values if kind == 5 else tuple(values)


@pytest.mark.parametrize("seed", range(3))
def test_the_beginning_of_a_value_is_that_of_its_repr(seed: int) -> None:
    rng = random.Random(seed)
    for trial in range(1000):
        value, room = some_value(rng, 4), rng.randrange(1, 60)
        whole, shown = repr(value), beginning(value, room)
        where = f"seed {seed}, trial {trial}: {value!r}, {room}"
        if len(whole) <= room:
            assert shown == whole, where
        else:
            assert (shown[:room], len(shown) > room) == (whole[:room], True), where


class Unseen:
    """A value that must not be looked at."""

    def __repr__(self) -> str:
        raise AssertionError("a value far behind the beginning was shown")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([*range(100), Unseen()], str([*range(100)])[:200]),
        ({number: number for number in range(100)} | {"x": Unseen()}, str({n: n for n in range(100)})[:200]),
        ([[["x" * 300], Unseen()]], "[[['" + "x" * 196),
        (array("i", range(1000)), str([*range(1000)])[:200]),
        ("x" * 300, "'" + "x" * 199),
    ],
)
def test_a_large_value_is_cut(value: Any, shown: str) -> None:
    assert str(RequestError("field", value, "is wrong")) == f"field={shown}...: is wrong"
