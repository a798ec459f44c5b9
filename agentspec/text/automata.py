"""Compile expressions over characters to deterministic finite automata, written as grammar rules.

When a text can be parsed in two ways, xgrammar merges states of its automata too freely. A deterministic automaton has
one parse, so there is nothing to merge. Knows nothing of pattern syntax or schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from agentspec.text.grammar_rules import Rules, character_class

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""(first, last) code points, both inclusive."""

MAX_POSITIONS = 2000
MAX_STATES = 1000


class TooLargeError(ValueError):
    """The automaton of the expression exceeds MAX_POSITIONS or MAX_STATES."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One of these characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Chain:
    """Concatenation; without parts, the empty text."""

    parts: tuple[Expression, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Expression
    low: int
    high: int | None
    """None: unbounded."""


Expression: TypeAlias = Chars | Chain | Choice | Repeat


def text(characters: str) -> Expression:
    return Chain(tuple(Chars(((ord(character), ord(character)),)) for character in characters))


def add_automaton(rules: Rules, expression: Expression) -> str:
    """Add rules that match the expression and return the name of the start rule.

    Raises TooLargeError, and RequestError when the whole grammar exceeds its work limit."""
    if (known := rules.find_rule(expression)) is not None:
        return known
    positions = _Positions(rules)
    whole = positions.add(expression)
    start = frozenset({-1})
    follow = {-1: whole.first, **dict(enumerate(positions.follow))}
    ends = whole.last | ({-1} if whole.is_nullable else set())
    names = {start: rules.reserve()}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        reachable = set().union(*(follow[position] for position in state))
        rules.spend(
            sum(len(follow[position]) for position in state)
            + 4 * sum(len(positions.ranges[position]) for position in reachable)
        )
        if len(names) > MAX_STATES:
            raise TooLargeError(f"comes to an automaton of more than {MAX_STATES} states")
        loop, parts = "", ['""'] if state & ends else []
        for target, ranges in _split(reachable, positions.ranges).items():
            if target == state:
                loop = f"{character_class(ranges)}* "
                continue
            if target not in names:
                names[target] = rules.reserve()
                waiting.append(target)
            parts.append(f"{character_class(ranges)} {names[target]}")
        rules.fill(names[state], f"{loop}({' | '.join(parts)})")
    return rules.store_rule(expression, names[start])


@dataclass(frozen=True, slots=True)
class _Part:
    """The positions at which texts of an expression may begin (first) and end (last)."""

    is_nullable: bool
    first: frozenset[int]
    last: frozenset[int]


_EMPTY = _Part(True, frozenset(), frozenset())


@dataclass(slots=True)
class _Positions:
    """Glushkov construction (1961): one position per character class, and the positions that may follow each."""

    rules: Rules
    """Counts the work against its limit."""
    ranges: list[Ranges] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def add(self, expression: Expression) -> _Part:
        match expression:
            case Chars(ranges):
                if len(self.ranges) == MAX_POSITIONS:
                    raise TooLargeError(f"asks for more than {MAX_POSITIONS} characters one by one")
                self.ranges.append(ranges)
                self.follow.append(set())
                place = frozenset({len(self.ranges) - 1})
                return _Part(False, place, place)
            case Chain(parts):
                return self._chain(self.add(part) for part in parts)
            case Choice(parts):
                found = [self.add(part) for part in parts]
                firsts, lasts = (
                    frozenset().union(*places)
                    for places in ((each.first for each in found), (each.last for each in found))
                )
                return _Part(any(each.is_nullable for each in found), firsts, lasts)
            case Repeat(part, low, high):
                needed = [self.add(part) for _ in range(low)]
                if high is not None:
                    return self._chain([*needed, self._optional(part, high - low)])
                again = self.add(part)
                for end in again.last:
                    self.follow[end] |= again.first
                return self._chain([*needed, _Part(True, again.first, again.last)])

    def _optional(self, part: Expression, times: int) -> _Part:
        """Repeat the part 0 to `times` times, as nested optional parts."""
        found = _EMPTY
        for _ in range(times):
            found = self._chain([self.add(part), found])
            found = _Part(True, found.first, found.last)
        return found

    def _chain(self, parts: Iterable[_Part]) -> _Part:
        whole = _EMPTY
        for part in parts:
            self.rules.spend(1 + len(whole.last) * (1 + len(part.first)))
            for place in whole.last:
                self.follow[place] |= part.first
            first = whole.first | part.first if whole.is_nullable else whole.first
            last = whole.last | part.last if part.is_nullable else part.last
            whole = _Part(whole.is_nullable and part.is_nullable, first, last)
        return whole


def _split(positions: set[int], ranges: list[Ranges]) -> dict[frozenset[int], Ranges]:
    """Partition the characters by the set of positions that each one leads to."""
    edges = sorted({edge for position in positions for low, high in ranges[position] for edge in (low, high + 1)})
    opened: dict[int, list[int]] = {}
    closed: dict[int, list[int]] = {}
    for position in positions:
        for low, high in ranges[position]:
            opened.setdefault(low, []).append(position)
            closed.setdefault(high + 1, []).append(position)
    found: dict[frozenset[int], list[tuple[int, int]]] = {}
    current: list[int] = []
    for edge, following in itertools.pairwise(edges):
        for position in closed.get(edge, ()):
            current.remove(position)
        current += opened.get(edge, ())
        if current:
            pieces = found.setdefault(frozenset(current), [])
            if pieces and pieces[-1][1] == edge - 1:
                pieces[-1] = (pieces[-1][0], following - 1)
            else:
                pieces.append((edge, following - 1))
    return {target: tuple(pieces) for target, pieces in found.items()}
