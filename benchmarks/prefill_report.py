"""The prefill benchmark's figures as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.prefill_cases import PaceFigures, PromptFigures, SessionFigures, p99
from benchmarks.prefill_floor import Rates

SYNTHETIC = (
    "Synthetic: random weights of published shapes; the state and keys of cached contexts are random where a lone "
    "prompt is timed, computed"
    " elsewhere; drafts accepted at a forced rate."
)

PROMPT_HEADER = (
    "| model | new tokens | cached context | ms to the first token (least, most) | tokens/s"
    " | TFLOPS (linear and experts, attention, recurrence: PFLOP) | of the matmul rate | floor, ms | times the floor |"
)
SESSION_HEADER = (
    "| model | turn | prompt | from the cache | hit | ms to the first token | floor, ms | times the "
    "floor | tokens/s after it |"
)
PACE_HEADER = (
    "| model | streams | context of each | prompt | s to its first token | between tokens idle, ms: median, p99, "
    "most | meanwhile"
    " | p99 meanwhile over idle |"
)

Figures = PromptFigures | SessionFigures | PaceFigures


@dataclass(kw_only=True, slots=True)
class Entry:
    """A requested part. Without figures, the note gives the reason."""

    model: str
    what: str
    figures: Figures | None = None
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Report:
    machine: str
    command: str
    checks: list[str]
    rates: Rates
    entries: list[Entry] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    """Each engine's captured graphs, and its start time."""
    seconds: float = 0.0
    """Duration of the whole run."""

    def lines(self, entry: Entry) -> list[str]:
        """The entry's rows of its table."""
        figures = entry.figures
        if figures is None:
            return [f"| {entry.model} | {entry.what}: {entry.note} |"]
        if isinstance(figures, PromptFigures):
            return [self._prompt(entry.model, figures)]
        if isinstance(figures, SessionFigures):
            return self._session(entry.model, figures)
        return [self._pace(entry.model, figures)]

    def markdown(self) -> str:
        rates = self.rates
        fp8 = "" if rates.matmul_fp8 is None else f"FP8 matmul {rates.matmul_fp8 / 1e12:.4g} TFLOPS sustained, "
        lines = [
            f"`{self.command}` on {self.machine}; {self.seconds:.0f} s. In the same run: bf16 matmul "
            f"{rates.matmul / 1e12:.4g} TFLOPS sustained"
            f" ({rates.matmul_burst / 1e12:.4g} after a pause), {fp8}copy {rates.bandwidth.copy / 1e12:.2f} TB/s,"
            f" read {rates.bandwidth.read / 1e12:.2f} TB/s.",
            SYNTHETIC,
            *[f"Checked first: {check}." for check in self.checks],
            *[f"Engine: {engine}." for engine in self.engines],
        ]
        for kind, header in (
            (PromptFigures, PROMPT_HEADER),
            (SessionFigures, SESSION_HEADER),
            (PaceFigures, PACE_HEADER),
        ):
            entries = [entry for entry in self.entries if isinstance(entry.figures, kind)]
            if entries:
                lines += ["", *table(header, [line for entry in entries for line in self.lines(entry)])]
        missing = [f"- {entry.model}, {entry.what}: {entry.note}" for entry in self.entries if entry.figures is None]
        if missing:
            lines += ["", *missing]
        return "\n".join(lines)

    def as_json(self) -> str:
        whole = {
            "machine": self.machine,
            "command": self.command,
            "synthetic": SYNTHETIC,
            "checks": self.checks,
            "engines": self.engines,
            "rates": asdict(self.rates),
            "seconds": self.seconds,
            "entries": [self._entry(entry) for entry in self.entries],
        }
        return json.dumps(whole, indent=1)

    def _entry(self, entry: Entry) -> dict[str, Any]:
        return {
            "model": entry.model,
            "what": entry.what,
            "note": entry.note,
            "figures": None if entry.figures is None else entry.figures.as_dict(),
        }

    def _prompt(self, model: str, figures: PromptFigures) -> str:
        flops = figures.flops
        sums = (
            flops.get("linear", 0.0) + flops.get("experts", 0.0),
            flops.get("attention", 0.0),
            flops.get("recurrence", 0.0),
        )
        parts = ", ".join(f"{flop / 1e15:.3f}" for flop in sums)
        cells = [
            model,
            f"{figures.case.count:,}",
            f"{figures.case.context:,}",
            f"{ms(figures.median_s)} ({ms(min(figures.seconds))}, {ms(max(figures.seconds))})",
            f"{figures.tokens_per_second:,.0f}",
            f"{figures.flops_per_second / 1e12:.0f} ({parts})",
            f"{100 * figures.of_matmul_rate:.1f} %",
            ms(figures.floor_s),
            f"{figures.times_floor:.2f}",
        ]
        return f"| {' | '.join(cells)} |"

    def _session(self, model: str, figures: SessionFigures) -> list[str]:
        rows = [
            f"| {model} | {number} | {turn.prompt:,} | {turn.cached:,} | {100 * turn.cached / turn.prompt:.2f} % | "
            f"{ms(turn.first_token_s)}"
            f" | {ms(turn.floor_s)} | {turn.times_floor:.2f} | {turn.decode_tokens_per_second:,.0f} |"
            for number, turn in enumerate(figures.turns, start=1)
        ]
        later = figures.turns[1:]
        speed = statistics.median(turn.decode_tokens_per_second for turn in later)
        floor_s = statistics.median(turn.floor_s for turn in later)
        totals = (
            f"| {model} | 2 and later | {sum(turn.prompt for turn in later):,} | {sum(turn.cached for turn in later):,}"
            f" | {100 * figures.hit_share:.2f} % | {ms(figures.later_first_token_s)} (median) | {ms(floor_s)}"
            f" | {figures.later_times_floor:.2f} (most {max(turn.times_floor for turn in later):.2f}) | {speed:,.0f} |"
        )
        return [*rows, totals]

    def _pace(self, model: str, figures: PaceFigures) -> str:
        case = figures.case
        cells = [
            model,
            f"{case.streams}",
            f"{case.context:,}",
            f"{case.prompt:,}",
            f"{figures.prompt_s:.2f}",
            gaps(figures.idle_s),
            gaps(figures.busy_s),
            f"{figures.ratio:.2f}",
        ]
        return f"| {' | '.join(cells)} |"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def gaps(seconds: Sequence[float]) -> str:
    return f"{ms(statistics.median(seconds))}, {ms(p99(seconds))}, {ms(max(seconds))}"


def table(header: str, rows: Sequence[str]) -> list[str]:
    return [header, f"|{'---|' * (header.count('|') - 1)}", *rows]
