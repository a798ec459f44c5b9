"""One request: validation of its fields, and how its stream, text and usage grow."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import ContextLengthError, RequestError
from agentspec.runtime.constraint import Constraint
from agentspec.runtime.plan import SlotOutcome
from agentspec.runtime.request import Request, derive_seed, new_request
from agentspec.types import (
    STOP_ID,
    STOP_LENGTH,
    STOP_RUNNING,
    Breakpoint,
    CheckpointKind,
    FinishReason,
    ModelSpec,
    SamplingParams,
    TokenScore,
)
from agentspec.wire import Submit
from tests.fakes.automaton import Everything

TOKEN_BYTES = [bytes([token]) for token in range(128)]
SPEC = ModelSpec(
    name="m",
    vocab_size=128,
    num_real_tokens=120,
    max_context=100,
    hidden_size=1,
    has_mtp=True,
    stop_token_ids=(0, 1),
    row_bytes=1,
    page_bytes=1,
    block_tokens=16,
)


def make(
    *,
    number: int = 0,
    engine_seed: int = 0,
    token_bytes: list[bytes] | None = TOKEN_BYTES,
    max_length: int = 100,
    constraint: Constraint | None = None,
    forces_acceptance: bool = False,
    **fields: Any,
) -> Request:
    sampling = SamplingParams(
        **{name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    )
    submit = Submit(**{"request_id": "r", "prompt_ids": [65, 66, 67], "sampling": sampling, **fields})
    return new_request(
        submit,
        number=number,
        spec=SPEC,
        max_length=max_length,
        engine_seed=engine_seed,
        token_bytes=token_bytes,
        constraint=constraint,
        allow_forced_output=True,
        forces_acceptance=forces_acceptance,
    )


def outcome(
    text: str, *, drafted: int = 3, accepted: int | None = None, stop: int = STOP_RUNNING, stop_id: int | None = None
) -> SlotOutcome:
    emitted = [ord(letter) for letter in text] + ([] if stop_id is None else [stop_id])
    return SlotOutcome(
        slot=0,
        emitted=emitted,
        num_drafted=drafted,
        num_accepted=max(0, len(emitted) - 1) if accepted is None else accepted,
        stop=stop,
        length=9,
        checkpoints=((7, 0), (8, 0)),
    )


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"prompt_ids": []}, "prompt_ids", []),
        ({"prompt_ids": [5, 128]}, "prompt_ids", 128),
        ({"prompt_ids": [5, -1]}, "prompt_ids", -1),
        ({"temperature": -0.1}, "temperature", -0.1),
        ({"temperature": float("nan")}, "temperature", None),
        ({"top_k": 129}, "top_k", 129),
        ({"top_p": 0.0}, "top_p", 0.0),
        ({"min_p": 1.0}, "min_p", 1.0),
        ({"presence_penalty": 2.1}, "presence_penalty", 2.1),
        ({"frequency_penalty": -2.1}, "frequency_penalty", -2.1),
        ({"repetition_penalty": 0.0}, "repetition_penalty", 0.0),
        ({"logit_bias": {128: 1.0}}, "logit_bias", 128),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3]", 101.0),
        ({"seed": -1}, "seed", -1),
        ({"seed": 2**63}, "seed", 2**63),
        ({"max_tokens": -1}, "max_tokens", -1),
        ({"min_tokens": -1}, "min_tokens", -1),
        ({"min_tokens": 2**31}, "min_tokens", 2**31),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", 6),
        ({"min_tokens": 5, "forces_acceptance": True}, "min_tokens", 5),
        ({"min_tokens": 3, "forced_output": [65, 66, 1, 67]}, "min_tokens", 3),
        ({"stop": ("a", "")}, "stop", ["a", ""]),
        ({"stop": ("a",) * 17}, "stop", ["a"] * 17),
        ({"stop_token_ids": (128,)}, "stop_token_ids", 128),
        ({"stop_token_ids": tuple(range(17))}, "stop_token_ids", list(range(17))),
        ({"stop": ("a",), "token_bytes": None}, "stop", ["a"]),
        ({"prompt_logprobs": 21}, "prompt_logprobs", 21),
        ({"prompt_logprobs": -1}, "prompt_logprobs", -1),
        ({"logprobs": 21}, "logprobs", 21),
        ({"logprobs": -1}, "logprobs", -1),
        ({"constraint": Everything(128), "ignore_eos": True}, "ignore_eos", True),
        ({"breakpoints": [Breakpoint(4, CheckpointKind.USER)]}, "breakpoints", 4),
        ({"breakpoints": [Breakpoint(-1, CheckpointKind.USER)]}, "breakpoints", -1),
        ({"breakpoints": [Breakpoint(2, CheckpointKind.SYSTEM), Breakpoint(1, CheckpointKind.USER)]}, "breakpoints", 1),
    ],
)
def test_wrong_field_is_refused_by_name_and_value(fields: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make(**fields)
    assert caught.value.field == field
    if value is not None:
        assert caught.value.value == value
    assert str(caught.value).startswith(f"{field}=")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(100, 0, True), (99, None, True), (100, None, False), (60, 40, True), (60, 41, False)],
)
def test_prompt_and_output_share_the_context(prompt: int, max_tokens: int | None, fits: bool) -> None:
    if fits:
        assert make(prompt_ids=[65] * prompt, max_tokens=max_tokens).length_limit == (
            100 if max_tokens is None else prompt + max_tokens
        )
        return
    with pytest.raises(
        ContextLengthError,
        match=rf"{prompt} tokens.*{'at least one new token' if max_tokens is None else max_tokens}.*100 tokens",
    ):
        make(prompt_ids=[65] * prompt, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_min_tokens_beyond_the_context_is_refused(max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError, match=r"60 tokens.*with min_tokens 41 exceeds .* 100 tokens"):
        make(prompt_ids=[65] * 60, min_tokens=41, max_tokens=max_tokens)


def test_min_tokens_needs_no_masks_with_ignore_eos() -> None:
    """Benchmarks send min_tokens with ignore_eos: no masks, so no waiting for the host."""
    assert make(min_tokens=9, ignore_eos=True).constraint is None
    assert make(min_tokens=9, ignore_eos=True, forces_acceptance=True, forced_output=[1, 1]).constraint is None
    assert make(min_tokens=0).constraint is None
    assert make(min_tokens=9, ignore_eos=True, stop_token_ids=(7,)).constraint is not None
    assert make(min_tokens=2, forced_output=[65, 66, 1]).constraint is not None


def test_stop_ids_combine_the_models_and_the_requests() -> None:
    assert make(stop_token_ids=(9, 1)).stop_ids == (0, 1, 9)
    assert make(stop_token_ids=(9, 1), ignore_eos=True).stop_ids == (9, 1)
    assert make(ignore_eos=True).stop_ids == ()


def test_seed_is_the_requests_own_or_derived_from_its_number() -> None:
    assert make(seed=7, number=3).seed == 7
    seeds = [make(number=number, engine_seed=engine).seed for engine in range(10) for number in range(100)]
    assert seeds == [derive_seed(engine, number) for engine in range(10) for number in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 0) == 16294208416658607535 >> 1, "splitmix64's published first output for seed 0"


def test_session_keys_of_sessions_and_single_requests_never_collide() -> None:
    assert make(session_id="a").session_key == make(session_id="a", number=5).session_key
    assert make(number=1).session_key != make(number=2).session_key
    assert make(session_id="request 1").session_key != make(number=1).session_key


def test_tokens_become_events_and_usage() -> None:
    request = make()
    event = request.take_outcome(outcome("xyz"))
    assert event is not None
    assert (event.token_ids, event.text) == ([120, 121, 122], "xyz")
    assert list(request.sequence) == [65, 66, 67, 120, 121, 122]
    assert request.rolling == ((7, 0), (8, 0))
    assert request.ending is None
    assert request.take_outcome(outcome("", drafted=0)) is None
    assert request.usage.completion_tokens == 3


def test_a_stop_id_is_kept_but_never_shown() -> None:
    request = make()
    event = request.take_outcome(outcome("x", stop=STOP_ID, stop_id=1))
    assert event is not None
    assert (event.token_ids, event.text) == ([120, 1], "x")
    assert (request.ending, request.stop_match) == (FinishReason.STOP, 1)
    finish = request.finish(FinishReason.STOP)
    assert (finish.stop_match, finish.text, finish.usage.completion_tokens) == (1, "", 2)


def test_length_limit_flushes_held_back_text() -> None:
    request = make(stop=("xyz!",))
    event = request.take_outcome(outcome("axyz", stop=STOP_LENGTH))
    assert event is not None
    assert (event.text, request.ending) == ("a", FinishReason.LENGTH)
    finish = request.finish(FinishReason.LENGTH)
    assert (finish.text, finish.stop_match) == ("xyz", None)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    request = make(stop=("yz",))
    first = request.take_outcome(outcome("xy"))
    assert first is not None
    assert first.text == "x"
    event = request.take_outcome(outcome("zab"))
    assert event is not None
    assert (event.token_ids, event.text) == ([ord("z")], "")
    assert (request.ending, request.stop_match) == (FinishReason.STOP, "yz")
    assert "".join(map(chr, request.sequence)) == "ABCxyz"
    finish = request.finish(FinishReason.STOP)
    assert (finish.text, finish.stop_match, finish.usage.completion_tokens) == ("", "yz", 3)


def test_a_stop_string_before_a_stop_id_or_the_limit_wins() -> None:
    for stop, stop_id in ((STOP_ID, 1), (STOP_LENGTH, None)):
        request = make(stop=("b",))
        event = request.take_outcome(outcome("abc", stop=stop, stop_id=stop_id))
        assert event is not None
        assert event.token_ids == [97, 98]
        assert (request.ending, request.stop_match) == (FinishReason.STOP, "b")


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    request = make(stop=("bc",))
    request.take_outcome(outcome("abc", stop=STOP_LENGTH))
    assert (request.ending, request.stop_match) == (FinishReason.STOP, "bc")


def test_speculation_is_counted_by_position() -> None:
    request = make()
    request.takes_first_step = True
    request.take_outcome(outcome("a", drafted=0))
    assert request.usage.completion_tokens == 1
    for accepted in (0, 3, 2, 3):
        request.take_outcome(outcome("abcd"[: accepted + 1], drafted=3))
    request.take_outcome(outcome("", drafted=0))  # a step that found the slot inert
    spec = request.usage.spec
    assert (spec.num_steps, spec.num_drafted, spec.num_accepted) == (4, 12, 8), "the first token comes with the prompt"
    assert spec.drafted_by_position == [4, 4, 4]
    assert spec.accepted_by_position == [3, 3, 2]
    assert spec.histogram == [1, 0, 1, 2]


def test_positions_without_acceptance_are_counted() -> None:
    request = make()
    request.take_outcome(outcome("a", drafted=3))
    assert (request.usage.spec.drafted_by_position, request.usage.spec.accepted_by_position) == ([1, 1, 1], [0, 0, 0])


def test_scores_are_reported_only_when_requested_and_complete() -> None:
    request = make(prompt_logprobs=0, max_tokens=0)
    before = request.needs_scores
    assert before
    assert not request.decodes
    request.scores = [TokenScore(66, -1.0, [])]
    assert request.finish(FinishReason.ABORT).prompt_scores is None, "incomplete scores are not reported"
    request.scores.append(TokenScore(67, -1.0, []))
    assert not request.needs_scores
    assert request.finish(FinishReason.LENGTH).prompt_scores == request.scores
    assert make().finish(FinishReason.LENGTH).prompt_scores is None
    assert make(prompt_ids=[65], prompt_logprobs=2).finish(FinishReason.LENGTH).prompt_scores == []
