"""The figures of the report page: their data and texts. replay/plots.py owns their layout."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.replay import plots
from agentspec.replay.measure import SessionRecord, Summary, TurnRecord
from agentspec.replay.report import Report, count, milliseconds, share

MAX_TIMELINES = 80
"""Greatest number of sessions in the timeline; the table below it lists all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    title: str
    note: str = ""
    key: tuple[tuple[str, str], ...] = ()
    """Legend after the note: (CSS class, meaning)."""
    plot: plots.Plot | None = None
    absent: str = ""
    """Reason for the missing plot."""
    kind: str = ""


def two_columns(report: Report) -> list[Figure]:
    """Return the figures in two columns."""
    return [
        _first_token_plot(report),
        _hit_plot(report.summary),
        _acceptance_plot(report.summary),
        _token_plot(report),
    ]


def timeline(report: Report) -> Figure | None:
    """Return a timeline of all sessions' requests; None when nothing was sent."""
    rows = [(session.session_id, _spans(report, session)) for session in report.sessions if session.turns]
    if not rows:
        return None
    left_out = f" The first {MAX_TIMELINES} of {len(rows)} sessions." if len(rows) > MAX_TIMELINES else ""
    over = (("over", "over a bound"),) if report.slo is not None else ()
    return Figure(
        title="Sessions over time",
        key=(
            ("wait", "waiting for the first token"),
            ("stream", "streaming"),
            *over,
            ("failed", "failed; blank: tools and people." + left_out),
        ),
        plot=plots.timelines(rows[:MAX_TIMELINES], report.summary.wall, axis="seconds since the start", show=_plain),
        kind="wide",
    )


def _first_token_plot(report: Report) -> Figure:
    title = "Time to first token, by turn"
    columns = report.summary.by_turn
    if not any(column.time_to_first_token.count for column in columns):
        return Figure(title=title, absent="No turn was answered.")
    place = {column.turn: index for index, column in enumerate(columns)}
    points = [
        plots.Dot(
            place[turn.turn],
            wait * 1000,
            f"{turn.session_id}, turn {turn.turn + 1}: {milliseconds(wait)} ms",
            "over" if "ttft" in report.missed(turn) else "",
        )
        for turn in _answered(report.sessions)
        if (wait := turn.time_to_first_token) is not None
    ]
    medians = [
        None if column.time_to_first_token.p50 is None else column.time_to_first_token.p50 * 1000 for column in columns
    ]
    plot = plots.dots(points, medians, axis="turn of the session", show=_plain)
    key = (("over", "over the bound"),) if report.slo is not None and "ttft" in report.slo.bounds else ()
    note = "Milliseconds; each dot is a request, the line goes through the medians."
    return Figure(title=title, note=note, key=key, plot=plot)


def _hit_plot(summary: Summary) -> Figure:
    title = "Prefix hit, by turn"
    if not summary.hits.num_turns:
        return Figure(title=title, absent="The server does not report cached tokens.")
    columns = [
        plots.Bar(
            str(column.turn + 1),
            (
                column.hits.cached_tokens / column.hits.num_turns,
                (column.hits.prompt_tokens - column.hits.cached_tokens) / column.hits.num_turns,
            ),
            "" if column.hits.share is None else f"{column.hits.share:.0%}",
            f"turn {column.turn + 1}: {column.hits.cached_tokens:,} of {column.hits.prompt_tokens:,} tokens, "
            f"{share(column.hits.share)}",
        )
        for column in summary.by_turn
        if column.hits.num_turns
    ]
    plot = plots.bars(columns, axis="turn of the session", show=_plain)
    key = (("part0", "from the cache"), ("part1", "computed"))
    return Figure(title=title, note="Mean prompt tokens of a request:", key=key, plot=plot)


def _acceptance_plot(summary: Summary) -> Figure:
    title = "Acceptance, by draft position"
    speculation = summary.speculation
    if speculation is None:
        return Figure(title=title, absent="The server does not report speculation.")
    if not summary.acceptance_by_position:
        return Figure(
            title=title,
            absent="Nothing was drafted." if not speculation.num_drafted else "The server does not report positions.",
        )
    counts = zip(speculation.drafted_by_position, speculation.accepted_by_position, strict=False)
    columns = [
        plots.Bar(
            str(place),
            ((rate or 0.0) * 100,),
            share(rate),
            f"position {place}: {accepted:,} of {drafted:,} drafts, {share(rate)}",
        )
        for place, (rate, (drafted, accepted)) in enumerate(
            zip(summary.acceptance_by_position, counts, strict=True), start=1
        )
    ]
    note = (
        "FORCED to set rates; says nothing about the model."
        if summary.forced_acceptance
        else "Each bar is the accepted share of the drafts offered at its position."
    )
    plot = plots.bars(columns, axis="draft position", show=lambda value: f"{value:.0f} %", high=112)
    return Figure(title=title, note=note, plot=plot)


def _token_plot(report: Report) -> Figure:
    title = "Time between tokens"
    values = sorted(value * 1000 for turn in _answered(report.sessions) if (value := turn.time_per_token) is not None)
    if not values:
        return Figure(title=title, absent="No answer came in more than one piece.")
    step = plots.ticks(values[-1] or 1, at_most=14)
    width = step[1] if len(step) > 1 else values[-1] or 1
    counts = [0] * (int(values[-1] / width) + 1)
    for value in values:
        counts[int(value / width)] += 1
    columns = [
        plots.Bar(
            _plain(index * width),
            (number,),
            str(number) if number else "",
            f"{_plain(index * width)} to {_plain((index + 1) * width)} ms: {number}",
        )
        for index, number in enumerate(counts)
    ]
    plot = plots.bars(columns, axis="milliseconds, from", show=_plain)
    return Figure(title=title, note="Each bar counts requests, by their mean milliseconds between tokens.", plot=plot)


def _spans(report: Report, session: SessionRecord) -> list[plots.Span]:
    spans = []
    for turn in session.turns:
        label = f"turn {turn.turn + 1}: sent at {turn.sent:.2f} s"
        if turn.error is not None:
            spans.append(plots.Span(turn.sent, turn.end, "failed", f"{label}, failed: {turn.error}"))
            continue
        first = turn.sent + (turn.time_to_first_token if turn.time_to_first_token is not None else turn.latency)
        label += (
            f", first token after {milliseconds(first - turn.sent)} ms, last after {milliseconds(turn.latency)} ms, "
            f"{count(turn.prompt_tokens)} prompt, {count(turn.cached_tokens)} cached, "
            f"{count(turn.completion_tokens)} output tokens"
        )
        missed = report.missed(turn)
        if missed:
            label += f", over the bounds of {', '.join(missed)}"
        over = " over" if missed else ""
        spans += [
            plots.Span(turn.sent, first, f"wait{over}", label),
            plots.Span(first, turn.end, f"stream{over}", label),
        ]
    return spans


def _answered(sessions: list[SessionRecord]) -> list[TurnRecord]:
    return [turn for session in sessions for turn in session.turns if turn.error is None]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
