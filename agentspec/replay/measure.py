"""Measurements: one record per request, and the summary of a run. Pure arithmetic; knows nothing of HTTP, files or
formats.

Times are seconds on the run's clock, which starts at 0. A value that the server did not report is None and is excluded
from every sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from agentspec.replay.outcomes import LiveCounts, SessionOutcome, count, count_groups
from agentspec.replay.reply import Speculation


@dataclass(kw_only=True, slots=True)
class TurnRecord:
    """One request as seen by the client."""

    session_id: str
    turn: int
    """Number of earlier requests of the session."""
    delay_kind: str
    due: float
    """Scheduled time: the end of the previous turn plus the recorded wait, or the session's arrival."""
    sent: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each stream event with output. Counts as 1 token when the server doesn't report tokens per
    chunk."""
    end: float = 0.0
    """Time of the last token; for a failed turn, of the failure."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    speculation: Speculation | None = None
    forced_acceptance: bool = False
    user_turn: int | None = None
    """In a session with a world: index of the user turn, from 0."""
    diverged: bool = False
    """Whether the previous answer was replaced by the recorded one, because its tool calls did not match."""
    is_warmup: bool = False
    """Whether it was sent during warm-up. Only failed warm-up requests are kept."""
    error: str | None = None

    @property
    def lag(self) -> float:
        """Seconds between due time and sending."""
        return max(0.0, self.sent - self.due)

    @property
    def latency(self) -> float:
        """Turn time: seconds from sending to the last token."""
        return self.end - self.sent

    @property
    def time_to_first_token(self) -> float | None:
        return self.tokens[0][0] - self.sent if self.tokens else None

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds between tokens after the first event; None for an answer in a single event."""
        if len(self.tokens) < 2:
            return None
        first_time, num_first = self.tokens[0]
        num_after = (self.completion_tokens or sum(count for _, count in self.tokens)) - num_first
        return (self.tokens[-1][0] - first_time) / num_after if num_after > 0 else None

    @property
    def normalized_latency(self) -> float | None:
        """Turn time per output token, in seconds."""
        return self.latency / self.completion_tokens if self.completion_tokens else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive stream events."""
        times = [time for time, _ in self.tokens]
        return [after - before for before, after in pairwise(times)]

    @property
    def longest_gap(self) -> float | None:
        return max(self.gaps, default=None)


