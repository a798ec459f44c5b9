"""Constrained requests in the schedule: when they decode, how their constraint is called, and that a failing one
affects no other request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from agentspec.runtime.constraint import DEAD_END, MaskRows
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.request import Request
from agentspec.types import FinishReason, WindowShape
from agentspec.wire import TokensEvent
from tests.fakes.automaton import Everything
from tests.fakes.scripted_device import VOCABULARY, House, letters

TEXT = "the quick brown fox jumps over the lazy dog"


def anything() -> Everything:
    return Everything(VOCABULARY)


def decode_steps(house: House, request_id: str) -> list[int]:
    """Indexes of the plans in which a request gets tokens, including its first step. The request keeps its slot."""
    slots = {join.slot for plan in house.device.plans for join in plan.joins if join.request_id == request_id}
    assert len(slots) == 1
    return [index for index, plan in enumerate(house.device.plans) if slots & set(plan.first_slots + plan.decode_slots)]


def gaps(steps: list[int]) -> set[int]:
    return {later - earlier for earlier, later in itertools.pairwise(steps)}


def plans_alone(overlap: bool) -> list[StepPlan]:
    house = House(overlap=overlap, accept=1)
    house.submit("free", letters(20), TEXT)
    house.run()
    return house.device.plans


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_constrained", [1, 2])
def test_unconstrained_request_is_never_delayed(overlap: bool, num_constrained: int) -> None:
    """It decodes in the same steps, with the same drafts and pages, as when it runs alone; a constrained one in every
    other step."""
    house = House(overlap=overlap, accept=1)
    house.submit("free", letters(20), TEXT)
    for number in range(num_constrained):
        house.submit(f"c{number}", letters(25, seed=1 + number), TEXT[:15], constraint=anything())
    house.run()
    alone = plans_alone(overlap)
    free = decode_steps(house, "free")
    assert free == [index for index, plan in enumerate(alone) if plan.first_slots or plan.decode_slots]
    slot = alone[0].first_slots[0]
    assert [plan.num_drafted for plan in house.device.plans[: len(alone)]] == [plan.num_drafted for plan in alone]
    pages = [[update[1] for update in plan.page_updates if update[0] == slot] for plan in house.device.plans]
    assert pages[: len(alone)] == [[update[1] for update in plan.page_updates] for plan in alone]
    for number in range(num_constrained):
        constrained = decode_steps(house, f"c{number}")
        assert gaps(constrained[1:]) == ({2} if overlap else {1})
        assert constrained[1] - constrained[0] <= (3 if overlap else 1), (
            "after its first step it may wait for the others"
        )
        assert constrained[-1] < free[-1], "the unconstrained one ran all the time"
        assert house.said(f"c{number}") == TEXT[:15]


@pytest.mark.parametrize("overlap", [False, True])
def test_only_constrained_requests_decode_in_every_step(overlap: bool) -> None:
    """Every launched step decodes all of them: the host reads a step at once when nothing else can be launched."""
    house = House(overlap=overlap, accept=3, drafts=3)
    constraints = [anything() for _ in range(3)]
    for number, constraint in enumerate(constraints):
        house.submit(f"c{number}", letters(10 + number, seed=number), TEXT, constraint=constraint)
    house.run()
    decoding = [plan for plan in house.device.plans if plan.first_slots or plan.decode_slots]
    steps = 1 + -(-(len(TEXT) - 1) // 4)  # no drafts in the first window, four tokens a step afterwards
    assert len(decoding) == steps
    assert all(len(plan.first_slots + plan.decode_slots) == 3 for plan in decoding)
    assert len(house.device.plans) - len(decoding) <= 1, "plus one plan that only clears the slots"


def test_constrained_requests_synchronise_their_steps() -> None:
    """A request that joins in an odd step gets its first token there and then waits for the others, so that the batch
    is not split for good."""
    house = House(overlap=True, accept=1)
    house.submit("free", letters(20), TEXT)
    house.submit("c0", letters(12, seed=1), TEXT[:15], constraint=anything())
    for number in (1, 2):
        house.step()
        house.submit(f"c{number}", letters(12, seed=1 + number), TEXT[:15], constraint=anything())
    house.run()
    first = decode_steps(house, "c0")
    assert gaps(first) == {2}
    for number in (1, 2):
        joined, *others = decode_steps(house, f"c{number}")
        assert joined == house.step_of_join(f"c{number}")
        assert set(others) & set(range(first[0], first[-1] + 1)) <= set(first)
        assert others[0] - joined <= 3
    assert gaps(decode_steps(house, "free")) == {1}


def test_new_constrained_requests_do_not_delay_decoding_ones() -> None:
    """Constrained requests for a single token come one after another: those that decode continue in every other
    step."""
    house = House(overlap=True, accept=0, max_running=3)
    house.submit("c", letters(12), TEXT, constraint=anything())
    for number in range(40):
        house.submit(f"short{number}", letters(12, seed=1 + number), "x", constraint=anything())
        house.step()
    house.run()
    assert gaps(decode_steps(house, "c")) <= {1, 2}


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_are_requested_for_the_windows_drafts(overlap: bool) -> None:
    house = House(overlap=overlap, accept=2, drafts=3)
    constraint = anything()
    house.submit("c", letters(10), "abcdefghij", constraint=constraint)
    house.run()
    told = [bytes(window).decode() for window in constraint.windows]
    assert told == ["", "bcd", "efg", "hij"], "none at the join, then the device's drafts"
    assert bytes(constraint.followed).decode() == "abcdefghij"


def test_masks_cover_at_most_depth_and_available_drafts() -> None:
    house = House(overlap=False, accept=3, drafts=3)
    constraint = anything()
    house.submit("c", letters(10), TEXT, constraint=constraint)
    depths = [1, 3, 2, 0, 3, 3]
    for depth in depths:
        house.depth.num_drafted = depth
        house.step()
    assert [len(window) for window in constraint.windows] == [0, 1, 2, 0, 0, 3]
    assert [len(masks) for plan in house.device.plans for masks in plan.masks.values()] == [1, 2, 3, 1, 1, 4]


@pytest.mark.parametrize(
    ("shape", "most"), [(WindowShape(3), 3), (WindowShape(3, 1), 7)], ids=["MTP alone", "with copies"]
)
def test_a_window_with_copies_has_masks_for_all_drafts_that_were_made(
    shape: WindowShape, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have more columns than the shape, which is a mean."""
    house, asked = House(overlap=False, accept=3, drafts=7), []
    next_masks = Request.next_masks

    def watched(self: Request, num_drafted: int, *, width: int) -> MaskRows | None:
        asked.append(num_drafted)
        return next_masks(self, num_drafted, width=width)

    monkeypatch.setattr(Request, "next_masks", watched)
    monkeypatch.setattr(house.depth, "choose", lambda *_: shape)
    house.submit("c", letters(10), TEXT, constraint=anything())
    house.run()
    assert asked == [most] * len(asked)


