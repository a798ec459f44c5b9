"""Requests on their way through the scheduler. Transitions covered, each with a step in flight and without:

    WAITING -> PREFILL -> DECODE -> DONE      by stop id, length, stop string
    any phase -> DONE                         by abort, directly or through LEAVING
    WAITING -> WAITING                        no slot, no room, session passed over

test_preemption.py has the way back from PREFILL and DECODE to WAITING, test_scheduler_prefill.py what happens inside
PREFILL.
"""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from agentspec.runtime.request import Phase
from agentspec.types import CheckpointKind, FinishReason, rows_of_request
from agentspec.wire import FinishEvent, TokensEvent
from tests.fakes.scripted_device import BLOCK, PAGE_BYTES, ROW_BYTES, House, letters

USER = CheckpointKind.USER


def test_reused_slot_is_left_before_it_is_joined() -> None:
    house = House(max_running=2)
    for number in range(7):
        house.submit(f"r{number}", letters(20, seed=number), "abcdef" * (1 + number % 3))
    house.run()
    joins = [join for plan in house.device.plans for join in plan.joins]
    assert {join.slot for join in joins} == {0, 1}
    assert [join.request_id for join in joins] == [f"r{number}" for number in range(7)]
    assert sum(len(plan.leaves) for plan in house.device.plans) == 7
    assert max(house.depth.batches) == 2


def test_device_stop_releases_at_once() -> None:
    """The next step is in flight with the ended request in it, but its slot is inert there."""
    for stop_ids, reason in (((ord("d"),), FinishReason.STOP), ((), FinishReason.LENGTH)):
        house = House(overlap=True)
        request = house.submit("a", letters(20), "abcd", max_tokens=4, stop_ids=stop_ids)
        while request.phase is not Phase.DONE:
            house.step()
        assert request.in_flight == 1
        assert not house.cache.leases
        assert house.finish("a").reason is reason
        assert house.said("a") == "abcd"
        house.run()


def test_requests_ended_in_one_step_are_released_in_plan_order() -> None:
    """The order decides which rows and pages are reused next and what is evicted, so it must be the same in every
    run."""
    for _ in range(5):
        house = House(max_running=8)
        requests = [house.submit(f"r{number}", letters(20, seed=number), "a" * 200) for number in range(8)]
        house.run_until(lambda requests=requests: all(request.phase is Phase.DECODE for request in requests))  # type: ignore[misc]
        plan, names = house.device.plans[-1], {request.slot: request.request_id for request in requests}
        for request in requests:
            house.loop.abort(request.request_id)
        ended = [event.request_id for event in house.step() if isinstance(event, FinishEvent)]
        assert ended == [names[slot] for slot in plan.first_slots + plan.decode_slots]
        house.run()


@pytest.mark.parametrize("how", ["stop string", "abort"])
def test_host_stop_releases_after_the_step_in_flight(how: str) -> None:
    house = House(overlap=True)
    request = house.submit("a", letters(20), "abcd" * 30, stop=("dabcda",) if how == "stop string" else ())
    if how == "abort":
        house.run_until(lambda: len(house.said("a")) >= 4)
        house.loop.abort("a")
    else:
        house.run_until(lambda: request.phase is Phase.LEAVING)
    assert (request.phase, request.in_flight) == (Phase.LEAVING, 1)
    assert len(house.cache.leases) == 1
    assert not isinstance(house.events["a"][-1], FinishEvent)
    house.step()
    assert not house.cache.leases
    expected = "abcdabcda" if how == "stop string" else "abcda"
    assert house.said("a") == expected
    house.run()


def test_without_overlap_every_end_releases_at_once() -> None:
    house = House(overlap=False)
    request = house.submit("a", letters(20), "abcd" * 30, stop=("dabc",))
    house.run_until(lambda: request.phase is not Phase.WAITING)
    house.run_until(lambda: request.phase is not Phase.DECODE)
    assert request.phase is Phase.DONE
    assert not house.cache.leases


