"""`min_tokens` in the randomised proof of engine_proof.py and on a real small model.

Every stream must equal that of a plain loop that computes the banned stop ids for each token
(tests/fakes/hash_chain.py), alone, with no cache and no drafts, whatever k, overlap, batching, constraints, preemption
and stops are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from agentspec.engine.assembly import Assembly
from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.least_tokens import LeastTokens
from agentspec.runtime.request import new_request
from agentspec.text.detokenizer import Detokenizer
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import Submit, TokensEvent
from tests.fakes.automaton import Automaton, Rules
from tests.properties.engine_proof import Proof
from tests.properties.engine_setup import EngineSetup
from tests.properties.real_model import STOP_ID, VOCAB, assemble_engine, load, write_agreeing_checkpoint
from tests.properties.real_model import EngineSetup as RealSetup

SHARDS = 2
SETUPS = 6
"""Per shard."""
TURNS = 60
"""Per engine."""

LEAST = {
    "held": 80,
    "held: batched with others": 25,
    "held: stop id after the minimum": 8,
    "held: continues past the minimum": 25,
    "held: with a constraint": 20,
    "held: complete too early": 2,
    "held: stop string ignored": 5,
    "held: stop string after the minimum": 3,
    "held: drafts accepted": 80,
    "held: preempted": 1,
}
"""How often a shard must take each path at least."""


class LeastProof(Proof):
    """Most requests have a minimum, some of those also a constraint."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._own_rng = random.Random(setup.seed + 1)
        spec = self.model.spec
        self._rules = Rules(
            3,
            vocab_size=spec.vocab_size,
            num_real_tokens=spec.num_real_tokens,
            stop_id=spec.stop_token_ids[0],
            share=0.3,
        )
        for state in range(2, 31, 9):  # here the output is complete: only the stop id is allowed
            self._rules.allowed_SV[state] = np.arange(spec.vocab_size) == spec.stop_token_ids[0]
        self._share = self._own_rng.choice([0.3, 0.7, 1.0])

    def extend_submit(self, submit: Submit) -> tuple[Submit, Automaton | None]:
        sampling = submit.sampling
        if self._own_rng.random() < self._share:
            room = self.max_length - len(submit.prompt_ids)
            least = min(
                self._own_rng.choice([1, 2, 3, 5, 8, 20, 50]),
                room if sampling.max_tokens is None else sampling.max_tokens,
            )
            sampling = msgspec.structs.replace(sampling, min_tokens=least)
        is_constrained = self._own_rng.random() < 0.25 and not sampling.ignore_eos
        return msgspec.structs.replace(submit, sampling=sampling), Automaton(self._rules) if is_constrained else None

    def count(self) -> None:
        """Which paths the turns that ended have taken."""
        for turn, finish in self.ended:
            least = turn.submit.sampling.min_tokens
            if not (least and turn.request.stop_ids):
                continue
            last = turn.emitted[-1] if turn.emitted else None
            self.paths["held"] += 1
            self.paths["held: batched with others"] += self._share < 1.0
            self.paths["held: stop id after the minimum"] += (
                finish.reason is FinishReason.STOP and last in turn.request.stop_ids
            )
            self.paths["held: continues past the minimum"] += len(turn.emitted) > least + self.setup.max_draft_tokens
            self.paths["held: with a constraint"] += turn.automaton is not None
            self.paths["held: complete too early"] += finish.refused == "sampling.min_tokens"
            self.paths["held: stop string ignored"] += any(stop in turn.text for stop in turn.submit.sampling.stop)
            self.paths["held: stop string after the minimum"] += isinstance(finish.stop_match, str)
            self.paths["held: drafts accepted"] += finish.usage.spec.num_accepted
            self.paths["held: preempted"] += turn.request.preemptions > 0


@pytest.mark.parametrize("shard", range(SHARDS))
def test_streams_with_min_tokens_match_reference_loop(shard: int) -> None:
    paths: Counter[str] = Counter()
    for number in range(SETUPS):
        seed = 700_000 + 100 * shard + number
        print(f"setup {seed}")
        proof = LeastProof(EngineSetup.random(seed))
        proof.run(TURNS)
        proof.count()
        paths.update(proof.paths)
    rare = {path: f"{paths[path]} of {least}" for path, least in LEAST.items() if paths[path] < least}
    assert not rare, f"paths that the proof hardly takes: {rare}"


