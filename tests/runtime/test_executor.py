"""ModelExecutor: plans in, outcomes out; prefill, joins, leaves, pages and pointers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from agentspec.errors import ConfigError
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.plan import ChunkPlan, OwnRows, SlotJoin, StepPlan
from agentspec.types import SamplingParams, tokens
from tests.fakes.automaton import Everything, pack
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.step_driver import StepDriver, greedy

MODEL = HashChainModel(seed=23, draft_accuracy=0.85)
BLOCK = MODEL.spec.block_tokens


def make_executor(model: HashChainModel = MODEL, *, max_running: int = 2, max_draft_tokens: int = 3) -> ModelExecutor:
    model.allocate(num_rows=40, num_pages=80)
    return ModelExecutor(model, max_running=max_running, max_draft_tokens=max_draft_tokens, max_pages_per_slot=20)


def chunk(
    ids: Sequence[int],
    *,
    start: int = 0,
    read_row: int = 0,
    writes: Sequence[tuple[int, int]],
    pages: list[int],
    next_token: int | None = None,
    score_top: int | None = None,
) -> ChunkPlan:
    return ChunkPlan(
        request_id="r",
        token_ids=tokens(ids),
        start=start,
        read_row=read_row,
        state_writes=tuple(writes),
        page_ids=pages,
        next_token=next_token,
        score_top=score_top,
    )


def join(
    known: Sequence[int],
    *,
    slot: int,
    rows: list[int],
    pages: list[int],
    checkpoint_length: int = 0,
    constrained: bool = False,
    logprobs: int | None = None,
) -> SlotJoin:
    """A greedy request over `known`, whose state is in rows[0]."""
    return SlotJoin(
        request_id=f"r{slot}",
        slot=slot,
        length=len(known) - 1,
        last_token=known[-1],
        rows=OwnRows.of(rows),
        checkpoint_length=checkpoint_length,
        page_ids=pages,
        length_limit=10_000,
        stop_ids=(),
        seed=0,
        sampling=SamplingParams(temperature=0.0),
        prompt_ids=tokens(known),
        output_ids=tokens(),
        constrained=constrained,
        logprobs=logprobs,
    )


def random_tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(47) for _ in range(count)]


def test_chunked_prefill_equals_one_prefill() -> None:
    for seed in range(30):
        generator = random.Random(seed)
        ids = random_tokens(generator.randint(2, 100), seed)
        executor = make_executor()
        pages = generator.sample(range(1, 80), 12)
        row, start = 0, 0
        checkpoints: dict[int, int] = {}
        while start < len(ids):
            count = generator.randint(1, len(ids) - start)
            inner = {generator.randint(1, count) for _ in range(3)} - {count}
            writes = [(c, 10 + len(checkpoints) + i) for i, c in enumerate(sorted(inner))]
            checkpoints.update({r: start + c for c, r in writes})
            # The running state stays in row 5: from the second chunk on it is read and overwritten in one call.
            plan = StepPlan(
                chunks=[
                    chunk(
                        ids[start : start + count], start=start, read_row=row, writes=[*writes, (count, 5)], pages=pages
                    )
                ]
            )
            executor.collect(executor.launch(plan))
            start, row = start + count, 5
        context = f"seed {seed}:"
        MODEL.check_row(5, ids, context=context)
        MODEL.check_pages(pages, ids, context=context)
        for checkpoint_row, length in checkpoints.items():
            MODEL.check_row(checkpoint_row, ids[:length], context=context)


def test_resumed_request_equals_one_from_scratch_and_keeps_the_checkpoint() -> None:
    """Resuming reads the checkpoint by pointer and shares its pages; stream and acceptance are the same as without a
    cache."""
    for seed in range(10):
        generator = random.Random(seed)
        shared = random_tokens(3 * BLOCK, seed)
        suffix = random_tokens(generator.choice([1, 1, 2, 16, 20]), seed + 100)
        executor = make_executor()
        shared_pages = [1, 2, 3]
        executor.collect(
            executor.launch(StepPlan(chunks=[chunk(shared, writes=[(len(shared), 9)], pages=shared_pages)]))
        )
        rows, pages = list(range(20, 26)), [*shared_pages, *range(10, 20)]
        plan = StepPlan(num_drafted=3, first_slots=[0])
        plan.chunks = [chunk(suffix, start=len(shared), read_row=9, writes=[(len(suffix), rows[0])], pages=pages)]
        plan.joins = [join(shared + suffix, slot=0, rows=rows, pages=pages)]
        resumed = []
        for _ in range(12):
            resumed += executor.collect(executor.launch(plan)).slots
            plan = StepPlan(num_drafted=3, decode_slots=[0])
        MODEL.check_row(9, shared, context=f"seed {seed}:")
        MODEL.check_pages(shared_pages, shared, context=f"seed {seed}:")

        driver = StepDriver(MODEL, max_running=1, max_draft_tokens=3)
        plan = StepPlan()
        driver.plan_join(plan, 0, greedy(shared + suffix, 10_000))
        for _ in range(12):
            driver.step(3, plan=plan)
            plan = StepPlan()
        scratch = driver.running[0].outcomes
        assert [(o.emitted, o.num_drafted, o.num_accepted) for o in resumed] == [
            (o.emitted, o.num_drafted, o.num_accepted) for o in scratch
        ]


def test_prefill_checkpoint_becomes_the_first_rolling_one() -> None:
    ids = random_tokens(2 * BLOCK + 5, 3)
    executor = make_executor()
    rows, pages = list(range(20, 26)), list(range(1, 15))
    boundary = 2 * BLOCK
    plan = StepPlan(
        chunks=[chunk(ids, writes=[(boundary, rows[-2]), (len(ids), rows[0])], pages=pages)],
        joins=[join(ids, slot=0, rows=rows, pages=pages, checkpoint_length=boundary)],
        num_drafted=3,
        first_slots=[0],
    )
    known, lengths = list(ids), []
    for _ in range(12):
        outcome = executor.collect(executor.launch(plan)).slots[0]
        plan = StepPlan(num_drafted=3, decode_slots=[0])
        known += outcome.emitted
        lengths.append([length for _, length in outcome.checkpoints])
        for row, length in outcome.checkpoints:
            if length:
                MODEL.check_row(row, known[:length])
    assert lengths[0] == [boundary, 0]
    assert lengths[-1][0] > lengths[-1][1] >= boundary


def test_slot_can_be_left_and_joined_in_the_same_plan() -> None:
    driver = StepDriver(MODEL, max_running=2, max_draft_tokens=3)
    plan = StepPlan()
    first, second = greedy(random_tokens(20, 1), 200), greedy(random_tokens(9, 2), 60)
    driver.plan_join(plan, 0, first)
    driver.step(3, plan=plan)
    assert driver.step(3, plan=StepPlan(leaves=[0]))[0].emitted == []
    plan = StepPlan(leaves=[0])
    running = driver.plan_join(plan, 0, second)
    while not running.is_done:
        driver.step(3, plan=plan)
        plan = StepPlan()
        driver.check(running)
    assert running.emitted == MODEL.reference_stream(second)


def test_slot_keeps_nothing_of_its_last_request() -> None:
    """Bias, penalties, counts, stop ids and limits of the previous request must not remain."""
    heavy = SamplingParams(
        temperature=1.5,
        logit_bias={4: 50.0},
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=3.0,
        top_k=3,
    )
    requests = [
        ReferenceRequest(prompt=[1, 2, 3], sampling=heavy, seed=1, length_limit=30, stop_ids=(9, 10)),
        ReferenceRequest(prompt=[1, 2, 3], sampling=SamplingParams(temperature=1.0), seed=1, length_limit=60),
        ReferenceRequest(
            prompt=[4, 4, 4],
            sampling=SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.1),
            seed=2,
            length_limit=60,
        ),
        ReferenceRequest(prompt=[1, 2, 3], sampling=SamplingParams(temperature=0.0), seed=1, length_limit=60),
    ]
    driver = StepDriver(MODEL, max_running=1, max_draft_tokens=2)
    for request in requests:
        plan = StepPlan()
        running = driver.plan_join(plan, 0, request)
        while not running.is_done:
            driver.step(2, plan=plan)
            plan = StepPlan()
        assert running.emitted == MODEL.reference_stream(request)


def test_request_that_rejoins_with_output_continues_unchanged() -> None:
    sampling = SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)
    request = ReferenceRequest(prompt=random_tokens(15, 4), sampling=sampling, seed=77, length_limit=70)
    whole = MODEL.reference_stream(request)
    for cut in (1, 7, 30, len(whole) - 1):
        driver = StepDriver(MODEL, max_running=1, max_draft_tokens=3)
        plan = StepPlan()
        running = driver.plan_join(plan, 0, request, output_ids=whole[:cut])
        while not running.is_done:
            driver.step(3, plan=plan)
            plan = StepPlan()
        assert running.emitted == whole


def test_page_updates_apply_to_their_own_plans_step() -> None:
    ids = random_tokens(10, 5)
    executor = make_executor()
    rows, pages = list(range(20, 26)), [1]
    plan = StepPlan(
        chunks=[chunk(ids, writes=[(10, rows[0])], pages=pages)],
        joins=[join(ids, slot=1, rows=rows, pages=pages)],
        num_drafted=3,
        first_slots=[1],
    )
    known = list(ids)
    for step in range(12):
        need = -(-(len(known) + 8) // BLOCK)
        if step:
            plan = StepPlan(num_drafted=3, decode_slots=[1])
            plan.page_updates = [(1, index, 40 + index) for index in range(len(pages), need)]
            pages += [page for _, _, page in plan.page_updates]
        else:
            plan.joins[0].page_ids.extend(range(40 + 1, 40 + need))
            pages = plan.joins[0].page_ids
        known += executor.collect(executor.launch(plan)).slots[0].emitted
        MODEL.check_pages(pages, known[:-1])
    assert len(pages) >= 3
    assert known == ids + MODEL.reference_stream(greedy(ids, len(known)))


def test_late_collect_returns_the_same_results() -> None:
    """With overlap the host reads a step after launching the next: results must not be overwritten."""
    request = ReferenceRequest(prompt=[3, 1, 2], sampling=SamplingParams(temperature=1.0), seed=5, length_limit=200)
    driver = StepDriver(MODEL, max_running=1, max_draft_tokens=3)
    plan = StepPlan(num_drafted=3, first_slots=[0])
    driver.plan_join(plan, 0, request)
    executor = driver.executor
    tickets, emitted = [executor.launch(plan)], []
    for _ in range(20):
        tickets.append(executor.launch(StepPlan(num_drafted=3, decode_slots=[0])))
        emitted += executor.collect(tickets.pop(0)).slots[0].emitted
    assert emitted == MODEL.reference_stream(request)[: len(emitted)]


def test_prompt_scores_are_log_probabilities() -> None:
    """Of the tokens that follow the chunk's tokens, including the one after the chunk, where it doesn't end the
    prompt."""
    ids = random_tokens(75, 6)
    for top, count in ((0, 74), (3, 74), (3, 75)):
        executor = make_executor()
        following = ids[count] if count < 75 else None
        plan = StepPlan(
            chunks=[
                chunk(ids[:count], writes=[(count, 20)], pages=list(range(1, 8)), next_token=following, score_top=top)
            ]
        )
        scores = executor.collect(executor.launch(plan)).scores["r"]
        assert [score.token_id for score in scores] == ids[1:]
        for position, score in enumerate(scores):
            logits = MODEL.logits(torch.tensor([MODEL.reference_state(ids[: position + 1]).row[1:].tolist()]))[0]
            logprobs = logits.log_softmax(0)
            assert score.logprob == pytest.approx(logprobs[score.token_id].item(), abs=1e-5)
            expected = logprobs.topk(top)
            assert [token for token, _ in score.top] == expected.indices.tolist()
            assert [value for _, value in score.top] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_emitted_scores_belong_to_their_own_request() -> None:
    """Neighbours want no scores, or another number of alternatives, and the slot has its next request before the scores
    are read."""
    first, second = random_tokens(9, 1), random_tokens(14, 2)
    executor = make_executor(max_running=3)
    logit_bias = SamplingParams(temperature=0.0, logit_bias={5: 30.0})
    plan = StepPlan(num_drafted=3, first_slots=[2, 0, 1])
    for slot, (ids, logprobs) in enumerate(((first, 3), (second, None), (second, 0))):
        rows, pages = list(range(10 + 6 * slot, 16 + 6 * slot)), list(range(1 + 5 * slot, 6 + 5 * slot))
        plan.chunks.append(chunk(ids, writes=[(len(ids), rows[0])], pages=pages))
        plan.joins.append(join(ids, slot=slot, rows=rows, pages=pages, logprobs=logprobs))
    plan.joins[0] = dataclasses.replace(plan.joins[0], sampling=logit_bias)
    ticket = executor.launch(plan)
    again = StepPlan(num_drafted=3, decode_slots=[2], leaves=[0])
    again.joins = [join(first, slot=0, rows=list(range(10, 16)), pages=[1, 2])]
    later = executor.launch(again)
    by_slot = {outcome.slot: outcome for outcome in executor.collect(ticket).slots}
    assert by_slot[1].scores is None
    for slot, known, num_alternatives in ((0, list(first), 3), (2, list(second), 0)):
        outcome = by_slot[slot]
        assert outcome.scores is not None
        assert [score.token_id for score in outcome.scores] == outcome.emitted
        for score in outcome.scores:
            expected = MODEL.logits(torch.from_numpy(MODEL.reference_state(known).row[1:])).log_softmax(-1)
            assert score.logprob == pytest.approx(expected[score.token_id].item(), abs=1e-5), (
                "from the raw logits, without the bias"
            )
            assert [token for token, _ in score.top] == expected.topk(num_alternatives).indices.tolist()
            known.append(score.token_id)
    assert by_slot[0].emitted[0] == 5
    (outcome,) = executor.collect(later).slots
    assert outcome.scores is not None
    assert len(outcome.scores) == len(outcome.emitted)


def test_constrained_slot_returns_its_drafts() -> None:
    ids = random_tokens(20, 3)
    perfect = HashChainModel(seed=23, draft_accuracy=1.0)
    executor = make_executor(perfect)
    plan = StepPlan(num_drafted=3, first_slots=[0, 1])
    for slot in (0, 1):
        rows, pages = list(range(10 + 6 * slot, 16 + 6 * slot)), list(range(1 + 6 * slot, 7 + 6 * slot))
        plan.chunks.append(chunk(ids, writes=[(20, rows[0])], pages=pages))
        plan.joins.append(join(ids, slot=slot, rows=rows, pages=pages, constrained=slot == 1))
    everything = Everything(perfect.spec.vocab_size)
    plan.masks = {1: everything.masks([])}
    free, constrained = executor.collect(executor.launch(plan)).slots
    stream = perfect.reference_stream(greedy(ids, 60))
    for outcome in (free, constrained):
        assert (outcome.num_drafted, outcome.emitted, outcome.drafts) == (0, stream[:1], stream[1:4])
    barred = np.ones(perfect.spec.vocab_size, dtype=np.bool_)
    barred[stream[2]] = False
    masks = everything.masks(constrained.drafts)
    masks[1] = pack(barred)
    _, after = executor.collect(executor.launch(StepPlan(num_drafted=3, decode_slots=[0, 1], masks={1: masks}))).slots
    assert after.num_drafted == 3
    assert (after.num_accepted, after.emitted[0]) == (1, stream[1])
    assert after.emitted[1] != stream[2], "the second draft is not allowed"
    perfect.check_pages(
        list(range(7, 13)), [*ids, stream[0], stream[1]], context="MTP K/V of the prompt's last pair included:"
    )


def test_empty_decode_has_no_outcomes() -> None:
    executor = make_executor()
    outcome = executor.collect(executor.launch(StepPlan(leaves=[1], page_updates=[(0, 2, 7)])))
    assert (outcome.slots, outcome.scores, outcome.prefill_seconds, outcome.decode_seconds) == ([], {}, 0.0, 0.0)


def test_chunks_and_decode_steps_are_timed() -> None:
    driver = StepDriver(MODEL, max_running=1, max_draft_tokens=1)
    plan = StepPlan(num_drafted=1, first_slots=[0])
    driver.plan_join(plan, 0, greedy([1, 2], 50))
    with_prompt = driver.executor.collect(driver.executor.launch(plan))
    assert with_prompt.prefill_seconds > 0.0 == with_prompt.decode_seconds, "a first step is no decode step"
    alone = driver.executor.collect(driver.executor.launch(StepPlan(num_drafted=1, decode_slots=[0])))
    assert alone.decode_seconds > 0.0 == alone.prefill_seconds


def test_settings_that_do_not_fit_the_model_raise_config_error() -> None:
    plain = HashChainModel(has_mtp=False)
    with pytest.raises(ConfigError, match=r"draft_tokens=2.*no MTP head"):
        make_executor(plain, max_draft_tokens=2)
    with pytest.raises(ConfigError, match="draft_tokens=8"):
        make_executor(max_draft_tokens=8)
    with pytest.raises(ConfigError, match=r"draft_tokens=4.*0 to 3"):
        make_executor(HashChainModel(block_tokens=8), max_draft_tokens=4)
    with pytest.raises(ConfigError, match="force_acceptance"):
        ModelExecutor(MODEL, max_running=1, max_draft_tokens=3, max_pages_per_slot=4, force_acceptance=(0.5,))
