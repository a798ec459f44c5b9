"""Prompts in the scheduler: chunks and budget, checkpoints, waiting for another request's prefix, scores, and requests
that only want their prompt computed."""

from __future__ import annotations

import pytest

from agentspec.types import CheckpointKind, FinishReason, TokenScore
from tests.fakes.scripted_device import BLOCK, House, letters

SYSTEM, USER = CheckpointKind.SYSTEM, CheckpointKind.USER


def test_prompt_is_cut_at_the_budget_and_joins_with_its_last_chunk() -> None:
    house = House(budget=64)
    house.submit("a", letters(200), "hello")
    house.run()
    assert house.chunks("a") == [(0, 64), (64, 64), (128, 64), (192, 8)]
    last = house.device.plans[3]
    assert [join.request_id for join in last.joins] == ["a"]
    assert (last.first_slots, last.decode_slots) == ([last.joins[0].slot], []), (
        "its first token comes with its last chunk"
    )
    assert house.said("a") == "hello"


def test_chunks_end_on_block_boundaries_with_any_budget() -> None:
    house = House(budget=70)
    house.submit("a", letters(200), "x")
    house.run()
    assert [length for _, length in house.chunks("a")] == [64, 64, 64, 8]


def test_no_step_computes_more_than_its_budget() -> None:
    for seed in range(20):
        budget = (80, 64, 100)[seed % 3]
        house = House(budget=budget, max_running=6)
        for number in range(8):
            house.submit(f"r{number}", letters(1 + (seed * 37 + number * 53) % 300, seed=number), "abc" * (number % 4))
        house.run()
        assert all(sum(len(chunk.token_ids) for chunk in plan.chunks) <= budget for plan in house.device.plans), seed


def test_the_oldest_prompt_gets_half_of_the_budget_and_short_ones_pass_it() -> None:
    house = House(budget=64)
    house.submit("long", letters(1000), "x")
    house.submit("medium", letters(60, seed=1), "x")
    house.submit("short", letters(12, seed=2), "x")
    house.step()
    assert {chunk.request_id: len(chunk.token_ids) for chunk in house.device.plans[0].chunks} == {
        "long": 32,
        "short": 12,
        "medium": 16,
    }
    house.run()
    assert house.step_of_join("short") == 0
    assert house.step_of_join("medium") <= 2
    assert house.step_of_join("long") > 15
    assert [length for _, length in house.chunks("long")][5:10] == [64] * 5, "alone again, it has the whole budget"


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    house = House(budget=64, max_running=4)
    house.submit("long", letters(640), "x")
    for number in range(60):
        house.submit(f"s{number}", letters(60, seed=1 + number), "abcdefgh")
        house.step()
    house.run()
    steps = [
        index
        for index, plan in enumerate(house.device.plans)
        if any(chunk.request_id == "long" for chunk in plan.chunks)
    ]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "it advances in every step"
    assert len(steps) <= 640 // 32


def test_decoding_continues_beside_a_long_prompt() -> None:
    house = House(budget=64)
    house.submit("talks", letters(10), "y" * 60)
    house.step()
    house.submit("long", letters(900, seed=1), "x")
    house.run()
    busy = [plan for plan in house.device.plans if any(chunk.request_id == "long" for chunk in plan.chunks)]
    assert len(busy) >= 14
    assert all(plan.decode_slots for plan in busy)


def test_checkpoints_stand_at_breakpoints_and_at_the_end_of_the_turn() -> None:
    house = House()
    house.submit("a", letters(150), "o" * 50, points=[(50, SYSTEM), (140, USER)])
    house.run()
    assert house.published == [("SYSTEM", 48), ("USER", 128), ("TURN", 192)]


def test_the_next_turn_resumes_at_the_end_of_the_last_one() -> None:
    house = House()
    prompt = letters(150)
    house.submit("one", prompt, "o" * 50, points=[(50, SYSTEM), (140, USER)], session="s")
    house.run()
    grown = [*prompt, *[ord("o")] * 50, *letters(9, seed=3)]
    house.submit("two", grown, "p", points=[(50, SYSTEM), (140, USER)], session="s")
    house.run()
    assert house.finish("two").usage.cached_tokens == 192
    assert house.chunks("two") == [(192, len(grown) - 192)]


def test_rewritten_turn_resumes_at_the_last_user_message() -> None:
    house = House()
    prompt = letters(150)
    house.submit("one", prompt, "o" * 50, points=[(50, SYSTEM), (131, USER)])
    house.run()
    house.submit("two", prompt[:131] + letters(70, seed=4), "p", points=[(50, SYSTEM), (131, USER)])
    house.run()
    assert house.finish("two").usage.cached_tokens == 128


def test_a_second_session_hits_the_system_prompt_on_its_first_turn() -> None:
    house = House()
    system = letters(100)
    house.submit("a", system + letters(40, seed=1), "x", points=[(100, SYSTEM), (140, USER)], session="a")
    house.run()
    house.submit("b", system + letters(40, seed=2), "x", points=[(100, SYSTEM), (140, USER)], session="b")
    house.run()
    assert house.finish("b").usage.cached_tokens == 96


def test_second_prompt_leaves_a_checkpoint_at_the_branching_point() -> None:
    house = House()
    shared = letters(90)
    for number in range(3):
        house.submit(f"r{number}", shared + letters(200, seed=1 + number), "x", points=[(285, USER)])
        house.run()
    cached = [house.finish(f"r{number}").usage.cached_tokens for number in range(3)]
    assert cached == [0, 0, 80]
    assert ("BRANCH", 80) in house.published


