"""Random clients of an engine: conversations that grow, fork and are rendered differently, and the requests of each
turn.

Generates submits, and stores what a client knows of its conversation. Knows nothing about the engine's internals.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from agentspec.runtime.request import Request
from agentspec.types import Breakpoint, CheckpointKind, SamplingParams
from agentspec.wire import Submit
from tests.fakes.automaton import Automaton
from tests.properties.engine_setup import EngineSetup

TOKEN_TEXT = ["abcdefghijklmnopqrstuvwxyz"[i % 26] + "xyz"[i % 3] * (i % 2) for i in range(64)]
TOKEN_BYTES = [text.encode() for text in TOKEN_TEXT]


@dataclass(slots=True)
class Session:
    """A conversation as its client stores it."""

    session_id: str
    namespace: str
    system: list[int]
    history: list[int] = field(default_factory=list)
    prompt_length: int = 0
    """Of the last turn."""
    user_mark: int = 0
    """End of the last user message: a template may render everything after it differently."""
    is_faithful: bool = True
    """The client sends generated turns back unchanged."""
    is_busy: bool = False


@dataclass(slots=True)
class Turn:
    """A request, its output, and what the device did for it."""

    session: Session
    request: Request
    submit: Submit
    automaton: Automaton | None = None
    """The output's constraint."""
    emitted: list[int] = field(default_factory=list)
    text: str = ""
    abort_after: int | None = None
    """Loop iterations after which the client aborts."""
    aborted: bool = False
    cached: int | None = None
    """Cached tokens of the first hit that it was admitted with."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(emitted, drafted, accepted) of every decode step that was collected before the request ended."""
    num_first_steps: int = 0
    length_before: int = 0
    """Tokens in the state before its last step."""
    """One for each admission that got as far as the first step."""


class Clients:
    """All clients of one engine."""

    def __init__(self, setup: EngineSetup, rng: random.Random, *, num_tokens: int, max_length: int) -> None:
        self._setup = setup
        self._rng = rng
        self._num_tokens = num_tokens
        self._max_length = max_length
        self._systems = [
            self._tokens(
                min(rng.choice([0, 20, 70, 150, 300, 300, 300]), max_length // (6 if setup.short_prompts else 3))
            )
            for _ in range(3)
        ]
        first = self._systems[0]
        self._systems[2] = first[: len(first) // 2] + self._tokens(
            len(first) - len(first) // 2
        )  # an agent with other tools
        self._sessions: list[Session] = []
        self._num_submits = 0

    def next_submit(self) -> tuple[Session, Submit]:
        rng = self._rng
        session = self._next_session()
        prompt = self._prompt(session)
        breakpoints = self._breakpoints(session)
        is_scoring = rng.random() < self._setup.scoring_share
        session.is_busy = True
        self._num_submits += 1
        return session, Submit(
            request_id=f"r{self._num_submits}",
            prompt_ids=prompt,
            sampling=self._sampling(len(prompt), only_prompt=is_scoring and rng.random() < 0.7),
            breakpoints=breakpoints,
            session_id=session.session_id if rng.random() < self._setup.session_share else None,
            namespace=session.namespace,
            prompt_logprobs=2 if is_scoring else None,
        )

    def end(self, turn: Turn) -> None:
        """Record a turn's end: the client continues from everything that it received."""
        turn.session.history = list(turn.submit.prompt_ids) + turn.emitted
        turn.session.is_busy = False

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._num_tokens) for _ in range(count)]

    def _next_session(self) -> Session:
        rng = self._rng
        idle = [session for session in self._sessions if not session.is_busy]
        if idle and rng.random() < 0.8:
            return rng.choice(idle[-8:])
        session = Session(f"s{len(self._sessions)}", rng.choice(["", "", "", "salt"]), rng.choice(self._systems))
        session.history = list(session.system)
        session.is_faithful = rng.random() < 0.7
        if self._sessions and rng.random() < 0.4:  # a fork: another session's conversation, or the beginning of it
            other = rng.choice([other for other in self._sessions if other.is_busy] or self._sessions)
            session.system = other.system
            if rng.random() < 0.7:
                session.history, session.user_mark, session.prompt_length = (
                    other.history,
                    other.user_mark,
                    other.prompt_length,
                )
            else:
                session.history = other.history[: rng.randrange(len(other.history) + 1)]
            if rng.random() < 0.8:
                session.namespace = other.namespace
        self._sessions.append(session)
        return session

    def _prompt(self, session: Session) -> list[int]:
        """The history as the client sends it, plus a tool result, or a user message, which moves the user mark."""
        rng = self._rng
        history = session.history
        is_tool_result = 0 < session.prompt_length <= len(history) and rng.random() < 0.6
        if not session.is_faithful:
            history = history[: session.prompt_length] + self._tokens(rng.randrange(20))
        elif not is_tool_result and rng.random() < 0.4:  # the template renders the last loop differently
            history = history[: session.user_mark] + self._tokens(rng.randrange(6))
        added = self._tokens(
            rng.choice([1, 2, 5, 17, 40, 40, 120] if self._max_length > 200 else [1, 2, 5, 17, 17, 40])
        )
        prompt = history + added
        if len(prompt) + 8 > self._max_length or (self._setup.short_prompts and len(prompt) > self._max_length // 4):
            prompt = (session.system + added)[: self._max_length - 8]
            is_tool_result = False
        if not is_tool_result:
            session.user_mark = max(len(prompt) - rng.randrange(6), min(len(session.system), len(prompt)))
        session.prompt_length = len(prompt)
        return prompt

    def _breakpoints(self, session: Session) -> list[Breakpoint]:
        system_mark = min(len(session.system), session.user_mark)
        marks = [Breakpoint(system_mark, CheckpointKind.SYSTEM)] if system_mark else []
        marks.append(Breakpoint(session.user_mark, CheckpointKind.USER))
        return marks if self._rng.random() < 0.9 else []

    def _sampling(self, prompt_length: int, *, only_prompt: bool) -> SamplingParams:
        rng = self._rng
        num_stops = rng.choice([1, 1, 3]) if rng.random() < self._setup.stopping_share else 0
        stop = tuple(
            "".join(rng.choice("abcdefghxyz"[: 8 if size == 1 else 11]) for _ in range(size))
            for size in rng.choices([1, 1, 2, 3], k=num_stops)
        )
        ignore_eos = rng.random() < 0.2
        common: dict[str, Any] = {"stop": stop, "ignore_eos": ignore_eos}
        common["max_tokens"] = (
            0
            if only_prompt
            else self._max_tokens(prompt_length, ends_itself=self._setup.stop_chance > 0 and not ignore_eos)
        )
        if rng.random() < 0.2:
            common["stop_token_ids"] = (rng.randrange(40),)
        if rng.random() >= self._setup.sampled_share:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
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

    def _max_tokens(self, prompt_length: int, *, ends_itself: bool) -> int | None:
        room = self._max_length - prompt_length
        if self._rng.random() < 0.05 and (ends_itself or room <= 100):  # no long runs of a single stream
            return None
        lengths = [12, 24, 60, 100] if self._setup.long_outputs else [0, 1, 2, 6, 12, 12, 24, 24, 60]
        return min(room, self._rng.choice(lengths))
