"""Compare the prefill policy with fixed budgets, by dry runs on measured costs: `python -m benchmarks.policy FILE...
--costs 4b --lanes 16 32`.

Each cell of the table shows the mean turn and the wall time of `--max-gap` relative to the best fixed budget, and the
longest gap in ms beside that of the budget with the shortest mean turn. Histories are recorded, memory is unbounded,
and every lane has a slot. `--storm N` adds N first prompts of 2,000 tokens that arrive at once, with answers of 300
tokens: the last first token and the mean turn, beside the time of all prompts' passes in sequence.

Takes minutes, because each budget is a separate run. `--budgets` without values omits them: then the cells are seconds
of the mean turn and of wall time, and the gap.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentspec.commands.dry_run import DEFAULT_DRAFTS, recorded_sessions
from agentspec.engine import bundled
from agentspec.replay.encoders import find_encoder
from agentspec.replay.options import ReplayOptions
from agentspec.replay.render import TraceRenderer
from agentspec.replay.schema import load
from agentspec.replay.token_runs import TokenRuns
from agentspec.runtime.pace import DEFAULT_MAX_GAP
from agentspec.simulate.closed_loop import RecordedTurn
from agentspec.simulate.dry_run import DryMemory, DryRun, DryRunResult
from agentspec.simulate.model_costs import ModelCosts, model_costs

BUDGETS = (512, 1024, 2048, 4096, 8192)
HOLD_SECONDS = 5.0
STORM_PROMPT, STORM_ANSWER = 2_000, 300

RecordedFile = Sequence[tuple[str, Sequence[RecordedTurn]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one run, in seconds."""

    mean_turn: float
    wall: float
    longest_gap: float
    last_first_token: float

    @classmethod
    def of(cls, result: DryRunResult) -> Outcome:
        return cls(
            mean_turn=sum(turn.seconds for turn in result.ended) / len(result.ended),
            wall=result.virtual_seconds,
            longest_gap=max(turn.longest_gap for turn in result.ended),
            last_first_token=max(turn.times[0] for turn in result.ended),
        )


def read(path: Path, options: ReplayOptions) -> RecordedFile:
    """Render a file's sessions once for all runs."""
    renderer = TraceRenderer(
        find_encoder(bundled.checkpoint_of("tiny-agent")), options.template, token_runs=TokenRuns(0, *options.token_ids)
    )
    return [(session_id, list(turns)) for session_id, turns in recorded_sessions(load(path), renderer, options)]


def storm(count: int) -> RecordedFile:
    """Sessions of one turn without a common prefix."""
    rng = random.Random(0)

    def words(length: int) -> array[int]:
        return array("i", (rng.randrange(100, 200_000) for _ in range(length)))

    turns = (
        RecordedTurn(prompt=words(STORM_PROMPT), output=words(STORM_ANSWER), breakpoints=[], delay_seconds=0.0)
        for _ in range(count)
    )
    return [(f"s{number}", [turn]) for number, turn in enumerate(turns)]


def outcome(
    sessions: RecordedFile,
    costs: ModelCosts,
    lanes: int,
    budget: int | Literal["auto"],
    *,
    max_gap: float = DEFAULT_MAX_GAP,
    memory_gib: float | None = None,
    num_seeds: int = 1,
) -> Outcome:
    """Run with several seeds of accepted drafts; times are means, the gap is the maximum."""
    outcomes = [_run(sessions, costs, lanes, budget, max_gap, memory_gib, seed) for seed in range(num_seeds)]
    return Outcome(
        mean_turn=statistics.fmean(one.mean_turn for one in outcomes),
        wall=statistics.fmean(one.wall for one in outcomes),
        longest_gap=max(one.longest_gap for one in outcomes),
        last_first_token=statistics.fmean(one.last_first_token for one in outcomes),
    )


