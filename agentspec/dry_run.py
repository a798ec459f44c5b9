"""`agentspec replay FILE --dry-run MODEL`: the real scheduler and the real cache under a recorded workload, with no forward pass.

Rows, pages, checkpoints, admission, eviction and preemption are the engine's own; only the device is missing. `DryExecutor`
hands out the recorded tokens, keeps the rolling checkpoints by the same rule as the decode step, and charges a named model's
costs to a virtual clock. What comes out is what the cache would reach, beside the file's ideal.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentspec.cache.hybrid_cache import HybridCache
from agentspec.errors import ConfigError
from agentspec.model_costs import ModelCosts
from agentspec.runtime.admission import SessionGate
from agentspec.runtime.memory_plan import RESERVED
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.plan import SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.request import new_request
from agentspec.runtime.scheduler import Scheduler
from agentspec.runtime.step_loop import StepLoop
from agentspec.types import BLOCK_TOKENS, STOP_LENGTH, STOP_RUNNING, Breakpoint, ModelSpec, SamplingParams
from agentspec.wire import FinishEvent, Submit


@dataclass(frozen=True, kw_only=True, slots=True)
class DryTurn:
    """One recorded request."""

    prompt: array[int]
    output: array[int]
    breakpoints: list[Breakpoint]
    delay_seconds: float
    """Wait after the previous turn ended."""


@dataclass(slots=True)
class _Slot:
    join: SlotJoin
    script: Iterator[int]
    length: int
    write_rows: list[int]
    newer: tuple[int, int]
    older: tuple[int, int]
    remaining: int


class DryExecutor:
    """An executor that has no device: it follows the script and keeps the integers that the decode step would keep."""

    def __init__(self, *, costs: ModelCosts, num_drafted: int, block_tokens: int, seed: int) -> None:
        self.now = 0.0
        self.scripts: dict[str, array[int]] = {}
        """Recorded output by request id; the driver adds them before it submits."""
        self._costs = costs
        self._num_drafted = num_drafted
        self._block = block_tokens
        self._random = random.Random(seed)
        self._slots: dict[int, _Slot] = {}

    def launch(self, plan: StepPlan) -> StepOutcome:
        for slot in plan.leaves:
            self._slots.pop(slot, None)
        self.now += sum(len(chunk.token_ids) for chunk in plan.chunks) * self._costs.prefill_seconds_per_token
        for join in plan.joins:
            self._join(join)
        if plan.decode_slots:
            self.now += self._costs.step_seconds
        return StepOutcome(slots=[self._decode(slot, plan.num_drafted) for slot in plan.decode_slots])

    def collect(self, ticket: StepOutcome) -> StepOutcome:
        return ticket

    def _join(self, join: SlotJoin) -> None:
        rest = self.scripts[join.request_id][len(join.output_ids) :]
        newer, older = join.spare_rows
        self._slots[join.slot] = _Slot(join, iter(rest), join.length, list(join.write_rows), (newer, join.checkpoint_length), (older, 0), len(rest))

    def _decode(self, index: int, num_drafted: int) -> SlotOutcome:
        slot = self._slots[index]
        num_accepted = 0
        rates = self._costs.acceptance[:num_drafted]
        while num_accepted < len(rates) and self._random.random() < rates[num_accepted]:
            num_accepted += 1
        num_accepted = min(num_accepted, slot.remaining - 1)
        emitted = [next(slot.script) for _ in range(num_accepted + 1)] if slot.remaining else []
        before = slot.length
        slot.length += len(emitted)
        slot.remaining -= len(emitted)
        boundary = slot.length // self._block * self._block
        if boundary > before:
            column = boundary - before - 1
            freed, slot.older = slot.older[0], slot.newer
            slot.newer, slot.write_rows[column] = (slot.write_rows[column], boundary), freed
        return SlotOutcome(
            slot=index,
            emitted=emitted,
            num_drafted=num_drafted if emitted else 0,
            num_accepted=max(num_accepted, 0),
            stop=STOP_RUNNING if slot.remaining or not emitted else STOP_LENGTH,
            length=slot.length,
            checkpoints=(slot.newer, slot.older),
        )


class _Fixed:
    """The dry run's depth: always the same."""

    def __init__(self, num_drafted: int) -> None:
        self._num_drafted = num_drafted

    def choose(self, batch_size: int) -> int:
        return self._num_drafted

    def observe(self, *, num_drafted: int, slots: list[tuple[int, int]], seconds: float) -> None:
        """Nothing to learn: costs and acceptance are given."""


@dataclass(kw_only=True, slots=True)
class DryRunResult:
    """What one dry run reached. Shares are of prompt tokens."""

    num_sessions: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    virtual_seconds: float = 0.0
    cache: dict[str, int] = field(default_factory=dict)
    cached_by_request: list[tuple[str, int, int]] = field(default_factory=list)
    """(request id, prompt tokens, cached tokens) in the order in which the requests ended."""

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


UNBOUNDED_BYTES = 1 << 50
UNBOUNDED_PAGES = 1 << 20
UNBOUNDED_ROWS = 1 << 17