def holds_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    original = LeastTokens.__init__

    def init(self: LeastTokens, inner: Any, *, num_tokens: int, **keywords: Any) -> None:
        original(self, inner, num_tokens=num_tokens - 1, **keywords)

    patch.setattr(LeastTokens, "__init__", init)


def masks_only_first_column(patch: pytest.MonkeyPatch) -> None:
    """Only the first column is masked, so a draft of a stop id is accepted."""
    original = LeastTokens.masks

    def masks(self: LeastTokens, drafts: Sequence[int]) -> MaskRows:
        rows = original(self, drafts)
        return np.concatenate((rows[:1], self.free_rows(len(drafts))))

    patch.setattr(LeastTokens, "masks", masks)


def keeps_masks_after_minimum(patch: pytest.MonkeyPatch) -> None:
    """After the minimum, only the next token's mask is cleared, so stop ids stay banned if another request in the batch
    is constrained."""
    original = LeastTokens.free_rows
    patch.setattr(LeastTokens, "free_rows", lambda self, num_rows: original(self, 1))


def never_ends_minimum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LeastTokens, "advance", lambda self, token_ids: None if self.inner is None else self.inner.advance(token_ids)
    )


def stops_before_minimum(patch: pytest.MonkeyPatch) -> None:
    original = Detokenizer.__init__
    patch.setattr(Detokenizer, "__init__", lambda self, table, stop=(), *, min_tokens=0: original(self, table, stop))


@pytest.mark.parametrize(
    "bug",
    [
        holds_one_token_too_few,
        masks_only_first_column,
        keeps_masks_after_minimum,
        never_ends_minimum,
        stops_before_minimum,
    ],
)
def test_planted_bug_is_detected(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def run_setups() -> None:
        for seed in (700_007, *range(700_000, 700_020)):  # the first one has the rare paths
            proof = LeastProof(EngineSetup.random(seed))
            proof.run(TURNS)

    with pytest.raises((AssertionError, RuntimeError)):
        run_setups()


def run_submits(parts: Assembly, submits: Sequence[Submit]) -> dict[str, list[int]]:
    for number, submit in enumerate(submits):
        parts.loop.submit(
            new_request(submit, number=number, spec=parts.spec, max_length=500, engine_seed=0, token_bytes=None)
        )
    streams: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    while parts.loop.has_work:
        for event in parts.loop.run_once():
            if isinstance(event, TokensEvent):
                streams[event.request_id] += event.token_ids
    return streams


def test_drafts_and_overlap_never_change_stream_with_min_tokens(tmp_path: Path) -> None:
    model = load(write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2))
    rng = random.Random(8)
    submits = [
        Submit(
            request_id=f"r{number}",
            prompt_ids=[rng.randrange(3, VOCAB) for _ in range(rng.randint(5, 90))],
            sampling=SamplingParams(
                temperature=0.0 if number % 2 else 0.8,
                seed=number,
                max_tokens=30,
                min_tokens=rng.choice([0, 1, 5, 12, 30]),
                logit_bias={STOP_ID: 100.0},  # sampled as soon as it is allowed
            ),
        )
        for number in range(12)
    ]
    num_accepted = 0
    expected: dict[str, list[int]] = {}
    for k, overlap in [(k, overlap) for k in (0, 1, 3, 5) for overlap in (False, True)]:
        parts = assemble_engine(RealSetup(max_draft_tokens=k, overlap=overlap, num_pages=60), model)
        streams = run_submits(parts, submits)
        expected = streams if (k, overlap) == (0, False) else expected
        assert streams == expected, f"k={k}, overlap={overlap}"
        for submit in submits:
            least = submit.sampling.min_tokens
            assert (
                streams[submit.request_id].index(STOP_ID) == least
                if least < 30
                else STOP_ID not in streams[submit.request_id]
            )
        num_accepted += parts.loop.metrics.accepted_tokens
    assert num_accepted > 60
