"""The loop reads each step's results one step later with overlap, and at once without it. Both give the same
streams."""

from __future__ import annotations

import pytest

from agentspec.runtime.pace import FixedPace, Room, StepTimes
from agentspec.runtime.plan import StepOutcome
from agentspec.wire import TokensEvent
from tests.fakes.scripted_device import House, letters


def test_with_overlap_results_are_one_step_late() -> None:
    house = House(overlap=True)
    house.submit("a", letters(10), "abcdefghij")
    assert house.step() == []
    assert (len(house.device.plans), house.device.num_collected) == (1, 0)
    events = house.step()
    assert [event.token_ids for event in events if isinstance(event, TokensEvent)] == [[ord("a")]]
    assert (len(house.device.plans), house.device.num_collected) == (2, 1)


def test_without_overlap_each_step_is_read_before_the_next() -> None:
    house = House(overlap=False)
    house.submit("a", letters(10), "abcdefghij")
    for said in ("a", "abcde", "abcdefghi", "abcdefghij"):
        house.step()
        assert house.said("a") == said
        assert len(house.device.plans) == house.device.num_collected


def test_the_last_step_is_read_when_there_is_nothing_to_launch() -> None:
    house = House(overlap=True)
    house.submit("a", letters(10), "")
    house.step()
    assert len(house.device.plans) == 1
    house.step()
    assert (len(house.device.plans), house.device.num_collected) == (1, 1), "an empty plan is never launched"
    house.run()


def test_an_idle_loop_has_no_work() -> None:
    house = House()
    before = house.loop.has_work
    assert not before
    assert house.loop.run_once() == []
    assert house.device.plans == []
    house.submit("a", letters(10), "abc")
    assert house.loop.has_work
    house.run()
    assert house.loop.run_once() == []


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_overlap_changes_no_stream(accepted: int) -> None:
    said = []
    for overlap in (True, False):
        house = House(overlap=overlap, accept=accepted, max_running=2)
        for number in range(5):
            house.submit(
                f"r{number}",
                letters(10 + 30 * number, seed=number),
                "the quick brown fox"[: 5 * number],
                stop=("brown",),
            )
        house.run()
        said.append([(house.said(request_id), house.finish(request_id).reason) for request_id in house.requests])
    assert said[0] == said[1]


def test_window_policy_chooses_for_each_batch_and_observes_outcomes() -> None:
    house = House(overlap=False, accept=2, drafts=3)
    house.submit("a", letters(10), "abcdefgh")
    house.submit("b", letters(10, seed=1), "a")
    house.run()
    assert house.depth.batches == [2, 1, 1, 1]
    assert house.depth.observed == [(3, [(3, 2)]), (3, [(3, 2)]), (3, [(3, 0)])], "first steps verify nothing"


@pytest.mark.parametrize("rides", [False, True])
def test_window_policy_gets_no_time_of_a_step_with_riding_windows(rides: bool) -> None:
    """Most of that time is included in the chunks' time."""
    house = House(overlap=False, accept=2, drafts=3, max_running=2)
    house.device.decode_seconds, house.device.rides = 0.25, rides
    house.submit("a", letters(10), "abcdefghijklmn")
    house.step()
    house.submit("b", letters(10, seed=1), "a")
    house.run()
    chunks = [bool(plan.chunks) for plan in house.device.plans if plan.decode_slots]
    assert chunks[:3] == [True, False, False]
    assert house.depth.seconds == [0.0 if rides and with_chunks else 0.25 for with_chunks in chunks]
    assert len(house.depth.observed) == len(chunks), "accepted drafts count"


def test_pace_observes_every_step() -> None:
    pace = ListeningPace()
    house = House(overlap=False, drafts=3, pace=pace)
    house.device.decode_seconds, house.device.prefill_cost = 0.25, lambda start, count: start + count
    house.submit("a", letters(100), "abcdef")
    house.run()
    assert pace.asked == [False, False]
    chunks, contexts = [[(0, 64)], [(64, 36)], [], [], []], [[], [], [104], [105], []]
    assert [times.chunks for times in pace.told] == chunks
    assert [times.contexts for times in pace.told] == contexts
    assert [(times.prefill_seconds, times.decode_seconds) for times in pace.told] == [
        (64.0, 0.0),
        (100.0, 0.0),
        (0.0, 0.25),
        (0.0, 0.25),
        (0.0, 0.0),
    ]
    house.submit("b", letters(20, seed=1), "abcdef")
    house.step()
    house.submit("c", letters(20, seed=2), "a")
    house.step()
    assert pace.asked[-2:] == [False, True]


