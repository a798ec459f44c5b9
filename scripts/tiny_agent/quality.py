"""The share of held-out sessions that a model solves: counts by group, by thinking and by kind of turn, as Markdown,
text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentspec.replay.outcomes import LiveCounts, count
from agentspec.replay.report_live import session_json
from scripts.tiny_agent.domain import Turn
from scripts.tiny_agent.held_out import Played
from scripts.tiny_agent.misses import count_kinds, find_misses

VALID_SHARE, GOAL_SHARE = 0.95, 0.80
"""Required shares over the whole held-out set: valid tool calls, and sessions at their goal."""

EXPLANATION = """A tool call is valid when its tool exists and its arguments are an object that the tool's JSON \
schema allows. A turn of the user is
at its goal (`Goal` in `agentspec/replay/world.py`) when it ends with an answer in words that holds every text that \
the goal names, the records have
changed in exactly the way that the goal names, and no more calls were made than it allows; a session is when all its \
turns are. Known tools are those
of training, with values drawn anew, four in five of them words that training never saw; unseen tools have names and \
parameters that it never saw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCounts:
    """User's turns of one kind."""

    kind: str
    num_turns: int
    num_reached: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """One run over held-out sessions."""

    rows: list[LiveCounts]
    """By group, by thinking, and of all sessions, in this order."""
    kinds: list[TurnCounts]
    """By what the gold trajectory does."""
    seconds: float
    num_failed: int
    """Sessions that a failed request ended."""
    played: Sequence[Played]

    @property
    def total(self) -> LiveCounts:
        return self.rows[-1]

    @property
    def shortfalls(self) -> list[str]:
        """Text on missed VALID_SHARE and GOAL_SHARE; empty when both are reached."""
        total = self.total
        pairs = (
            ("tool calls valid", total.num_valid, total.num_calls, VALID_SHARE),
            ("sessions at goal", total.num_sessions_reached, total.num_sessions, GOAL_SHARE),
        )
        return [
            f"{name}: {share_of(part, whole)}, less than {least:.0%}"
            for name, part, whole, least in pairs
            if not whole or part / whole < least
        ]


def judge(played: Sequence[Played], *, seconds: float, num_failed: int) -> Quality:
    """Count the outcomes of the sessions."""
    rows = [
        count((p.outcome for p in played if p.held_out.group == group), f"{group} tools")
        for group in ("known", "unseen")
    ]
    rows += [
        count((p.outcome for p in played if p.example.thinking is on), f"thinking {'on' if on else 'off'}")
        for on in (True, False)
    ]
    rows.append(count((p.outcome for p in played), "all"))
    return Quality(rows=rows, kinds=_kinds(played), seconds=seconds, num_failed=num_failed, played=played)


def _kinds(played: Sequence[Played]) -> list[TurnCounts]:
    turns, reached = Counter[str](), Counter[str]()
    for session in played:
        for turn, entry in zip(session.example.turns, session.outcome.turns, strict=True):
            for kind in kinds_of(turn, session.example.world):
                turns[kind] += 1
                reached[kind] += entry.reached is True
    return [TurnCounts(kind=kind, num_turns=turns[kind], num_reached=reached[kind]) for kind in sorted(turns)]


def kinds_of(turn: Turn, world: dict[str, Any]) -> list[str]:
    """What the gold trajectory of a turn does: its shape, each action that it takes, and whether a tool refuses."""
    rounds = [message["tool_calls"] for message in turn.messages if message.get("tool_calls")]
    if not rounds:
        return ["shape: no call"]
    if len(rounds) > 1:
        shape = "calls in a row"
    else:
        shape = "one call" if len(rounds[0]) == 1 else "calls at once"
    actions = {world["actions"][call["function"]["name"]]["do"] for calls in rounds for call in calls}
    refused = any(message["role"] == "tool" and message["content"].startswith('{"error"') for message in turn.messages)
    return [
        f"shape: {shape}",
        *(f"action: {action}" for action in sorted(actions)),
        *(["a tool refuses"] if refused else []),
    ]


def markdown(quality: Quality) -> str:
    """The table of the model card."""
    lines = ["| sessions | tool calls valid | user turns at goal | sessions at goal |", "|---|---|---|---|"]
    for row in quality.rows:
        cells = (
            share_of(row.num_valid, row.num_calls),
            share_of(row.num_turns_reached, row.num_turns),
            share_of(row.num_sessions_reached, row.num_sessions),
        )
        lines.append(f"| {row.group} | {' | '.join(cells)} |")
    return "\n".join(lines)


def diagnosis(quality: Quality) -> str:
    """A listing of misses, for training the model."""
    lines = [
        f"{quality.total.num_sessions} sessions in {quality.seconds:.0f} s, {quality.num_failed} ended by a failed "
        f"request",
        "",
    ]
    lines += [
        f"{'user turns at goal, by what the gold trajectory does':<64}",
        *(_kind_line(kind) for kind in quality.kinds),
        "",
    ]
    misses = count_kinds(find_misses(quality.played))
    lines += [f"{'missed turns by their first difference from gold':<64}{'first of session':>18}{'after a miss':>14}"]
    lines += [f"  {kind:<62}{first:>18}{later:>14}" for kind, first, later in misses] or ["  none"]
    if quality.total.problems:
        lines += ["", "invalid tool calls", *(f"  {kind:<62}{number:>18}" for kind, number in quality.total.problems)]
    return "\n".join(lines)


def _kind_line(kind: TurnCounts) -> str:
    return f"  {kind.kind:<62}{share_of(kind.num_reached, kind.num_turns):>18}"


def to_json(quality: Quality) -> dict[str, Any]:
    """All counts, JSON-ready."""
    return {
        "rows": [asdict(row) for row in quality.rows],
        "turn_kinds": [asdict(kind) for kind in quality.kinds],
        "misses": [
            {"kind": kind, "first_of_session": first, "after_a_miss": later}
            for kind, first, later in count_kinds(find_misses(quality.played))
        ],
        "seconds": quality.seconds,
        "failed_sessions": quality.num_failed,
        "sessions": [
            {
                "session_id": played.example.session_id,
                "group": played.held_out.group,
                "thinking": played.example.thinking,
                "tasks": list(played.held_out.tasks),
                **session_json(played.outcome),
            }
            for played in quality.played
        ],
    }


def share_of(part: int, whole: int) -> str:
    """`9 of 10, 90.0%`."""
    return f"{part} of {whole}" + (f", {part / whole:.1%}" if whole else "")
