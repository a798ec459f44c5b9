"""`min_tokens` in the randomised proof of engine_proof.py and on a real small model.

Every stream must be that of a plain loop that works out for each token which stop ids may not come yet
(tests/fakes/hash_chain.py), alone, with no cache and no drafts: whatever k, overlap, company, constraints, preemption
and stops do.
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
from tests.properties.house import House
from tests.properties.real_model import STOP_ID, VOCAB, assemble_house, load, write_agreeing_checkpoint
from tests.properties.real_model import House as RealHouse

SHARDS = 2
HOUSES = 9
"""A shard."""
TURNS = 60
"""A house."""

LEAST = {
    "held": 100,
    "held: beside others that are not": 25,
    "held: stop id behind the minimum": 8,
    "held: goes on behind the minimum": 30,
    "held: with a constraint": 20,
    "held: complete too early": 2,
    "held: stop string passed over": 5,
    "held: stop string behind the minimum": 3,
    "held: drafts accepted": 80,
    "held: preempted": 1,
}
"""How often a shard must take each path at least."""


class LeastProof(Proof):
    """Most requests have a minimum, some of those a constraint beside it."""

    def __init__(self, house: House) -> None:
        super().__init__(house)
        self._mine = random.Random(house.seed + 1)
        spec = self.model.spec
        self._rules = Rules(
            3,
            vocab_size=spec.vocab_size,
            num_real_tokens=spec.num_real_tokens,
            stop_id=spec.stop_token_ids[0],
            share=0.3,
        )
        for state in range(2, 31, 9):  # here the output is complete, and nothing else may come
            self._rules.allowed_SV[state] = np.arange(spec.vocab_size) == spec.stop_token_ids[0]
        self._share = self._mine.choice([0.3, 0.7, 1.0])

    def dress(self, submit: Submit) -> tuple[Submit, Automaton | None]:
        sampling = submit.sampling
        if self._mine.random() < self._share:
            room = self.max_length - len(submit.prompt_ids)
            least = min(
                self._mine.choice([1, 2, 3, 5, 8, 20, 50]), room if sampling.max_tokens is None else sampling.max_tokens
            )
            sampling = msgspec.structs.replace(sampling, min_tokens=least)
        is_constrained = self._mine.random() < 0.25 and not sampling.ignore_eos
        return msgspec.structs.replace(submit, sampling=sampling), Automaton(self._rules) if is_constrained else None

    def count(self) -> None:
        """Which paths the turns that ended have taken."""
        for turn, finish in self.ended:
            least = turn.submit.sampling.min_tokens
            if not (least and turn.request.stop_ids):
                continue
            last = turn.emitted[-1] if turn.emitted else None
            self.paths["held"] += 1
            self.paths["held: beside others that are not"] += self._share < 1.0
            self.paths["held: stop id behind the minimum"] += (
                finish.reason is FinishReason.STOP and last in turn.request.stop_ids
            )
            self.paths["held: goes on behind the minimum"] += len(turn.emitted) > least + self.house.max_draft_tokens
            self.paths["held: with a constraint"] += turn.automaton is not None
            self.paths["held: complete too early"] += finish.refused == "sampling.min_tokens"
            self.paths["held: stop string passed over"] += any(stop in turn.text for stop in turn.submit.sampling.stop)
            self.paths["held: stop string behind the minimum"] += isinstance(finish.stop_match, str)
            self.paths["held: drafts accepted"] += finish.usage.spec.num_accepted
            self.paths["held: preempted"] += turn.request.preemptions > 0


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_stream_with_a_minimum_is_that_of_a_plain_loop(shard: int) -> None:
    paths: Counter[str] = Counter()
    for number in range(HOUSES):
        seed = 700_000 + 100 * shard + number
        print(f"house {seed}")
        proof = LeastProof(House.random(seed))
        proof.run(TURNS)
        proof.count()
        paths.update(proof.paths)
    rare = {path: f"{paths[path]} of {least}" for path, least in LEAST.items() if paths[path] < least}
    assert not rare, f"paths that the proof hardly takes: {rare}"


def holds_a_token_less(patch: pytest.MonkeyPatch) -> None:
    original = LeastTokens.__init__

    def init(self: LeastTokens, inner: Any, *, num_tokens: int, **keywords: Any) -> None:
        original(self, inner, num_tokens=num_tokens - 1, **keywords)

    patch.setattr(LeastTokens, "__init__", init)


def holds_the_first_column_alone(patch: pytest.MonkeyPatch) -> None:
    """A draft of a stop id is accepted."""
    original = LeastTokens.masks

    def masks(self: LeastTokens, drafts: Sequence[int]) -> MaskRows:
        rows = original(self, drafts)
        return np.concatenate((rows[:1], self.free_rows(len(drafts))))

    patch.setattr(LeastTokens, "masks", masks)


def leaves_the_last_masks_behind(patch: pytest.MonkeyPatch) -> None:
    """Stop ids stay banned wherever somebody else in the batch is constrained, but for the next token."""
    original = LeastTokens.free_rows
    patch.setattr(LeastTokens, "free_rows", lambda self, num_rows: original(self, 1))


def holds_for_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LeastTokens, "advance", lambda self, token_ids: None if self.inner is None else self.inner.advance(token_ids)
    )


def stops_at_any_string(patch: pytest.MonkeyPatch) -> None:
    original = Detokenizer.__init__
    patch.setattr(Detokenizer, "__init__", lambda self, table, stop=(), *, min_tokens=0: original(self, table, stop))


@pytest.mark.parametrize(
    "bug",
    [
        holds_a_token_less,
        holds_the_first_column_alone,
        leaves_the_last_masks_behind,
        holds_for_good,
        stops_at_any_string,
    ],
)
def test_a_planted_bug_is_noticed(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def run_houses() -> None:
        for seed in (700_007, *range(700_000, 700_020)):  # the first one shows what is rare
            proof = LeastProof(House.random(seed))
            proof.run(TURNS)

    with pytest.raises((AssertionError, RuntimeError)):
        run_houses()


def hear(parts: Assembly, submits: Sequence[Submit]) -> dict[str, list[int]]:
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


def test_on_real_kernels_neither_drafts_nor_overlap_change_a_stream_with_a_minimum(tmp_path: Path) -> None:
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
                logit_bias={STOP_ID: 100.0},  # it comes as soon as it may
            ),
        )
        for number in range(12)
    ]
    num_accepted = 0
    expected: dict[str, list[int]] = {}
    for k, overlap in [(k, overlap) for k in (0, 1, 3, 5) for overlap in (False, True)]:
        parts = assemble_house(RealHouse(max_draft_tokens=k, overlap=overlap, num_pages=60), model)
        streams = hear(parts, submits)
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