@pytest.mark.parametrize("overlap", [True, False])
def test_published_checkpoint_covers_only_kept_tokens(overlap: bool) -> None:
    """The device may run past a stop that only the host sees, and over a block boundary: then the older rolling
    checkpoint is published."""
    num_passed = 0
    for accepted, prompt_length, kept in itertools.product(range(4), (9, 16, 30), range(1, 36)):
        house = House(overlap=overlap, accept=accepted)
        house.submit("a", letters(prompt_length), "." * (kept - 1) + "!" + "." * 60, stop=("!",))
        newest = 0
        while house.loop.has_work:
            house.step()
            newest = max([newest, *(slot.newer[1] for slot in house.device.slots.values())])
        case = f"accepted {accepted}, prompt {prompt_length}, kept {kept}"
        assert len(house.said("a")) == kept, case
        length = prompt_length + kept
        turns = [at for kind, at in house.published if kind == "TURN"]
        num_passed += newest > length
        if overlap and length // BLOCK > (prompt_length - 1) // BLOCK:
            assert turns == [length // BLOCK * BLOCK], (
                f"{case}: the step in flight brought the last kept token into the state"
            )
        else:
            assert turns in ([length // BLOCK * BLOCK], [(length - 1) // BLOCK * BLOCK], []), case
    assert num_passed > 5, "too few cases in which the newer checkpoint lies beyond the stop"


def test_abort_publishes_only_sent_tokens() -> None:
    for steps in range(2, 14):
        house = House()
        house.submit("a", letters(20), "o" * 200)
        for _ in range(steps):
            house.step()
        house.loop.abort("a")
        house.run()
        assert all(length <= 20 + len(house.said("a")) for _, length in house.published)


def test_abort_while_waiting() -> None:
    house = House(max_running=1)
    house.submit("a", letters(20), "x" * 30)
    waiting = house.submit("b", letters(20, seed=1), "y")
    house.step()
    house.loop.abort("b")
    assert waiting.phase is Phase.DONE
    house.step()
    assert house.finish("b").reason is FinishReason.ABORT
    assert house.finish("b").usage.completion_tokens == 0
    house.run()
    assert house.said("a") == "x" * 30


@pytest.mark.parametrize("overlap", [True, False])
def test_abort_before_the_first_step(overlap: bool) -> None:
    house = House(overlap=overlap)
    house.submit("a", letters(20), "x")
    house.loop.abort("a")
    assert house.loop.has_work, "its event is not sent yet"
    house.run()
    assert house.finish("a").reason is FinishReason.ABORT
    assert house.device.plans == []


@pytest.mark.parametrize("overlap", [True, False])
def test_abort_in_prefill_keeps_what_was_published(overlap: bool) -> None:
    house = House(budget=32, overlap=overlap)
    request = house.submit("a", letters(300), "x", points=[(64, CheckpointKind.SYSTEM), (299, USER)])
    for _ in range(5):
        house.step()
    assert request.phase is Phase.PREFILL
    house.loop.abort("a")
    house.loop.abort("a")
    house.run()
    assert house.finish("a").reason is FinishReason.ABORT
    house.submit("b", letters(300), "x")
    house.run()
    assert house.finish("b").usage.cached_tokens == 64


def test_abort_while_leaving_changes_nothing() -> None:
    house = House()
    request = house.submit("a", letters(20), "abcd" * 20, stop=("da",))
    house.run_until(lambda: request.phase is Phase.LEAVING)
    house.loop.abort("a")
    house.run()
    assert house.finish("a").reason is FinishReason.STOP


def test_abort_of_an_unknown_or_ended_request_is_no_error() -> None:
    house = House()
    house.submit("a", letters(20), "x")
    house.run()
    house.loop.abort("a")
    house.loop.abort("nobody")
    assert not house.loop.has_work


def test_each_token_and_each_end_is_sent_exactly_once() -> None:
    """Random traffic with aborts and stops. House checks that no event follows a terminal event and that every request
    has one."""
    for seed in range(30):
        rng = random.Random(seed)
        house = House(
            rows=rng.choice([14, 30, 80]),
            pages=rng.choice([30, 300]),
            max_running=rng.choice([1, 2, 5]),
            budget=rng.choice([16, 40, 200]),
            overlap=rng.random() < 0.7,
            accept=partial(rng.randint, 0, 3),
            hold_seconds=rng.choice([0.0, 5.0]),
            gate_bytes=rng.choice([2000, 20_000, 10**9]),
        )
        outputs, aborted = {}, set()
        for number in range(25):
            output = "".join(rng.choice("abc") for _ in range(rng.randrange(80)))
            outputs[f"r{number}"] = output
            shared = letters(rng.choice([10, 40, 90]), seed=rng.randrange(3))
            house.submit(
                f"r{number}",
                shared + letters(rng.randrange(1, 60), seed=number),
                output,
                points=[(len(shared), CheckpointKind.SYSTEM)],
                session=rng.choice([None, "s1", "s2", "s3"]),
                stop=rng.choice([(), ("abca",)]),
            )
            for _ in range(rng.randrange(4)):
                house.step()
                house.now += rng.choice([0.0, 1.0])
            if rng.random() < 0.2:
                aborted.add(victim := rng.choice(list(outputs)))
                house.loop.abort(victim)
        house.run()
        for request_id, output in outputs.items():
            cut = output.find("abca")
            whole = output if cut < 0 or not house.requests[request_id].submit.sampling.stop else output[: cut + 4]
            said = house.said(request_id)
            finish = house.finish(request_id)
            if finish.reason is FinishReason.ABORT:
                assert request_id in aborted, f"seed {seed}"
                assert whole.startswith(said), f"seed {seed}"
            else:
                assert said == whole, f"seed {seed}: {request_id}"
            assert finish.usage.completion_tokens == len(said), f"seed {seed}"
        assert sum(house.metrics.finished.values()) == 25, f"seed {seed}"
        house.cache.clear()
        assert house.cache.used_bytes == 0, f"seed {seed}: something leaked"


def test_pages_grow_two_windows_ahead_within_the_limit() -> None:
    """The device fails at a window that its pages don't cover. This test checks that pages grow with the sequence
    instead of being taken at once."""
    for count in range(290, 310):
        house = House(drafts=7, accept=7)
        request = house.submit("a", letters(20), "o" * count)
        while house.loop.has_work:
            house.step()
            if request.lease is not None:
                assert len(request.lease.page_ids) * BLOCK <= len(request.sequence) + 4 * 8 + BLOCK
        most = 1 + max(index for plan in house.device.plans for _, index, _ in plan.page_updates)
        assert most <= -(-(request.length_limit + 2 * 8) // BLOCK)
        assert house.said("a") == "o" * count


def test_longest_sequence_fits_alone() -> None:
    house = House(pages=12, rows=8, max_running=1)
    longest = 11 * BLOCK - 8
    house.submit("a", letters(100), "o" * (longest - 100))
    house.run()
    assert house.said("a") == "o" * (longest - 100)
    assert house.metrics.preemptions == 0


def crowded() -> House:
    """Memory for the working sets of one and a half sessions."""
    house = House(gate_bytes=2 * ROW_BYTES + 60 * PAGE_BYTES, hold_seconds=5.0)
    house.submit("a1", letters(400), "x" * 20, session="a")
    house.submit("b1", letters(400, seed=1), "y" * 200, session="b")
    house.submit("c1", letters(400, seed=2), "z", session="c")
    return house


def test_live_sessions_turn_passes_sessions_that_do_not_fit() -> None:
    house = crowded()
    house.run_until(lambda: not house.scheduler.knows("a1"))
    house.submit("a2", [*letters(400), *[ord("x")] * 20, *letters(30, seed=3)], "z" * 20, session="a")
    house.run()
    assert house.step_of_join("a2") < house.step_of_join("c1")
    assert house.finish("a2").usage.cached_tokens == 416


def test_a_session_waits_while_the_first_one_runs() -> None:
    house = crowded()
    house.run_until(lambda: house.said("a1") != "")
    assert house.scheduler.num_running == 1


def test_new_session_takes_the_memory_of_an_ended_one() -> None:
    """While another request streams, and with a hold of five seconds: all returning sessions had returned within
    milliseconds."""
    house = House(rows=200, pages=900, budget=2000, gate_bytes=3 * ROW_BYTES + 110 * PAGE_BYTES, hold_seconds=5.0)
    house.submit("streams", letters(20), "x" * 1000)
    prompt = list(letters(300))
    for turn in range(34):
        house.now += 0.01
        house.submit(f"old{turn}", prompt, "y" * 4, session="old")
        house.run_until(lambda turn=turn: not house.scheduler.knows(f"old{turn}"))  # type: ignore[misc]
        prompt += [*b"yyyy", *letters(20, seed=turn)]
    house.submit("new", letters(700, seed=9), "z", session="new")
    house.step()
    assert house.scheduler.num_waiting == 1, "the old one has only just ended a turn"
    house.now += 0.3
    house.run_until(lambda: house.said("new") != "")
    assert house.scheduler.knows("streams")
    house.run()


def test_aborted_waiting_session_blocks_no_other() -> None:
    house = House(gate_bytes=2 * (2 * ROW_BYTES + 60 * PAGE_BYTES))
    house.submit("a", letters(400), "x" * 300, session="a")
    house.submit("big", letters(4000, seed=1), "y", session="b")
    house.submit("c", letters(400, seed=2), "z", session="c")
    house.run_until(lambda: house.said("a") != "")
    assert house.scheduler.num_running == 1
    house.loop.abort("big")
    house.step()
    assert house.scheduler.num_running == 2
    house.run()


def test_already_published_state_gives_its_row_back() -> None:
    """Two equal prompts at once, too short for one to wait for the other."""
    house = House(budget=200)
    requests = [house.submit(f"r{number}", letters(50), "x" * 40) for number in range(2)]
    house.run_until(lambda: all(request.phase is Phase.DECODE for request in requests))
    house.step()
    assert house.published == [("USER", 48), ("USER", 48)]
    rows = [len(request.lease.own_rows) for request in requests if request.lease is not None]
    assert rows == [rows_of_request(3)] * 2
    house.run()


def test_oldest_session_is_admitted_when_nothing_runs() -> None:
    house = crowded()
    house.run()
    joins = [house.step_of_join(request_id) for request_id in ("a1", "b1", "c1")]
    assert joins == sorted(joins)


def test_requests_without_a_session_do_not_wait_for_each_other_while_they_fit() -> None:
    house = House(max_running=4, budget=512)
    for number in range(4):
        house.submit(f"r{number}", letters(50, seed=number), "abc")
    house.step()
    assert house.scheduler.num_running == 4


def test_events_of_a_request_come_in_order_and_carry_its_id() -> None:
    house = House()
    house.submit("a", letters(20), "hello world")
    house.submit("b", letters(20, seed=1), "bye")
    house.run()
    for request_id in ("a", "b"):
        *tokens, last = house.events[request_id]
        assert isinstance(last, FinishEvent)
        assert all(isinstance(event, TokensEvent) and event.request_id == request_id for event in tokens)
    assert "".join(event.text for event in house.events["a"]) == "hello world"
