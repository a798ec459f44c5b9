"""The results of a replay as text and JSON. replay/page.py renders the same object as HTML.

Every format states when acceptance was forced, and shows "not reported" for values that the server did not report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentspec import files
from agentspec.replay import report_json, report_live
from agentspec.replay.measure import Distribution, SessionRecord, Summary, TurnColumn, TurnRecord
from agentspec.replay.slo import Goodput, Slo

REPORT_SCHEMA = "agentspec.report/1"
FORCED_LABEL = (
    "FORCED ACCEPTANCE: drafts were accepted at set rates, not by the model. "
    "The text is meaningless; these are benchmark figures."
)
NOT_REPORTED = "not reported"

MAX_TURN_LINES = 16
"""Greatest number of lines in the table by turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One finished replay."""

    file: str
    source: dict[str, Any]
    """The `source` field of the replay file."""
    model: str
    url: str
    settings: dict[str, str]
    sessions: list[SessionRecord]
    summary: Summary
    slo: Slo | None = None
    """Service level objectives, if given."""

    @property
    def goodput(self) -> Goodput | None:
        if self.slo is None:
            return None
        return self.slo.goodput((turn for session in self.sessions for turn in session.turns), self.summary.wall)

    def missed(self, turn: TurnRecord) -> list[str]:
        """Return the names of the bounds that a turn exceeded; empty without bounds."""
        return [] if self.slo is None else self.slo.missed(turn)

    @property
    def has_failures(self) -> bool:
        return self.summary.num_failed_sessions > 0

    def table(self) -> str:
        """Return the text report."""
        return "\n".join(_table(self))

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON data: the summary, and an entry for each request."""
        goodput = self.goodput
        return {
            "schema": REPORT_SCHEMA,
            "forced_acceptance": self.summary.forced_acceptance,
            **({"warning": FORCED_LABEL} if self.summary.forced_acceptance else {}),
            "file": self.file,
            "source": self.source,
            "model": self.model,
            "url": self.url,
            "settings": self.settings,
            "summary": report_json.summary_json(self.summary),
            **(
                {"slo": report_json.goodput_json(self.slo, goodput)}
                if self.slo is not None and goodput is not None
                else {}
            ),
            **({"live": report_live.counts_json(self.summary)} if self.summary.live is not None else {}),
            "by_turn": [report_json.column_json(column) for column in self.summary.by_turn],
            "sessions": [
                {
                    "session_id": session.session_id,
                    "group": session.group,
                    **({"parent": session.parent} if session.parent is not None else {}),
                    "planned_turns": session.num_planned,
                    "error": session.error,
                    **({"live": report_live.session_json(session.outcome)} if session.outcome is not None else {}),
                }
                for session in self.sessions
            ],
            "requests": [
                report_json.request_json(turn, self.slo) for session in self.sessions for turn in session.turns
            ],
        }

    def write_json(self, path: str) -> None:
        files.write(path, (json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n").encode(), field="json")


def _table(report: Report) -> list[str]:
    summary = report.summary
    lines = [
        f"{report.file}  on  {report.model}  at  {report.url}",
        "  ".join(f"{name} {value}," for name, value in report.settings.items()).rstrip(","),
    ]
    if summary.forced_acceptance:
        lines += ["", FORCED_LABEL]
    lines += [""] + [f"{name:<26}{value}" for name, value in count_rows(report)]
    if len(summary.live_groups) > 1:
        lines += ["", f"{'sessions with a world':<26}" + "".join(f"{head:>22}" for head in report_live.GROUP_HEAD)]
        lines += [
            f"{row[0]:<26}" + "".join(f"{cell:>22}" for cell in row[1:]) for row in report_live.group_rows(summary)
        ]
    lines += ["", f"{'milliseconds':<26}" + "".join(f"{head:>10}" for head in ("mean", "p50", "p90", "p99", "max"))]
    lines += [
        f"{name:<26}" + "".join(f"{milliseconds(value):>10}" for value in _five(distribution))
        for name, distribution in time_rows(summary)
    ]
    lines += [
        "",
        f"{'turn':<26}"
        + "".join(f"{head:>14}" for head in ("requests", "first token", "turn time", "prompt", "prefix hit", "share")),
    ]
    shown = summary.by_turn if len(summary.by_turn) <= MAX_TURN_LINES else summary.by_turn[: MAX_TURN_LINES - 1]
    lines += [f"{column.turn + 1:<26}" + "".join(f"{value:>14}" for value in _column_cells(column)) for column in shown]
    if len(shown) < len(summary.by_turn):
        lines.append(f"and {len(summary.by_turn) - len(shown)} later turns, listed by --json and --html")
    if summary.live is not None and summary.live.problems:
        lines += ["", "invalid tool calls"] + [f"  {number} x  {kind}" for kind, number in summary.live.problems]
    if summary.errors:
        lines += ["", "failed sessions"] + [f"  {count} x  {message}" for message, count in summary.errors]
    return lines


def count_rows(report: Report) -> list[tuple[str, str]]:
    """Return the counts of a run as (name, text)."""
    summary = report.summary
    not_sent = summary.num_planned_turns - summary.num_turns - summary.num_failed_turns
    turns = f"{summary.num_turns} answered of {summary.num_planned_turns}"
    if summary.num_failed_turns or not_sent:
        turns += f", {summary.num_failed_turns} failed, {not_sent} not sent"
    if summary.num_diverged:
        turns += f", {summary.num_diverged} after a recorded answer that replaced a diverged one"
    sessions = f"{summary.num_sessions - summary.num_failed_sessions} completed of {summary.num_sessions}"
    if summary.num_subagents:
        sessions += f", {summary.num_subagents} of them subagents"
    rows = [
        ("sessions", sessions),
        ("turns", turns),
        ("failures", str(summary.num_failed_sessions)),
        *report_live.rows(summary),
        ("wall time", f"{summary.wall:.2f} s"),
        ("prompt tokens", count(summary.prompt_tokens)),
        ("output tokens", count(summary.output_tokens)),
        ("output tokens a second", rate(summary.output_rate)),
        *_gpu_rows(summary),
        ("normalized interactivity", _interactivity(summary)),
        *_slo_rows(report),
        ("prefix hit", hit_text(summary)),
    ]
    return rows + speculation_rows(summary)


def _gpu_rows(summary: Summary) -> list[tuple[str, str]]:
    if summary.num_gpus is None:
        return []
    of = f"of {summary.num_gpus} GPU{'s' if summary.num_gpus > 1 else ''}"
    return [
        (
            "tokens a second a GPU",
            f"{rate(summary.output_rate_per_gpu)} output, {rate(summary.total_rate_per_gpu)} with the prompts, {of}",
        )
    ]


def _interactivity(summary: Summary) -> str:
    """Return the interactivity as text; docs/replay.md has its formula."""
    return (
        NOT_REPORTED if summary.interactivity is None else f"{summary.interactivity:,.1f} tokens a second a user, P90"
    )


def _slo_rows(report: Report) -> list[tuple[str, str]]:
    """Return the rows of service level objectives; empty without bounds."""
    goodput = report.goodput
    if goodput is None:
        return []
    missed = [f"{name} {number:,}" for name, number in goodput.missed.items() if number]
    return [
        ("bounds of a turn", str(report.slo)),
        ("turns within bounds", f"{goodput.num_met:,} of {goodput.num_turns:,}, {share(goodput.share)}"),
        ("turns over a bound", ", ".join(missed) or "none"),
        ("goodput", "-" if goodput.rate is None else f"{goodput.rate:,.2f} turns a second"),
    ]


def speculation_rows(summary: Summary) -> list[tuple[str, str]]:
    if summary.speculation is None:
        return [("emitted tokens a step", NOT_REPORTED), ("acceptance by position", NOT_REPORTED)]
    emitted = "no decode steps" if summary.emitted_per_step is None else f"{summary.emitted_per_step:.2f}"
    if len(summary.emitted_by_source) > 1:
        parts = (f"{number:.2f} {name}" for name, number in summary.emitted_by_source.items())
        emitted += f" = 1 + {' + '.join(parts)}"
    if not summary.speculation.num_drafted:
        accepted = "nothing was drafted"
    elif not summary.acceptance_by_position:
        accepted = NOT_REPORTED
    else:
        rates = enumerate(summary.acceptance_by_position, start=1)
        accepted = "  ".join(
            "  ".join(
                [name] * (len(summary.emitted_by_source) > 1) + [f"{place}: {share(rate)}" for place, rate in own]
            )
            for name, counts in summary.speculation.by_source.items()
            if (own := list(islice(rates, len(counts.drafted))))
        )
    forced = "  (forced)" if summary.forced_acceptance else ""
    return [
        ("emitted tokens a step", emitted + forced),
        (
            "drafts accepted",
            share(summary.draft_acceptance) + forced if summary.speculation.num_drafted else "nothing was drafted",
        ),
        ("acceptance by position", accepted + forced),
    ]


def time_rows(summary: Summary) -> list[tuple[str, Distribution]]:
    return [
        ("turn time", summary.latency),
        ("time to first token", summary.time_to_first_token),
        ("first token, first turns", summary.first_token_of_first_turns),
        ("first token, later turns", summary.first_token_of_later_turns),
        ("time between tokens", summary.time_per_token),
        ("gap between events", summary.gaps),
        ("schedule lag", summary.lag),
    ]


def hit_text(summary: Summary) -> str:
    hits = summary.hits
    if not hits.num_turns:
        return NOT_REPORTED
    text = f"{hits.cached_tokens:,} of {hits.prompt_tokens:,} prompt tokens, {share(hits.share)}"
    return (
        text
        if hits.num_turns == summary.num_turns
        else f"{text} ({hits.num_turns} of {summary.num_turns} turns report it)"
    )


def count(value: int | None) -> str:
    return NOT_REPORTED if value is None else f"{value:,}"


def rate(value: float | None) -> str:
    return NOT_REPORTED if value is None else f"{value:,.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def milliseconds(seconds: float | None) -> str:
    """Format as milliseconds with three significant digits, or as whole milliseconds from 100 ms on."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _five(distribution: Distribution) -> list[float | None]:
    return [distribution.mean, distribution.p50, distribution.p90, distribution.p99, distribution.largest]


def _column_cells(column: TurnColumn) -> list[str]:
    times = [f"{milliseconds(distribution.p50)} ms" for distribution in (column.time_to_first_token, column.latency)]
    cells = [str(column.latency.count), *times]
    if not column.hits.num_turns:
        return [*cells, NOT_REPORTED, NOT_REPORTED, "-"]
    return [*cells, f"{column.hits.prompt_tokens:,}", f"{column.hits.cached_tokens:,}", share(column.hits.share)]
