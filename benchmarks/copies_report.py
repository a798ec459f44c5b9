"""The copies benchmark's figures, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from agentspec.types import MIN_COPY_MATCH
from benchmarks.copies_offline import LENGTHS
from benchmarks.recorded_turns import Played, RecordedTurn, Recording
from benchmarks.running_engine import Case

SYNTHETIC = (
    "Synthetic: random weights of published shapes, random state and keys for the context; MTP drafts are right at "
    "given rates, drawn by position. Recorded: prompts and answers, and so every copy."
)
HEADER = (
    "| sessions | model | state | users | copies | tokens a step | of these: MTP by position, copies | "
    "ms a step: median (p99) | tokens/s | against MTP alone |"
)
COPIED_LENGTHS = [(low, high) for low, high in LENGTHS if high >= MIN_COPY_MATCH]
WIDTHS_HEADER = "| sessions | model | state | users | copies | timed steps | columns: share of these, median ms |"
LENGTHS_HEADER = (
    f"| sessions | model | users | copies | {' | '.join(f'{low}-{high}' for low, high in COPIED_LENGTHS)} |"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLength:
    """Windows with copies behind MTP drafts that were all right, of one group of match lengths."""

    num_windows: int
    first_right: int
    """Windows whose first copy was accepted."""
    num_accepted: int
    """Copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    num_windows: int
    """Steps, counted per slot; first steps are left out."""
    accepted: list[float]
    """Accepted drafts per window, by position: MTP drafts, then copies."""
    step_ms: float
    """Median. Of the timed steps, as all times."""
    late_step_ms: float
    """The 99th percentile."""
    tokens_per_second: float
    """Emitted in the timed steps, over their time."""
    num_timed: int
    by_width: dict[int, tuple[float, float]]
    """By the columns of a window: share of the timed steps, and their median in ms."""
    by_length: list[ByLength]
    """By COPIED_LENGTHS."""
    num_checked: int
    """Windows whose copies were compared with the rule."""
    num_turns: int
    start_seconds: float

    @property
    def tokens_a_step(self) -> float:
        return 1 + sum(self.accepted)


@dataclass(kw_only=True, slots=True)
class Result:
    """A case on one file. `note` gives the reason for missing figures."""

    case: Case
    recording: Recording
    figures: Figures | None = None
    note: str = ""


def figures_of(played: Played, turns: Sequence[RecordedTurn], *, num_mtp: int, num_checked: int) -> Figures | None:
    """None: no step was timed."""
    timed, windows = played.timed, played.windows
    if not timed:
        return None
    counts = Counter(position for _, window in windows for position in range(window.accepted))
    by_width: defaultdict[int, list[float]] = defaultdict(list)
    for step, seconds in timed:
        by_width[step.num_drafted + 1].append(seconds * 1e3)
    step_ms = [seconds * 1e3 for _, seconds in timed]
    num_emitted = sum(window.accepted + 1 for step, _ in timed for window in step.windows)
    return Figures(
        num_windows=len(windows),
        accepted=[counts[position] / len(windows) for position in range(max(counts, default=-1) + 1)],
        step_ms=statistics.median(step_ms),
        late_step_ms=float(np.percentile(step_ms, 99)),
        tokens_per_second=num_emitted / sum(step_ms) * 1e3,
        num_timed=len(timed),
        by_width={width: (len(own) / len(timed), statistics.median(own)) for width, own in sorted(by_width.items())},
        by_length=_by_length(played, turns, num_mtp),
        num_checked=num_checked,
        num_turns=played.num_turns,
        start_seconds=played.start_seconds,
    )


def _by_length(played: Played, turns: Sequence[RecordedTurn], num_mtp: int) -> list[ByLength]:
    with_copies = [
        (int(turns[window.turn].matches.length_N[window.last + num_mtp]), window.accepted - num_mtp)
        for _, window in played.windows
        if window.offered > num_mtp and window.accepted >= num_mtp
    ]
    groups = [[accepted for length, accepted in with_copies if low <= length <= high] for low, high in COPIED_LENGTHS]
    return [ByLength(num_windows=len(own), first_right=sum(map(bool, own)), num_accepted=sum(own)) for own in groups]


