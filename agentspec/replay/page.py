"""The report as one self-contained HTML page without scripts, in the reader's light or dark colour scheme."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agentspec import files
from agentspec.replay import page_plots, report_live
from agentspec.replay.measure import SessionRecord, Summary
from agentspec.replay.outcomes import LiveCounts
from agentspec.replay.report import (
    FORCED_LABEL,
    NOT_REPORTED,
    Report,
    count,
    count_rows,
    milliseconds,
    rate,
    share,
    time_rows,
)
from agentspec.replay.slo import Goodput

MAX_CARDS = 8
"""Two full rows; further figures are in the tables below."""
MAX_OPEN_ROWS = 12
"""Longer tables are collapsed."""

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["px"] = "{:.1f}".format


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    value: str
    unit: str
    note: str
    """Under the value."""
    kind: str = ""
    """CSS class."""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    note: str
    """Shown when the table isn't collapsed."""
    head: list[str]
    rows: list[list[str]]
    is_folded: bool = False


def write_page(report: Report, path: str) -> None:
    files.write(path, render_page(report).encode(), field="html")


def render_page(report: Report) -> str:
    """Render the page as HTML that is also well-formed XML."""
    summary = report.summary
    tables = [_times_table(summary), _turn_table(summary), *_over_table(report), *_live_tables(report)]
    return _TEMPLATES.get_template("page.html.jinja").render(
        report=report,
        file_name=Path(report.file).name,
        answered=f"{summary.num_turns:,} turns of {summary.num_sessions:,} sessions in {_seconds(summary.wall)}",
        forced_label=FORCED_LABEL,
        cards=_cards(report)[:MAX_CARDS],
        figures=page_plots.two_columns(report),
        timeline=page_plots.timeline(report),
        tables=[*tables, _session_table(report.sessions)],
        lists=[("Counts", count_rows(report)), ("Settings", _settings(report))],
    )


def _cards(report: Report) -> list[Card]:
    summary, goodput = report.summary, report.goodput
    turn, between = summary.latency, summary.time_per_token
    firsts = [
        milliseconds(times.p50) for times in (summary.first_token_of_first_turns, summary.first_token_of_later_turns)
    ]
    emitted = NOT_REPORTED if summary.emitted_per_step is None else f"{summary.emitted_per_step:.2f}"
    hit = share(summary.hits.share) if summary.hits.num_turns else NOT_REPORTED
    hit_note = (
        f"{count(summary.hits.cached_tokens)} of {count(summary.hits.prompt_tokens)} prompt tokens"
        if summary.hits.num_turns
        else "no usage details"
    )
    accepted = (
        f"{share(summary.draft_acceptance)} of drafts accepted" if summary.draft_acceptance is not None else "no drafts"
    )
    failures = summary.num_failed_sessions
    answered = f"{summary.num_turns:,} of {summary.num_planned_turns:,} turns answered"
    forced = "forced: " if summary.forced_acceptance else ""
    cards = [
        Card("Turn time", milliseconds(turn.p50), "ms", f"p90 {milliseconds(turn.p90)} · p99 {milliseconds(turn.p99)}"),
        Card(
            "Time to first token",
            milliseconds(summary.time_to_first_token.p50),
            "ms",
            f"first turns {firsts[0]} · later {firsts[1]}",
        ),
        Card(
            "Output tokens a second",
            rate(summary.output_rate),
            "",
            f"{count(summary.output_tokens)} in {_seconds(summary.wall)}",
        ),
        Card("Prefix hit", hit, "", hit_note),
        Card("Failed sessions", str(failures), "", answered, "bad" if failures else ""),
        Card("Emitted tokens a step", emitted, "", forced + accepted),
        Card(
            "Time between tokens",
            milliseconds(between.p50),
            "ms",
            f"p90 {milliseconds(between.p90)} · p99 {milliseconds(between.p99)}",
        ),
        Card("Normalized interactivity", rate(summary.interactivity), "", "tokens a second a user, P90"),
    ]
    if goodput is not None:
        cards.insert(0, _goodput_card(goodput))
    return cards if summary.live is None else [*_live_cards(summary.live), *cards]


def _goodput_card(goodput: Goodput) -> Card:
    speed = "-" if goodput.rate is None else f"{goodput.rate:,.2f}"
    note = f"{goodput.num_met:,} of {goodput.num_turns:,} · {speed} a second"
    return Card(
        "Turns within bounds", share(goodput.share), "", note, "over" if goodput.num_met < goodput.num_turns else ""
    )


