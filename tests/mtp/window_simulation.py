"""A decode loop without a model or a clock: slots that write texts in which some stretches repeat the session, and
steps whose time follows from a cost function. The host observes a step after it has chosen the next one's shape.

`python -m tests.mtp.window_simulation` prints tokens per second of the policy, of fixed shapes and of an oracle.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentspec.mtp.shared_rows import share_rows
from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.types import SlotResult, WindowShape

MAX_MTP = 3
COPIES = (4, 12)
SHAPES = [WindowShape(k) for k in range(MAX_MTP + 1)] + [WindowShape(MAX_MTP, count) for count in COPIES]
FOLD_TOKENS = 16


class Policy(Protocol):
    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape: ...

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens alternate between two states, a Markov chain: inside a repeated stretch and outside."""

    run: float = 1.0
    """Mean number of tokens of a stretch."""
    gap: float = float("inf")
    """Mean number of tokens between two stretches; infinite: there are none."""
    copy_rate: float = 0.93
    """Probability that a copied token is right, inside a stretch."""
    mtp: tuple[float, ...] = (0.9, 0.83, 0.78)
    """Acceptance of MTP drafts by position, given that those before were accepted."""
    mtp_inside: tuple[float, ...] = (0.95, 0.93, 0.92)
    """The same inside a stretch."""