def test_plan_has_masks_for_constrained_slots_only() -> None:
    house = House(overlap=False)
    house.submit("free", letters(10), TEXT)
    house.submit("c", letters(10, seed=1), TEXT, constraint=anything())
    house.run()
    for plan in house.device.plans:
        assert len(plan.masks) == sum(slot == 1 for slot in plan.first_slots + plan.decode_slots)


def test_constraint_advances_only_up_to_a_stop_string() -> None:
    house = House(overlap=True, accept=3)
    constraint = anything()
    house.submit("c", letters(10), TEXT, stop=("brown",), constraint=constraint)
    house.run()
    assert house.finish("c").stop_match == "brown"
    said = bytes(constraint.followed).decode()
    assert TEXT.startswith(said)
    assert "brown" not in said


@pytest.mark.parametrize("overlap", [False, True])
def test_constraint_keeps_its_position_over_a_preemption(overlap: bool) -> None:
    house = House(overlap=overlap, pages=14, max_running=3, drafts=1, accept=1, caching=True)
    constraints = {f"c{number}": anything() for number in range(3)}
    long_text = TEXT * 3
    for number, (request_id, constraint) in enumerate(constraints.items()):
        house.submit(request_id, letters(30, seed=number), long_text, constraint=constraint)
    house.run()
    assert house.metrics.preemptions > 0
    for request_id, constraint in constraints.items():
        assert house.said(request_id) == long_text
        assert bytes(constraint.followed).decode() == long_text
    preempted = [join for plan in house.device.plans for join in plan.joins if join.output_ids]
    assert preempted
    assert all(join.constrained for join in preempted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(5))
