"""The window policy without copies, on simulated acceptance and costs: it finds the best k, follows changes, and leaves
a losing k."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.types import SlotResult, WindowShape


class Simulation:
    """Steps whose slots accept draft i with probability rates[i], given the ones before, and take cost(batch, k)
    seconds."""

    def __init__(
        self,
        policy: AdaptiveWindow,
        *,
        rates: list[float],
        cost: Callable[[int, int], float],
        seed: int = 1,
        noise: float = 0.05,
    ) -> None:
        self.policy, self.rates, self.cost, self.noise = policy, rates, cost, noise
        self.random = random.Random(seed)
        self.drafted = 0
        self.chosen: list[int] = []

    def run(self, steps: int, batch: int = 1) -> float:
        """Emitted tokens per second over `steps` steps."""
        emitted, seconds = 0, 0.0
        for _ in range(steps):
            shape = self.policy.choose(batch)
            assert shape.num_copies == 0
            k = shape.num_mtp
            self.chosen.append(k)
            slots = []
            for _ in range(batch):
                offered, accepted = min(k, self.drafted), 0
                while accepted < offered and self.random.random() < self.rates[accepted]:
                    accepted += 1
                slots.append(SlotResult(offered, 0, accepted))
                emitted += accepted + 1
            self.drafted = k
            took = self.cost(batch, k) * (1 + self.noise * self.random.uniform(-1, 1))
            seconds += took
            self.policy.observe(shape=shape, slots=slots, seconds=took)
        return emitted / seconds

    def ideal(self, k: int, batch: int = 1) -> float:
        emitted, survives = 1.0, 1.0
        for rate in self.rates[:k]:
            survives *= rate
            emitted += survives
        return batch * emitted / self.cost(batch, k)

    def best(self, batch: int = 1) -> float:
        return max(self.ideal(k, batch) for k in range(len(self.rates) + 1))


def memory_bound(batch: int, k: int) -> float:
    """One user on a GPU: a draft costs little compared to reading the weights."""
    return 1.0 + 0.12 * k


def compute_bound(batch: int, k: int) -> float:
    """Verifying a token costs as much as decoding one, and drafting is added: speculation always loses."""
    return 1.0 + 1.2 * k


def mixed(batch: int, k: int) -> float:
    return 1.0 + 0.1 * k + 0.05 * batch * (k + 1)


def test_fixed_window_never_changes() -> None:
    shape = WindowShape(3, 4)
    policy = FixedWindow(shape)
    policy.observe(shape=shape, slots=[SlotResult(3, 0, 0)], seconds=1.0)
    assert [policy.choose(batch, num_matched) for batch, num_matched in ((1, 0), (8, 8), (64, 1))] == [shape] * 3


@pytest.mark.parametrize("rates", [[0.9] * 7, [0.85, 0.75, 0.65, 0.6, 0.5, 0.4, 0.3], [0.5] * 7, [0.1] * 7])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound, mixed])
@pytest.mark.parametrize("batch", [1, 8])
def test_adaptive_window_converges_to_near_optimum(
    rates: list[float], cost: Callable[[int, int], float], batch: int
) -> None:
    simulation = Simulation(AdaptiveWindow(7), rates=rates, cost=cost)
    simulation.run(300, batch)
    assert simulation.run(3000, batch) > 0.88 * simulation.best(batch)


def test_unprofitable_speculation_is_turned_off() -> None:
    simulation = Simulation(AdaptiveWindow(3), rates=[0.3, 0.3, 0.3], cost=compute_bound)
    simulation.run(100)
    plain = simulation.ideal(0)
    assert simulation.run(1000) > 0.93 * plain
    assert simulation.chosen[-1000:].count(0) > 950
    worst_hundred = min(simulation.run(100) for _ in range(10))
    assert worst_hundred > 0.85 * plain


def test_adapts_to_changing_acceptance() -> None:
    simulation = Simulation(AdaptiveWindow(3), rates=[0.9, 0.85, 0.8], cost=memory_bound_dear)
    simulation.run(300)
    assert simulation.run(1000) > 0.9 * simulation.best()
    simulation.rates = [0.05, 0.05, 0.05]
    simulation.run(300)
    assert simulation.run(1000) > 0.9 * simulation.best() == pytest.approx(0.9)
    simulation.rates = [0.9, 0.85, 0.8]
    simulation.run(6000)
    assert simulation.run(1000) > 0.9 * simulation.best()


def memory_bound_dear(batch: int, k: int) -> float:
    return 1.0 + 0.25 * k


def test_adapts_to_changing_costs() -> None:
    simulation = Simulation(AdaptiveWindow(3), rates=[0.7, 0.7, 0.7], cost=memory_bound)
    simulation.run(500)
    simulation.cost = compute_bound
    simulation.run(500)
    assert simulation.run(1000) > 0.9 * simulation.best()


def test_batch_sizes_have_separate_depths() -> None:
    policy = AdaptiveWindow(3)
    one = Simulation(policy, rates=[0.8, 0.7, 0.6], cost=lambda batch, k: 1.0 + 0.05 * k * batch)
    for _ in range(20):
        one.run(50, batch=1)
        one.run(50, batch=32)
    assert one.run(500, batch=1) > 0.9 * one.best(1)
    assert one.run(500, batch=32) > 0.9 * one.best(32)
    small = [policy.choose(1).num_mtp for _ in range(50)]
    large = [policy.choose(32).num_mtp for _ in range(50)]
    assert max(set(small), key=small.count) == 3
    assert max(set(large), key=large.count) == 0


def test_one_slow_step_changes_nothing() -> None:
    simulation = Simulation(AdaptiveWindow(3), rates=[0.9, 0.9, 0.9], cost=memory_bound)
    simulation.run(300)
    simulation.policy.observe(shape=WindowShape(3), slots=[SlotResult(3, 0, 3)], seconds=1000.0)
    assert simulation.run(300) > 0.88 * simulation.best()


def test_adaptive_window_works_without_step_times() -> None:
    policy = AdaptiveWindow(3)
    for _ in range(200):
        shape = policy.choose(4)
        assert 0 <= shape.num_mtp <= 3
        policy.observe(shape=shape, slots=[SlotResult(shape.num_mtp, 0, shape.num_mtp)] * 4, seconds=0.0)


def test_max_depth_zero_never_drafts() -> None:
    simulation = Simulation(AdaptiveWindow(0), rates=[], cost=memory_bound)
    simulation.run(200)
    assert set(simulation.chosen) == {0}


def test_adaptive_window_is_deterministic_and_explores_rarely() -> None:
    runs = [Simulation(AdaptiveWindow(7), rates=[0.9] * 7, cost=memory_bound) for _ in range(2)]
    for simulation in runs:
        simulation.run(2000)
    assert runs[0].chosen == runs[1].chosen
    last = runs[0].chosen[-1000:]
    most = max(set(last), key=last.count)
    assert sum(abs(k - most) > 1 for k in last) < 60