NO_MATCHES = Text()
RARE = Text(run=24.0, gap=1500.0)
LONG_RUNS = Text(run=120.0, gap=250.0)
SHORT_RUNS = Text(run=16.0, gap=60.0)
FALSE_MATCHES = Text(run=60.0, gap=100.0, copy_rate=0.3, mtp_inside=(0.9, 0.83, 0.78))
TEXTS = {
    "none": NO_MATCHES,
    "rare": RARE,
    "long runs": LONG_RUNS,
    "short runs": SHORT_RUNS,
    "false matches": FALSE_MATCHES,
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the time of a step depends on."""

    batch: int
    shape: WindowShape
    num_live: int
    """Columns that hold the last emitted token or a draft made for the window's prefix."""


Cost = Callable[[Load], float]
"""Milliseconds of a step without folds and noise."""


def dense(load: Load) -> float:
    """Reading the weights dominates up to some 100 tokens; every column counts, live or dead."""
    tokens = load.batch * load.shape.width
    return 12.0 + 0.3 * load.shape.num_mtp + 0.025 * tokens + 0.09 * max(tokens - 96, 0)


def mixture(load: Load) -> float:
    """Reading the experts that live tokens visit dominates: 8 of 256 each. A dead column visits none."""
    visited = 1.0 - (1.0 - 8 / 256) ** load.num_live
    return 1.8 + 0.15 * load.shape.num_mtp + 14.0 * visited + 0.012 * load.batch * load.shape.width


def padded_mixture(load: Load) -> float:
    """A mixture whose dead columns visit experts too."""
    return mixture(replace(load, num_live=load.batch * load.shape.width))


def large_dense(load: Load) -> float:
    """Products of more than some 16 tokens are bound by more than the weights' bytes."""
    rows = load.batch * load.shape.width
    return 11.5 + 0.2 * load.shape.num_mtp + 0.02 * load.num_live + 0.03 * rows + 0.06 * max(rows - 16, 0)


COSTS: dict[str, Cost] = {
    "dense": dense,
    "large dense": large_dense,
    "mixture": mixture,
    "padded mixture": padded_mixture,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a policy is measured on."""

    text: Text
    cost: Cost
    batch: int
    seed: int
    noise: float = 0.03
    """Standard deviation of a step's time, as a share of it."""
    slow_share: float = 0.001
    """Share of the steps that take ten times as long."""
    fold: float = 0.3
    """Milliseconds for each slot that crosses a multiple of FOLD_TOKENS."""
    overlap: bool = True
    """A step's result is observed after the next shape was chosen."""
    shares: bool = False
    """Windows share the rows of a forward."""
    knows_made: bool = False
    """The host counts the copies that the last known step made for the next window, not those of its own window."""


class SlotText:
    """One slot's tokens, drawn by position: so every policy meets the same text."""

    def __init__(self, text: Text, seed: int) -> None:
        self.text = text
        """May be replaced in a text that no other simulation reads; tokens drawn before stay."""
        self._random = random.Random(seed)
        self._inside = False
        self.inside = bytearray()
        """By position: inside a stretch."""
        self.draws: list[float] = []
        """By position, uniform: the drafted token is right if this is below the draft's rate."""

    def extend_to(self, length: int) -> None:
        while len(self.draws) < length:
            mean = self.text.run if self._inside else self.text.gap
            self._inside ^= self._random.random() < 1.0 / mean
            self.inside.append(self._inside)
            self.draws.append(self._random.random())

    def has_copy(self, position: int) -> bool:
        """Whether a copied token at this position is right, if those before it were."""
        return bool(self.inside[position]) and self.draws[position] < self.text.copy_rate


@functools.cache
def _shared_text(text: Text, seed: int) -> SlotText:
    """Drawn once for all simulations that read it."""
    return SlotText(text, seed)


@dataclass(slots=True)
class _Slot:
    text: SlotText
    position: int = 0
    """Of the next token."""
    num_mtp: int = 0
    """MTP drafts made for the next window."""
    matched: bool = False
    """Copies were made for the next window."""
    known: bool = False
    """Matched, in the last window that the host knows of."""


class Simulation:
    """Steps of a batch under a policy."""

    def __init__(self, policy: Policy, case: Case, *, may_change: bool = False) -> None:
        """may_change: the texts are drawn for this simulation alone, so that `change_text` can change them."""
        self.policy, self.case = policy, case
        self._may_change = may_change
        self.emitted, self.ms = 0, 0.0
        self.chosen: list[WindowShape] = []
        draw = SlotText if may_change else _shared_text
        self.slots = [_Slot(draw(case.text, case.seed * 1000 + place)) for place in range(case.batch)]
        self._random = random.Random(case.seed)
        self._unread: list[tuple[WindowShape, list[SlotResult], list[bool], float]] = []

    def run(self, steps: int) -> float:
        """Emitted tokens per second of these steps."""
        before, ms = self.emitted, self.ms
        for _ in range(steps):
            self._step()
        return (self.emitted - before) / (self.ms - ms) * 1000.0

    @property
    def num_matched(self) -> int:
        """Slots whose next window has copies, which the host does not know yet."""
        return sum(slot.matched for slot in self.slots)

    def change_text(self, text: Text) -> None:
        """All slots go on with another kind of text."""
        assert self._may_change, "other simulations read these texts"
        for slot in self.slots:
            slot.text.text = text

    def _step(self) -> None:
        case = self.case
        shape = self.policy.choose(case.batch, sum(slot.known for slot in self.slots))
        self.chosen.append(shape)
        folds = sum(slot.position // FOLD_TOKENS for slot in self.slots)
        counts = self._copies_of(shape)
        results = [self._advance(slot, shape, most) for slot, most in zip(self.slots, counts, strict=True)]
        folds = sum(slot.position // FOLD_TOKENS for slot in self.slots) - folds
        num_live = case.batch + sum(result.offered for result in results)
        ms = case.cost(Load(batch=case.batch, shape=shape, num_live=num_live)) + case.fold * folds
        ms *= max(0.5, self._random.gauss(1.0, case.noise)) * (10.0 if self._random.random() < case.slow_share else 1.0)
        self.ms += ms
        self._unread.append((shape, results, [slot.matched for slot in self.slots], ms))
        while len(self._unread) > case.overlap:
            self._read(*self._unread.pop(0))

    def _copies_of(self, shape: WindowShape) -> list[int]:
        """The most copies that each slot's window has."""
        if not (self.case.shares and shape.num_copies):
            return [shape.num_copies] * len(self.slots)
        own, most = 1 + MAX_MTP, max(COPIES)
        wanted = [1 + slot.num_mtp + (most if slot.matched else 0) for slot in self.slots]
        counts = share_rows(wanted, num_rows=len(self.slots) * shape.width, own_columns=own)
        return [count - 1 - slot.num_mtp for count, slot in zip(counts, self.slots, strict=True)]

    def _read(self, shape: WindowShape, results: list[SlotResult], made: list[bool], ms: float) -> None:
        self.policy.observe(shape=shape, slots=results, seconds=ms / 1000.0)
        for slot, result, is_made in zip(self.slots, results, made, strict=True):
            slot.known = is_made if self.case.knows_made else result.matched

    def _advance(self, slot: _Slot, shape: WindowShape, most_copies: int) -> SlotResult:
        tokens, start, was_matched, matched = slot.text, slot.position, slot.known, slot.matched
        tokens.extend_to(start + 2 * MAX_MTP + max(COPIES) + 2)
        num_mtp = min(shape.num_mtp, slot.num_mtp)
        num_copies = most_copies if matched and num_mtp == MAX_MTP else 0
        text = tokens.text
        rates = text.mtp_inside if tokens.inside[start + MAX_MTP - 1] else text.mtp
        accepted = 0
        while accepted < num_mtp and tokens.draws[start + accepted] < rates[accepted]:
            accepted += 1
        if accepted == num_mtp:
            while accepted < num_mtp + num_copies and tokens.has_copy(start + accepted):
                accepted += 1
        self.emitted += accepted + 1
        slot.position += accepted + 1
        slot.num_mtp = shape.num_mtp
        slot.matched = slot.num_mtp == MAX_MTP and bool(tokens.inside[slot.position + MAX_MTP - 1])
        return SlotResult(num_mtp + num_copies, num_copies, accepted, matched, was_matched)


class Oracle:
    """Knows rates, costs and how many windows have copies, before the step."""

    def __init__(self) -> None:
        self.watched: Simulation | None = None
        self._best: dict[int, WindowShape] = {}

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        assert self.watched is not None
        case, matched = self.watched.case, self.watched.num_matched
        if matched not in self._best:
            self._best[matched] = max(SHAPES, key=lambda shape: _ideal(case, shape, matched))
        return self._best[matched]

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        """Do nothing: it knows."""


def _ideal(case: Case, shape: WindowShape, matched: int) -> float:
    """Expected tokens per millisecond of a step with this many matched windows."""
    text = case.text
    copies = [text.copy_rate * (1.0 - 1.0 / text.run)] * shape.num_copies
    emitted = matched * _expected([*text.mtp_inside[: shape.num_mtp], *copies])
    emitted += (case.batch - matched) * _expected(text.mtp[: shape.num_mtp])
    num_live = case.batch * (1 + shape.num_mtp) + matched * shape.num_copies
    ms = case.cost(Load(batch=case.batch, shape=shape, num_live=num_live))
    return emitted / (ms + case.fold * emitted / FOLD_TOKENS)


def _expected(rates: Sequence[float]) -> float:
    emitted = survives = 1.0
    for rate in rates:
        survives *= rate
        emitted += survives
    return emitted


def with_oracle(case: Case) -> Simulation:
    policy = Oracle()
    policy.watched = Simulation(policy, case)
    return policy.watched


def without_copies() -> AdaptiveWindow:
    """The policy that chooses the number of MTP drafts alone."""
    return AdaptiveWindow(MAX_MTP)


def with_copies(*, shares: bool = False) -> AdaptiveWindow:
    return AdaptiveWindow(MAX_MTP, COPIES, shares=shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--knows-made", action="store_true")
    parser.add_argument("--shares", action="store_true")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.steps} steps. Tokens per second of MTP-3; the rest relative to it")
    print(f"{'cost':15}{'batch':>5}  {'text':14}{'MTP-3':>8}{'best k':>8}{'policy':>8}{'oracle':>8}  best fixed")
    for (cost_name, cost), batch in itertools.product(COSTS.items(), args.batches):
        for text_name, text in TEXTS.items():
            case = Case(
                text=text, cost=cost, batch=batch, seed=args.seed, knows_made=args.knows_made, shares=args.shares
            )
            fixed = {shape: Simulation(FixedWindow(shape), case).run(args.steps) for shape in SHAPES}
            mtp3 = fixed[WindowShape(MAX_MTP)]
            best = max(fixed, key=lambda shape: fixed[shape])
            sharing = functools.partial(with_copies, shares=args.shares)
            depth, policy = (Simulation(new(), case).run(args.steps) for new in (without_copies, sharing))
            oracle = with_oracle(case).run(args.steps)
            print(
                f"{cost_name:15}{batch:5}  {text_name:14}{mtp3:8.1f}{depth / mtp3:8.3f}{policy / mtp3:8.3f}"
                f"{oracle / mtp3:8.3f}  {fixed[best] / mtp3:.3f} ({best.num_mtp}, {best.num_copies})",
                flush=True,
            )


if __name__ == "__main__":
    main()
