"""Preemption when pages run out: the youngest request releases everything but its last checkpoint, and later continues
unchanged.

Transitions covered, each with a step in flight and without: DECODE -> LEAVING -> WAITING, DECODE -> WAITING, PREFILL ->
LEAVING -> WAITING, and out of LEAVING to DONE by the last step's own end, by an abort, and by a stop string.
"""

from __future__ import annotations

import pytest

from agentspec.runtime.plan import StepOutcome, StepPlan
from agentspec.runtime.request import Phase, Request
from agentspec.types import CheckpointKind, FinishReason
from tests.fakes.scripted_device import BLOCK, House, letters

USER = CheckpointKind.USER
TALE = "".join(chr(97 + place * 7 % 26) for place in range(400))
"""An output in which every mistake shows."""


def tight(*, overlap: bool = True, accept: int = 3) -> House:
    """Two requests of 20 + 200 tokens: both can start, but they can't both reach their end at once."""
    return House(pages=20, overlap=overlap, accept=accept)


def run_until_preempted(house: House, request: Request) -> None:
    house.run_until(lambda: request.preemptions > 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_youngest_is_preempted_and_its_stream_is_unchanged(overlap: bool, accepted: int) -> None:
    house = tight(overlap=overlap, accept=accepted)
    requests = [house.submit(f"r{number}", letters(20, seed=number), TALE[:200]) for number in range(3)]
    house.run()
    assert [house.said(f"r{number}") for number in range(3)] == [TALE[:200]] * 3
    assert requests[0].preemptions == 0
    assert requests[2].preemptions > 0
    assert house.metrics.preemptions == sum(request.preemptions for request in requests)
    assert {house.finish(f"r{number}").usage.completion_tokens for number in range(3)} == {200}


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_request_resumes_from_its_last_checkpoint(overlap: bool) -> None:
    house = tight(overlap=overlap)
    house.submit("old", letters(20), TALE[:200])
    young = house.submit("young", letters(20, seed=1), TALE[:200])
    house.run_until(lambda: young.preemptions > 0 and young.phase is Phase.WAITING)
    kind, length = house.published[-1]
    assert kind == "TURN"
    assert length in (len(young.sequence) // BLOCK * BLOCK, (len(young.sequence) - 1) // BLOCK * BLOCK)
    house.loop.abort("old")  # otherwise its growth may evict the published checkpoint
    house.run_until(lambda: young.phase is not Phase.WAITING)
    assert house.resumed[-1] == length
    house.run()
    assert house.said("young") == TALE[:200]
    assert house.finish("young").usage.cached_tokens == 0, "counted once, at first admission"


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_request_resumes_without_its_checkpoint(overlap: bool) -> None:
    house = tight(overlap=overlap)
    house.submit("old", letters(20), TALE[:200])
    young = house.submit("young", letters(20, seed=1), TALE[:200])
    house.run_until(lambda: young.preemptions > 0 and young.phase is Phase.WAITING)
    house.cache.clear()
    house.run()
    assert house.resumed[-1] == 0
    assert house.said("young") == TALE[:200]


def test_tokens_of_the_step_in_flight_are_kept() -> None:
    house = tight(overlap=True)
    house.submit("old", letters(20), TALE[:200])
    young = house.submit("young", letters(20, seed=1), TALE[:200])
    run_until_preempted(house, young)
    assert young.phase is Phase.WAITING, "the step in flight ended in the same pass of the loop"
    emitted = sum(len(plan.first_slots + plan.decode_slots) > 1 for plan in house.device.plans)
    assert len(house.said("young")) == 1 + 4 * (emitted - 1), "one token of the first step, four of each later one"
    assert not any(
        slot.join.request_id == "young" and slot.active and len(slot.sequence) != len(young.sequence)
        for slot in house.device.slots.values()
    )
    house.run()
    assert house.said("young") == TALE[:200]


def test_preempted_requests_resume_in_order_of_arrival() -> None:
    house = House(pages=24, max_running=4)
    requests = [house.submit(f"r{number}", letters(20, seed=number), TALE[:150]) for number in range(5)]
    order: list[str] = []
    while house.loop.has_work:
        before = {request.request_id for request in requests if request.phase is Phase.WAITING}
        house.step()
        after = {request.request_id for request in requests if request.phase is Phase.WAITING}
        gone = sorted(before - after)
        assert gone == sorted(before)[: len(gone)]
        order += gone
    assert house.metrics.preemptions > 0
    assert len(order) > 5


def test_the_oldest_is_never_preempted() -> None:
    house = House(pages=24, max_running=4)
    first = house.submit("first", letters(20), TALE[:250])
    for number in range(12):
        house.submit(f"r{number}", letters(20, seed=1 + number), TALE[: 30 + number])
    house.run()
    assert first.preemptions == 0


def test_request_is_preempted_during_prefill() -> None:
    """A long prompt has its pages from the start, so the decoding request runs out of pages while the other is still in
    prefill."""
    house = House(pages=30, budget=16)
    house.submit("old", letters(40), TALE[:300])
    young = house.submit("young", letters(350, seed=1), TALE[:10], points=[(160, USER)])
    house.run_until(lambda: young.preemptions > 0)
    computed = young.computed
    assert 0 < computed < young.prefill_end
    assert house.said("young") == ""
    house.run()
    assert house.said("young") == TALE[:10]
    assert house.said("old") == TALE[:300]
    if ("USER", 160) in house.published:
        assert house.resumed[-1] in (0, 160)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("output", ["", TALE[:20]])
def test_scores_survive_a_preemption(overlap: bool, output: str) -> None:
    house = House(pages=30, budget=16, overlap=overlap)
    house.submit("old", letters(40), TALE[:300])
    prompt = letters(350, seed=1)
    young = house.submit("young", prompt, output, scores=3)
    house.run_until(lambda: young.preemptions > 0)
    house.run()
    scores = house.finish("young").prompt_scores
    assert scores is not None
    assert [score.token_id for score in scores] == prompt[1:]
    assert [score.logprob for score in scores] == [-float(place) for place in range(1, 350)]
    assert house.said("young") == output


def test_complete_scores_are_not_computed_again() -> None:
    house = tight()
    house.submit("old", letters(20), TALE[:200])
    young = house.submit("young", letters(20, seed=1), TALE[:200], scores=0)
    run_until_preempted(house, young)
    house.run()
    scored = [chunk for plan in house.device.plans for chunk in plan.chunks if chunk.score_top is not None]
    assert len(scored) == 1
    assert len(house.finish("young").prompt_scores or []) == 19


def test_abort_ends_a_request_that_is_being_retracted() -> None:
    house = tight()
    house.submit("old", letters(20), TALE[:200])
    young = house.submit("young", letters(20, seed=1), TALE[:200])
    launch = house.device.launch

    def abort_and_launch(plan: StepPlan) -> StepOutcome:
        if young.phase is Phase.LEAVING:
            assert (young.ending, young.in_flight) == (None, 1)
            house.scheduler.abort("young")
        return launch(plan)

    house.device.launch = abort_and_launch  # type: ignore[method-assign]
    house.run()
    assert young.phase is Phase.DONE
    assert house.finish("young").reason is FinishReason.ABORT
    assert house.said("young") == TALE[: len(house.said("young"))]
    assert house.said("old") == TALE[:200]


@pytest.mark.parametrize("how", ["stop string", "stop id", "length"])
def test_preempted_request_that_ends_in_flight_does_not_resume(how: str) -> None:
    for end in range(60, 200):
        house = tight()
        output = TALE[: end - 1] + "!"
        house.submit("old", letters(20), TALE[:200])
        young = house.submit(
            "young",
            letters(20, seed=1),
            output + TALE[:50] * (how != "length"),
            max_tokens=len(output) if how == "length" else None,
            stop=("!",) if how == "stop string" else (),
            stop_ids=(ord("!"),) if how == "stop id" else (),
        )
        ended_while_leaving = False
        while house.loop.has_work:
            before = young.preemptions
            house.step()
            ended_while_leaving |= young.preemptions > before and young.phase is Phase.DONE
        assert house.said("young") == output
        assert house.finish("young").reason is (FinishReason.LENGTH if how == "length" else FinishReason.STOP)
        if ended_while_leaving:
            joins = [join for plan in house.device.plans for join in plan.joins if join.request_id == "young"]
            assert len(joins) == young.preemptions, "it joined once and did not come back after the last retraction"
            return
    raise AssertionError("no output ended in the step that was in flight")


def test_preempted_request_waits_for_pages_the_others_can_grow_into() -> None:
    """Otherwise it would be admitted and preempted again at once."""
    house = House(pages=20, max_running=6, accept=0)
    for number in range(6):
        house.submit(f"r{number}", letters(20, seed=number), TALE[:200])
    house.run()
    assert house.metrics.preemptions <= 15
