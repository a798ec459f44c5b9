"""The report's part on sessions with a world, as rows of text and as JSON. Empty for a file without worlds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agentspec.replay.measure import SessionRecord, Summary
from agentspec.replay.outcomes import LiveCounts, SessionOutcome, UserTurn

GROUP_HEAD = ("tool calls valid", "user turns at goal", "sessions at goal")


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the counts over all groups as (name, text)."""
    return [] if summary.live is None else list(zip(GROUP_HEAD, _cells(summary.live), strict=True))


def group_rows(summary: Summary) -> list[list[str]]:
    """Return one row per group: its name, then the cells under GROUP_HEAD."""
    return [[str(counts.group), *_cells(counts)] for counts in summary.live_groups]


def missed_rows(sessions: list[SessionRecord]) -> list[list[str]]:
    """Return a row for each user turn that missed its goal: session, turn from 1, valid calls, reasons."""
    return [
        [
            session.session_id,
            str(place),
            f"{sum(call.problem is None for call in turn.calls)} of {len(turn.calls)}",
            "; ".join(turn.missed),
        ]
        for session in sessions
        if session.outcome is not None
        for place, turn in enumerate(session.outcome.turns, start=1)
        if turn.reached is False
    ]


def counts_json(summary: Summary) -> dict[str, Any]:
    assert summary.live is not None
    return {
        **_counts_json(summary.live),
        "groups": [{"group": counts.group, **_counts_json(counts)} for counts in summary.live_groups],
    }


def session_json(outcome: SessionOutcome) -> dict[str, Any]:
    """Return the outcome of a session with every call, so that a reader can find the model's mistakes."""
    return {
        "calls": len(outcome.calls),
        "valid_calls": outcome.num_valid,
        "user_turns": outcome.num_goals,
        "user_turns_at_goal": outcome.num_reached,
        "at_goal": outcome.reached,
        "turns": [_turn_json(place, turn) for place, turn in enumerate(outcome.turns)],
    }


def _turn_json(place: int, turn: UserTurn) -> dict[str, Any]:
    return {
        "user_turn": place,
        "at_goal": turn.reached,
        "missed": turn.missed,
        "ending": turn.ending,
        "requests": turn.num_requests,
        "answer": turn.answer,
        "reasoning": turn.reasoning,
        "calls": [asdict(call) for call in turn.calls],
    }


def _counts_json(counts: LiveCounts) -> dict[str, Any]:
    return {
        "calls": counts.num_calls,
        "valid_calls": counts.num_valid,
        "valid_share": _share(counts.num_valid, counts.num_calls),
        "invalid_calls": [{"kind": kind, "calls": number} for kind, number in counts.problems],
        "user_turns": counts.num_turns,
        "user_turns_at_goal": counts.num_turns_reached,
        "sessions": counts.num_sessions,
        "sessions_at_goal": counts.num_sessions_reached,
        "goal_share": _share(counts.num_sessions_reached, counts.num_sessions),
    }


def _cells(counts: LiveCounts) -> list[str]:
    pairs = (
        (counts.num_valid, counts.num_calls),
        (counts.num_turns_reached, counts.num_turns),
        (counts.num_sessions_reached, counts.num_sessions),
    )
    return [f"{part} of {whole}" + (f", {part / whole:.1%}" if whole else "") for part, whole in pairs]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
