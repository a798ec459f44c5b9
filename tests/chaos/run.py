"""The whole chaos suite: `make chaos`, or `python -m tests.chaos.run --only kills --scale 0.1`. Half an hour on two
cores.

Every attack runs against a server of its own, started as a user starts it. Any violation makes the exit status 1: a
wrong answer, a stream without exactly one terminal event, a counter that isn't zero afterwards, memory growth, or a
server that is too far behind the control process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tests.chaos import bodies, half_open, hang_ups, kills, neighbours, restarts
from tests.chaos.arena import RSS_GROWTH, Outcome

HEALTH_MILLISECONDS, GAP_MILLISECONDS = 100.0, 250.0
"""Maximum delay of the server compared with the control process."""

Attack = Callable[..., Awaitable[Outcome]]

ATTACKS: dict[str, tuple[Attack, int]] = {
    "hang-ups": (hang_ups.run, 10_000),
    "hang-ups-tiny-agent": (partial(hang_ups.run, light=False), 500),
    "half-open": (half_open.run, 2_000),
    "few-files": (half_open.few_files, 100),
    "bodies": (bodies.run, 2),
    "kills": (kills.run, 200),
    "restarts": (restarts.run, 30),
    "neighbours": (neighbours.run, 60),
}
"""Name, attack, and its full size; tests/chaos/test_short.py has the small sizes."""

COLUMNS = (
    "attack",
    "size",
    "seconds",
    "answers compared",
    "refused",
    "memory before, most, after, MiB",
    "/health behind, ms",
    "streams behind, ms",
    "failures",
)


def judge(outcome: Outcome) -> None:
    """Add the violations of time and memory limits."""
    for name, grown in outcome.grown().items():
        outcome.check(False, f"{name} holds more than {RSS_GROWTH - 1:.0%} more than before: {grown}")
    watched = outcome.watched
    if watched:
        limits = {"health": HEALTH_MILLISECONDS} | ({"gaps": GAP_MILLISECONDS} if outcome.is_paced else {})
        for what, limit in limits.items():
            behind = watched[what]["behind"]
            outcome.check(behind <= limit, f"{what}: {behind} ms behind the control process, more than {limit:g}")
        outcome.check(not watched["num_failed"], f"{watched['num_failed']} probes of /health failed")
        outcome.check(not watched["num_broken"], f"{watched['num_broken']} watched streams broke off")


def row(outcome: Outcome) -> str:
    memory = "; ".join(
        f"{name} {before:.0f}, {outcome.rss_most.get(name, 0):.0f}, {outcome.rss_after.get(name, 0):.0f}"
        for name, before in outcome.rss_before.items()
    )
    behind = [_times(outcome.watched[what]) if outcome.watched else "" for what in ("health", "gaps")]
    refused = ", ".join(f"{count} x {status}" for status, count in sorted(outcome.refused.items()))
    cells = (
        outcome.name,
        f"{outcome.size:,}",
        f"{outcome.seconds:.0f}",
        f"{outcome.num_compared:,}",
        refused,
        memory,
        *behind,
        str(len(outcome.failures)),
    )
    return f"| {' | '.join(cells)} |"


def _times(figures: dict[str, float]) -> str:
    return f"{figures['behind']:g} (p99 {figures['p99']:g}, control {figures['control_p99']:g})"


async def run(names: list[str], seed: int, scale: float, folder: Path) -> list[Outcome]:
    outcomes = []
    for name in names:
        attack, size = ATTACKS[name]
        print(f"{name}: size {max(1, int(size * scale)):,}, seed {seed}", flush=True)
        outcome = await attack(max(1, int(size * scale)), seed, with_watch=True, log=folder / f"{name}.log")
        judge(outcome)
        for failure in outcome.failures:
            print(f"  FAILED {failure}", flush=True)
        print(f"  {json.dumps(outcome.notes)}\n{row(outcome)}", flush=True)
        outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="these attacks alone")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 2**32,
        help="of everything that is drawn (default: the clock; it is printed)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the servers say on stderr in FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(run(options.only, options.seed, options.scale, folder))
    print(f"\n{platform.platform()}, seed {options.seed}\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    print("\n".join(map(row, outcomes)))
    if options.json:
        options.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
