"""The decode benchmark's figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.bandwidth import Bandwidth
from benchmarks.decode_timing import Result

SYNTHETIC = "Synthetic: random weights of published shapes, random state and keys for the context, drafts accepted at a forced rate."
HEADER = (
    "| model | context | batch | k | emitted a step: forced (seen) | ms a step | tokens/s | floor, ms | of the floor | kernels a step | GPU idle"
    " (traced) | host, ms a step |"
)


@dataclass(kw_only=True, slots=True)
class Report:
    machine: str
    command: str
    checks: list[str]
    bandwidth: Bandwidth
    results: list[Result]
    seconds: float = 0.0
    """The whole run took."""

    def line(self, result: Result) -> str:
        """A row of the table; a figure that is missing is a dash, and the note says why."""
        case, timing, traced = result.case, result.timing, result.traced
        head = [f"{case.model}{' sampled' * case.sampled}", f"{case.context:,}", f"{case.batch}", f"{case.depth}"]
        if timing is None:
            return f"| {' | '.join([*head, result.note or 'not run yet', *['–'] * 7])} |"
        floor = result.floor_ms(self.bandwidth.read)
        forced = "–" if case.depth == "auto" else f"{case.expected_emitted:.2f}"
        cells = [
            f"{forced} ({timing.emitted:.2f})",
            f"{timing.step_ms:.3f}",
            f"{result.tokens_per_second:,.0f}",
            "–" if floor is None else f"{floor:.3f}",
            "–" if floor is None else f"{100 * floor / timing.step_ms:.1f} %",
            "–" if traced is None else f"{traced.kernels:.1f}",
            "–"
            if traced is None or result.idle_share is None
            else f"{100 * result.idle_share:.1f} % ({100 * (1 - traced.busy_ms / traced.step_ms):.1f} %)",
            f"{timing.host_ms:.3f}{f' ({result.note})' * bool(result.note)}",
        ]
        return f"| {' | '.join([*head, *cells])} |"

    def markdown(self) -> str:
        copy, read = self.bandwidth.copy / 1e12, self.bandwidth.read / 1e12
        lines = [
            f"`{self.command}` on {self.machine}; {self.seconds:.0f} s. Copy {copy:.2f} TB/s, read {read:.2f} TB/s, measured in this run.",
            SYNTHETIC,
            *[f"Checked first: {check}." for check in self.checks],
            "",
            HEADER,
            f"|{'---|' * (HEADER.count('|') - 1)}",
            *[self.line(result) for result in self.results],
            "",
            "Idle: the part of an untimed-by-the-profiler step in which, by the trace, no kernel runs; in brackets the same of the traced step, which"
            " tracing makes longer.",
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        whole = {
            "machine": self.machine,
            "command": self.command,
            "synthetic": SYNTHETIC,
            "checks": self.checks,
            "bandwidth": asdict(self.bandwidth),
            "seconds": self.seconds,
            "results": [result.as_dict(self.bandwidth.read) for result in self.results],
        }
        return json.dumps(whole, indent=1)
