"""The window policy with copies, on simulated texts and costs: it uses them where they gain, never loses much to MTP
drafts alone, and learns by source and position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.types import SlotResult, WindowShape
from tests.mtp.window_simulation import (
    COPIES,
    COSTS,
    FALSE_MATCHES,
    LONG_RUNS,
    MAX_MTP,
    NO_MATCHES,
    RARE,
    TEXTS,
    Case,
    Simulation,
    dense,
    mixture,
    padded_mixture,
    with_copies,
    with_oracle,
    without_copies,
)

MTP_ALONE = WindowShape(MAX_MTP)


def wide_share(simulation: Simulation, last: int) -> float:
    return sum(shape.num_copies > 0 for shape in simulation.chosen[-last:]) / last


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("cost", COSTS)
def test_copies_never_cost_more_than_one_percent(cost: str, batch: int, text: str) -> None:
    steps = {1: 8000, 4: 3000, 16: 2000}[batch]
    case = Case(text=TEXTS[text], cost=COSTS[cost], batch=batch, seed=1)
    alone, policy = (Simulation(new(), case).run(steps) for new in (without_copies, with_copies))
    fixed = Simulation(FixedWindow(MTP_ALONE), case).run(steps)
    print(f"seed 1: {alone:.1f} tokens/s without copies, {fixed:.1f} with MTP-3, {policy:.1f} with copies")
    assert policy > 0.99 * alone
    assert policy > 0.99 * fixed


def test_text_without_matches_never_sees_a_wide_window() -> None:
    simulation = Simulation(with_copies(), Case(text=NO_MATCHES, cost=dense, batch=4, seed=5))
    simulation.run(3000)
    assert wide_share(simulation, 3000) == 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_long_repeats_on_a_dense_model_gain_nearly_what_an_oracle_gains(seed: int) -> None:
    case = Case(text=LONG_RUNS, cost=dense, batch=1, seed=seed)
    fixed, policy = Simulation(FixedWindow(MTP_ALONE), case).run(6000), Simulation(with_copies(), case).run(6000)
    best = with_oracle(case).run(6000)
    print(f"seed {seed}: {fixed:.1f} tokens/s with MTP-3, {policy:.1f} with copies, {best:.1f} with an oracle")
    assert policy > 1.1 * fixed
    assert policy > 0.97 * best


@pytest.mark.parametrize("cost", ["mixture", "padded mixture"])
def test_a_mixture_gains_from_long_repeats(cost: str) -> None:
    case = Case(text=LONG_RUNS, cost=COSTS[cost], batch=1, seed=3)
    assert Simulation(with_copies(), case).run(6000) > 1.02 * Simulation(FixedWindow(MTP_ALONE), case).run(6000)


def test_knowing_the_copies_made_for_the_next_window_gains_more() -> None:
    """A host that reads them from the last outcome is one step behind, not two."""
    gains = []
    for knows_made in (False, True):
        case = Case(text=TEXTS["short runs"], cost=padded_mixture, batch=1, seed=4, knows_made=knows_made)
        gains.append(Simulation(with_copies(), case).run(8000))
    print(f"seed 4: {gains[0]:.1f} and {gains[1]:.1f} tokens/s")
    assert gains[1] > gains[0]


@pytest.mark.parametrize("cost", ["dense", "large dense"])
def test_shared_rows_gain_more_where_rows_cost(cost: str) -> None:
    """With several users, one that repeats its session has the columns that the others don't need."""
    gains = {}
    for shares in (False, True):
        case = Case(text=TEXTS["short runs"], cost=COSTS[cost], batch=4, seed=11, knows_made=True, shares=shares)
        fixed, policy = (
            Simulation(new, case).run(4000) for new in (FixedWindow(MTP_ALONE), with_copies(shares=shares))
        )
        gains[shares] = policy / fixed
    print(f"seed 11: {gains[False]:.3f} and, with shared rows, {gains[True]:.3f} of MTP-3")
    assert gains[True] > gains[False] + 0.01
    assert gains[True] > 1.04


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 4])
def test_shared_rows_never_cost_more_than_one_percent(batch: int, text: str) -> None:
    case = Case(text=TEXTS[text], cost=COSTS["large dense"], batch=batch, seed=1, knows_made=True, shares=True)
    fixed, policy = (Simulation(new, case).run(3000) for new in (FixedWindow(MTP_ALONE), with_copies(shares=True)))
    assert policy > 0.99 * fixed


def test_without_overlap_it_works_as_well() -> None:
    case = Case(text=LONG_RUNS, cost=dense, batch=4, seed=6, overlap=False, knows_made=True)
    assert Simulation(with_copies(), case).run(3000) > 1.1 * Simulation(FixedWindow(MTP_ALONE), case).run(3000)


def test_follows_a_text_whose_matches_become_false_and_true_again() -> None:
    simulation = Simulation(with_copies(), Case(text=LONG_RUNS, cost=mixture, batch=1, seed=7), may_change=True)
    simulation.run(2000)
    assert wide_share(simulation, 1000) > 0.1
    simulation.change_text(FALSE_MATCHES)
    simulation.run(3000)
    assert wide_share(simulation, 2000) < 0.03
    simulation.change_text(LONG_RUNS)
    simulation.run(6000)
    assert wide_share(simulation, 1000) > 0.1


