"""The engine's randomised proof, as a program: random houses, random sessions, and what must hold of every turn.

The device is real (decode_step, prefill, buffers), the model is the hash chain: any wrong row, stale page or early publish changes its
output. `Proof` checks

- every state at the moment it is published, and again at the moment a request resumes from it: equal to a from-scratch prefill of its key;
- every stream: equal to the same request run alone, with no cache and no drafts;
- every request: exactly one terminal event, with true usage;
- drafts of a perfect drafter: all accepted, whatever was cached, resumed or preempted before;
- the books: the cache's invariants during the run, and nothing leaked after it.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

from agentspec.assembly import Assembly, build
from agentspec.cache import invariants
from agentspec.config import EngineConfig
from agentspec.runtime.memory_plan import MemoryPlan, longest_sequence
from agentspec.runtime.request import Request, new_request
from agentspec.types import Breakpoint, CheckpointKind, FinishReason, SamplingParams
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest

BLOCK = 16
TOKEN_TEXT = ["abcdefghijklmnopqrstuvwxyz"[i % 26] + "xyz"[i % 3] * (i % 2) for i in range(64)]
TOKEN_BYTES = [text.encode() for text in TOKEN_TEXT]


@dataclass(frozen=True, kw_only=True, slots=True)
class House:
    """One engine to build."""

    seed: int
    max_draft_tokens: int
    random_depth: bool
    overlap: bool
    prefill_budget: int
    max_running: int
    num_rows: int
    num_pages: int
    draft_accuracy: float
    stop_chance: float
    prefix_cache: bool
    hold_seconds: float
    long_outputs: bool
    session_share: float
    """Share of requests that name their session."""

    @classmethod
    def random(cls, rng: random.Random) -> House:
        drafts = rng.choice([0, 1, 2, 3, 5, 7])
        tight = rng.random() < 0.4
        max_running = rng.choice([1, 3, 6] if tight else [1, 2, 3, 6])
        return cls(
            seed=rng.randrange(2**31),
            max_draft_tokens=drafts,
            random_depth=rng.random() < 0.5,
            overlap=rng.random() < 0.6,
            prefill_budget=rng.choice([64, 80, 144, 512]),
            max_running=max_running,
            num_rows=2 + rng.randint(1, max_running) * (drafts + 3) + rng.randrange(5)
            if tight
            else 2 + max_running * (drafts + 3) + rng.choice([2, 10, 60]),
            num_pages=rng.randrange(12, 30) if tight else rng.choice([40, 80, 400]),
            draft_accuracy=rng.choice([0.0, 0.5, 0.9, 1.0]),
            stop_chance=rng.choice([0.0, 0.02, 0.1]),
            prefix_cache=rng.random() < 0.9,
            hold_seconds=rng.choice([0.0, 5.0]),
            session_share=rng.choice([0.0, 0.9]),
            long_outputs=rng.random() < (0.7 if tight else 0.1),
        )


@dataclass(slots=True)
class Session:
    """A conversation as a client would keep it."""

    session_id: str
    namespace: str
    system: list[int]
    history: list[int] = field(default_factory=list)
    user_mark: int = 0
    """Where the last user message ended: a template may render everything after it anew."""


@dataclass(slots=True)
class Turn:
    session: Session
    request: Request
    submit: Submit
    emitted: list[int] = field(default_factory=list)
    text: str = ""
    abort_after: int | None = None
    """Loop iterations after which the client gives up."""
    aborted: bool = False


class RandomDepth:
    """A depth policy that never settles."""

    def __init__(self, max_draft_tokens: int, rng: random.Random) -> None:
        self._max, self._rng = max_draft_tokens, rng

    def choose(self, batch_size: int) -> int:
        return self._rng.randint(0, self._max)

    def observe(self, *, num_drafted: int, slots: list[tuple[int, int]], seconds: float) -> None:
        pass


class Proof:
    """Runs one house until `num_turns` turns have ended, and checks everything."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.rng = random.Random(house.seed)
        self.now = 0.0
        self.model = HashChainModel(
            seed=house.seed, block_tokens=BLOCK, draft_accuracy=house.draft_accuracy, stop_chance=house.stop_chance, max_context=1024
        )
        max_length = min(1024, longest_sequence(house.num_pages, house.max_draft_tokens, BLOCK))
        self.assembly = self._build(max_length)
        self.max_length = max_length
        self.systems = [self._tokens(self.rng.randrange(0, min(80, max_length // 3))) for _ in range(3)]
        self.running: dict[str, Turn] = {}
        self.ended: list[tuple[Turn, FinishEvent]] = []
        self.sessions: list[Session] = []
        self.number = 0
        self.num_hits = 0
        self.num_published = 0
        self._spy()

    def _build(self, max_length: int) -> Assembly:
        house = self.house
        config = EngineConfig(
            draft_tokens=house.max_draft_tokens,
            prefix_cache=house.prefix_cache,
            overlap=house.overlap,
            max_running=house.max_running,
            prefill_budget=house.prefill_budget,
            session_hold_seconds=house.hold_seconds,
        )
        return build(
            self.model,
            config=config,
            memory=MemoryPlan(num_rows=house.num_rows, num_pages=house.num_pages, max_length=max_length),
            depth_policy=RandomDepth(house.max_draft_tokens, random.Random(house.seed)) if house.random_depth else None,
            clock=lambda: self.now,
        )

    def _spy(self) -> None:
        """Check states where they change hands: at publish and at resume."""
        cache: Any = self.assembly.cache
        match, acquire, publish = cache.match, cache.acquire, cache.publish
        looked_up: list[array[int]] = []

        def spy_match(namespace: str, tokens: array[int], **keywords: Any) -> Any:
            looked_up[:] = [tokens]
            return match(namespace, tokens, **keywords)

        def spy_acquire(found: Any, **keywords: Any) -> Any:
            lease = acquire(found, **keywords)
            if lease.num_cached:
                self.num_hits += 1
                self._check_state(lease.read_row, lease.page_ids, looked_up[0], lease.num_cached, "resumed")
            return lease

        def spy_publish(lease: Any, namespace: str, tokens: array[int], length: int, row: int, kind: CheckpointKind) -> bool:
            self.num_published += 1
            self._check_state(row, lease.page_ids, tokens, length, f"published {kind.name}")
            taken: bool = publish(lease, namespace, tokens, length, row, kind)
            return taken

        cache.match, cache.acquire, cache.publish = spy_match, spy_acquire, spy_publish

    def _check_state(self, row: int, page_ids: list[int], tokens: array[int], length: int, what: str) -> None:
        key, context = tokens[:length], f"{self.house}: {what}"
        self.model.check_row(row, key, context=context)
        self.model.check_pages(page_ids[: length // BLOCK], key, with_mtp=self.house.max_draft_tokens > 0, context=context)

    def run(self, num_turns: int) -> None:
        concurrency = self.rng.randint(1, self.house.max_running + 3)
        while len(self.ended) < num_turns or self.running:
            while len(self.running) < concurrency and len(self.ended) + len(self.running) < num_turns:
                self._submit()
            self._maybe_abort()
            self.now += self.rng.choice([0.0, 0.01, 1.0])
            for event in self.assembly.loop.run_once():
                self._take(event)
            if self.rng.random() < 0.05:
                invariants.check(self.assembly.cache)
        while self.assembly.loop.has_work:
            assert not self.assembly.loop.run_once(), f"{self.house}: an event after the last terminal event"
        self._check_streams()
        self._check_books()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.model.spec.num_real_tokens) for _ in range(count)]

    def _submit(self) -> None:
        turn_session, prompt, breakpoints = self._next_prompt()
        self.number += 1
        scoring = self.rng.random() < 0.03
        max_tokens = 0 if scoring else self._max_tokens(len(prompt))
        submit = Submit(
            request_id=f"r{self.number}",
            prompt_ids=prompt,
            sampling=self._sampling(max_tokens),
            breakpoints=breakpoints,
            session_id=turn_session.session_id if self.rng.random() < self.house.session_share else None,
            namespace=turn_session.namespace,
            prompt_logprobs=2 if scoring else None,
        )
        request = new_request(submit, number=self.number, spec=self.model.spec, max_length=self.max_length, engine_seed=7, token_bytes=TOKEN_BYTES)
        turn = Turn(turn_session, request, submit)
        if self.rng.random() < 0.08:
            turn.abort_after = self.rng.randrange(6)
        self.running[submit.request_id] = turn
        self.assembly.loop.submit(request)

    def _next_prompt(self) -> tuple[Session, list[int], list[Breakpoint]]:
        busy = {id(turn.session) for turn in self.running.values()}
        idle = [session for session in self.sessions if id(session) not in busy]
        rng = self.rng
        if not idle or rng.random() < 0.15:
            session = Session(f"s{len(self.sessions)}", rng.choice(["", "", "", "salt"]), rng.choice(self.systems))
            session.history = list(session.system)
            if self.sessions and rng.random() < 0.3:  # a fork: the beginning of somebody's conversation
                other = rng.choice(self.sessions)
                session.namespace, session.system = other.namespace, other.system
                session.history = other.history[: rng.randrange(len(other.history) + 1)]
            self.sessions.append(session)
        else:
            session = rng.choice(idle[-8:])
        history = session.history
        if rng.random() < 0.25:  # the template renders the last loop anew
            history = history[: session.user_mark] + self._tokens(rng.randrange(6))
        added = self._tokens(rng.choice([1, 2, 5, 17, 40, 40, 120]))
        prompt = history + added
        if len(prompt) + 8 > self.max_length:
            session.history, session.user_mark = list(session.system), 0
            prompt = (session.system + added)[: self.max_length - 8]
        marks = [Breakpoint(min(len(session.system), len(prompt)), CheckpointKind.SYSTEM)] if session.system else []
        session.user_mark = max(len(prompt) - rng.randrange(6), marks[-1].offset if marks else 0)
        marks.append(Breakpoint(session.user_mark, CheckpointKind.USER))
        return session, prompt, marks if rng.random() < 0.9 else []

    def _max_tokens(self, prompt_length: int) -> int | None:
        room = self.max_length - prompt_length
        if self.rng.random() < 0.02:
            return None
        lengths = [12, 60, 60, 120] if self.house.long_outputs else [0, 1, 2, 6, 12, 12, 24, 24, 60]
        return min(room, self.rng.choice(lengths))

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        rng = self.rng
        stop = tuple("".join(rng.choice("abcdefghxyz") for _ in range(rng.choice([2, 3]))) for _ in range(rng.choice([0, 0, 0, 1, 3])))
        common: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop, "ignore_eos": rng.random() < 0.2}
        if rng.random() < 0.2:
            common["stop_token_ids"] = (rng.randrange(40),)
        if rng.random() < 0.6:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 3, 20]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            logit_bias={3: 2.0, 5: -100.0} if rng.random() < 0.2 else {},
            seed=rng.choice([None, 1, 12345]),
            **common,
        )

    def _maybe_abort(self) -> None:
        for turn in self.running.values():
            if turn.abort_after is not None and not turn.aborted:
                turn.abort_after -= 1
                if turn.abort_after < 0:
                    turn.aborted = True
                    self.assembly.loop.abort(turn.submit.request_id)

    def _take(self, event: Event) -> None:
        assert event.request_id in self.running, f"{self.house}: {event} after its request's terminal event"
        turn = self.running[event.request_id]
        turn.text += event.text
        if isinstance(event, TokensEvent):
            assert event.token_ids, f"{self.house}: an empty event"
            turn.emitted.extend(event.token_ids)
            return
        del self.running[event.request_id]
        turn.session.history = list(turn.submit.prompt_ids) + turn.emitted
        self.ended.append((turn, event))

    def _check_streams(self) -> None:
        references = self.model.reference_streams(
            [
                ReferenceRequest(
                    prompt=turn.submit.prompt_ids,
                    sampling=turn.submit.sampling,
                    seed=turn.request.seed,
                    length_limit=turn.request.length_limit,
                    stop_ids=turn.request.stop_ids,
                )
                for turn, _ in self.ended
            ]
        )
        for (turn, finish), reference in zip(self.ended, references, strict=True):
            self._check_stream(turn, finish, reference)

    def _check_stream(self, turn: Turn, finish: FinishEvent, reference: list[int]) -> None:
        where = f"{self.house}: request {turn.submit}"
        expected, text, stop_string = cut_at_stop_string(reference, turn)
        if finish.reason is FinishReason.ABORT:
            assert turn.aborted, where
            assert turn.emitted == expected[: len(turn.emitted)], where
        else:
            assert turn.emitted == expected, where
            assert turn.text == text, where
            stopped = stop_string is not None or (bool(expected) and expected[-1] in turn.request.stop_ids)
            assert finish.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), where
        usage, spec = finish.usage, finish.usage.spec
        assert usage.prompt_tokens == len(turn.submit.prompt_ids), where
        assert usage.completion_tokens == len(turn.emitted), where
        assert usage.cached_tokens % BLOCK == 0, where
        assert usage.cached_tokens < len(turn.submit.prompt_ids), where
        assert sum(spec.drafted_by_position) == spec.num_drafted, where
        assert sum(spec.accepted_by_position) == spec.num_accepted, where
        assert sum(spec.histogram) == spec.num_steps, where
        if self.house.draft_accuracy == 1.0 and turn.submit.sampling.is_greedy and not turn.submit.sampling.has_penalties:
            missed = spec.num_drafted - spec.num_accepted  # only the step that ended the request may drop drafts
            assert missed <= self.house.max_draft_tokens, f"{where}: a perfect drafter lost {missed} drafts"
        if turn.submit.prompt_logprobs is not None and finish.reason is not FinishReason.ABORT:
            self._check_scores(turn, finish, where)

    def _check_scores(self, turn: Turn, finish: FinishEvent, where: str) -> None:
        prompt = turn.submit.prompt_ids
        assert finish.prompt_scores is not None, where
        assert [score.token_id for score in finish.prompt_scores] == prompt[1:], f"{len(finish.prompt_scores)} scores: {where}"
        if prompt[1:]:
            last = finish.prompt_scores[-1]
            best = self.model.reference_stream(
                ReferenceRequest(prompt=prompt[:-1], sampling=SamplingParams(temperature=0.0), seed=0, length_limit=len(prompt))
            )
            assert last.top[0][0] == best[0], where

    def _check_books(self) -> None:
        cache = self.assembly.cache
        invariants.check(cache)
        cache.clear()
        invariants.check(cache)
        assert cache.available_rows() == self.house.num_rows - 2, f"{self.house}: rows leaked"
        assert cache.available_pages() == self.house.num_pages - 1, f"{self.house}: pages leaked"


def cut_at_stop_string(reference: list[int], turn: Turn) -> tuple[list[int], str, str | None]:
    """Tokens up to the one that completes a stop string, the text before it, and that string."""
    shown = reference[:-1] if reference and reference[-1] in turn.request.stop_ids else reference
    text = ""
    for count, token in enumerate(shown, 1):
        text += TOKEN_TEXT[token]
        found = [(text.index(stop), stop) for stop in turn.submit.sampling.stop if stop in text]
        if found:
            at, stop = min(found)
            return reference[:count], text[:at], stop
    return reference, text, None