@dataclass(kw_only=True, slots=True)
class SessionRecord:
    session_id: str
    group: str | None
    num_planned: int
    """Number of planned turns. In a session with a world: one per user turn, plus one for each further request."""
    turns: list[TurnRecord] = field(default_factory=list)
    error: str | None = None
    """Why the session ended early."""
    outcome: SessionOutcome | None = None
    """Of a session with a world; None for others."""
    parent: str | None = None
    """Of a subagent: id of the session that starts it."""
    num_warmup: int = 0
    """Number of warm-up requests, which are in neither `turns` nor `num_planned`."""
    last_end: float = 0.0
    """When its last request ended, including warm-up."""

    @property
    def hit_share(self) -> float | None:
        return hits(self.turns).share


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Statistics of a list of seconds; all None when it is empty. Percentiles are interpolated linearly between the
    closest ranks."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    largest: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        if not ordered:
            return cls(count=0, mean=None, p50=None, p90=None, p99=None, largest=None)
        p50, p90, p99 = np.percentile(ordered, (50, 90, 99)).tolist()
        return cls(count=len(ordered), mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, largest=ordered[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """Prompt tokens served by a prefix cache, over the turns that report them."""

    num_turns: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def hits(turns: Iterable[TurnRecord]) -> Hits:
    known = [
        (turn.prompt_tokens, turn.cached_tokens)
        for turn in turns
        if turn.prompt_tokens is not None and turn.cached_tokens is not None
    ]
    return Hits(
        num_turns=len(known),
        prompt_tokens=sum(prompt for prompt, _ in known),
        cached_tokens=sum(cached for _, cached in known),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnColumn:
    """All turns with the same index in their sessions."""

    turn: int
    time_to_first_token: Distribution
    latency: Distribution
    hits: Hits


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Summary of a run. Failed turns are counted as failures only."""

    num_sessions: int
    num_subagents: int
    """Number of sessions with a parent."""
    num_failed_sessions: int
    num_planned_turns: int
    num_turns: int
    """Number of answered turns."""
    num_failed_turns: int
    num_diverged: int
    errors: list[tuple[str, int]]
    """(reason, number of sessions that it ended), most frequent first."""
    wall: float
    prompt_tokens: int | None
    output_tokens: int | None
    latency: Distribution
    """Turn time."""
    time_to_first_token: Distribution
    first_token_of_first_turns: Distribution
    """Time to first token of the first turns of sessions."""
    first_token_of_later_turns: Distribution
    """Time to first token of all other turns."""
    time_per_token: Distribution
    normalized_latency: Distribution
    gaps: Distribution
    lag: Distribution
    hits: Hits
    speculation: Speculation | None
    forced_acceptance: bool
    by_turn: list[TurnColumn]
    num_gpus: int | None
    """Number of GPUs of the server, if given."""
    live: LiveCounts | None
    """Of the sessions with a world; None when there are none."""
    live_groups: list[LiveCounts]

    @property
    def output_rate(self) -> float | None:
        """Output tokens per second over all sessions."""
        return self.output_tokens / self.wall if self.output_tokens is not None and self.wall > 0 else None

    @property
    def output_rate_per_gpu(self) -> float | None:
        return self.output_rate / self.num_gpus if self.output_rate is not None and self.num_gpus is not None else None

    @property
    def total_rate_per_gpu(self) -> float | None:
        """Prompt and output tokens per second per GPU, including tokens from a prefix cache."""
        if self.output_rate_per_gpu is None or self.prompt_tokens is None or self.num_gpus is None:
            return None
        return self.output_rate_per_gpu + self.prompt_tokens / self.wall / self.num_gpus

    @property
    def interactivity(self) -> float | None:
        """E2E normalized interactivity in output tokens per second per user: 1 / P90 of (turn time / output tokens).

        The percentile is taken before the inverse (SemiAnalysis InferenceX, AgentX guidelines in MODELS.md; aiperf's
        e2e_normalized_interactivity_p90)."""
        return 1 / self.normalized_latency.p90 if self.normalized_latency.p90 else None

    @property
    def emitted_per_step(self) -> float | None:
        """Mean tokens per decode step of a request: accepted drafts and the bonus token."""
        if self.speculation is None or not self.speculation.num_steps:
            return None
        return 1 + self.speculation.num_accepted / self.speculation.num_steps

    @property
    def emitted_by_source(self) -> dict[str, float]:
        """Mean accepted drafts per decode step, by their source. With the bonus token: `emitted_per_step`."""
        if self.speculation is None or not self.speculation.num_steps:
            return {}
        by_source = self.speculation.by_source
        return {name: sum(counts.accepted) / self.speculation.num_steps for name, counts in by_source.items()}

    @property
    def draft_acceptance(self) -> float | None:
        if self.speculation is None or not self.speculation.num_drafted:
            return None
        return self.speculation.num_accepted / self.speculation.num_drafted

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Acceptance rate at each draft position."""
        if self.speculation is None:
            return []
        pairs = zip(self.speculation.drafted_by_position, self.speculation.accepted_by_position, strict=False)
        return [accepted / drafted if drafted else None for drafted, accepted in pairs]


def summarize(sessions: Sequence[SessionRecord], wall: float, *, num_gpus: int | None = None) -> Summary:
    """Summarise a run of `wall` seconds, on `num_gpus` GPUs if known."""
    sent = [turn for session in sessions for turn in session.turns]
    turns = [turn for turn in sent if turn.error is None]
    speculation: Speculation | None = None
    for turn in turns:
        if turn.speculation is not None:
            speculation = speculation or Speculation()
            speculation.add_counters(turn.speculation)
    outcomes = [(session.group, session.outcome) for session in sessions if session.outcome is not None]
    failures = Counter(turn.error for turn in sent if turn.error is not None)
    failures.update(session.error for session in sessions if session.error is not None and not session.turns)
    return Summary(
        num_sessions=len(sessions),
        num_subagents=sum(session.parent is not None for session in sessions),
        num_failed_sessions=sum(session.error is not None for session in sessions),
        num_planned_turns=sum(session.num_planned for session in sessions),
        num_turns=len(turns),
        num_failed_turns=len(sent) - len(turns),
        num_diverged=sum(turn.diverged for turn in turns),
        errors=failures.most_common(),
        wall=wall,
        prompt_tokens=_total(turn.prompt_tokens for turn in turns),
        output_tokens=_total(turn.completion_tokens for turn in turns),
        latency=Distribution.of(turn.latency for turn in turns),
        time_to_first_token=_first_tokens(turns),
        first_token_of_first_turns=_first_tokens(turn for turn in turns if turn.turn == 0),
        first_token_of_later_turns=_first_tokens(turn for turn in turns if turn.turn > 0),
        time_per_token=Distribution.of(_known(turn.time_per_token for turn in turns)),
        normalized_latency=Distribution.of(_known(turn.normalized_latency for turn in turns)),
        gaps=Distribution.of(gap for turn in turns for gap in turn.gaps),
        lag=Distribution.of(turn.lag for turn in sent),
        hits=hits(turns),
        speculation=speculation,
        forced_acceptance=any(turn.forced_acceptance for turn in sent),
        by_turn=_columns(turns),
        num_gpus=num_gpus,
        live=count(outcome for _, outcome in outcomes) if outcomes else None,
        live_groups=count_groups(outcomes),
    )


def _columns(turns: Sequence[TurnRecord]) -> list[TurnColumn]:
    places: dict[int, list[TurnRecord]] = {}
    for turn in turns:
        places.setdefault(turn.turn, []).append(turn)
    return [
        TurnColumn(
            turn=place,
            time_to_first_token=_first_tokens(there),
            latency=Distribution.of(turn.latency for turn in there),
            hits=hits(there),
        )
        for place, there in sorted(places.items())
    ]


def _first_tokens(turns: Iterable[TurnRecord]) -> Distribution:
    return Distribution.of(_known(turn.time_to_first_token for turn in turns))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
