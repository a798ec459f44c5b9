"""Sampled output of the whole engine, with drafts and cache hits, has the distribution of the plain model.

Many requests have the same prompt and different seeds. Their first three tokens are compared with the exact
probabilities from a plain forward over every continuation. Seeds are fixed, so the result is too; for a correct engine
the probability that another choice of seeds fails is FALSE_ALARM per setting. The same test detects planted biases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.engine.in_process import Engine
from agentspec.kernels.reference import sampling as sampling_kernels
from agentspec.kernels.reference import window as window_module
from agentspec.kernels.reference.philox import uniform
from agentspec.types import Breakpoint, CheckpointKind, SamplingParams
from agentspec.wire import Submit, TokensEvent
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.distribution import next_token_probs, p_value
from tests.fakes.oracle import Oracle
from tests.fakes.sequence_driver import Driver
from tests.properties.real_model import EngineSetup, assemble_engine, load, write_agreeing_checkpoint

FALSE_ALARM = 1e-6
NUM_REQUESTS = 1500
VOCAB = 12
DEPTH = 3
PROMPT = random.Random(3).choices(range(VOCAB), k=65)
"""One block that all requests share, and one token."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot, filtered": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.8,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 1.0},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_agreeing_checkpoint(
        directory, namespace="flat", vocab_size=VOCAB, num_hidden_layers=2, full_attention_interval=2
    )


@pytest.fixture(scope="module")
def logits(checkpoint: Path) -> dict[tuple[int, ...], Tensor]:
    """Raw logits after the prompt and every continuation of less than DEPTH tokens."""
    model = load(checkpoint)
    continuations = [tail for length in range(DEPTH) for tail in product(range(VOCAB), repeat=length)]
    driver = Driver(model, num_sequences=len(continuations), max_tokens=len(PROMPT) + DEPTH, num_rows_each=1)
    hiddens = driver.prefill_together([[*PROMPT, *tail] for tail in continuations])
    found = {tail: model.logits(hidden_NH[-1]) for tail, hidden_NH in zip(continuations, hiddens, strict=True)}
    oracle = Oracle(checkpoint)
    for tail in continuations[:3]:
        assert relative_error(found[tail], oracle.logits(oracle.hidden([*PROMPT, *tail]))[-1]) < TOLERANCE
    return found


def expected_triples(logits: dict[tuple[int, ...], Tensor], sampling: SamplingParams) -> Tensor:
    """Probability of each [first, second, third] token."""
    probs = {tail: next_token_probs(of_tail, PROMPT, tail, sampling) for tail, of_tail in logits.items()}
    chances = [probs[()][a] * probs[(a,)][b] * probs[(a, b)] for a, b in product(range(VOCAB), repeat=2)]
    return torch.stack(chances).view(VOCAB, VOCAB, VOCAB)


@dataclass
class Samples:
    streams: list[list[int]]
    num_accepted: int
    num_hits: int

    def triples(self) -> Tensor:
        first = torch.tensor([stream[:DEPTH] for stream in self.streams])
        cell = (first * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
        return torch.bincount(cell, minlength=VOCAB**3).view(VOCAB, VOCAB, VOCAB)


def draw(
    checkpoint: Path, setting: dict[str, Any], *, num_drafted: int = 2, num_requests: int = NUM_REQUESTS
) -> Samples:
    """Run the prompt with seeds 0, 1, ... through one engine."""
    setup = EngineSetup(max_draft_tokens=num_drafted, max_running=250, num_pages=600)
    engine = Engine(assemble_engine(setup, load(checkpoint)))
    submits = [
        Submit(
            request_id=f"r{seed}",
            prompt_ids=PROMPT,
            sampling=SamplingParams(**setting, seed=seed, max_tokens=DEPTH, ignore_eos=True),
            breakpoints=[Breakpoint(64, CheckpointKind.SYSTEM)],
            session_id="samples",
        )
        for seed in range(num_requests)
    ]
    first_stream, first_finish = engine.generate(submits[0])
    samples = Samples([first_stream], first_finish.usage.spec.num_accepted, num_hits=0)
    for submit in submits[1:]:
        engine.submit(submit)
    for submit in submits[1:]:
        samples.streams.append([])
        for event in engine.events(submit.request_id):
            if isinstance(event, TokensEvent):
                samples.streams[-1].extend(event.token_ids)
            else:
                samples.num_accepted += event.usage.spec.num_accepted
                samples.num_hits += event.usage.cached_tokens > 0
    return samples


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_triples_follow_model_distribution(
    name: str, checkpoint: Path, logits: dict[tuple[int, ...], Tensor]
) -> None:
    samples = draw(checkpoint, SETTINGS[name])
    assert samples.num_hits == NUM_REQUESTS - 1
    assert samples.num_accepted > NUM_REQUESTS // 10
    value = p_value(samples.triples(), expected_triples(logits, SamplingParams(**SETTINGS[name])))
    assert value > FALSE_ALARM, f"{name}: p = {value:.3g}"


@pytest.mark.parametrize("name", SETTINGS)
def test_seeded_stream_is_independent_of_drafts(name: str, checkpoint: Path) -> None:
    plain, drafted = (draw(checkpoint, SETTINGS[name], num_drafted=k, num_requests=300).streams for k in (0, 2))
    assert plain == drafted


def accept_always(chosen: Tensor, drafts: Tensor, valid: Tensor) -> Tensor:
    return valid


def emit_drafts(chosen_BT: Tensor, drafts_Bk: Tensor, valid_B: Tensor) -> Tensor:
    """Accept every draft: emits the drafts instead of the target's tokens."""
    column_k = torch.arange(drafts_Bk.shape[1])
    chosen_BT[:, :-1] = torch.where(column_k < valid_B[:, None], drafts_Bk, chosen_BT[:, :-1])
    return valid_B


def same_noise_everywhere(seed: Tensor, position: Tensor, num_tokens: int, purpose: int) -> Tensor:
    return uniform(seed, torch.zeros_like(position), num_tokens, purpose)


@pytest.mark.parametrize(
    ("module", "name", "bias"),
    [
        (window_module, "count_matches", emit_drafts),
        (window_module, "count_matches", accept_always),
        (sampling_kernels, "uniform", same_noise_everywhere),
    ],
    ids=["drafts are emitted as they are", "rejected drafts stay in the state", "noise is reused"],
)
def test_planted_sampling_bias_is_detected(
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    bias: Callable[..., Tensor],
    checkpoint: Path,
    logits: dict[tuple[int, ...], Tensor],
) -> None:
    monkeypatch.setattr(module, name, bias)
    value = p_value(
        draw(checkpoint, SETTINGS["plain"]).triples(), expected_triples(logits, SamplingParams(temperature=1.0))
    )
    assert value < FALSE_ALARM, f"p = {value:.3g}"
