"""The report as one HTML page: nothing is loaded from anywhere, it needs no script, and it follows the reader's light or dark setting."""

from __future__ import annotations

from html import escape
from pathlib import Path

from agentspec.replay import plots, report_live
from agentspec.replay.measure import SessionRecord, Summary, TurnRecord
from agentspec.replay.outcomes import LiveCounts
from agentspec.replay.page_style import STYLE
from agentspec.replay.report import FORCED_LABEL, NOT_REPORTED, Report, count, count_rows, milliseconds, share, time_rows

MAX_TIMELINES = 80
"""Sessions drawn in the timeline; the table below it has them all."""


def write_page(report: Report, path: str) -> None:
    Path(path).write_text(render_page(report), encoding="utf-8")


def render_page(report: Report) -> str:
    """The whole page, well-formed as XML too."""
    summary = report.summary
    body = "".join(
        (
            _header(report),
            f'<p class="forced" role="alert">{escape(FORCED_LABEL)}</p>' if summary.forced_acceptance else "",
            _cards(summary),
            f'<section class="plots">{_first_token_plot(report)}{_hit_plot(summary)}{_acceptance_plot(summary)}{_token_plot(report)}</section>',
            _timeline(report),
            _times_table(summary),
            _turn_table(summary),
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


def _cards(summary: Summary) -> str:
    first, between, lag = summary.time_to_first_token, summary.time_per_token, summary.lag
    rate = NOT_REPORTED if summary.output_rate is None else f"{summary.output_rate:,.1f}"
    emitted = NOT_REPORTED if summary.emitted_per_step is None else f"{summary.emitted_per_step:.2f}"
    hit = share(summary.hits.share) if summary.hits.num_turns else NOT_REPORTED
    hit_note = (
        f"{count(summary.hits.cached_tokens)} of {count(summary.hits.prompt_tokens)} prompt tokens" if summary.hits.num_turns else "no usage details"
    )
    accepted = f"{share(summary.draft_acceptance)} of drafts accepted" if summary.draft_acceptance is not None else "no drafts"
    failures = summary.num_failed_sessions
    cards = [
        ("Time to first token", milliseconds(first.p50), "ms", f"p90 {milliseconds(first.p90)} · p99 {milliseconds(first.p99)}", ""),
        ("Time between tokens", milliseconds(between.p50), "ms", f"p90 {milliseconds(between.p90)} · p99 {milliseconds(between.p99)}", ""),
        ("Output tokens a second", rate, "", f"{count(summary.output_tokens)} in {_seconds(summary.wall)}", ""),
        ("Prefix hit", hit, "", hit_note, ""),
        ("Emitted tokens a step", emitted, "", ("forced: " if summary.forced_acceptance else "") + accepted, ""),
        ("Failed sessions", str(failures), "", f"{summary.num_turns:,} of {summary.num_planned_turns:,} turns answered", "bad" if failures else ""),
        ("Diverged turns", str(summary.num_diverged), "", "live answers replaced by recorded ones", ""),
        ("Schedule lag", milliseconds(lag.p50), "ms", f"p99 {milliseconds(lag.p99)} · max {milliseconds(lag.largest)}", ""),
    ]
    if summary.live is not None:  # in place of the last two, whose figures stand below as well
        cards = [*_live_cards(summary.live), *cards[:-2]]
    return '<section class="cards">' + "".join(_card(*card) for card in cards) + "</section>"


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


def _figure(title: str, note: str, plot: str, kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption><h2>{escape(title)}</h2><p>{note}</p></figcaption>{plot}</figure>'


def _absent(title: str, reason: str) -> str:
    return _figure(title, "", f'<p class="absent">{escape(reason)}</p>')


def _first_token_plot(report: Report) -> str:
    title = "Time to first token, by turn"
    columns = report.summary.by_turn
    if not any(column.time_to_first_token.count for column in columns):
        return _absent(title, "No turn was answered.")
    place = {column.turn: index for index, column in enumerate(columns)}
    points = [
        plots.Dot(place[turn.turn], wait * 1000, f"{turn.session_id}, turn {turn.turn + 1}: {milliseconds(wait)} ms")
        for turn in _answered(report.sessions)
        if (wait := turn.time_to_first_token) is not None
    ]
    medians = [None if column.time_to_first_token.p50 is None else column.time_to_first_token.p50 * 1000 for column in columns]
    plot = plots.dots(points, medians, axis="turn of the session", show=_plain)
    return _figure(title, "Milliseconds; each dot is a request, the line goes through the medians.", plot)


def _hit_plot(summary: Summary) -> str:
    title = "Prefix hit, by turn"
    if not summary.hits.num_turns:
        return _absent(title, "The server does not report cached tokens.")
    columns = [
        plots.Bar(
            str(column.turn + 1),
            (column.hits.cached_tokens / column.hits.num_turns, (column.hits.prompt_tokens - column.hits.cached_tokens) / column.hits.num_turns),
            "" if column.hits.share is None else f"{column.hits.share:.0%}",
            f"turn {column.turn + 1}: {column.hits.cached_tokens:,} of {column.hits.prompt_tokens:,} tokens, {share(column.hits.share)}",
        )
        for column in summary.by_turn
        if column.hits.num_turns
    ]
    key = '<span class="key part0"></span>from the cache <span class="key part1"></span>computed'
    return _figure(title, f"Mean prompt tokens of a request: {key}", plots.bars(columns, axis="turn of the session", show=_plain))


def _acceptance_plot(summary: Summary) -> str:
    title = "Acceptance, by draft position"
    speculation = summary.speculation
    if speculation is None:
        return _absent(title, "The server does not report speculation.")
    if not summary.acceptance_by_position:
        return _absent(title, "Nothing was drafted." if not speculation.num_drafted else "The server does not report positions.")
    counts = zip(speculation.drafted_by_position, speculation.accepted_by_position, strict=False)
    columns = [
        plots.Bar(str(place), ((rate or 0.0) * 100,), share(rate), f"position {place}: {accepted:,} of {drafted:,} drafts, {share(rate)}")
        for place, (rate, (drafted, accepted)) in enumerate(zip(summary.acceptance_by_position, counts, strict=True), start=1)
    ]
    note = (
        "FORCED to set rates; says nothing about the model."
        if summary.forced_acceptance
        else "Accepted share of the drafts offered at each position."
    )
    return _figure(title, note, plots.bars(columns, axis="draft position", show=lambda value: f"{value:.0f} %", high=112))


def _token_plot(report: Report) -> str:
    title = "Time between tokens"
    values = sorted(value * 1000 for turn in _answered(report.sessions) if (value := turn.time_per_token) is not None)
    if not values:
        return _absent(title, "No answer came in more than one piece.")
    step = plots.ticks(values[-1] or 1, at_most=14)
    width = step[1] if len(step) > 1 else values[-1] or 1
    counts = [0] * (int(values[-1] / width) + 1)
    for value in values:
        counts[int(value / width)] += 1
    columns = [
        plots.Bar(
            _plain(index * width), (number,), str(number) if number else "", f"{_plain(index * width)} to {_plain((index + 1) * width)} ms: {number}"
        )
        for index, number in enumerate(counts)
    ]
    return _figure(title, "Requests by their mean milliseconds between tokens.", plots.bars(columns, axis="milliseconds, from", show=_plain))


def _timeline(report: Report) -> str:
    rows = [(session.session_id, _spans(session)) for session in report.sessions if session.turns]
    if not rows:
        return ""
    left_out = f" The first {MAX_TIMELINES} of {len(rows)} sessions." if len(rows) > MAX_TIMELINES else ""
    key = (
        '<span class="key wait"></span>waiting for the first token <span class="key stream"></span>streaming '
        '<span class="key failed"></span>failed; blank: tools and people.'
    )
    plot = plots.timelines(rows[:MAX_TIMELINES], report.summary.wall, axis="seconds since the start", show=_plain)
    return _figure("Sessions over time", key + left_out, plot, kind="wide")


def _spans(session: SessionRecord) -> list[plots.Span]:
    spans = []
    for turn in session.turns:
        label = f"turn {turn.turn + 1}: sent at {turn.sent:.2f} s"
        if turn.error is not None:
            spans.append(plots.Span(turn.sent, turn.end, "failed", f"{label}, failed: {turn.error}"))
            continue
        first = turn.sent + (turn.time_to_first_token if turn.time_to_first_token is not None else turn.latency)
        tokens = f"{count(turn.prompt_tokens)} prompt, {count(turn.cached_tokens)} cached, {count(turn.completion_tokens)} output tokens"
        label = f"{label}, first token after {milliseconds(first - turn.sent)} ms, {tokens}"
        spans += [plots.Span(turn.sent, first, "wait", label), plots.Span(first, turn.end, "stream", label)]
    return spans


def _times_table(summary: Summary) -> str:
    rows = [
        [name, *(milliseconds(value) for value in (times.mean, times.p50, times.p90, times.p99, times.largest))] for name, times in time_rows(summary)
    ]
    return _table("Times", "Milliseconds.", ["", "mean", "p50", "p90", "p99", "max"], rows)


def _turn_table(summary: Summary) -> str:
    rows = [
        [
            str(column.turn + 1),
            f"{column.time_to_first_token.count:,}",
            milliseconds(column.time_to_first_token.p50),
            milliseconds(column.time_to_first_token.p90),
            count(column.hits.prompt_tokens if column.hits.num_turns else None),
            count(column.hits.cached_tokens if column.hits.num_turns else None),
            share(column.hits.share),
        ]
        for column in summary.by_turn
    ]
    head = ["turn", "requests", "first token p50, ms", "p90, ms", "prompt tokens", "cached tokens", "hit share"]
    return _table("Turns", "", head, rows, is_folded=len(rows) > 12)


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
        for title, rows in (("Counts", count_rows(report.summary)), ("Settings", settings))
    )
    return f'<section class="facts">{lists}</section>'


def _table(title: str, note: str, head: list[str], rows: list[list[str]], *, is_folded: bool = False) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
    if is_folded:
        return f'<section class="table"><details><summary><h2>{escape(title)}</h2> <span>{len(rows)} rows</span></summary>{table}</details></section>'
    return f'<section class="table"><h2>{escape(title)}</h2><p>{escape(note)}</p>{table}</section>'


def _answered(sessions: list[SessionRecord]) -> list[TurnRecord]:
    return [turn for session in sessions for turn in session.turns if turn.error is None]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