def _live_cards(live: LiveCounts) -> list[Card]:
    calls = share(live.num_valid / live.num_calls) if live.num_calls else "no calls"
    goals = share(live.num_sessions_reached / live.num_sessions) if live.num_sessions else "no goals"
    user_turns = f"{live.num_turns_reached} of {live.num_turns} user turns"
    return [
        Card("Sessions at goal", goals, "", f"{live.num_sessions_reached} of {live.num_sessions} · {user_turns}"),
        Card("Tool calls valid", calls, "", f"{live.num_valid:,} of {live.num_calls:,}"),
    ]


def _times_table(summary: Summary) -> Table:
    rows = [
        [name, *(milliseconds(value) for value in (times.mean, times.p50, times.p90, times.p99, times.largest))]
        for name, times in time_rows(summary)
    ]
    return Table("Times", "Milliseconds.", ["", "mean", "p50", "p90", "p99", "max"], rows)


def _turn_table(summary: Summary) -> Table:
    rows = [
        [
            str(column.turn + 1),
            f"{column.latency.count:,}",
            milliseconds(column.time_to_first_token.p50),
            milliseconds(column.time_to_first_token.p90),
            milliseconds(column.latency.p50),
            milliseconds(column.latency.p90),
            count(column.hits.prompt_tokens if column.hits.num_turns else None),
            count(column.hits.cached_tokens if column.hits.num_turns else None),
            share(column.hits.share),
        ]
        for column in summary.by_turn
    ]
    head = [
        "turn",
        "requests",
        "first token p50, ms",
        "p90, ms",
        "turn time p50, ms",
        "p90, ms",
        "prompt tokens",
        "cached tokens",
        "hit share",
    ]
    return Table("Turns", "", head, rows, is_folded=len(rows) > MAX_OPEN_ROWS)


def _over_table(report: Report) -> list[Table]:
    rows = [
        [
            turn.session_id,
            str(turn.turn + 1),
            f"{turn.sent:.2f}",
            *(
                milliseconds(value)
                for value in (turn.latency, turn.time_to_first_token, turn.time_per_token, turn.longest_gap)
            ),
            ", ".join(missed),
        ]
        for session in report.sessions
        for turn in session.turns
        if (missed := report.missed(turn))
    ]
    if not rows:
        return []
    head = [
        "session",
        "turn",
        "sent at, s",
        "turn time, ms",
        "first token, ms",
        "between tokens, ms",
        "longest gap, ms",
        "over",
    ]
    return [Table("Turns over a bound", f"Bounds: {report.slo}.", head, rows, is_folded=len(rows) > MAX_OPEN_ROWS)]


def _live_tables(report: Report) -> list[Table]:
    summary, missed = report.summary, report_live.missed_rows(report.sessions)
    tables = []
    if len(summary.live_groups) > 1:
        head = ["group", *report_live.GROUP_HEAD]
        tables.append(Table("Sessions with a world, by group", "", head, report_live.group_rows(summary)))
    if missed:
        note = "What the turn's goal asks for and did not hold."
        head = ["session", "user turn", "tool calls valid", "missed"]
        tables.append(Table("Goals missed", note, head, missed, is_folded=len(missed) > MAX_OPEN_ROWS))
    return tables


def _session_table(sessions: list[SessionRecord]) -> Table:
    rows = []
    for session in sessions:
        last = session.turns[-1].end if session.turns else 0.0
        begin = session.turns[0].sent if session.turns else 0.0
        answered = sum(turn.error is None for turn in session.turns)
        output = sum(turn.completion_tokens or 0 for turn in session.turns)
        outcome = session.error or "completed"
        if session.outcome is not None and session.outcome.num_goals:
            outcome += f"; {session.outcome.num_reached} of {session.outcome.num_goals} user turns at goal"
        rows.append(
            [
                session.session_id,
                f"{answered} of {session.num_planned}",
                f"{last - begin:.2f}",
                f"{output:,}",
                share(session.hit_share),
                outcome,
            ]
        )
    return Table(
        "Sessions",
        "",
        ["session", "turns", "seconds", "output tokens", "hit share", "outcome"],
        rows,
        is_folded=len(rows) > MAX_OPEN_ROWS,
    )


def _settings(report: Report) -> list[tuple[str, str]]:
    settings = [("file", report.file), ("model", report.model), ("server", report.url), *report.settings.items()]
    return settings + [(f"source: {name}", str(value)) for name, value in report.source.items()]


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