def _run(
    sessions: RecordedFile,
    costs: ModelCosts,
    lanes: int,
    budget: int | Literal["auto"],
    max_gap: float,
    memory_gib: float | None,
    seed: int,
) -> Outcome:
    dry = DryRun(
        costs=costs,
        memory=DryMemory.bounded(memory_gib, costs=costs, max_running=lanes, num_drafted=DEFAULT_DRAFTS),
        max_running=lanes,
        num_drafted=DEFAULT_DRAFTS,
        prefill_budget=budget,
        max_gap=max_gap,
        hold_seconds=HOLD_SECONDS,
        seed=seed,
        on_submit=lambda turn: None,
    )
    return Outcome.of(dry.run(((name, iter(turns)) for name, turns in sessions), lanes))


def cell(ours: Outcome, budgets: Sequence[Outcome]) -> str:
    if not budgets:
        return f"{ours.mean_turn:.4f}, {ours.wall:.3f}; {ours.longest_gap * 1e3:.0f} ms"
    best = min(budgets, key=lambda one: one.mean_turn)
    turn = ours.mean_turn / best.mean_turn - 1
    wall = ours.wall / min(one.wall for one in budgets) - 1
    return f"{turn:+.1%}, {wall:+.1%}; {ours.longest_gap * 1e3:.0f} ({best.longest_gap * 1e3:.0f}) ms"


def storm_row(count: int, costs: ModelCosts, budget: int | Literal["auto"], max_gap: float, num_seeds: int) -> str:
    found = outcome(storm(count), costs, count, budget, max_gap=max_gap, num_seeds=num_seeds)
    back_to_back = count * costs.pass_seconds([(0, STORM_PROMPT)])
    return (
        f"| {costs.name} | {budget} | {found.last_first_token:.3f}, {found.last_first_token / back_to_back:.3f} of "
        f"{back_to_back:.3f} | "
        f"{found.mean_turn:.3f} | {found.wall:.3f} | {found.longest_gap * 1e3:.0f} |"
    )


def rows(options: argparse.Namespace) -> Iterator[str]:
    if options.storm:
        yield (
            f"| {options.storm} first prompts | budget | last first token, s | mean turn, s | wall, s | longest "
            f"gap, ms |"
        )
        yield "|---" * 6 + "|"
    for name, budget in itertools.product(options.costs, ("auto", *options.budgets)) if options.storm else ():
        yield storm_row(options.storm, model_costs(name), budget, options.max_gap, options.seeds)
    if options.files:
        yield "| workload | model | " + " | ".join(f"{lanes} lanes" for lanes in options.lanes) + " |"
        yield "|---" * (2 + len(options.lanes)) + "|"
    for path in options.files:
        sessions = read(path, ReplayOptions(output="forced", sessions=options.sessions, max_turns=options.max_turns))
        for name in options.costs:
            cells = []
            for lanes in options.lanes:
                some = sessions[:lanes] if options.session_a_lane else sessions
                budgets = [
                    outcome(some, model_costs(name), lanes, budget, num_seeds=options.seeds)
                    for budget in options.budgets
                ]
                cells.append(
                    cell(
                        outcome(
                            some, model_costs(name), lanes, "auto", max_gap=options.max_gap, num_seeds=options.seeds
                        ),
                        budgets,
                    )
                )
            yield f"| {path.name.split('.')[0]} | {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="recorded sessions")
    parser.add_argument("--costs", nargs="+", default=["4b", "27b-fp8"])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS)
    parser.add_argument("--sessions", type=int, help="the first so many of each file")
    parser.add_argument("--max-turns", type=int, help="the first so many of each session")
    parser.add_argument("--session-a-lane", action="store_true", help="as many sessions as lanes")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs whose mean counts: which drafts are accepted moves a cell by some tenths of a percent",
    )
    parser.add_argument("--max-gap", type=float, default=DEFAULT_MAX_GAP)
    parser.add_argument("--storm", type=int, metavar="N", help="N first prompts at once")
    for row in rows(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
