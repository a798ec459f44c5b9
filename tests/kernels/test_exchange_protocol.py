"""The protocol of the exchange kernels as a state machine, without kernels: which slots are written when, over random
schedules in which every store and every flag arrives at its own time.

Ranks run the same sequence of exchanges, programs in any order. A read of a slot must find what its exchange put
there. The protocol of kernels/triton/exchange.py never fails; each planted mistake must.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

PROGRAMS = 4
"""Largest grid; the only one where grids are fixed."""
CELLS = 4
"""Largest number of cells of an exchange. A cell is the smallest piece of a slot."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    halves: int = 2
    fixed_grid: bool = True
    """All exchanges of a kind have PROGRAMS programs, each with its own region, flags and counter; else grids vary, and
    regions are packed."""
    shared_epoch: bool = False
    """One epoch for all programs, advanced by the last program that ends; else a counter for each program."""
    first_to_end_advances: bool = False
    """Instead of the last."""
    waits_for_previous: bool = True
    """Whether pushes wait until the exchange before has ended on this rank."""
    release_covers_pushes: bool = True
    """Whether a flag arrives after the pushes before it."""
    pairs: bool = False
    """Two ranks, whose large sums are rounds in which each pushes all it has, the next before one is awaited."""
    quarters: int = 4
    """Places of such rounds."""
    tagged: bool = False
    """Cells of one-shots have their epoch as a tag, and no flags are set. There are no programs without a cell, so each
    program counts the exchanges in which it had some."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    kind: str
    """"one-shot", "two-shot" or "paired". Each kind has slots, flags and epochs of its own."""
    cells: int
    programs: int
    rounds: int = 1

    @property
    def phases(self) -> int:
        return 2 if self.kind == "two-shot" else 1


@dataclass
class Message:
    """A store on its way."""

    deliver: Callable[[], None]
    after: list[Message]
    is_delivered: bool = False


Step = Callable[[], bool]
"""What a program waits for before it goes on."""


@dataclass
class Machine:
    scheme: Scheme
    ranks: int
    exchanges: list[Exchange]
    slots: dict[Any, Any] = field(default_factory=dict)
    """(rank, kind, phase, half, sender, place): (exchange, round, phase, sender)."""
    tags: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))
    flags: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))
    epochs: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))
    ended: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))
    """(rank, exchange): programs that have ended."""
    last_flags: dict[Any, list[Message]] = field(default_factory=dict)
    in_flight: list[Message] = field(default_factory=list)
    num_wrong: int = 0

    def has_ended(self, rank: int, index: int) -> bool:
        return index < 0 or self.ended[rank, index] == self.exchanges[index].programs

    def places(self, exchange: Exchange, program: int) -> list[int]:
        share = -(-exchange.cells // exchange.programs)
        mine = range(program * share, min((program + 1) * share, exchange.cells))
        return [program * CELLS + index for index in range(len(mine))] if self.scheme.fixed_grid else list(mine)

    def program(self, rank: int, index: int, program: int) -> Iterator[Step]:
        scheme, exchange = self.scheme, self.exchanges[index]
        kind, places = exchange.kind, self.places(exchange, program)
        peers = [peer for peer in range(self.ranks) if peer != rank]
        yield lambda: self.has_ended(rank, index - 1 if scheme.waits_for_previous else index - 2)
        counter = (rank, kind) if scheme.shared_epoch else (rank, kind, program)
        if not scheme.waits_for_previous:  # as if the epoch were right, so that only the pushes are wrong
            epoch = sum(other.rounds for other in self.exchanges[:index] if other.kind == kind)
        else:
            epoch = self.epochs[counter]
        if kind == "paired":
            yield from self.paired(rank, index, program, epoch)
            epoch += exchange.rounds
        for turn in range(0 if kind == "paired" else exchange.rounds):
            epoch += 1
            half = epoch % scheme.halves
            for phase in range(exchange.phases):
                sent: dict[int, list[Message]] = {peer: [] for peer in peers}
                for place in places:
                    for peer in peers:
                        key = (peer, kind, phase, half, rank, place)
                        sent[peer].append(self.send(self.slots, key, (index, turn, phase, rank), tag=epoch))
                        yield lambda: True
                if scheme.tagged and kind == "one-shot":
                    for place in places:
                        for peer in peers:
                            key = (rank, kind, phase, half, peer, place)
                            yield lambda key=key, epoch=epoch: self.tags[key] == epoch  # type: ignore[misc]
                            self.num_wrong += self.slots[key] != (index, turn, phase, peer)
                    continue
                for peer in peers:
                    flag = (peer, kind, phase, program, rank)
                    # Stores of one program to one place keep their order, whatever else is missing.
                    after = [*self.last_flags.get(flag, []), *(sent[peer] if scheme.release_covers_pushes else [])]
                    self.last_flags[flag] = [self.send(self.flags, flag, epoch, after)]
                if not scheme.waits_for_previous:
                    yield lambda: self.has_ended(rank, index - 1)
                for peer in peers:
                    flag = (rank, kind, phase, program, peer)
                    yield lambda flag=flag, epoch=epoch: self.flags[flag] >= epoch  # type: ignore[misc]
                for place in places:
                    for peer in peers:
                        yield lambda: True
                        found = self.slots.get((rank, kind, phase, half, peer, place))
                        self.num_wrong += found != (index, turn, phase, peer)
        is_absent = scheme.tagged and kind == "one-shot" and not places
        self.end(rank, index, counter, self.epochs[counter] if is_absent else epoch)

    def paired(self, rank: int, index: int, program: int, epoch: int) -> Iterator[Step]:
        exchange, peer = self.exchanges[index], 1 - rank
        places, flag = self.places(exchange, program), (peer, "paired", 0, program, rank)
        for turn in range(exchange.rounds + 1):
            if turn < exchange.rounds:
                ahead, sent = epoch + turn + 1, []
                for place in places:
                    key = (peer, "paired", 0, ahead % self.scheme.quarters, rank, place)
                    sent.append(self.send(self.slots, key, (index, turn, 0, rank)))
                    yield lambda: True
                self.last_flags[flag] = [self.send(self.flags, flag, ahead, [*self.last_flags.get(flag, []), *sent])]
            if turn > 0:
                own_flag, awaited = (rank, "paired", 0, program, peer), epoch + turn
                yield lambda own_flag=own_flag, awaited=awaited: self.flags[own_flag] >= awaited  # type: ignore[misc]
                for place in places:
                    yield lambda: True
                    found = self.slots.get((rank, "paired", 0, awaited % self.scheme.quarters, peer, place))
                    self.num_wrong += found != (index, turn - 1, 0, peer)

    def send(
        self, memory: dict[Any, Any], key: Any, value: Any, after: list[Message] | None = None, *, tag: int = 0
    ) -> Message:
        """A tag arrives together with the value."""

        def deliver() -> None:
            memory[key] = value
            if memory is self.slots:
                self.tags[key] = tag

        message = Message(deliver, after or [])
        self.in_flight.append(message)
        return message

    def end(self, rank: int, index: int, counter: Any, epoch: int) -> None:
        self.ended[rank, index] += 1
        is_turn = self.ended[rank, index] == 1 if self.scheme.first_to_end_advances else self.has_ended(rank, index)
        if not self.scheme.shared_epoch or is_turn:
            self.epochs[counter] = epoch

    def run(self, generator: random.Random) -> bool:
        """Whether all programs ended and every read was right. Some ranks, programs and stores are far slower than
        others."""
        actors: list[tuple[float, Iterator[Step], list[Step]]] = []
        rank_speeds = [generator.choice([0.05, 1.0, 1.0]) for _ in range(self.ranks)]
        network_speed = generator.choice([0.05, 0.5, 1.0])
        for rank in range(self.ranks):
            for index, exchange in enumerate(self.exchanges):
                for program in range(exchange.programs):
                    steps = self.program(rank, index, program)
                    speed = rank_speeds[rank] * generator.choice([0.05, 1.0, 1.0])
                    actors.append((speed, steps, [next(steps)]))
        while actors:
            ready = [actor for actor in actors if actor[2][0]()]
            if not ready and not self.in_flight:
                return False  # all wait for each other
            if self.in_flight and (not ready or generator.random() < network_speed):
                self.deliver_one(generator)
                continue
            # A program runs for a few steps at a time.
            actor = generator.choices(ready, [speed for speed, _, _ in ready])[0]
            for _ in range(generator.randint(1, 6)):
                following = next(actor[1], None)
                if following is None:
                    actors.remove(actor)
                    break
                actor[2][0] = following
                if not following():
                    break
        return self.num_wrong == 0

    def deliver_one(self, generator: random.Random) -> None:
        message = generator.choice(self.in_flight)
        while earlier := [other for other in message.after if not other.is_delivered]:
            message = generator.choice(earlier)
        message.deliver()
        message.is_delivered = True
        self.in_flight.remove(message)


def random_machine(scheme: Scheme, generator: random.Random) -> Machine:
    exchanges = []
    for _ in range(6):
        large = "paired" if scheme.pairs else "two-shot"
        kind = generator.choice(["one-shot", "one-shot", "one-shot", large])
        exchanges.append(
            Exchange(
                kind=kind,
                cells=generator.randint(1, CELLS),
                programs=PROGRAMS if scheme.fixed_grid else generator.choice([1, 2, PROGRAMS]),
                rounds=1 if kind == "one-shot" else generator.choice([1, 2, 5] if scheme.pairs else [1, 2]),
            )
        )
    return Machine(scheme, 2 if scheme.pairs else generator.choice([2, 2, 3]), exchanges)


def num_failures(scheme: Scheme, runs: int, *, stop: bool) -> int:
    seed = random.randrange(2**31)
    print(f"{seed=}")
    generator, failures = random.Random(seed), 0
    for _ in range(runs):
        failures += not random_machine(scheme, generator).run(generator)
        if failures and stop:
            break
    return failures


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(Scheme(), id="fixed grids"),
        pytest.param(Scheme(fixed_grid=False, shared_epoch=True), id="one epoch, moved by the last"),
        pytest.param(Scheme(tagged=True), id="tags instead of flags"),
        pytest.param(Scheme(pairs=True, tagged=True), id="paired rounds"),
    ],
)
def test_right_protocols_never_read_wrong_data(scheme: Scheme) -> None:
    assert num_failures(scheme, 500, stop=False) == 0


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(Scheme(fixed_grid=False), id="counters per program with grids that vary"),
        pytest.param(Scheme(halves=1), id="one half"),
        pytest.param(Scheme(waits_for_previous=False), id="a push before the wait"),
        pytest.param(
            Scheme(fixed_grid=False, shared_epoch=True, first_to_end_advances=True), id="an epoch advanced early"
        ),
        pytest.param(Scheme(release_covers_pushes=False), id="no barrier before the release"),
        pytest.param(Scheme(tagged=True, halves=1), id="tags, and one half"),
        pytest.param(Scheme(pairs=True, quarters=2), id="paired rounds, and two places"),
        pytest.param(Scheme(tagged=True, waits_for_previous=False), id="tags, and a push before the wait"),
    ],
)
def test_planted_mistakes_are_found(scheme: Scheme) -> None:
    assert num_failures(scheme, 1000, stop=True) > 0
