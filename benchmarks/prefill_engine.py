"""An engine that serves requests in sequence, and measures each one: time to first token, cached tokens.

Uses the engine's own scheduler, step loop, cache and executor, assembled by assembly.build with default settings,
except for a given memory size and no host tier. Weights are random, contexts may be random instead of computed
(published.PrefilledModel), and acceptance is forced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.runtime.memory_plan import RESERVED, MemoryPlan
from agentspec.runtime.pace import Pace
from agentspec.runtime.request import Request, new_request
from agentspec.runtime.scheduler import SESSION_CHECKPOINTS
from agentspec.types import MOST_RIDERS, Breakpoint, CheckpointKind, ModelSpec, SamplingParams, tokens
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import acceptance_rate, kernels_of_ranks

NUM_DRAFTS = 3
EMITTED = 3.39
"""Mean tokens per step with the forced acceptance."""

SPARE_CHECKPOINTS = 24
"""Rows besides those of running requests: for grid checkpoints of a long prompt, and for earlier prompts."""


ROWS_A_SLOT = NUM_DRAFTS + 3 + SESSION_CHECKPOINTS
"""State rows for a slot without a ring, and its session's checkpoints."""


class NoFigureError(Exception):
    """The engine didn't behave as the measurement requires, so there is no figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory needs of an engine."""

    longest: int
    """Tokens, prompt and output, of a sequence."""
    others: int = 0
    """Tokens of other sequences, running or cached, that must stay in memory."""
    max_running: int = 1
    rows_a_slot: int = ROWS_A_SLOT
    """State rows for each of max_running."""

    def beside(self, other: Room) -> Room:
        """For the one and then the other."""
        return Room(
            longest=max(self.longest, other.longest),
            others=max(self.others, other.others),
            max_running=max(self.max_running, other.max_running),
            rows_a_slot=max(self.rows_a_slot, other.rows_a_slot),
        )

    def memory(self, spec: ModelSpec) -> MemoryPlan:
        block, window = spec.block_tokens, NUM_DRAFTS + 1
        pages = (
            sum(-(-length // block) for length in (self.longest, self.others))
            + 4 * self.max_running * -(-window // block)
            + 1
        )
        rows = RESERVED + self.max_running * self.rows_a_slot + SPARE_CHECKPOINTS
        return MemoryPlan(num_rows=rows, num_pages=pages, max_length=self.longest)

    def num_bytes(self, spec: ModelSpec) -> int:
        memory = self.memory(spec)
        return memory.num_rows * spec.row_bytes + memory.num_pages * spec.page_bytes


@dataclass(kw_only=True, slots=True)
class Answer:
    """Times of one request, by the host's clock."""

    submitted: float
    arrivals: list[float] = field(default_factory=list)
    """Times of the events with tokens."""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_over: bool = False

    @property
    def first_token_s(self) -> float:
        """Measured from the submission, including validation and the host's own work."""
        return self.arrivals[0] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class PromptEngine:
    """Requests have numbers; `step` runs the engine's loop once for all of them."""

    def __init__(
        self,
        model: PrefilledModel,
        device: torch.device,
        room: Room,
        *,
        overlap: bool = True,
        prefix_cache: bool = True,
        pace: Pace | None = None,
        most_riders: int = MOST_RIDERS,
    ) -> None:
        """pace: None: the engine's own."""
        config = EngineConfig(
            tensor_parallel=model.shared.rank.count,
            draft_tokens=NUM_DRAFTS,
            copy_drafts=0,  # streams without sense have none, and graphs for them would only take time
            force_acceptance=(acceptance_rate(EMITTED),) * NUM_DRAFTS,
            max_running=room.max_running,
            overlap=overlap,
            prefix_cache=prefix_cache,
            session_hold_seconds=0.0,
        )
        model.computes_prompts = True  # for the graphs
        memory = room.memory(model.spec)
        began = time.perf_counter()
        with kernels_of_ranks(config, model, memory, device) as ahead:
            parts = build(
                model, config=config, memory=memory, device=device, ahead=ahead, pace=pace, most_riders=most_riders
            )
        self.start_seconds = time.perf_counter() - began
        self.graphs = parts.graphs
        self.cache = parts.cache
        self.executor = parts.loop.executor
        self.metrics = parts.loop.metrics
        self.device = device
        self.model = model
        self._loop = parts.loop
        self._max_length = room.longest
        self._answers: dict[str, Answer] = {}
        self._num_asked = 0

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        session: str | None = None,
        breakpoints: Sequence[tuple[int, CheckpointKind]] = (),
        namespace: str = "",
    ) -> Answer:
        answer = Answer(submitted=time.perf_counter())
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        points = [Breakpoint(offset, kind) for offset, kind in breakpoints]
        number, self._num_asked = self._num_asked, self._num_asked + 1
        submit = Submit(
            request_id=str(number),
            prompt_ids=list(prompt),
            sampling=sampling,
            breakpoints=points,
            session_id=session,
            namespace=namespace,
        )
        self._loop.submit(self._request(submit, number))
        self._answers[submit.request_id] = answer
        return answer

    def step(self) -> list[Answer]:
        """Run one step; return the answers that got tokens."""
        events = self._loop.run_once()
        now = time.perf_counter()
        return [answer for event in events if (answer := self._take(event, now)) is not None]

    def ask(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        session: str | None = None,
        breakpoints: Sequence[tuple[int, CheckpointKind]] = (),
        namespace: str = "",
    ) -> Answer:
        """Submit to an idle engine, and run it until it is idle again."""
        self.settle()
        answer = self.submit(
            prompt, max_tokens=max_tokens, session=session, breakpoints=breakpoints, namespace=namespace
        )
        self.settle()
        assert answer.is_over
        return answer

    def cache_context(self, prompt: Sequence[int], *, compute: bool) -> None:
        """Cache a checkpoint at the end of `prompt`'s whole blocks, which isn't superseded when prompts resume from it.

        compute: False: state and keys are random instead of computed. Raises NoFigureError when memory is too small."""
        block = self.model.spec.block_tokens
        boundary = len(prompt) // block * block
        self.model.computes_prompts = compute
        try:  # one token beyond the boundary, and a kind that is never superseded
            self.ask([*prompt[:boundary], 0], breakpoints=[(boundary, CheckpointKind.BRANCH)])
        finally:
            self.model.computes_prompts = True
        found = self.cache.match("", tokens(prompt), limit=boundary)
        if found.num_tokens != boundary or found.kind is not CheckpointKind.BRANCH:
            raise NoFigureError(f"there was no row for a checkpoint behind {boundary} tokens")

    def settle(self) -> None:
        """Wait until host and device are idle."""
        while self._loop.has_work:
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _request(self, submit: Submit, number: int) -> Request:
        return new_request(
            submit, number=number, spec=self.model.spec, max_length=self._max_length, engine_seed=0, token_bytes=None
        )

    def _take(self, event: Event, now: float) -> Answer | None:
        answer = self._answers[event.request_id]
        if isinstance(event, TokensEvent):
            answer.arrivals.append(now)
            answer.token_ids += event.token_ids
            return answer
        assert isinstance(event, FinishEvent)
        if event.error is not None:
            raise NoFigureError(f"request {event.request_id} failed: {event.error}")
        answer.prompt_tokens, answer.cached_tokens, answer.is_over = (
            event.usage.prompt_tokens,
            event.usage.cached_tokens,
            True,
        )
        del self._answers[event.request_id]
        return None