def test_prefixes_are_shared_only_within_a_namespace() -> None:
    house = House()
    for number, namespace in enumerate(("", "salt", "salt", "")):
        house.submit(f"r{number}", letters(100), "x", namespace=namespace)
        house.run()
    assert [house.finish(f"r{number}").usage.cached_tokens for number in range(4)] == [0, 0, 96, 96]


def test_without_a_prefix_cache_nothing_is_ever_cached() -> None:
    house = House(caching=False)
    for number in range(2):
        house.submit(f"r{number}", letters(200), "abcabc", points=[(100, SYSTEM)])
        house.run()
    assert house.resumed == [0, 0]
    assert house.metrics.prefill_tokens == 2 * 200


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("agents", [2, 5, 12])
def test_concurrent_agents_compute_their_common_prefix_once(agents: int, overlap: bool) -> None:
    house = House(max_running=4, overlap=overlap)
    shared = letters(320)
    for number in range(agents):
        house.submit(
            f"a{number}",
            shared + letters(20, seed=1 + number),
            "xyz",
            points=[(320, SYSTEM), (335, USER)],
            session=f"s{number}",
        )
    house.run()
    assert house.metrics.prefill_tokens == 340 + (agents - 1) * 20
    assert all(house.said(f"a{number}") == "xyz" for number in range(agents))


def test_concurrent_equal_prompts_compute_all_but_the_tail_once() -> None:
    house = House(max_running=8)
    for number in range(6):
        house.submit(f"a{number}", letters(200), "xyz", points=[(200, USER)])
    house.run()
    assert house.metrics.prefill_tokens == 200 + 5 * (200 - 192)


def test_request_does_not_wait_for_a_prefix_that_saves_little() -> None:
    """Four blocks are worth a wait, three are not."""
    for blocks, waits in ((3, False), (4, True)):
        house = House(budget=16)
        shared = letters(blocks * BLOCK)
        house.submit("a", shared + letters(200, seed=1), "x", points=[(len(shared), SYSTEM)])
        house.submit("b", shared + letters(200, seed=2), "x", points=[(len(shared), SYSTEM)])
        house.run()
        assert house.finish("b").usage.cached_tokens == (len(shared) if waits else 0)


def test_requests_stop_waiting_for_an_aborted_prefix() -> None:
    house = House(budget=16)
    for number in range(3):
        house.submit(f"a{number}", letters(200), "xyz", points=[(200, USER)])
    house.step()
    house.step()
    assert house.scheduler.num_waiting == 2
    house.loop.abort("a0")
    house.run()
    assert house.finish("a0").reason is FinishReason.ABORT
    assert [house.said(f"a{number}") for number in (1, 2)] == ["xyz", "xyz"]
    assert house.finish("a2").usage.cached_tokens == 192


def test_request_does_not_wait_for_an_evicted_checkpoint() -> None:
    house = House(budget=32)
    shared = letters(64)
    house.submit("a", shared + letters(600, seed=1), "x", points=[(64, SYSTEM), (128, USER)])
    house.run_until(lambda: ("USER", 128) in house.published)
    house.cache.clear()
    house.submit("b", shared + letters(100, seed=2), "x", points=[(64, SYSTEM)])
    house.step()
    assert house.scheduler.num_running == 2
    house.run()


def test_a_checkpoint_without_a_row_is_left_out_and_counted() -> None:
    drafts = 3
    house = House(rows=2 + drafts + 3, max_running=1, drafts=drafts)
    house.submit("a", letters(100), "o" * 30, points=[(50, SYSTEM), (99, USER)])
    house.run()
    assert house.metrics.checkpoints_skipped == 2
    assert house.published == [("TURN", 128)], "the rolling checkpoint has a row of the request's own"


def test_max_tokens_0_computes_the_prompt_and_emits_nothing() -> None:
    house = House()
    house.submit("a", letters(200), "", points=[(150, USER)])
    house.run()
    finish = house.finish("a")
    assert (finish.reason, finish.usage.completion_tokens, len(house.events["a"])) == (FinishReason.LENGTH, 0, 1)
    assert not any(plan.joins or plan.first_slots or plan.decode_slots for plan in house.device.plans)
    assert house.published == [("USER", 144)]
    house.submit("b", letters(200), "x", points=[(150, USER)])
    house.run()
    assert house.finish("b").usage.cached_tokens == 144


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_prompts_of_a_token_or_a_block(length: int) -> None:
    for output in ("", "x", "x" * 40):
        house = House()
        house.submit("a", letters(length), output)
        house.run()
        assert house.said("a") == output
        assert house.finish("a").reason is FinishReason.LENGTH


def scores_of(prompt: list[int]) -> list[TokenScore]:
    """The scores that the scripted device gives."""
    return [TokenScore(token, -float(place), []) for place, token in enumerate(prompt) if place]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("output", ["", "abc"])
def test_prompt_scores_come_over_several_chunks(overlap: bool, output: str) -> None:
    house = House(budget=32, overlap=overlap)
    prompt = letters(150)
    house.submit("warm", prompt, "x")
    house.run()
    house.submit("a", prompt, output, scores=2)
    house.run()
    finish = house.finish("a")
    assert finish.prompt_scores == scores_of(prompt)
    assert finish.usage.cached_tokens == 0, "scores need every position computed"
    assert {chunk.score_top for plan in house.device.plans for chunk in plan.chunks if chunk.request_id == "a"} == {2}
    assert house.finish("warm").prompt_scores is None


def test_scored_prompt_leaves_checkpoints_for_others() -> None:
    house = House()
    house.submit("a", letters(150), "", scores=0, points=[(140, USER)])
    house.run()
    house.submit("b", letters(150), "x")
    house.run()
    assert house.finish("b").usage.cached_tokens == 128
