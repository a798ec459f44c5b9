"""The parts of the prefill benchmark: single prompts, an agent's session, and a long prompt beside running streams.

Every measured prompt has new token ids, after a cached context. All times are the host's, from the submission.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentspec.models.hf_config import TextConfig
from agentspec.models.protocol import StepModel
from agentspec.mtp.draft_vocab import draft_vocab_size
from agentspec.types import BLOCK_TOKENS, CheckpointKind
from benchmarks.prefill_engine import NUM_DRAFTS, Answer, NoFigureError, PromptEngine, Room
from benchmarks.prefill_floor import Operation, Rates, arithmetic_seconds_of, flops_by_kind, operations, seconds_of

WARM_UPS = 2
"""Warm-up prompts of the same size, for compilation and the libraries' choice of kernels."""

SETTLING_STEPS = 8
"""Seconds between a prompt's end and the steps that count as idle."""


class Words:
    """New random token ids."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self._random = random.Random(seed)
        self._ids = range(num_tokens)

    def __call__(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of the model that determine its floor."""

    config: TextConfig
    draft_vocab: int
    fp8_drafts: bool = False
    fp8_pages: bool = False
    ranks: int = 1
    """GPUs that share its operations."""

    @classmethod
    def of(cls, config: TextConfig, model: StepModel, *, fp8_pages: bool = False, ranks: int = 1) -> Shape:
        draft_vocab = draft_vocab_size(None, num_real_tokens=model.spec.num_real_tokens)
        return cls(
            config=config, draft_vocab=draft_vocab, fp8_drafts=model.fp8_drafts, fp8_pages=fp8_pages, ranks=ranks
        )

    def floor_s(self, count: int, start: int, rates: Rates) -> float:
        """Seconds of `operations` at the measured rates of each GPU."""
        return seconds_of(self.operations(count, start), rates) / self.ranks

    def operations(self, count: int, start: int) -> list[Operation]:
        """The floor of a prompt's new tokens after a context, until the first token."""
        return operations(
            self.config,
            count=count,
            start=start,
            num_drafts=NUM_DRAFTS,
            draft_vocab=self.draft_vocab,
            fp8_drafts=self.fp8_drafts,
            fp8_pages=self.fp8_pages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCase:
    """`count` new tokens after `context` cached ones."""

    count: int
    context: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or self.context < 0 or self.context % BLOCK_TOKENS:
            raise ValueError(
                f"{self.count}@{self.context}: must be at least one token, behind whole blocks of {BLOCK_TOKENS}"
            )

    def __str__(self) -> str:
        return f"{self.count:,} tokens behind {self.context:,}"

    @property
    def room(self) -> Room:
        """Memory for this prompt, and for the remains of the one before."""
        return Room(longest=self.context + self.count + 64, others=self.count + 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFigures:
    case: PromptCase
    seconds: list[float]
    """Time to first token of each measured prompt."""
    flops: dict[str, float]
    arithmetic_s: float
    """Time of the arithmetic alone at the measured rates."""
    floor_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.case.count / self.median_s

    @property
    def flops_per_second(self) -> float:
        return sum(self.flops.values()) / self.median_s

    @property
    def of_matmul_rate(self) -> float:
        """The arithmetic's share of the measured time."""
        return self.arithmetic_s / self.median_s

    @property
    def times_floor(self) -> float:
        return self.median_s / self.floor_s

    def as_dict(self) -> dict[str, Any]:
        names = ("median_s", "tokens_per_second", "flops_per_second", "of_matmul_rate", "times_floor")
        return asdict(self) | {name: getattr(self, name) for name in names}


def time_prompts(engine: PromptEngine, case: PromptCase, shape: Shape, rates: Rates, *, repeats: int) -> PromptFigures:
    words = Words(case.count + case.context, engine.model.spec.num_real_tokens)
    context = words(case.context)
    if context:
        engine.cache_context(context, compute=False)
    seconds = []
    for round_number in range(WARM_UPS + repeats):
        answer = engine.ask(context + words(case.count))
        if answer.cached_tokens != case.context:
            raise NoFigureError(f"{answer.cached_tokens} tokens came from the cache instead of {case.context}")
        if round_number >= WARM_UPS:
            seconds.append(answer.first_token_s)
    ops = shape.operations(case.count, case.context)
    return PromptFigures(
        case=case,
        seconds=seconds,
        flops=flops_by_kind(ops),
        arithmetic_s=arithmetic_seconds_of(ops, rates) / shape.ranks,
        floor_s=shape.floor_s(case.count, case.context, rates),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionCase:
    """An agent's session: a long first turn, then short tool results."""

    first: int = 50_000
    turns: int = 12
    """Turns after the first one."""
    append: int = 800
    output: int = 200

    def __str__(self) -> str:
        return f"session of {self.first:,} tokens and {self.turns} turns of {self.append:,} more"

    @property
    def room(self) -> Room:
        return Room(longest=self.first + (self.turns + 1) * (self.append + self.output) + 64, others=128)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnFigures:
    prompt: int
    cached: int
    first_token_s: float
    floor_s: float
    """Floor of the tokens that can't be cached: those after the last whole block of the known prefix."""
    decode_tokens_per_second: float

    @property
    def times_floor(self) -> float:
        return self.first_token_s / self.floor_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFigures:
    case: SessionCase
    turns: list[TurnFigures]
    """The first one too."""

    @property
    def hit_share(self) -> float:
        """In tokens, from turn 2 on."""
        later = self.turns[1:]
        return sum(turn.cached for turn in later) / sum(turn.prompt for turn in later)

    @property
    def later_times_floor(self) -> float:
        """Median over turn 2 and later."""
        return statistics.median(turn.times_floor for turn in self.turns[1:])

    @property
    def later_first_token_s(self) -> float:
        return statistics.median(turn.first_token_s for turn in self.turns[1:])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            name: getattr(self, name) for name in ("hit_share", "later_times_floor", "later_first_token_s")
        }


def run_session(engine: PromptEngine, case: SessionCase, shape: Shape, rates: Rates) -> SessionFigures:
    """Run the session. Every prompt is computed, including the first one."""
    words = Words(1, engine.model.spec.num_real_tokens)
    block = engine.model.spec.block_tokens
    for count in (case.append, case.append + block, min(case.first, 8_192)):  # warm up with the sizes of the session
        engine.ask(words(count), max_tokens=case.output)
    prompt, known, turns = words(case.first), 0, []
    for _ in range(case.turns + 1):
        answer = engine.ask(
            prompt, max_tokens=case.output, session="agent", breakpoints=[(len(prompt), CheckpointKind.USER)]
        )
        start = known // block * block
        gaps = sum(answer.gaps_s)
        figures = TurnFigures(
            prompt=len(prompt),
            cached=answer.cached_tokens,
            first_token_s=answer.first_token_s,
            floor_s=shape.floor_s(len(prompt) - start, start, rates),
            decode_tokens_per_second=(len(answer.token_ids) - 1) / gaps if gaps else math.nan,
        )
        turns.append(figures)
        known = len(prompt) + len(answer.token_ids) - 1  # the last token was emitted but isn't in the state
        prompt = prompt + answer.token_ids + words(case.append)
    return SessionFigures(case=case, turns=turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceCase:
    """Decoding streams, and a long prompt that arrives during decoding."""

    context: int
    """Tokens in each stream's state."""
    streams: int = 8
    prompt: int = 50_000
    idle_steps: int = 200
    warm_up_prompt: int = 6_144

    def __str__(self) -> str:
        return f"{self.prompt:,} tokens among {self.streams} streams of {self.context:,}"

    @property
    def tokens_a_stream(self) -> int:
        """More tokens than a stream can emit during the prompt, with the smallest chunk per step."""
        steps = self.idle_steps + SETTLING_STEPS + (self.prompt + self.warm_up_prompt) // 64 + 100
        return steps * (NUM_DRAFTS + 1)

    @property
    def room(self) -> Room:
        longest = max(self.context + self.tokens_a_stream, self.prompt) + 64
        others = self.streams * (self.context + self.tokens_a_stream + 64) + self.warm_up_prompt
        return Room(longest=longest, others=others, max_running=self.streams + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceFigures:
    case: PaceCase
    idle_s: list[float]
    """Time between events of a stream, every stream's."""
    busy_s: list[float]
    """The same, from the submit of the long prompt to its first token."""
    prompt_s: float
    """Time to the long prompt's first token."""

    @property
    def ratio(self) -> float:
        return p99(self.busy_s) / p99(self.idle_s)

    def as_dict(self) -> dict[str, Any]:
        gaps = {
            f"{name}_{what}_s": summarize(values)
            for name, values in (("idle", self.idle_s), ("busy", self.busy_s))
            for what, summarize in (("median", statistics.median), ("p99", p99), ("max", max))
        }
        return {
            "case": asdict(self.case),
            "prompt_s": self.prompt_s,
            "ratio": self.ratio,
            "busy_gaps_s": self.busy_s,
            **gaps,
        }


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def run_pace(engine: PromptEngine, case: PaceCase) -> PaceFigures:
    words = Words(2, engine.model.spec.num_real_tokens)
    contexts = [words(case.context) for _ in range(case.streams)]
    for context in contexts:  # computed, because the engine must learn its real pace
        engine.cache_context(context, compute=True)
    streams = [engine.submit(context + words(16), max_tokens=case.tokens_a_stream) for context in contexts]
    while not all(stream.arrivals for stream in streams):
        engine.step()
    run_until_first_token(engine, engine.submit(words(case.warm_up_prompt), max_tokens=1))
    for _ in range(SETTLING_STEPS):
        engine.step()
    idle_from = time.perf_counter()
    for _ in range(case.idle_steps):
        engine.step()
    idle_s = gaps_between(streams, idle_from, time.perf_counter())
    newcomer = engine.submit(words(case.prompt), max_tokens=1)
    run_until_first_token(engine, newcomer)
    arrived = newcomer.arrivals[0]
    ended = [number for number, stream in enumerate(streams) if stream.is_over]
    if ended:
        raise NoFigureError(f"streams {ended} ended before the prompt was in")
    return PaceFigures(
        case=case,
        idle_s=idle_s,
        busy_s=gaps_between(streams, newcomer.submitted, arrived),
        prompt_s=newcomer.first_token_s,
    )


def run_until_first_token(engine: PromptEngine, answer: Answer) -> None:
    """Run until the first token, and to the end of its step."""
    while not answer.arrivals:
        engine.step()


def gaps_between(streams: Sequence[Answer], begin: float, end: float) -> list[float]:
    """Times between a stream's events that end within [begin, end]."""
    return [
        after - before
        for stream in streams
        for before, after in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        if begin <= after <= end
    ]