@dataclass(kw_only=True, slots=True)
class Report:
    machine: str
    command: str
    tokenizer: str
    rates: Sequence[float]
    checks: list[str]
    results: list[Result]
    seconds: float = 0.0
    """Duration of the whole run."""

    def baseline(self, result: Result) -> Figures | None:
        """Of MTP alone, on the same turns, by as many users."""

        def key(one: Result) -> tuple[str, str, int]:
            return one.recording.name, one.case.model, one.case.batch

        alone = [one.figures for one in self.results if not one.case.copies and key(one) == key(result)]
        return alone[0] if alone else None

    def line(self, result: Result) -> str:
        """A row of the table; a missing figure is a dash, and the note gives the reason."""
        head, figures = _head(result), result.figures
        if figures is None:
            return _row([*head, result.note or "not run yet", *["–"] * 4])
        mtp, copies = figures.accepted[: len(self.rates)], figures.accepted[len(self.rates) :]
        baseline = self.baseline(result)
        ratio = "–"
        if baseline is not None:
            ratio = f"{figures.tokens_per_second / baseline.tokens_per_second:.3f}"
        cells = [
            f"{figures.tokens_a_step:.2f}",
            f"{' + '.join(f'{share:.2f}' for share in mtp)}, {sum(copies):.2f}",
            f"{figures.step_ms:.3f} ({figures.late_step_ms:.3f})",
            f"{figures.tokens_per_second:,.0f}",
            ratio + f" ({result.note})" * bool(result.note),
        ]
        return _row([*head, *cells])

    def markdown(self) -> str:
        found = [(result, result.figures) for result in self.results if result.figures is not None]
        recordings = {result.recording.name: result.recording for result in self.results}
        return "\n".join(
            [
                f"`{self.command}` on {self.machine}; {self.seconds:.0f} s.",
                SYNTHETIC,
                f"Tokens are those of {self.tokenizer}. Where these are shorter than a large model's, matches are"
                f" longer in tokens, and gates weaker. MTP rates {', '.join(map(str, self.rates))}.",
                *[f"{recording}." for recording in recordings.values()],
                *[f"Checked first: {check}." for check in self.checks],
                "",
                *_table(HEADER, [self.line(result) for result in self.results]),
                "",
                *_table(WIDTHS_HEADER, [_widths(result, figures) for result, figures in found]),
                "",
                "Copies behind MTP drafts that were all right, by the tokens of their match: the first copy right, "
                "accepted copies a window (windows).",
                "",
                *_table(LENGTHS_HEADER, [_lengths(*one) for one in found if one[0].case.copies]),
            ]
        )

    def as_json(self) -> str:
        results = [
            {
                "case": asdict(result.case),
                "sessions": str(result.recording),
                "figures": None
                if result.figures is None
                else asdict(result.figures) | {"tokens_a_step": result.figures.tokens_a_step},
                "note": result.note,
            }
            for result in self.results
        ]
        whole = {
            "machine": self.machine,
            "command": self.command,
            "synthetic": SYNTHETIC,
            "tokenizer": self.tokenizer,
            "rates": list(self.rates),
            "checks": self.checks,
            "seconds": self.seconds,
            "results": results,
        }
        return json.dumps(whole, indent=1)


def _head(result: Result) -> list[str]:
    case = result.case
    return [result.recording.name, case.model, case.state_form, str(case.batch), _copies(case)]


def _copies(case: Case) -> str:
    return str(case.copies) if case.shares else f"{case.copies}, one width"


def _widths(result: Result, figures: Figures) -> str:
    cells = [f"{width}: {share:.0%}, {ms:.3f}" for width, (share, ms) in figures.by_width.items()]
    return _row([*_head(result), str(figures.num_timed), "; ".join(cells)])


def _lengths(result: Result, figures: Figures) -> str:
    cells = [
        f"{one.first_right / one.num_windows:.0%}, {one.num_accepted / one.num_windows:.2f} ({one.num_windows})"
        if one.num_windows
        else "–"
        for one in figures.by_length
    ]
    return _row([result.recording.name, result.case.model, str(result.case.batch), _copies(result.case), *cells])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(header: str, rows: Sequence[str]) -> list[str]:
    return [header, f"|{'---|' * (header.count('|') - 1)}", *rows]
