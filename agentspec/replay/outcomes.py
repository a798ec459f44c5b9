"""Outcomes of sessions with a world: calls, user turns, and their totals. Pure data; knows nothing of HTTP or time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["not begun", "answered", "cut", "limit", "failed"]
"""How a user turn ended: with an answer, truncated at max_tokens, after max_requests requests without an answer, or by
a failed request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOutcome:
    """One tool call that the model made, or tried to make."""

    name: str | None
    """None: the server could not parse the call."""
    arguments: str
    """As returned by the server; for a call that it could not parse, the answer's text."""
    result: str | None
    """Content of the tool message; None: the call was not executed."""
    problem: str | None
    """Why the call is invalid; None for a valid one."""
    kind: str | None
    """The problem without names and values, for counting."""


@dataclass(kw_only=True, slots=True)
class UserTurn:
    """One user turn: all requests up to the answer."""

    has_goal: bool
    num_requests: int = 0
    calls: list[CallOutcome] = field(default_factory=list)
    answer: str = ""
    reasoning: str = ""
    """Reasoning of the last answer."""
    ending: Ending = "not begun"
    missed: list[str] = field(default_factory=list)
    """Why the goal was not reached."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal was reached; None without a goal."""
        return not self.missed if self.has_goal else None


@dataclass(kw_only=True, slots=True)
class SessionOutcome:
    """A session with a world."""

    turns: list[UserTurn]

    @property
    def calls(self) -> list[CallOutcome]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def num_valid(self) -> int:
        return sum(call.problem is None for call in self.calls)

    @property
    def num_goals(self) -> int:
        return sum(turn.has_goal for turn in self.turns)

    @property
    def num_reached(self) -> int:
        return sum(turn.reached is True for turn in self.turns)

    @property
    def reached(self) -> bool | None:
        """Whether every goal of the session was reached; None when it has none."""
        return self.num_reached == self.num_goals if self.num_goals else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveCounts:
    """Totals over sessions with a world. Sessions and turns without a goal are not counted among the goals."""

    group: str | None
    """None: all groups."""
    num_calls: int
    num_valid: int
    problems: list[tuple[str, int]]
    """(kind, calls), most frequent first."""
    num_turns: int
    num_turns_reached: int
    num_sessions: int
    num_sessions_reached: int


def count(outcomes: Iterable[SessionOutcome], group: str | None = None) -> LiveCounts:
    """Return the totals of some sessions."""
    outcomes = list(outcomes)
    calls = [call for outcome in outcomes for call in outcome.calls]
    return LiveCounts(
        group=group,
        num_calls=len(calls),
        num_valid=sum(call.problem is None for call in calls),
        problems=Counter(call.kind for call in calls if call.kind is not None).most_common(),
        num_turns=sum(outcome.num_goals for outcome in outcomes),
        num_turns_reached=sum(outcome.num_reached for outcome in outcomes),
        num_sessions=sum(outcome.reached is not None for outcome in outcomes),
        num_sessions_reached=sum(outcome.reached is True for outcome in outcomes),
    )


def count_groups(outcomes: Iterable[tuple[str | None, SessionOutcome]]) -> list[LiveCounts]:
    """Return the totals per group, sorted by name. Sessions without a group are excluded."""
    groups: dict[str, list[SessionOutcome]] = {}
    for group, outcome in outcomes:
        if group is not None:
            groups.setdefault(group, []).append(outcome)
    return [count(there, group) for group, there in sorted(groups.items())]
