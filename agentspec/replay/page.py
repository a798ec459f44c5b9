"""The report as one HTML page: nothing is loaded from anywhere, it needs no script, and it follows the reader's light or dark setting."""

from __future__ import annotations

from html import escape
from pathlib import Path

from agentspec import files
from agentspec.replay import page_plots, report_live
from agentspec.replay.measure import SessionRecord, Summary
from agentspec.replay.outcomes import LiveCounts
from agentspec.replay.page_style import STYLE
from agentspec.replay.report import FORCED_LABEL, NOT_REPORTED, Report, count, count_rows, milliseconds, rate, share, time_rows
from agentspec.replay.slo import Goodput

MAX_CARDS = 8
"""Two full rows; what finds no room stands in the tables below."""


def write_page(report: Report, path: str) -> None:
    files.write(path, render_page(report).encode(), field="html")


def render_page(report: Report) -> str:
    """The whole page, well-formed as XML too."""
    summary = report.summary
    body = "".join(
        (
            _header(report),
            f'<p class="forced" role="alert">{escape(FORCED_LABEL)}</p>' if summary.forced_acceptance else "",
            _cards(report),
            page_plots.two_columns(report),
            page_plots.timeline(report),
            _times_table(summary),
            _turn_table(summary),
            _over_table(report),
            _live_tables(report),
            _session_table(report.sessions),
            _facts(report),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
        f"<title>{escape(report.model)}: replay of {escape(Path(report.file).name)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _header(report: Report) -> str:
    summary = report.summary
    answered = f"{summary.num_turns:,} turns of {summary.num_sessions:,} sessions in {_seconds(summary.wall)}"
    return (
        f'<header><p class="eyebrow">agentspec replay</p><h1>{escape(Path(report.file).name)}</h1>'
        f"<p class='lead'><strong>{escape(report.model)}</strong> at {escape(report.url)} · {escape(answered)}</p></header>"
    )


def _cards(report: Report) -> str:
    summary, goodput = report.summary, report.goodput
    turn, between = summary.latency, summary.time_per_token
    firsts = [milliseconds(times.p50) for times in (summary.first_token_of_first_turns, summary.first_token_of_later_turns)]
    emitted = NOT_REPORTED if summary.emitted_per_step is None else f"{summary.emitted_per_step:.2f}"
    hit = share(summary.hits.share) if summary.hits.num_turns else NOT_REPORTED
    hit_note = (
        f"{count(summary.hits.cached_tokens)} of {count(summary.hits.prompt_tokens)} prompt tokens" if summary.hits.num_turns else "no usage details"
    )
    accepted = f"{share(summary.draft_acceptance)} of drafts accepted" if summary.draft_acceptance is not None else "no drafts"
    failures = summary.num_failed_sessions
    cards = [
        ("Turn time", milliseconds(turn.p50), "ms", f"p90 {milliseconds(turn.p90)} · p99 {milliseconds(turn.p99)}", ""),
        ("Time to first token", milliseconds(summary.time_to_first_token.p50), "ms", f"first turns {firsts[0]} · later {firsts[1]}", ""),
        ("Output tokens a second", rate(summary.output_rate), "", f"{count(summary.output_tokens)} in {_seconds(summary.wall)}", ""),
        ("Prefix hit", hit, "", hit_note, ""),
        ("Failed sessions", str(failures), "", f"{summary.num_turns:,} of {summary.num_planned_turns:,} turns answered", "bad" if failures else ""),
        ("Emitted tokens a step", emitted, "", ("forced: " if summary.forced_acceptance else "") + accepted, ""),
        ("Time between tokens", milliseconds(between.p50), "ms", f"p90 {milliseconds(between.p90)} · p99 {milliseconds(between.p99)}", ""),
        ("Normalized interactivity", rate(summary.interactivity), "", "tokens a second a user, P90", ""),
    ]
    if goodput is not None:
        cards.insert(0, _goodput_card(goodput))
    if summary.live is not None:
        cards = [*_live_cards(summary.live), *cards]
    return '<section class="cards">' + "".join(_card(*card) for card in cards[:MAX_CARDS]) + "</section>"


def _goodput_card(goodput: Goodput) -> tuple[str, str, str, str, str]:
    note = f"{goodput.num_met:,} of {goodput.num_turns:,} · {'-' if goodput.rate is None else f'{goodput.rate:,.2f}'} a second"
    return ("Turns within bounds", share(goodput.share), "", note, "over" if goodput.num_met < goodput.num_turns else "")


def _live_cards(live: LiveCounts) -> list[tuple[str, str, str, str, str]]:
    calls = share(live.num_valid / live.num_calls) if live.num_calls else "no calls"
    goals = share(live.num_sessions_reached / live.num_sessions) if live.num_sessions else "no goals"
    turns = f"{live.num_sessions_reached} of {live.num_sessions} · {live.num_turns_reached} of {live.num_turns} user turns"
    return [("Sessions at goal", goals, "", turns, ""), ("Tool calls valid", calls, "", f"{live.num_valid:,} of {live.num_calls:,}", "")]


def _card(name: str, value: str, unit: str, note: str, kind: str) -> str:
    size = " long" if len(value) > 9 else ""
    unit = f"<small> {escape(unit)}</small>" if unit else ""
    return (
        f'<div class="card {kind}"><p class="name">{escape(name)}</p><p class="value{size}">{escape(value)}{unit}</p>'
        f'<p class="under">{escape(note)}</p></div>'
    )


def _times_table(summary: Summary) -> str:
    rows = [
        [name, *(milliseconds(value) for value in (times.mean, times.p50, times.p90, times.p99, times.largest))] for name, times in time_rows(summary)
    ]
    return _table("Times", "Milliseconds.", ["", "mean", "p50", "p90", "p99", "max"], rows)


def _turn_table(summary: Summary) -> str:
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
    head = ["turn", "requests", "first token p50, ms", "p90, ms", "turn time p50, ms", "p90, ms", "prompt tokens", "cached tokens", "hit share"]
    return _table("Turns", "", head, rows, is_folded=len(rows) > 12)


def _over_table(report: Report) -> str:
    rows = [
        [
            turn.session_id,
            str(turn.turn + 1),
            f"{turn.sent:.2f}",
            *(milliseconds(value) for value in (turn.latency, turn.time_to_first_token, turn.time_per_token, turn.longest_gap)),
            ", ".join(missed),
        ]
        for session in report.sessions
        for turn in session.turns
        if (missed := report.missed(turn))
    ]
    if not rows:
        return ""
    head = ["session", "turn", "sent at, s", "turn time, ms", "first token, ms", "between tokens, ms", "longest gap, ms", "over"]
    return _table("Turns over a bound", f"Bounds: {report.slo}.", head, rows, is_folded=len(rows) > 12)


def _live_tables(report: Report) -> str:
    summary, missed = report.summary, report_live.missed_rows(report.sessions)
    tables = ""
    if len(summary.live_groups) > 1:
        tables += _table("Sessions with a world, by group", "", ["group", *report_live.GROUP_HEAD], report_live.group_rows(summary))
    if missed:
        head = ["session", "user turn", "tool calls valid", "missed"]
        tables += _table("Goals missed", "What the turn's goal asks for and did not hold.", head, missed, is_folded=len(missed) > 12)
    return tables


def _session_table(sessions: list[SessionRecord]) -> str:
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
            [session.session_id, f"{answered} of {session.num_planned}", f"{last - begin:.2f}", f"{output:,}", share(session.hit_share), outcome]
        )
    return _table("Sessions", "", ["session", "turns", "seconds", "output tokens", "hit share", "outcome"], rows, is_folded=len(rows) > 12)


def _facts(report: Report) -> str:
    settings = [("file", report.file), ("model", report.model), ("server", report.url), *report.settings.items()]
    settings += [(f"source: {name}", str(value)) for name, value in report.source.items()]
    lists = "".join(
        f"<div><h2>{title}</h2><dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl></div>"
        for title, rows in (("Counts", count_rows(report)), ("Settings", settings))
    )
    return f'<section class="facts">{lists}</section>'


def _table(title: str, note: str, head: list[str], rows: list[list[str]], *, is_folded: bool = False) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
    if is_folded:
        return f'<section class="table"><details><summary><h2>{escape(title)}</h2> <span>{len(rows)} rows</span></summary>{table}</details></section>'
    return f'<section class="table"><h2>{escape(title)}</h2><p>{escape(note)}</p>{table}</section>'


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
