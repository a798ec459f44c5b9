"""Acceptance of the MTP head's drafts by position and by number of drafts, from the engine's counters; and its
tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.replay.measure import Summary

MAX_DRAFTS = 5

EXPLANATION = """A decode step verifies k drafts and emits those that stand, then one token of the target itself: 1 + \
the sum of a row on average.
A cell is the share of all decode steps in which the drafts at positions 1 to i stood; a draft behind a rejected one \
counts as not accepted. The end
of an answer counts against the drafts: its last step verifies k drafts like every other, and those for the stop \
token and behind it count as not
accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Counters of one run with a fixed number of drafts."""

    sampling: str
    num_drafts: int
    """The number k of drafts per step."""
    num_steps: int
    """Decode steps, summed over requests."""
    drafted: list[int]
    """By position: steps with a draft there."""
    accepted: list[int]
    """By position: steps that accepted that draft and all before it."""
    num_answers: int

    @property
    def shares(self) -> list[float | None]:
        """By position: accepted / drafted."""
        return [
            accepted / drafted if drafted else None
            for drafted, accepted in zip(self.drafted, self.accepted, strict=True)
        ]

    @property
    def shares_given_before(self) -> list[float | None]:
        """By position: accepted / steps that accepted all drafts before it."""
        before = [self.num_steps, *self.accepted]
        return [accepted / stood if stood else None for stood, accepted in zip(before, self.accepted, strict=False)]

    @property
    def emitted_per_step(self) -> float | None:
        return 1 + sum(self.accepted) / self.num_steps if self.num_steps else None


def read(summary: Summary, *, sampling: str, num_drafts: int) -> Acceptance:
    """The counters of a run. Raises ValueError when the server didn't report them, or drafted another number than
    `num_drafts`."""
    counters = summary.speculation
    if counters is None:
        raise ValueError("the server reports no speculation")
    if len(counters.drafted_by_position) != num_drafts:
        raise ValueError(f"the server drafted at {len(counters.drafted_by_position)} positions, not at {num_drafts}")
    return Acceptance(
        sampling=sampling,
        num_drafts=num_drafts,
        num_steps=counters.num_steps,
        drafted=counters.drafted_by_position,
        accepted=counters.accepted_by_position,
        num_answers=summary.num_turns,
    )


def markdown(rows: Sequence[Acceptance]) -> str:
    """One table of all runs, in their order."""
    heads = [f"position {place}" for place in range(1, MAX_DRAFTS + 1)]
    lines = [f"| answers | k | {' | '.join(heads)} | tokens a step |", "|---" * (MAX_DRAFTS + 3) + "|"]
    for row in rows:
        cells = [percent(share) for share in row.shares] + [""] * (MAX_DRAFTS - row.num_drafts)
        emitted = "-" if row.emitted_per_step is None else f"{row.emitted_per_step:.2f}"
        lines.append(f"| {row.sampling} | {row.num_drafts} | {' | '.join(cells)} | {emitted} |")
    return "\n".join(lines)


def to_json(rows: Sequence[Acceptance]) -> list[dict[str, Any]]:
    return [
        {
            "sampling": row.sampling,
            "draft_tokens": row.num_drafts,
            "answers": row.num_answers,
            "decode_steps": row.num_steps,
            "drafted_by_position": row.drafted,
            "accepted_by_position": row.accepted,
            "acceptance_by_position": row.shares,
            "acceptance_given_all_before": row.shares_given_before,
            "emitted_per_step": row.emitted_per_step,
        }
        for row in rows
    ]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