def test_gaps_of_running_streams_are_counted() -> None:
    """From the first token on, and not beyond a turn's end."""
    now = [0.0]
    house = House(overlap=False, accept=0, drafts=1)
    house.loop._clock = lambda: now[0]
    house.submit("a", letters(10), "abcd")
    for at in (1.0, 1.004, 1.104, 1.604):
        now[0] = at
        house.step()
    house.run()
    now[0] = 9.0
    house.submit("b", letters(10, seed=1), "x")
    house.run()
    metrics = house.metrics.as_dict()
    assert sum(metrics["gap_counts"]) == 3
    assert metrics["longest_gap_seconds"] == pytest.approx(0.5)
    assert metrics["gap_seconds"] == pytest.approx(0.604)
    assert [bound for bound, count in zip(metrics["gap_bounds"], metrics["gap_counts"], strict=False) if count] == [
        0.005,
        0.15,
        0.5,
    ]


def test_times_and_tokens_are_counted_as_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that takes a second per step, one request after another."""
    now = [10.0]
    house = House(overlap=False, accept=0, drafts=0, max_running=1, budget=64)
    house.loop._clock = lambda: now[0]
    collect = house.device.collect

    def collect_late(ticket: StepOutcome) -> StepOutcome:
        now[0] += 1.0
        return collect(ticket)

    monkeypatch.setattr(house.device, "collect", collect_late)
    house.submit("a", letters(100), "abc")  # two steps of its prompt, the second with its first token; two more tokens
    house.submit("b", letters(10, seed=1), "x")
    house.submit("c", letters(10, seed=2), "")
    house.submit("d", letters(10, seed=3), "x")
    house.loop.abort("d")
    house.run()
    metrics = house.metrics
    sums = [
        histogram.sum
        for histogram in (
            metrics.queue_seconds,
            metrics.prompt_seconds,
            metrics.decode_seconds,
            metrics.inference_seconds,
        )
    ]
    assert sums == [0 + 4 + 5, 2 + 1 + 1, 2 + 0, 4 + 1 + 1]
    counts = [
        sum(histogram.counts) for histogram in (metrics.queue_seconds, metrics.prompt_seconds, metrics.decode_seconds)
    ]
    assert counts == [3, 3, 2], "one was aborted while it waited, one wants no token"
    assert (sum(metrics.step_tokens.counts), metrics.step_tokens.sum) == (6, 64 + 37 + 1 + 1 + 11 + 10)


def test_preempted_request_is_timed_from_its_first_begin_and_token() -> None:
    house = House(overlap=True, accept=1, drafts=2, pages=14, max_running=3)
    for number in range(3):
        house.submit(f"r{number}", letters(20, seed=number), "the quick brown fox jumps over the lazy dog" * 2)
    house.run()
    assert house.metrics.preemptions > 0
    assert [
        sum(figure.counts)
        for figure in (house.metrics.queue_seconds, house.metrics.prompt_seconds, house.metrics.decode_seconds)
    ] == [3, 3, 3]
    assert house.metrics.inference_seconds.sum == pytest.approx(
        house.metrics.prompt_seconds.sum + house.metrics.decode_seconds.sum
    )


class ListeningPace:
    """Always 64 tokens; records its calls."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.told: list[StepTimes] = []

    def open(self, *, streams_run: bool) -> Room:
        self.asked.append(streams_run)
        return FixedPace(64, block_tokens=16).open(streams_run=streams_run)

    def observe(self, times: StepTimes) -> None:
        self.told.append(times)


def test_inert_slots_are_not_shown_to_the_window_policy() -> None:
    """With overlap the step after the last one still contains the ended request."""
    house = House(overlap=True, accept=3)
    house.submit("a", letters(10), "ab")
    house.run()
    assert len(house.depth.batches) == 3
    assert len(house.depth.observed) == 1


def test_metrics_count_what_was_launched_and_emitted() -> None:
    house = House(budget=32, accept=3)
    house.submit("a", letters(100), "abcdefghij")
    house.run()
    metrics = house.metrics
    assert metrics.requests == 1
    assert (metrics.prompt_tokens, metrics.prefill_tokens, metrics.cached_tokens, metrics.emitted_tokens) == (
        100,
        100,
        0,
        10,
    )
    assert metrics.steps == len(house.device.plans)
    assert metrics.first_slots == sum(len(plan.first_slots) for plan in house.device.plans) == 1
    assert metrics.decode_steps == sum(bool(plan.decode_slots) for plan in house.device.plans)
    assert metrics.decode_slots == sum(len(plan.decode_slots) for plan in house.device.plans)
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    spec = house.finish("a").usage.spec
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (spec.num_drafted, spec.num_accepted)


def test_device_error_reaches_the_caller() -> None:
    house = House()
    house.submit("a", letters(10), "abc")
    house.device.failure = RuntimeError("the device fell off")
    with pytest.raises(RuntimeError, match="fell off"):
        house.step()


def test_busy_loop_runs_deferred_work_periodically() -> None:
    house, done = House(accept=0), list[int]()
    house.loop.prepare = lambda: bool(done.append(len(house.device.plans)) or True)  # type: ignore[method-assign]
    house.submit("a", letters(10), "abcdefghij" * 30)
    house.run()
    assert done == [128, 256]
