"""The decode benchmark's figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.bandwidth import Bandwidth
from benchmarks.decode_timing import Result
from benchmarks.overlap import layer_table

SYNTHETIC = (
    "Synthetic: random weights of published shapes, random state and keys for the context, drafts accepted "
    "at a forced rate."
)
HEADER = (
    "| model | context | batch | k | emitted a step: forced (seen) | ms a step | tokens/s | floor, ms | of the "
    "floor | kernels a step | GPU idle"
    " (traced) | host, ms a step |"
)
EXPERTS_HEADER = (
    "| model | context | batch | k | experts read of a layer: mean (least, most) | of the MTP layer in a forward | "
    "MB a step: routed experts"
    " | rest of the trunk | head | drafts | state and keys |"
)
OVERLAP_HEADER = (
    "| model | context | batch | k | overlap | ms a step, in turns | saved | turns won | us a step "
    "beside routed experts | of that most |"
)


@dataclass(kw_only=True, slots=True)
class Report:
    machine: str
    command: str
    checks: list[str]
    bandwidth: Bandwidth
    results: list[Result]
    seconds: float = 0.0
    """Duration of the whole run."""

    def line(self, result: Result) -> str:
        """A row of the table; a missing figure is a dash, and the note gives the reason."""
        case, timing, traced = result.case, result.timing, result.traced
        head = _case_cells(result)
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
            f"`{self.command}` on {self.machine}; {self.seconds:.0f} s. Copy {copy:.2f} TB/s, read {read:.2f} TB/s, "
            f"measured in this run.",
            SYNTHETIC,
            *[f"Checked first: {check}." for check in self.checks],
            "",
            HEADER,
            f"|{'---|' * (HEADER.count('|') - 1)}",
            *[self.line(result) for result in self.results],
            *self._exchanges(),
            *_table(EXPERTS_HEADER, [row for result in self.results for row in self._experts(result)]),
            *_table(OVERLAP_HEADER, [row for result in self.results for row in self._overlap(result)]),
            *self._layers(),
            "",
            "Idle: the part of an untimed-by-the-profiler step in which, by the trace, no kernel runs; in brackets "
            "the same of the traced step, which"
            " tracing makes longer.",
        ]
        return "\n".join(lines)

    def _exchanges(self) -> list[str]:
        """What the floors count for sums over ranks."""
        return [
            f"{result.case}: {result.num_exchanges} sums a step of {result.exchange_us:.2f} us, measured alone in a "
            f"graph: {result.exchange_ms:.3f} ms of the floor."
            for result in self.results
            if result.exchange_us is not None
        ]

    def _experts(self, result: Result) -> list[str]:
        """The experts that the floor counts, and their share of it."""
        touched, parts = result.experts, result.floor_bytes
        if touched is None or parts is None:
            return []
        sizes = (parts.experts, parts.weights, parts.head, parts.mtp + parts.draft_head, parts.state + parts.kv)
        cells = [
            str(touched.trunk),
            "–" if touched.draft is None else str(touched.draft),
            *[f"{size / 1e6:,.0f}" for size in sizes],
        ]
        return [f"| {' | '.join([*_case_cells(result), *cells])} |"]

    def _overlap(self, result: Result) -> list[str]:
        rows = []
        for turns in result.overlap:
            cells = [turns.choice, f"{turns.step_ms:.3f}", "–", "–"]
            if turns is not result.overlap[0]:
                baseline = result.overlap[0]
                cells[2:] = [
                    f"{100 * turns.saved(baseline):.1f} %",
                    f"{turns.num_won(baseline)} of {len(turns.turns_ms)}",
                ]
            traced = ["–", "–"]
            if turns.layer:
                most = [f"{name[:40]} {us:.0f}" for name, us in list(turns.beside_us.items())[:3]]
                traced = [f"{sum(turns.beside_us.values()):.0f}", ", ".join(most)]
            rows.append(f"| {' | '.join([*_case_cells(result), *cells, *traced])} |")
        return rows

    def _layers(self) -> list[str]:
        """The first case that was traced with each choice of overlap."""
        for result in self.results:
            traced = [turns for turns in result.overlap if turns.layer]
            if traced:
                return [
                    line
                    for turns in traced
                    for line in (
                        "",
                        f"{result.case}, overlap {turns.choice}: a layer as the profiler saw it, us.",
                        "",
                        *layer_table(turns.layer),
                    )
                ]
        return []

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


def _case_cells(result: Result) -> list[str]:
    case = result.case
    model = f"{case.model}{' sampled' * case.sampled}{' rows' * (case.state_form == 'rows')}"
    model += f", {case.ranks} GPUs" * (case.ranks > 1)
    drafts = f"{case.depth} + {case.copies} copies" if case.copies else str(case.depth)
    drafts += ", one width" * (not case.shares)
    return [model, f"{case.context:,}", f"{case.batch}", drafts]


def _table(header: str, rows: list[str]) -> list[str]:
    return ["", header, f"|{'---|' * (header.count('|') - 1)}", *rows] if rows else []