def test_follows_a_change_of_costs() -> None:
    """Copies that were nearly free become dear, and back."""
    simulation = Simulation(with_copies(), Case(text=LONG_RUNS, cost=dense, batch=4, seed=8))
    simulation.run(1500)
    assert wide_share(simulation, 500) > 0.2
    simulation.case = replace(simulation.case, cost=lambda load: 3.0 * load.shape.width)
    simulation.run(1500)
    assert wide_share(simulation, 500) < 0.03
    simulation.case = replace(simulation.case, cost=dense)
    simulation.run(6000)
    assert wide_share(simulation, 500) > 0.2


def test_each_wide_shape_is_tried_twice_at_the_first_match_and_then_rarely() -> None:
    policy = with_copies()
    wide = []
    for step in range(2000):
        shape = policy.choose(1, int(step >= 500))
        if shape.num_copies:
            wide.append((step, shape.num_copies))
        slot = SlotResult(shape.num_drafted, shape.num_copies, 2, matched=step >= 500, was_matched=step >= 500)
        policy.observe(shape=shape, slots=[slot], seconds=1.0 + shape.num_copies)
    assert [step for step, _ in wide[:4]] == [500, 501, 502, 503]
    assert sorted(count for _, count in wide[:4]) == sorted(COPIES * 2)
    assert len(wide) - 4 < 1500 / 64


def test_acceptance_is_learned_by_source_and_position() -> None:
    policy = AdaptiveWindow(2, (4,))
    wide, narrow = WindowShape(2, 4), WindowShape(2)
    for _ in range(2000):
        policy.observe(shape=wide, slots=[SlotResult(6, 4, 4, matched=True, was_matched=True)], seconds=0.0)
        policy.observe(shape=narrow, slots=[SlotResult(2, 0, 0)], seconds=0.0)
    assert policy.expected_emitted(wide, matched=True) == pytest.approx(5.0, abs=0.3)
    assert policy.expected_emitted(narrow, matched=True) == pytest.approx(3.0, abs=0.15)
    for shape in (wide, narrow):
        assert policy.expected_emitted(shape, matched=False) == pytest.approx(1.0, abs=0.1)
        assert policy.expected_emitted(shape) == pytest.approx(2.0, abs=0.1)


def test_a_slow_first_trial_does_not_ban_a_shape() -> None:
    policy = with_copies()
    chosen = []
    for _ in range(400):
        shape = policy.choose(1, 1)
        chosen.append(shape)
        seconds = 100.0 if shape.num_copies and sum(s == shape for s in chosen) == 1 else 1.0
        slot = SlotResult(shape.num_drafted, shape.num_copies, shape.num_drafted, matched=True, was_matched=True)
        policy.observe(shape=shape, slots=[slot], seconds=seconds)
    assert chosen[-200:].count(WindowShape(MAX_MTP, max(COPIES))) > 190


def test_means_count_folds_that_a_median_would_not() -> None:
    """The wide shape is faster in most steps, but folds more often."""
    policy = AdaptiveWindow(1, (4,))
    chosen = []
    for step in range(600):
        shape = policy.choose(1, 1)
        chosen.append(shape)
        emitted = 1 + shape.num_mtp + (1 if shape.num_copies else 0)
        seconds = 1.0 if not shape.num_copies else (1.2 if step % 3 else 2.6)
        slot = SlotResult(shape.num_drafted, shape.num_copies, emitted - 1, matched=True, was_matched=True)
        policy.observe(shape=shape, slots=[slot], seconds=seconds)
    assert chosen[-200:].count(WindowShape(1)) > 180


def test_windows_with_fewer_drafts_say_nothing_about_matches() -> None:
    """Nothing is copied behind them, whatever the text is."""
    policy = with_copies()
    widest = WindowShape(MAX_MTP, max(COPIES))
    for _ in range(MAX_MTP + 2):
        shape = policy.choose(1, 1)
        policy.observe(shape=shape, slots=[], seconds=0.0)
    for shape in (MTP_ALONE, widest):
        slot = SlotResult(shape.num_drafted, shape.num_copies, shape.num_drafted, matched=True, was_matched=True)
        for _ in range(30):
            policy.observe(shape=shape, slots=[slot], seconds=1.0 + 0.1 * shape.num_copies)
    without_match = policy.expected_emitted(MTP_ALONE, matched=False)
    for _ in range(1000):
        policy.observe(shape=WindowShape(1), slots=[SlotResult(1, 0, 1, was_matched=True)], seconds=1.0)
    assert policy.expected_emitted(MTP_ALONE, matched=False) == pytest.approx(without_match, abs=0.1)
    assert [policy.choose(1, 1) for _ in range(10)].count(widest) >= 5


def test_choices_are_deterministic() -> None:
    case = Case(text=RARE, cost=mixture, batch=4, seed=9)
    first, second = (Simulation(with_copies(), case) for _ in range(2))
    assert first.run(500) == second.run(500)
    assert first.chosen == second.chosen
