"""Constrained requests and scores of generated tokens, in the randomised proof of engine_proof.py and on a real small
model.

Constraints are random automata (tests/fakes/automaton.py). Every stream must equal the same request alone under the
same automaton, with no cache and no drafts, whatever k, overlap, batching, preemption and stops are. Scores must be
those of the model's raw logits.
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
import torch
from torch import Tensor

from agentspec.engine.assembly import Assembly
from agentspec.kernels.reference import sampling
from agentspec.kernels.reference.sampling import apply_mask
from agentspec.runtime import executor
from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.decode_step import Forward, StepResult, decode_step
from agentspec.runtime.plan import SlotJoin, SlotOutcome
from agentspec.runtime.request import Phase, Request, new_request
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.types import FinishReason, SamplingParams, TokenScore
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent
from tests.fakes.automaton import Automaton, Rules
from tests.properties.clients import Turn
from tests.properties.engine_proof import Proof
from tests.properties.engine_setup import EngineSetup
from tests.properties.real_model import STOP_ID, VOCAB, assemble_engine, load, write_agreeing_checkpoint
from tests.properties.real_model import EngineSetup as RealSetup

SHARDS = 2
SETUPS = 8
"""Per shard."""
TURNS = 60
"""Per engine."""

LEAST = {
    "constrained": 150,
    "constrained: stop id inside a window": 1,
    "constrained: drafts accepted": 150,
    "constrained: forbidden drafts": 300,
    "constrained: preempted": 1,
    "constrained: aborted": 8,
    "constrained: aborted with a step in flight": 1,
    "constrained: stop string": 5,
    "constrained: dead end": 14,
    "constrained: dead end after drafts": 1,
    "scored": 100,
    "scored: cut by a stop string": 4,
}
"""How often a shard must take each path at least."""


class ConstrainedProof(Proof):
    """Some requests have a constraint, some have scores, some both."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._own_rng = random.Random(setup.seed + 1)
        spec = self.model.spec
        self._rules = [
            Rules(
                seed,
                vocab_size=spec.vocab_size,
                num_real_tokens=spec.num_real_tokens,
                stop_id=spec.stop_token_ids[0],
                share=share,
                num_dead_ends=num_dead_ends,
            )
            for seed, (share, num_dead_ends) in enumerate(((0.05, 0), (0.4, 0), (0.9, 0), (0.95, 2)))
        ]
        self._share = self._own_rng.choice([0.3, 0.7, 1.0])
        self._scores: dict[str, list[TokenScore]] = {}

    def extend_submit(self, submit: Submit) -> tuple[Submit, Automaton | None]:
        if self._own_rng.random() < 0.4:
            submit = msgspec.structs.replace(submit, logprobs=self._own_rng.choice([0, 1, 4]))
        is_constrained = self._own_rng.random() < self._share and not submit.sampling.ignore_eos
        return submit, Automaton(self._own_rng.choice(self._rules)) if is_constrained else None

    def _take(self, event: Event) -> None:
        turn = self.running[event.request_id]
        super()._take(event)
        if isinstance(event, TokensEvent):
            if turn.submit.logprobs is None:
                assert event.scores is None
            else:
                assert event.scores is not None
                self._scores.setdefault(event.request_id, []).extend(event.scores)
        elif turn.request.constraint is not None and event.reason is FinishReason.ABORT:
            self.paths["constrained: aborted"] += 1

    def _abort_some(self) -> None:
        before = {
            id(turn)
            for turn in self.running.values()
            if turn.request.constraint is not None and turn.request.phase is Phase.DECODE
        }
        super()._abort_some()
        leaving = [
            turn
            for turn in self.running.values()
            if turn.request.ending is FinishReason.ABORT and turn.request.in_flight
        ]
        self.paths["constrained: aborted with a step in flight"] += sum(id(turn) in before for turn in leaving)

    def check_ended(self) -> None:
        """Also check that each constraint followed the kept tokens, and that scores are correct."""
        for turn, finish in self.ended:
            if isinstance(turn.request.constraint, Automaton):
                self._check_constraint(turn, turn.request.constraint, finish)
            if turn.submit.logprobs is not None:
                self.paths["scored"] += 1
                self.paths["scored: cut by a stop string"] += isinstance(finish.stop_match, str)
                self._check_token_scores(turn.submit, turn.emitted, self._scores.get(turn.submit.request_id, []))

    def _check_constraint(self, turn: Turn, automaton: Automaton, finish: FinishEvent) -> None:
        emitted, cut_by_text = turn.emitted, isinstance(finish.stop_match, str)
        assert automaton.followed == emitted[: len(automaton.followed)], (
            f"{finish}: the constraint followed {automaton.followed} of {emitted}"
        )
        assert cut_by_text or automaton.followed == emitted, (
            f"{finish}: the constraint followed {automaton.followed} of {emitted}"
        )
        num_drawn = turn.num_first_steps + sum(step[0] for step in turn.steps)
        self.paths["constrained"] += 1
        self.paths["constrained: stop string"] += cut_by_text
        self.paths["constrained: dead end"] += finish.refused is not None
        self.paths["constrained: dead end after drafts"] += finish.refused is not None and num_drawn > len(emitted)
        self.paths["constrained: preempted"] += turn.request.preemptions > 0
        self.paths["constrained: drafts accepted"] += finish.usage.spec.num_accepted
        self.paths["constrained: stop id inside a window"] += (
            automaton.is_ended and bool(turn.steps) and turn.steps[-1][0] > 1
        )
        self.paths["constrained: forbidden drafts"] += automaton.num_barred

    def _check_token_scores(self, submit: Submit, emitted: list[int], scores: list[TokenScore]) -> None:
        assert [score.token_id for score in scores] == emitted, f"{len(scores)} scores of {len(emitted)} tokens"
        assert all(len(score.top) == submit.logprobs for score in scores)
        for index in self._own_rng.sample(range(len(scores)), min(4, len(scores))):
            known = [*submit.prompt_ids, *emitted[:index]]
            logprobs = self.model.logits(torch.from_numpy(self.model.reference_state(known).row[1:])).log_softmax(-1)
            assert abs(scores[index].logprob - logprobs[emitted[index]].item()) < 1e-4, f"score of token {index}"
            expected = logprobs.topk(submit.logprobs or 0)
            assert [token for token, _ in scores[index].top] == expected.indices.tolist(), (
                f"most likely tokens at the position of token {index}"
            )
            assert [value for _, value in scores[index].top] == pytest.approx(expected.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_constrained_streams_and_scores_match_reference(shard: int) -> None:
    paths: Counter[str] = Counter()
    for number in range(SETUPS):
        seed = 530_000 + 100 * shard + number
        print(f"setup {seed}")
        proof = ConstrainedProof(EngineSetup.random(seed))
        proof.run(TURNS)
        proof.check_ended()
        paths.update(proof.paths)
    rare = {path: f"{paths[path]} of {least}" for path, least in LEAST.items() if paths[path] < least}
    assert not rare, f"paths that the proof hardly takes: {rare}"


def takes_first_steps_without_masks(patch: pytest.MonkeyPatch) -> None:
    original = decode_step

    def step(*arguments: Any, forward: Forward, constrained: bool, **keywords: Any) -> StepResult:
        return original(
            *arguments, forward=forward, constrained=constrained and forward is not Forward.PREFILLED, **keywords
        )

    patch.setattr(executor, "decode_step", step)


def masks_a_column_late(patch: pytest.MonkeyPatch) -> None:
    original = Request.next_masks

    def late(self: Request, num_drafted: int, *, width: int) -> MaskRows | None:
        rows = original(self, num_drafted, width=width)
        return None if rows is None else np.concatenate((rows[:1], rows[:-1]))

    patch.setattr(Request, "next_masks", late)


def keeps_masks_of_previous_request(patch: pytest.MonkeyPatch) -> None:
    """The next request in the slot gets the masks of the previous one, if another request in its batch is
    constrained."""
    join = StepBuffers.join

    def forgetful(self: StepBuffers, joins: Sequence[SlotJoin]) -> None:
        before = self.sampling.mask_SWX.clone()
        join(self, joins)
        self.sampling.mask_SWX.copy_(before)

    patch.setattr(StepBuffers, "join", forgetful)


def uses_outdated_drafts(patch: pytest.MonkeyPatch) -> None:
    """The drafts of the previous step are used as the window's drafts."""
    original = Request.next_masks

    def hasty(self: Request, num_drafted: int, *, width: int) -> MaskRows | None:
        drafts = self.drafts
        rows = original(self, num_drafted, width=width)
        self.drafts = drafts
        return rows

    patch.setattr(Request, "next_masks", hasty)


def forgets_dead_ends(patch: pytest.MonkeyPatch) -> None:
    original = Request.next_masks

    def forgetful(self: Request, num_drafted: int, *, width: int) -> MaskRows | None:
        rows = original(self, num_drafted, width=width)
        self.dead_end = None
        return rows

    patch.setattr(Request, "next_masks", forgetful)


def scores_with_the_mask(patch: pytest.MonkeyPatch) -> None:
    """Scores are computed from the masked logits that the token was sampled from."""

    def apply_mask_in_place(logits_BTV: Tensor, mask_BTX: Tensor) -> Tensor:
        return logits_BTV.copy_(apply_mask(logits_BTV, mask_BTX))

    patch.setattr(sampling, "apply_mask", apply_mask_in_place)


def keeps_scores_beyond_a_stop_string(patch: pytest.MonkeyPatch) -> None:
    take = Request.take_outcome

    def take_all(self: Request, outcome: SlotOutcome) -> TokensEvent | None:
        event = take(self, outcome)
        return event if event is None else msgspec.structs.replace(event, scores=outcome.scores)

    patch.setattr(Request, "take_outcome", take_all)


@pytest.mark.parametrize(
    "bug",
    [
        takes_first_steps_without_masks,
        masks_a_column_late,
        keeps_masks_of_previous_request,
        uses_outdated_drafts,
        forgets_dead_ends,
        scores_with_the_mask,
        keeps_scores_beyond_a_stop_string,
    ],
)
def test_planted_bug_is_detected(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def run_setups() -> None:
        for seed in (500_010, *range(500_000, 500_020)):  # the first one has the rare paths
            proof = ConstrainedProof(EngineSetup.random(seed))
            proof.run(TURNS)
            proof.check_ended()

    with pytest.raises((AssertionError, RuntimeError)):
        run_setups()


def real_submits(rng: random.Random) -> list[Submit]:
    """Greedy and sampled requests."""
    return [
        Submit(
            request_id=f"r{number}",
            prompt_ids=[rng.randrange(3, VOCAB) for _ in range(rng.randint(5, 90))],
            sampling=SamplingParams(temperature=0.0 if number % 2 else 0.8, top_p=0.9, seed=number, max_tokens=24),
            logprobs=2,
        )
        for number in range(8)
    ]


def run_submits(
    parts: Assembly, submits: Sequence[Submit], rules: Rules
) -> tuple[dict[str, list[int]], dict[str, list[float]], dict[str, str | None]]:
    """Run submits together, half of them constrained. Returns emitted ids, their log-probabilities, and the refused
    field (or None), by request."""
    for number, submit in enumerate(submits):
        constraint = Automaton(rules) if number % 4 < 2 else None
        request = new_request(
            submit,
            number=number,
            spec=parts.spec,
            max_length=500,
            engine_seed=0,
            token_bytes=None,
            constraint=constraint,
        )
        parts.loop.submit(request)
    streams: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    scores: dict[str, list[float]] = {submit.request_id: [] for submit in submits}
    refused = {}
    while parts.loop.has_work:
        for event in parts.loop.run_once():
            if isinstance(event, TokensEvent):
                assert event.scores is not None
                streams[event.request_id] += event.token_ids
                scores[event.request_id] += [score.logprob for score in event.scores]
            else:
                refused[event.request_id] = event.refused
    return streams, scores, refused


@pytest.mark.parametrize(("num_dead_ends", "num_refused"), [(0, 0), (3, 4)])
def test_drafts_and_overlap_never_change_constrained_stream(
    tmp_path: Path, num_dead_ends: int, num_refused: int
) -> None:
    model = load(write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2))
    submits = real_submits(random.Random(8))
    expected: tuple[dict[str, list[int]], dict[str, list[float]], dict[str, str | None]] | None = None
    num_accepted = 0
    rules = Rules(
        3,
        vocab_size=model.spec.vocab_size,
        num_real_tokens=VOCAB,
        stop_id=STOP_ID,
        share=0.6,
        num_dead_ends=num_dead_ends,
    )
    for k, overlap in [(k, overlap) for k in range(6) for overlap in (False, True)]:
        parts = assemble_engine(RealSetup(max_draft_tokens=k, overlap=overlap, num_pages=60), model)
        streams, scores, refused = run_submits(parts, submits, rules)
        expected = expected or (streams, scores, refused)
        assert (streams, refused) == (expected[0], expected[2]), f"k={k}, overlap={overlap}"
        assert list(refused.values()).count("grammar.source") == num_refused
        for request_id, values in scores.items():
            assert values == pytest.approx(expected[1][request_id], abs=1e-3), f"k={k}, overlap={overlap}: {request_id}"
        num_accepted += parts.loop.metrics.accepted_tokens
    assert num_accepted > 100
