"""What a session's next turn computes on the real engine, and that resuming is as exact as computing.

Prompt lengths are chosen so that every boundary can be checked by hand; a block has 64 tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from agentspec.engine.in_process import Engine
from agentspec.models.protocol import VerifyBatch
from agentspec.types import BLOCK_TOKENS, Breakpoint, CheckpointKind, SamplingParams
from agentspec.wire import FinishEvent, Submit
from tests.fakes.compare import TOLERANCE, relative_error
from tests.properties.real_model import VOCAB, EngineSetup, Scratch, assemble_engine, load, write_agreeing_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=4)


@dataclass
class Answer:
    emitted: list[int]
    finish: FinishEvent
    prefilled: int
    """Number of tokens that prefill computed for this turn."""

    @property
    def cached(self) -> int:
        return self.finish.usage.cached_tokens


class SerialEngine:
    """One engine, and turns that run one after the other."""

    def __init__(self, checkpoint: Path, setup: EngineSetup) -> None:
        self.assembly = assemble_engine(setup, load(checkpoint))
        self.engine = Engine(self.assembly)
        self.metrics = self.assembly.loop.metrics
        self._number = 0
        self._rng = random.Random(7)

    def tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(3, VOCAB), k=count)

    def submit(self, prompt: list[int], *, system: int, query: int, session: str = "a", num_new: int = 20) -> Submit:
        """A submit with breakpoints after `system` and `query` tokens."""
        self._number += 1
        return Submit(
            request_id=f"r{self._number}",
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True),
            breakpoints=[Breakpoint(system, CheckpointKind.SYSTEM), Breakpoint(query, CheckpointKind.USER)],
            session_id=session,
        )

    def ask(self, prompt: list[int], *, system: int, query: int, session: str = "a", num_new: int = 20) -> Answer:
        before = self.metrics.prefill_tokens
        emitted, finish = self.engine.generate(
            self.submit(prompt, system=system, query=query, session=session, num_new=num_new)
        )
        return Answer(emitted, finish, self.metrics.prefill_tokens - before)


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def serial(request: pytest.FixtureRequest, checkpoint: Path) -> SerialEngine:
    return SerialEngine(checkpoint, EngineSetup(overlap=request.param))


def test_second_turn_computes_new_tokens_and_at_most_one_block(serial: SerialEngine) -> None:
    history, system = serial.tokens(250), 100
    for num_new in (20, 64, 1, 37):
        answer = serial.ask(history, system=system, query=200, num_new=num_new)
        history = history + answer.emitted
        result = serial.tokens(30)
        follow_up = serial.ask(history + result, system=system, query=200, num_new=5)
        assert follow_up.prefilled <= len(result) + BLOCK_TOKENS
        assert follow_up.cached >= len(history) - BLOCK_TOKENS
        assert follow_up.cached + follow_up.prefilled == len(history) + len(result)
        history = history + result + follow_up.emitted


def test_new_session_hits_shared_system_prompt(serial: SerialEngine) -> None:
    system = serial.tokens(200)
    assert serial.ask(system + serial.tokens(90), system=200, query=285, session="a").cached == 0
    assert serial.ask(system + serial.tokens(90), system=200, query=285, session="b").cached == 192
    assert serial.ask(system + serial.tokens(10), system=200, query=205, session="c").cached == 192


def test_new_query_resumes_at_last_user_message(serial: SerialEngine) -> None:
    prompt, query = serial.tokens(300), 290
    history = prompt
    for _ in range(3):
        answer = serial.ask(history, system=100, query=query, num_new=70)
        history = history + answer.emitted + serial.tokens(40)
    rewritten = history[:query] + serial.tokens(80)  # the template drops the reasoning of the loop
    answer = serial.ask(rewritten, system=100, query=len(rewritten) - 2)
    assert answer.cached == query // BLOCK_TOKENS * BLOCK_TOKENS == 256


def test_third_request_hits_unmarked_shared_prefix(serial: SerialEngine) -> None:
    common = serial.tokens(420)
    cached = [serial.ask(common + serial.tokens(60), system=40, query=470, session=name).cached for name in "abc"]
    assert cached == [0, 0, 384]  # the second request published a BRANCH checkpoint at the fork
    assert serial.assembly.cache.stats()["checkpoints_live_branch"] == 1


def test_disabled_prefix_cache_caches_nothing(checkpoint: Path) -> None:
    serial = SerialEngine(checkpoint, EngineSetup(prefix_cache=False))
    prompt = serial.tokens(200)
    for _ in range(2):
        answer = serial.ask(prompt, system=100, query=190)
        assert (answer.cached, answer.prefilled) == (0, len(prompt))
    assert serial.metrics.cached_tokens == 0
    assert serial.assembly.cache.stats()["checkpoints_created"] == 0


def test_preempted_request_resumes_from_rolling_checkpoint(checkpoint: Path) -> None:
    """The outputs of two requests need more than ten pages: the younger request is retracted, waits, and resumes from
    its checkpoint."""
    serial = SerialEngine(checkpoint, EngineSetup(max_running=2, num_pages=11, spare_rows=4))
    submits = [serial.submit(serial.tokens(150), system=0, query=0, session=name, num_new=220) for name in "ab"]
    for submit in submits:
        serial.engine.submit(submit)
    outputs = [
        [token for event in serial.engine.events(submit.request_id) for token in getattr(event, "token_ids", [])]
        for submit in submits
    ]
    assert serial.metrics.preemptions == 1
    computed_twice = serial.metrics.prefill_tokens - sum(len(submit.prompt_ids) - 1 for submit in submits)
    assert 0 <= computed_twice < BLOCK_TOKENS
    alone = SerialEngine(checkpoint, EngineSetup(max_running=1, num_pages=11, spare_rows=4, prefix_cache=False))
    for submit, output in zip(submits, outputs, strict=True):
        assert output == alone.engine.generate(submit)[0]


def test_drafts_after_hit_equal_drafts_after_cold_prefill(checkpoint: Path, serial: SerialEngine) -> None:
    """The MTP head resumes exactly: after a hit its drafts and their acceptance are the same as without one, position
    by position."""
    cold = SerialEngine(checkpoint, EngineSetup(prefix_cache=False, overlap=False))
    history, num_accepted = serial.tokens(230), 0
    for _ in range(5):
        warm_answer, cold_answer = (d.ask(history, system=100, query=200, num_new=40) for d in (serial, cold))
        assert warm_answer.emitted == cold_answer.emitted
        assert warm_answer.finish.usage.spec == cold_answer.finish.usage.spec
        num_accepted += warm_answer.finish.usage.spec.num_accepted
        history = history + warm_answer.emitted + serial.tokens(25)
    assert warm_answer.cached > 200
    assert num_accepted > 50


def test_logits_after_resume_equal_uncached_run(checkpoint: Path, serial: SerialEngine) -> None:
    """Compares every column of every window that belongs to the stream with one forward over the whole sequence."""
    history = serial.tokens(200)
    history = history + serial.ask(history, system=100, query=190, num_new=70).emitted + serial.tokens(20)
    model = serial.assembly.model
    windows: list[tuple[int, list[int], Tensor]] = []
    verify = model.verify

    def spy_verify(batch: VerifyBatch) -> Tensor:
        hidden_BTH = verify(batch)
        windows.append((int(batch.length_B[0]), batch.tokens_BT[0].tolist(), hidden_BTH[0].clone()))
        return hidden_BTH

    model.verify = spy_verify  # type: ignore[method-assign]
    answer = serial.ask(history, system=100, query=190)
    assert answer.cached == 256
    sequence = history + answer.emitted
    expected_NV = Scratch(checkpoint).logits(sequence)
    num_compared = 0
    for length, window, hidden_TH in windows:
        kept = next(
            (t for t, token in enumerate(window) if sequence[length + t : length + t + 1] != [token]), len(window)
        )
        if kept:
            got, expected = model.logits(hidden_TH[:kept]), expected_NV[length : length + kept]
            assert relative_error(got, expected) < TOLERANCE, f"window at {length}"
            num_compared += kept
    assert num_compared >= len(answer.emitted)