class DryRun:
    """Feeds turns to the loop on the virtual clock: turn k+1 of a session is due `delay` after turn k ended."""

    def __init__(
        self,
        *,
        costs: ModelCosts,
        memory_gib: float | None,
        max_running: int,
        num_drafted: int,
        prefill_budget: int,
        hold_seconds: float,
        seed: int,
        on_submit: Callable[[DryTurn], None],
    ) -> None:
        """`memory_gib` bounds checkpoints and pages; None: no bound. The rows in which running requests write (k + 3 each) are not
        counted against it, since no cache could use them. `on_submit` sees every turn in the order of submission."""
        self._on_submit = on_submit
        block = BLOCK_TOKENS
        page_bytes = costs.kv_bytes_per_token * block
        running_rows = RESERVED + max_running * (num_drafted + 3)
        memory_bytes = UNBOUNDED_BYTES if memory_gib is None else int(memory_gib * 2**30)
        if memory_bytes < 2 * page_bytes:
            raise ConfigError("memory", memory_gib, f"not even two blocks fit; a turn of {block} tokens needs {2 * page_bytes / 2**30:.3f} GiB")
        self._memory_gib = memory_gib
        budget_bytes = memory_bytes + running_rows * costs.row_bytes
        self._executor = DryExecutor(costs=costs, num_drafted=num_drafted, block_tokens=block, seed=seed)
        self._cache = HybridCache(
            num_rows=running_rows + min(UNBOUNDED_ROWS, memory_bytes // costs.row_bytes),
            num_pages=min(UNBOUNDED_PAGES, memory_bytes // page_bytes),
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
            block_tokens=block,
            budget_bytes=budget_bytes,
            clock=self._clock,
        )
        self._metrics = EngineMetrics()
        scheduler = Scheduler(
            cache=self._cache,
            gate=SessionGate(budget_bytes=memory_bytes, hold_seconds=hold_seconds, clock=self._clock),
            metrics=self._metrics,
            max_running=max_running,
            max_draft_tokens=num_drafted,
            prefill_budget=prefill_budget,
            block_tokens=block,
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
            hold_seconds=hold_seconds,
        )
        self._loop = StepLoop(scheduler=scheduler, executor=self._executor, depth_policy=_Fixed(num_drafted), metrics=self._metrics, overlap=True)
        self._reserved_tokens = block + 2 * (num_drafted + 1)
        self._max_length = min(UNBOUNDED_PAGES, memory_bytes // page_bytes) * block - self._reserved_tokens
        self._spec = ModelSpec(
            name=costs.name,
            vocab_size=2**31 - 1,
            num_real_tokens=2**31 - 1,
            max_context=self._max_length,
            has_mtp=True,
            stop_token_ids=(),
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
        )
        self._due: list[tuple[float, int, str, Iterator[DryTurn], DryTurn]] = []
        self._lanes: dict[str, tuple[str, Iterator[DryTurn]]] = {}
        self._number = 0
        self.result = DryRunResult()

    def _clock(self) -> float:
        return self._executor.now

    def run(self, sessions: Iterator[tuple[str, Iterator[DryTurn]]], concurrency: int) -> DryRunResult:
        """Replay sessions in `concurrency` closed-loop lanes, to the end."""
        for _ in range(concurrency):
            self._start_session(sessions)
        while self._due or self._loop.has_work:
            if not self._loop.has_work:
                self._executor.now = max(self._executor.now, self._due[0][0])
            while self._due and self._due[0][0] <= self._executor.now:
                self._submit(heapq.heappop(self._due))
            for event in self._loop.run_once():
                if isinstance(event, FinishEvent):
                    self._finished(event, sessions)
        result, metrics = self.result, self._metrics
        result.prompt_tokens, result.cached_tokens = metrics.prompt_tokens, metrics.cached_tokens
        result.prefill_tokens, result.output_tokens = metrics.prefill_tokens, metrics.emitted_tokens
        result.preemptions, result.virtual_seconds = metrics.preemptions, self._executor.now
        result.num_requests, result.cache = metrics.requests, self._cache.stats()
        return result

    def _start_session(self, sessions: Iterator[tuple[str, Iterator[DryTurn]]]) -> None:
        for session_id, turns in sessions:
            rest = iter(turns)
            first = next(rest, None)
            if first is not None:
                self.result.num_sessions += 1
                self._schedule(session_id, rest, first, 0.0)
                return

    def _schedule(self, session_id: str, rest: Iterator[DryTurn], turn: DryTurn, delay_seconds: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (self._executor.now + delay_seconds, self._number, session_id, rest, turn))

    def _submit(self, due: tuple[float, int, str, Iterator[DryTurn], DryTurn]) -> None:
        _, number, session_id, rest, turn = due
        request_id = f"{session_id}/{number}"
        num_tokens = len(turn.prompt) + len(turn.output)
        if num_tokens > self._max_length:
            needed_gib = (num_tokens + self._reserved_tokens) * self._spec.page_bytes / self._spec.block_tokens / 2**30
            reason = f"a turn of session {session_id!r} has {num_tokens} tokens, whose keys and values alone need {needed_gib + 0.0005:.3f} GiB"
            raise ConfigError("memory", self._memory_gib, reason)
        submit = Submit(
            request_id=request_id,
            prompt_ids=list(turn.prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=len(turn.output)),
            breakpoints=turn.breakpoints,
            session_id=session_id,
        )
        self._on_submit(turn)
        self._executor.scripts[request_id] = turn.output
        self._lanes[request_id] = (session_id, rest)
        self._loop.submit(new_request(submit, number=number, spec=self._spec, max_length=self._max_length, engine_seed=0, token_bytes=None))

    def _finished(self, event: FinishEvent, sessions: Iterator[tuple[str, Iterator[DryTurn]]]) -> None:
        session_id, rest = self._lanes.pop(event.request_id)
        del self._executor.scripts[event.request_id]
        self.result.cached_by_request.append((event.request_id, event.usage.prompt_tokens, event.usage.cached_tokens))
        following = next(rest, None)
        if following is None:
            self._start_session(sessions)
        else:
            self._schedule(session_id, rest, following, following.delay_seconds)
