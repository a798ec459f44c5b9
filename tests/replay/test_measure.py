"""Percentiles, pooled acceptance and hit shares of hand-made records."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from agentspec.replay.measure import Distribution, SessionRecord, TurnRecord, hits, summarize
from agentspec.replay.reply import Positions, Speculation
from agentspec.replay.report import speculation_rows
from agentspec.replay.report_json import summary_json


def record(place: int = 0, **fields: object) -> TurnRecord:
    return TurnRecord(session_id="s", turn=place, delay_kind="none", due=0.0, sent=0.0, **fields)  # type: ignore[arg-type]


def test_percentiles_interpolate_between_closest_ranks() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        values = [rng.expovariate(1) for _ in range(rng.randrange(2, 40))]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        of = Distribution.of(values)
        assert (of.p50, of.p90, of.p99) == pytest.approx((cuts[49], cuts[89], cuts[98])), f"seed {seed}"


def test_distribution_of_values() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    of = Distribution.of(values)
    assert (of.count, of.mean, of.p50, of.largest) == (4, statistics.mean(values), 2.5, 10.0)
    assert Distribution.of([]).p99 is None
    assert Distribution.of([4.0]).p99 == 4.0


def test_time_per_token_excludes_the_first_event() -> None:
    assert record(tokens=[(1.0, 3), (1.5, 2), (2.0, 2)], completion_tokens=7).time_per_token == pytest.approx(0.25)
    assert record(tokens=[(1.0, 1), (2.0, 1)]).time_per_token == pytest.approx(1.0)  # no usage: events count
    assert record(tokens=[(1.0, 4)], completion_tokens=4).time_per_token is None
    assert (
        record(tokens=[(1.0, 4), (1.1, 1)], completion_tokens=4).time_per_token is None
    )  # no tokens after the first event


def test_interactivity_is_the_inverse_p90_of_time_per_token() -> None:
    """1 / P90 of the ratios, not a percentile of rates or a ratio of percentiles. Turns without output are excluded."""
    rng = random.Random(7)
    turns = [record(end=rng.uniform(0.1, 9), completion_tokens=rng.randrange(1, 500)) for _ in range(30)]
    ratios = [turn.end / (turn.completion_tokens or 1) for turn in turns]
    turns += [
        record(end=100.0, completion_tokens=0),
        record(end=100.0),
        record(end=100.0, completion_tokens=5, error="gone"),
    ]
    summary = summarize([SessionRecord(session_id="s", group=None, num_planned=33, turns=turns)], wall=2.0)
    assert summary.interactivity == pytest.approx(1 / float(np.percentile(ratios, 90)))
    assert summary.normalized_latency.count == 30


def test_first_turns_have_a_separate_time_to_first_token() -> None:
    turns = [record(place, tokens=[(float(first), 1)], end=float(first)) for place, first in enumerate((9, 1, 2))]
    summary = summarize([SessionRecord(session_id="s", group=None, num_planned=3, turns=turns)], wall=9.0)
    assert (summary.first_token_of_first_turns.count, summary.first_token_of_first_turns.p50) == (1, 9.0)
    assert (summary.first_token_of_later_turns.count, summary.first_token_of_later_turns.mean) == (2, 1.5)
    assert [column.latency.p50 for column in summary.by_turn] == [9.0, 1.0, 2.0]


def test_rates_per_gpu_need_gpu_and_token_counts() -> None:
    def rates(num_gpus: int | None, **fields: int) -> tuple[float | None, float | None]:
        turns = [record(end=1.0, **fields)]
        summary = summarize(
            [SessionRecord(session_id="s", group=None, num_planned=1, turns=turns)], wall=2.0, num_gpus=num_gpus
        )
        return summary.output_rate_per_gpu, summary.total_rate_per_gpu

    assert rates(4, prompt_tokens=96, completion_tokens=8) == (1.0, 13.0)
    assert rates(None, prompt_tokens=96, completion_tokens=8) == (None, None)
    assert rates(4, completion_tokens=8) == (1.0, None)
    assert rates(4) == (None, None)


def test_hit_share_pools_tokens_of_reporting_turns() -> None:
    pooled = hits(
        [
            record(prompt_tokens=100, cached_tokens=50),
            record(prompt_tokens=300, cached_tokens=300),
            record(prompt_tokens=999),
        ]
    )
    assert (pooled.num_turns, pooled.prompt_tokens, pooled.cached_tokens) == (2, 400, 350)
    assert pooled.share == pytest.approx(0.875)


def test_acceptance_pools_counts_not_rates() -> None:
    first = Speculation(
        num_steps=10, num_drafted=15, num_accepted=9, by_source={"mtp": Positions(drafted=[10, 5], accepted=[7, 2])}
    )
    second = Speculation(
        num_steps=30, num_drafted=30, num_accepted=3, by_source={"mtp": Positions(drafted=[30], accepted=[3])}
    )
    turns = [
        record(speculation=first, tokens=[(1.0, 1)]),
        record(speculation=second, tokens=[(1.0, 1)]),
        record(tokens=[(1.0, 1)]),
    ]
    summary = summarize([SessionRecord(session_id="s", group=None, num_planned=3, turns=turns)], wall=2.0)
    assert summary.emitted_per_step == pytest.approx(1 + 12 / 40)
    assert summary.draft_acceptance == pytest.approx(12 / 45)
    assert summary.acceptance_by_position == pytest.approx([10 / 40, 2 / 5])
    assert first.drafted_by_position == [10, 5]  # summing must not change the records


def test_sources_are_told_apart() -> None:
    counts = Speculation(
        num_steps=10,
        num_drafted=22,
        num_accepted=18,
        by_source={
            "mtp": Positions(drafted=[10, 10], accepted=[9, 6]),
            "copy": Positions(drafted=[2, 2], accepted=[2, 1]),
        },
    )
    turns = [record(speculation=counts, tokens=[(1.0, 1)]) for _ in range(2)]
    summary = summarize([SessionRecord(session_id="s", group=None, num_planned=2, turns=turns)], wall=2.0)
    assert summary.emitted_by_source == pytest.approx({"mtp": 1.5, "copy": 0.3})
    rows = dict(speculation_rows(summary))
    assert rows["emitted tokens a step"] == "2.80 = 1 + 1.50 mtp + 0.30 copy"
    assert rows["acceptance by position"] == "mtp  1: 90.0%  2: 60.0%  copy  3: 100.0%  4: 50.0%"
    assert summary_json(summary)["by_source"]["copy"] == {
        "emitted_per_step": pytest.approx(0.3),
        "drafted_by_position": [4, 4],
        "accepted_by_position": [4, 2],
    }


def test_turn_columns_exclude_failures() -> None:
    good = SessionRecord(session_id="a", group=None, num_planned=2)
    good.turns = [
        record(0, tokens=[(1.0, 1)], prompt_tokens=10, cached_tokens=0),
        record(1, tokens=[(3.0, 1)], prompt_tokens=20, cached_tokens=15),
    ]
    bad = SessionRecord(session_id="b", group=None, num_planned=3, error="turn 2: gone")
    bad.turns = [
        record(0, tokens=[(2.0, 1)], prompt_tokens=30, cached_tokens=10),
        record(1, error="gone", tokens=[(9.0, 1)]),
    ]
    summary = summarize([good, bad], wall=4.0)
    assert [(column.turn, column.time_to_first_token.p50, column.hits.share) for column in summary.by_turn] == [
        (0, 1.5, 0.25),
        (1, 3.0, 0.75),
    ]
    assert (summary.num_turns, summary.num_failed_turns, summary.num_planned_turns) == (3, 1, 5)
    assert summary.errors == [("gone", 1)]


def test_empty_run_has_a_summary() -> None:
    summary = summarize([], wall=0.0)
    assert (summary.output_rate, summary.hits.share, summary.acceptance_by_position) == (None, None, [])
    assert (summary.interactivity, summary.latency.p50, summary.first_token_of_later_turns.p99) == (None, None, None)