def test_abort_frees_constrained_request_in_any_phase(overlap: bool, steps: int) -> None:
    house = House(overlap=overlap, accept=1, max_running=2)
    house.submit("c", letters(70), TEXT, constraint=anything())
    house.submit("other", letters(20, seed=1), TEXT, constraint=anything())
    for _ in range(steps):
        house.step()
    house.loop.abort("c")
    house.run()
    assert house.finish("c").reason is FinishReason.ABORT
    assert house.said("other") == TEXT


class Failing(Everything):
    """A constraint whose n-th call of `masks` or `advance` fails."""

    def __init__(self, where: str, count: int) -> None:
        super().__init__(VOCABULARY)
        self._left = {where: count}

    def _count(self, where: str) -> None:
        self._left[where] = self._left.get(where, 1000) - 1
        if self._left[where] < 0:
            raise ValueError("planted")

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        self._count("masks")
        return super().masks(drafts)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._count("advance")
        super().advance(token_ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["masks", "advance"])
@pytest.mark.parametrize("count", [0, 3])
def test_failing_grammar_ends_only_its_request(
    overlap: bool, where: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(overlap=overlap, accept=1, max_running=3)
    house.submit("bad", letters(20), TEXT, constraint=Failing(where, count))
    house.submit("good", letters(20, seed=1), TEXT, constraint=anything())
    house.submit("free", letters(20, seed=2), TEXT)
    house.run()
    finish = house.finish("bad")
    assert finish.reason is FinishReason.ERROR
    assert finish.error == "the grammar failed: ValueError: planted"
    assert finish.usage.completion_tokens == len(house.said("bad"))
    assert TEXT.startswith(house.said("bad"))
    assert house.said("good") == house.said("free") == TEXT
    assert house.metrics.finished["error"] == 1
    assert "the grammar of request bad failed" in caplog.text


class EndsDead(Everything):
    """Allows everything up to a dead end."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(VOCABULARY)
        self._num_tokens = num_tokens

    def masks(self, drafts: Sequence[int]) -> MaskRows:
        rows = super().masks(drafts)
        rows[self._num_tokens - len(self.followed) :][:1] = 0
        return rows


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accept", range(4))
@pytest.mark.parametrize("num_tokens", range(11))
@pytest.mark.parametrize("next_token", [TEXT[11], "\0"], ids=["goes on", "stop id"])
def test_dead_end_anywhere_in_a_window_ends_only_its_request(
    overlap: bool, accept: int, num_tokens: int, next_token: str
) -> None:
    """The device continues after the dead end, even to a stop id or the token limit; none of that is kept or
    counted."""
    house = House(overlap=overlap, accept=accept, max_running=3)
    told = TEXT[:num_tokens] + next_token + TEXT[num_tokens + 1 :]
    house.submit("bad", letters(20), told, max_tokens=num_tokens + 2, logprobs=0, constraint=EndsDead(num_tokens))
    house.submit("good", letters(20, seed=1), TEXT, constraint=anything())
    house.submit("free", letters(20, seed=2), TEXT)
    house.run()
    finish = house.finish("bad")
    assert (finish.reason, finish.error, finish.refused, finish.stop_match) == (
        FinishReason.ERROR,
        DEAD_END,
        "grammar.source",
        None,
    )
    assert house.said("bad") == TEXT[:num_tokens]
    assert all(masks.any(axis=1).all() for plan in house.device.plans for masks in plan.masks.values()), (
        "the device has tokens to sample from"
    )
    usage, spec = finish.usage, finish.usage.spec
    assert usage.completion_tokens == num_tokens
    lost = 1 + spec.num_steps + spec.num_accepted - num_tokens
    assert lost in (0, 1), "every token after the first is counted; at most the one after the last draft is lost"
    assert house.said("good") == house.said("free") == TEXT


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accept", range(4))
def test_request_that_ends_before_a_dead_end_has_no_error(overlap: bool, accept: int) -> None:
    house = House(overlap=overlap, accept=accept, max_running=3)
    house.submit("limit", letters(20), TEXT, max_tokens=9, constraint=EndsDead(9))
    house.submit("stop id", letters(20, seed=1), TEXT[:8] + "\0", constraint=EndsDead(9))
    house.submit("text", letters(20, seed=2), TEXT, stop=(TEXT[4:9],), constraint=EndsDead(9))
    house.run()
    ends = [(house.finish(name).reason, house.finish(name).stop_match) for name in ("limit", "stop id", "text")]
    assert ends == [(FinishReason.LENGTH, None), (FinishReason.STOP, 0), (FinishReason.STOP, TEXT[4:9])]


def test_stop_string_is_not_completed_after_a_dead_end() -> None:
    house = House(accept=3)
    house.submit("c", letters(20), TEXT, stop=(TEXT[4:9],), constraint=EndsDead(7))
    house.run()
    assert house.finish("c").reason is FinishReason.ERROR
    texts = [event.text for event in house.events["c"]]
    assert "".join(texts) == TEXT[:7], "held-back text is sent"


@pytest.mark.parametrize("steps", range(1, 6))
def test_abort_before_a_dead_end_ends_with_abort(steps: int) -> None:
    house = House(overlap=True, accept=0)
    house.submit("c", letters(20), TEXT, constraint=EndsDead(4))
    for _ in range(steps):
        house.step()
    house.loop.abort("c")
    house.run()
    assert house.finish("c").reason is FinishReason.ABORT


def test_dead_ends_of_preempted_requests_leak_nothing() -> None:
    house = House(pages=14, max_running=3, drafts=1, accept=1, caching=True)
    for number in range(3):
        house.submit(f"c{number}", letters(30, seed=number), TEXT * 3, constraint=EndsDead(100 + number))
    house.run()
    assert house.metrics.preemptions > 0
    assert [len(house.said(f"c{number}")) for number in range(3)] == [100, 101, 102]
    assert house.metrics.finished["error"] == 3


def test_scoring_only_request_never_asks_for_masks() -> None:
    house = House()
    constraint = anything()
    house.submit("c", letters(20), "", max_tokens=0, scores=0, constraint=constraint)
    house.run()
    assert constraint.windows == []
    assert house.finish("c").reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
def test_scores_are_sent_and_cut_with_their_tokens(overlap: bool) -> None:
    house = House(overlap=overlap, accept=3)
    house.submit("plain", letters(10), TEXT)
    house.submit("scored", letters(10, seed=1), TEXT, stop=("fox",), logprobs=0)
    house.run()
    for request_id, is_scored in (("plain", False), ("scored", True)):
        for event in house.events[request_id]:
            if isinstance(event, TokensEvent):
                assert (event.scores is not None) == is_scored
                assert event.scores is None or [score.token_id for score in event.scores] == event.token_ids
    assert house.said("scored") == TEXT[: TEXT.index("fox") + 3]
