"""Sampled output of speculative steps has the target's distribution: chi-square tests, and the same tests on planted
biases.

Thousands of slots run the same prompt with different seeds; the pairs of their first two tokens are compared with the
exact joint distribution. The seeds are fixed, so the result is too. For a correct step, the chance that a choice of
seeds would fail is the stated bound.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import sampling as sampling_kernels
from agentspec.kernels.reference import window as window_module
from agentspec.kernels.reference.philox import uniform
from agentspec.runtime.plan import StepPlan
from agentspec.types import SamplingParams
from tests.fakes.distribution import next_token_probs, p_value
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.step_driver import StepDriver

FALSE_ALARM = 1e-6
NUM_SLOTS = 3000
MODEL = HashChainModel(seed=17, num_real_tokens=24, num_padding_tokens=0, draft_accuracy=1.0)
VOCAB = MODEL.spec.vocab_size
PROMPT = [5, 1, 7, 3]
SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "filtered": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.4, logit_bias={3: 2.0}),
}


def target_probs(prompt: list[int], generated: list[int], sampling: SamplingParams) -> Tensor:
    """The target's distribution after prompt + generated, computed from the definition."""
    hidden = MODEL.reference_state([*prompt, *generated]).row[1:]
    return next_token_probs(MODEL.logits(torch.tensor([hidden.tolist()]))[0], prompt, generated, sampling)


def expected_pairs(sampling: SamplingParams) -> Tensor:
    first = target_probs(PROMPT, [], sampling)
    return torch.stack([first[token] * target_probs(PROMPT, [token], sampling) for token in range(VOCAB)])


def drawn_pairs(sampling: SamplingParams) -> Tensor:
    """How often each pair of first tokens was emitted, over slots with seeds 0 to NUM_SLOTS - 1."""
    driver = StepDriver(MODEL, max_running=NUM_SLOTS, max_draft_tokens=2, max_length=16)
    plan = StepPlan()
    for slot in range(NUM_SLOTS):
        driver.plan_join(plan, slot, ReferenceRequest(prompt=PROMPT, sampling=sampling, seed=slot, length_limit=12))
    driver.step(2, plan=plan)
    driver.step(2)
    pairs = torch.tensor([running.emitted[:2] for running in driver.running.values()])
    return torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_pairs_follow_the_target(name: str) -> None:
    value = p_value(drawn_pairs(SETTINGS[name]), expected_pairs(SETTINGS[name]))
    assert value > FALSE_ALARM, f"{name}: p = {value:.3g}"


right_draw = sampling_kernels.draw


def plant_accept_always(chosen: Tensor, drafts: Tensor, valid: Tensor) -> Tensor:
    return torch.full_like(valid, drafts.shape[1])


def plant_token_of_the_row_before(seed: Tensor, position: Tensor, num_tokens: int, purpose: int) -> Tensor:
    """The same noise at every position."""
    return uniform(seed, torch.zeros_like(position), num_tokens, purpose)


def plant_no_residual(logits: Tensor, position: Tensor, inputs: sampling_kernels.DrawInputs) -> Tensor:
    """Accept the draft with p(draft), otherwise draw from all of p instead of from the residual. (Drafts are the greedy
    tokens here.)"""
    B, T = position.shape
    draft = logits.argmax(-1)
    chance = (logits / inputs.temperature_B[:, None, None]).softmax(-1).gather(2, draft[..., None])[..., 0]
    accepted = uniform(inputs.seed_B[:, None].expand(B, T), position, 1, 7)[..., 0] < chance
    return torch.where(accepted, draft, right_draw(logits, position, inputs))


@pytest.mark.parametrize(
    ("module", "name", "bias"),
    [
        (window_module, "count_matches", plant_accept_always),
        (sampling_kernels, "uniform", plant_token_of_the_row_before),
        (sampling_kernels, "draw", plant_no_residual),
    ],
)
def test_planted_biases_are_detected(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, bias: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(module, name, bias)
    assert p_value(drawn_pairs(SETTINGS["plain"]), expected_pairs(SETTINGS["plain"])) < FALSE_ALARM


def test_chi_square_test_is_calibrated() -> None:
    """Draws from the exact distribution give no extreme p-values; draws from a slightly different one do."""
    probs = expected_pairs(SETTINGS["plain"])
    generator = torch.Generator().manual_seed(3)
    values = []
    for _ in range(40):
        drawn = torch.multinomial(probs.flatten(), NUM_SLOTS, replacement=True, generator=generator)
        values.append(p_value(torch.bincount(drawn, minlength=VOCAB * VOCAB), probs))
    assert 0.3 < sum(values) / len(values) < 0.7
    assert min(values) > 1e-4
