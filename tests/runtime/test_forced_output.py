"""Forced outputs: the requested output is emitted whatever the model predicts, and no other request changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentspec.cache import invariants
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, build
from agentspec.engine.in_process import Engine
from agentspec.errors import ContextLengthError, RequestError
from agentspec.runtime.memory_plan import MemoryPlan, longest_sequence
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import FinishEvent, Grammar, Submit, TokensEvent
from tests.fakes.hash_chain import HashChainModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3, max_tokens=40)


BLOCK = 16


def assembly(*, num_rows: int = 60, num_pages: int = 200, **settings: Any) -> Assembly:
    config = EngineConfig(**{"draft_tokens": 3, "max_running": 3, "allow_forced_output": True} | settings)
    memory = MemoryPlan(
        num_rows=num_rows, num_pages=num_pages, max_length=min(500, longest_sequence(num_pages, 3, BLOCK))
    )
    return build(HashChainModel(seed=5, max_context=600, block_tokens=BLOCK), config=config, memory=memory)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 46) for _ in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_output_is_the_forced_one(sampling: SamplingParams, overlap: bool) -> None:
    rng = random.Random(1)
    with Engine(assembly(overlap=overlap)) as engine:
        for number, length in enumerate((1, 40, 64, 130)):
            forced = words(rng, 40)
            asked = Submit(
                request_id=f"r{number}", prompt_ids=words(rng, length), sampling=sampling, forced_output=forced
            )
            ids, finish = engine.generate(asked)
            assert ids == forced
            assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.LENGTH, 40)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_forcing_the_models_own_output_takes_the_same_steps(sampling: SamplingParams) -> None:
    """The same tokens, steps and accepted drafts; after the last forced token the model continues by itself."""
    prompt = words(random.Random(2), 90)
    with Engine(assembly()) as engine:
        free, usual = engine.generate(Submit(request_id="free", prompt_ids=prompt, sampling=sampling, namespace="a"))
        for number in (1, 25, 40):
            forced = Submit(
                request_id=f"{number}",
                prompt_ids=prompt,
                sampling=sampling,
                namespace=f"{number}",
                forced_output=free[:number],
            )
            ids, finish = engine.generate(forced)
            assert ids == free
            assert finish.usage.spec == usual.usage.spec
    assert usual.usage.spec.num_accepted > 0


def test_drafts_are_accepted_against_the_forced_text() -> None:
    prompt = words(random.Random(3), 90)
    with Engine(assembly()) as engine:
        free, _ = engine.generate(Submit(request_id="free", prompt_ids=prompt, sampling=GREEDY))
        other = [(token + 1) % 46 for token in free]
        ids, finish = engine.generate(
            Submit(request_id="forced", prompt_ids=prompt, sampling=GREEDY, forced_output=other)
        )
    assert ids == other
    assert finish.usage.spec.num_accepted < finish.usage.spec.num_drafted / 2, "the head drafts its own model's tokens"


def test_stops_end_a_forced_output() -> None:
    stopping = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(7,))
    with Engine(assembly()) as engine:
        ids, finish = engine.generate(
            Submit(request_id="a", prompt_ids=[1, 2], sampling=stopping, forced_output=[5, 6, 7, 8, 9])
        )
    assert (ids, finish.reason, finish.stop_match) == ([5, 6, 7], FinishReason.STOP, 7)


def test_forced_output_affects_no_other_or_later_request() -> None:
    rng = random.Random(4)
    prompts = [words(rng, length) for length in (30, 77, 100)]
    alone: list[list[int]] = []
    with Engine(assembly()) as engine:
        for number, prompt in enumerate(prompts):
            alone.append(engine.generate(Submit(request_id=f"r{number}", prompt_ids=prompt, sampling=GREEDY))[0])
    parts = assembly(prefix_cache=False)
    with Engine(parts) as engine:
        for turn in range(3):
            asked = {}
            for number, prompt in enumerate(prompts):
                forced = words(rng, 40) if number == turn % 3 else None
                asked[f"{turn}/{number}"] = (forced or alone[number], Submit(
                    request_id=f"{turn}/{number}", prompt_ids=prompt, sampling=GREEDY, forced_output=forced
                ))  # fmt: skip
            for _, submit in asked.values():
                engine.submit(submit)
            for name, (expected, _) in asked.items():
                ids = [
                    token
                    for event in engine.events(name)
                    if isinstance(event, TokensEvent)
                    for token in event.token_ids
                ]
                assert ids == expected, name
    assert parts.loop.metrics.decode_slots > parts.loop.metrics.decode_steps, "some steps held several"


def test_preempted_request_keeps_its_forced_output_and_is_cached() -> None:
    rng = random.Random(5)
    parts = assembly(num_pages=40, num_rows=40, draft_tokens=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=150)
    asked = [
        Submit(request_id=f"r{number}", prompt_ids=words(rng, 60), sampling=sampling, forced_output=words(rng, 150))
        for number in range(4)
    ]
    with Engine(parts) as engine:
        for submit in asked:
            engine.submit(submit)
        for submit in asked:
            events = list(engine.events(submit.request_id))
            assert [
                token for event in events if isinstance(event, TokensEvent) for token in event.token_ids
            ] == submit.forced_output
            assert isinstance(events[-1], FinishEvent)
        last = asked[-1]
        assert last.forced_output is not None
        following = [*last.prompt_ids, *last.forced_output, 1, 2, 3]
        ids, finish = engine.generate(Submit(request_id="next", prompt_ids=following, sampling=GREEDY))
    assert parts.loop.metrics.preemptions > 0, "the memory must be too small"
    assert finish.usage.cached_tokens == (60 + 150 - 1) // BLOCK * BLOCK
    with Engine(assembly()) as engine:
        assert ids == engine.generate(Submit(request_id="alone", prompt_ids=following, sampling=GREEDY))[0]
    invariants.check(parts.cache)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"forced_output": []}, "forced_output=[]: must hold at least one token"),
        ({"forced_output": [1, 600]}, "forced_output=600: is not a token id"),
        ({"forced_output": [1] * 41}, "forced_output='41 tokens': are more than max_tokens 40"),
        ({"forced_output": [1], "grammar": Grammar(kind="regex", source="a")}, "can't go with a constrained output"),
        (
            {"forced_output": [1] * 600, "sampling": SamplingParams()},
            "with 600 forced tokens exceeds the context limit",
        ),
    ],
)
def test_invalid_forced_output_is_refused_by_field(fields: dict[str, Any], reason: str) -> None:
    parts = assembly()
    all_fields: dict[str, Any] = {"request_id": "a", "prompt_ids": [1, 2], "sampling": GREEDY} | fields
    submit = Submit(**all_fields)
    with Engine(parts) as engine, pytest.raises((RequestError, ContextLengthError)) as caught:
        engine._core.submit(submit, None)
    assert reason in str(caught.value)


def test_forced_output_needs_its_engine_setting() -> None:
    parts = assembly(allow_forced_output=False)
    with (
        Engine(parts) as engine,
        pytest.raises(RequestError, match=r"forced_output=\[1\]: is for benchmarks: .*--allow-forced-output"),
    ):
        engine.submit(Submit(request_id="a", prompt_ids=[1, 2], sampling=GREEDY, forced_output=[1]))


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_acceptance_accepts_the_forced_output(overlap: bool) -> None:
    """At set rates, whatever the head drafts: so random weights can replay a recorded session at a real model's
    pace."""
    rng = random.Random(6)
    parts = assembly(force_acceptance=(1.0, 0.5, 0.5), overlap=overlap)
    asked = [
        Submit(request_id=f"r{number}", prompt_ids=words(rng, 50), sampling=sampling, forced_output=words(rng, 40))
        for number, sampling in enumerate((GREEDY, SAMPLED, GREEDY))
    ]
    with Engine(parts) as engine:
        for submit in asked:
            engine.submit(submit)
        for submit in asked:
            *events, finish = engine.events(submit.request_id)
            assert [
                token for event in events if isinstance(event, TokensEvent) for token in event.token_ids
            ] == submit.forced_output
            assert isinstance(finish, FinishEvent)
            drafted, accepted = finish.usage.spec.drafted_by_position, finish.usage.spec.accepted_by_position
            assert accepted[0] >= drafted[0] - 1, "except a draft cut by the limit"
            assert accepted[2] < accepted[1] < drafted[1]


def test_copies_behind_a_refused_draft_fail() -> None:
    """A refused draft is a wrong token, as a real one would be: nothing in the text matches it."""
    rng = random.Random(7)
    asked = Submit(request_id="a", prompt_ids=words(rng, 50), sampling=GREEDY, forced_output=[10, 20, 30, 40] * 10)
    offered = []
    for rates in ((0.0, 0.0, 0.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.0)):
        with Engine(assembly(force_acceptance=rates, copy_drafts=2, draft_tokens=3)) as engine:
            ids, finish = engine.generate(asked)
        assert ids == asked.forced_output
        spec = finish.usage.spec
        assert spec.num_accepted == sum(spec.accepted_by_position)
        offered.append((sum(spec.drafted_by_position[3:]), sum(spec.accepted_by_position[3:])))
    assert offered[0] == (0, 0)
    assert offered[1][0] == offered[1][1] > 0, "copies only behind drafts that are right, and right themselves"
    assert offered[2][0] >= offered[2][1] > 0
