"""Tokens per second with copies on recorded sessions, by the window policy and given step times. Runs no model.

    python -m benchmarks.copies_clock FILE... [--sessions N] [--users 1 4] [--gates 2,3,4,6,8] [--cost dense|experts]

Texts, copies and MTP drafts are those of copies_offline. Slots decode their sessions in turns, windows share the rows
of a forward (mtp/shared_rows.py), and the host chooses the shape of a step before it knows the one before
(mtp/window_policy.py). Step times are given, so the figures say which gate is worth its columns, not how fast a GPU is:

dense: of a 27B in FP8 on an H100, measured by benchmarks.copies for 4 and 16 rows (one user), 16 and 32 rows (four);
    between and beyond them a row costs as much as it does there.
experts: reading what live tokens visit dominates, 8 of 256 experts each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentspec.engine import bundled
from agentspec.mtp.shared_rows import share_rows
from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.replay.encoders import find_encoder
from agentspec.replay.render import TraceRenderer
from agentspec.replay.schema import load
from agentspec.types import MAX_COPIES, SlotResult, WindowShape
from benchmarks.copies_offline import RATES, Matches, Text, draw_right_drafts, numbers, scored_texts

NUM_MTP = len(RATES)
COPIES = (4, MAX_COPIES)
GATES = (2, 3, 4, 5, 6, 8)


def dense(users: int, rows: int, live: int) -> float:
    """Milliseconds of a step with so many rows, of which `live` are live columns."""
    return 12.26 + 0.1 * (rows - 4) if users == 1 else 14.53 + 0.061 * (rows - 4 * users) + 0.3 * (users - 4)


def experts(users: int, rows: int, live: int) -> float:
    """As dense."""
    return 2.25 + 14.0 * (1.0 - (1.0 - 8 / 256) ** live) + 0.012 * rows


COSTS: dict[str, Callable[[int, int, int], float]] = {"dense": dense, "experts": experts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A text, and what a step at each of its positions meets."""

    text: Text
    length: list[int]
    run: list[int]
    right: list[int]
    """Leading MTP drafts that are right."""


class Slot:
    """Decodes the answers of its texts, one after the other."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._answers = iter([(work, *span) for work in works for span in work.text.answers])
        self.is_done = self.known = False
        """known: matched in the last step that the host knows of."""
        self._begin()

    def _begin(self) -> None:
        answer = next(self._answers, None)
        self.is_done, self.known = answer is None, False
        if answer is not None:
            self._work, self._last, self._stop = answer

    @property
    def match(self) -> int:
        """Length of the match behind MTP drafts that are all right, which the device sees. Behind a wrong draft it
        can't be known here, and counts as none."""
        final = self._last + NUM_MTP
        is_right = self._work.right[self._last] == NUM_MTP and final < self._stop - 1
        return self._work.length[final] if is_right else 0

    def advance(self, num_copies: int) -> tuple[int, int]:
        """(accepted drafts, emitted tokens) of a step whose window has so many copies."""
        room, accepted = self._stop - 1 - self._last, self._work.right[self._last]
        if num_copies and accepted == NUM_MTP:
            accepted += min(self._work.run[self._last + NUM_MTP], num_copies, max(room - NUM_MTP, 0))
        emitted = min(accepted + 1, room)
        self._last += emitted
        if self._last >= self._stop - 1:
            self._begin()
        return accepted, emitted


def works_of(path: Path, sessions: int | None) -> list[Work]:
    file, rng = load(path), np.random.default_rng(0)
    renderer = TraceRenderer(find_encoder(bundled.checkpoint_of("tiny-agent")), "stable")
    works = []
    for text in scored_texts(file, file.sessions[:sessions], renderer):
        matches = Matches.of(text.tokens_N, MAX_COPIES)
        right = draw_right_drafts(len(text.tokens_N), RATES, rng).tolist()
        works.append(Work(text=text, length=matches.length_N.tolist(), run=matches.run_N.tolist(), right=right))
    return works


def decode(
    works: Sequence[Work], users: int, gate: int | None, cost: Callable[[int, int, int], float]
) -> tuple[float, float]:
    """(tokens a step and slot, tokens a second) until a slot has no text left. gate: None: without copies."""
    policy: AdaptiveWindow | FixedWindow = FixedWindow(WindowShape(NUM_MTP))
    if gate is not None:
        policy = AdaptiveWindow(NUM_MTP, COPIES, min_mtp=NUM_MTP, shares=True)
    slots = [Slot(works[place::users]) for place in range(users)]
    unread: tuple[WindowShape, list[SlotResult], float] | None = None
    steps, tokens, ms = 0, 0, 0.0
    while not any(slot.is_done for slot in slots):
        shape = policy.choose(users, sum(slot.known for slot in slots))
        made = [gate is not None and slot.match >= gate for slot in slots]
        counts = [0] * users
        if shape.num_copies:
            wanted = [1 + NUM_MTP + MAX_COPIES * is_made for is_made in made]
            rows = share_rows(wanted, num_rows=users * shape.width, own_columns=1 + NUM_MTP)
            counts = [count - 1 - NUM_MTP for count in rows]
        results = []
        for slot, is_made, count in zip(slots, made, counts, strict=True):
            was_known = slot.known
            accepted, emitted = slot.advance(count)
            results.append(SlotResult(NUM_MTP + count, count, accepted, is_made, was_known))
            tokens += emitted
        spent = cost(users, users * shape.width, users * (1 + NUM_MTP) + sum(counts))
        steps, ms = steps + 1, ms + spent
        if unread is not None:
            policy.observe(shape=unread[0], slots=unread[1], seconds=unread[2] / 1000)
            for slot, result in zip(slots, unread[1], strict=True):
                slot.known = result.matched
        unread = shape, results, spent
    return tokens / max(steps, 1) / users, tokens / max(ms, 1e-9) * 1000


def lines(path: Path, options: argparse.Namespace) -> Iterator[str]:
    works, cost = works_of(path, options.sessions), COSTS[options.cost]
    for users in options.users:
        alone, seconds = decode(works, users, None, cost)
        cells = [
            f"{tokens:.2f}, {rate / seconds:.3f}"
            for tokens, rate in (decode(works, users, gate, cost) for gate in options.gates)
        ]
        yield f"| {path.name} | {options.cost} | {users} | {alone:.2f} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.copies_clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="recorded sessions (agentspec.replay/1)")
    parser.add_argument("--sessions", type=int, help="the first so many of each file")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--gates", type=numbers(int), default=GATES, help="least match lengths, comma-separated")
    parser.add_argument("--cost", choices=tuple(COSTS), default="dense")
    options = parser.parse_args(argv)
    print("Tokens a step, and tokens a second relative to MTP alone, by least match length:\n")
    print(f"| file | cost | users | MTP alone | {' | '.join(map(str, options.gates))} |")
    print("|" + "---|" * (4 + len(options.gates)))
    for path in options.files:
        print("\n".join(lines(path, options)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
