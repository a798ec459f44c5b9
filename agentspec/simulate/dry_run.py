"""`agentspec replay FILE --dry-run MODEL`: the real scheduler and the real cache under a recorded workload, with no
forward pass.

Rows, pages, checkpoints, admission, eviction and preemption are the engine's own; only the device is missing.
`DryExecutor` hands out the recorded tokens and keeps the rolling checkpoints by the same rule as the decode step. What
comes out is what the cache would reach, beside the file's ideal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from agentspec.cache.host_tier import HostMemory
from agentspec.cache.hybrid_cache import HybridCache
from agentspec.errors import ConfigError
from agentspec.mtp.depth_policy import FixedDepth
from agentspec.runtime.admission import SessionGate, rows_of_sessions
from agentspec.runtime.fairness import FairShare
from agentspec.runtime.memory_plan import RESERVED, MemoryPlan
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.pace import DEFAULT_MAX_GAP, FixedPace, GapPace
from agentspec.runtime.plan import SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.scheduler import Scheduler
from agentspec.runtime.step_loop import Copier, StepLoop
from agentspec.simulate.closed_loop import ClosedLoop, EndedTurn, RecordedTurn, Sessions, TimedExecutor, VirtualClock
from agentspec.simulate.model_costs import ModelCosts
from agentspec.types import BLOCK_TOKENS, FAIR_COST, STOP_LENGTH, STOP_RUNNING, ModelSpec, rows_of_request


@dataclass(slots=True)
class _Slot:
    join: SlotJoin
    script: Iterator[int]
    length: int
    write_rows: list[int]
    newer: tuple[int, int]
    older: tuple[int, int]
    remaining: int
    emissions: Iterator[int] | None
    """Tokens that each further step emits; None: by the costs' acceptance."""


class DryExecutor:
    """An executor that has no device: it follows the script and keeps the integers that the decode step would keep."""

    def __init__(
        self,
        *,
        acceptance: Sequence[float],
        block_tokens: int,
        seed: int,
        emissions: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`acceptance`: chance of each draft, given that those before it were accepted. `emissions`: by request id, how
        many tokens each step of it emits; None: drawn by `acceptance`."""
        self._acceptance = acceptance
        self._emissions = emissions
        self._block = block_tokens
        self._random = random.Random(seed)
        self._slots: dict[int, _Slot] = {}

    def launch(self, plan: StepPlan) -> StepOutcome:
        for slot in plan.leaves:
            self._slots.pop(slot, None)
        for join in plan.joins:
            self._join(join)
        # A first step verifies nothing: it emits one token.
        slots = [self._decode(slot, 0) for slot in plan.first_slots] + [
            self._decode(slot, plan.num_drafted) for slot in plan.decode_slots
        ]
        return StepOutcome(slots=slots)

    def collect(self, ticket: StepOutcome) -> StepOutcome:
        return ticket

    def _join(self, join: SlotJoin) -> None:
        assert join.forced_output is not None, "a dry run knows its outputs"
        rest = join.forced_output[len(join.output_ids) :]
        newer, older, emissions = (
            (join.rows.newer, join.checkpoint_length),
            (join.rows.older, 0),
            self._emissions_of(join),
        )
        self._slots[join.slot] = _Slot(
            join, iter(rest), join.length, list(join.rows.write), newer, older, len(rest), emissions
        )

    def _emissions_of(self, join: SlotJoin) -> Iterator[int] | None:
        """Those of its steps that are still to come: a preempted request joins again behind some."""
        if self._emissions is None:
            return None
        emissions, num_done = iter(self._emissions[join.request_id]), 0
        while num_done < len(join.output_ids):
            num_done += next(emissions)
        return emissions

    def _num_accepted(self, slot: _Slot, num_drafted: int) -> int:
        if slot.emissions is not None and slot.remaining:
            return next(slot.emissions) - 1
        rates = self._acceptance[:num_drafted]
        rejected = (index for index, rate in enumerate(rates) if self._random.random() >= rate)
        return min(next(rejected, len(rates)), slot.remaining - 1)

    def _decode(self, index: int, num_drafted: int) -> SlotOutcome:
        slot = self._slots[index]
        num_accepted = self._num_accepted(slot, num_drafted)
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
    ended: list[EndedTurn] = field(default_factory=list)
    """In the order in which the requests ended."""

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


UNBOUNDED_BYTES = 1 << 50
UNBOUNDED_PAGES = 1 << 20
UNBOUNDED_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class DryMemory:
    """What a dry run's cache has."""

    num_rows: int
    num_pages: int
    max_length: int
    """Tokens of the longest sequence that fits when it runs alone."""
    cache_bytes: int | None = None
    """Bound on rows and pages together; None: each pool is its own bound."""
    gib: float | None = None
    """What was asked for, where that was a bound."""

    @classmethod
    def bounded(cls, gib: float | None, *, costs: ModelCosts, max_running: int, num_drafted: int) -> Self:
        """`gib` bounds checkpoints and pages; None: no bound. The rows that running requests own are not counted
        against it, since no cache could use them. Raises ConfigError when not even two blocks fit."""
        page_bytes = costs.kv_bytes_per_token * BLOCK_TOKENS
        running_rows = _running_rows(max_running, num_drafted)
        memory_bytes = UNBOUNDED_BYTES if gib is None else int(gib * 2**30)
        if memory_bytes < 2 * page_bytes:
            least = 2 * page_bytes / 2**30
            raise ConfigError(
                "memory", gib, f"not even two blocks fit; a turn of {BLOCK_TOKENS} tokens needs {least:.3f} GiB"
            )
        num_pages = min(UNBOUNDED_PAGES, memory_bytes // page_bytes)
        return cls(
            num_rows=running_rows + min(UNBOUNDED_ROWS, memory_bytes // costs.row_bytes),
            num_pages=num_pages,
            max_length=num_pages * BLOCK_TOKENS - _reserved_tokens(num_drafted),
            cache_bytes=memory_bytes + running_rows * costs.row_bytes,
            gib=gib,
        )

    @classmethod
    def of_engine(cls, plan: MemoryPlan) -> Self:
        """The memory of an engine with this plan (engine/assembly.py)."""
        return cls(num_rows=plan.num_rows, num_pages=plan.num_pages, max_length=plan.max_length)


def _running_rows(max_running: int, num_drafted: int) -> int:
    """Rows that no checkpoint can stand in: the reserved ones and those in which running requests write."""
    return RESERVED + max_running * rows_of_request(num_drafted)


def _reserved_tokens(num_drafted: int) -> int:
    """The scratch page, and what a step may touch beyond the end of a sequence."""
    return BLOCK_TOKENS + 2 * (num_drafted + 1)


class DryRun:
    """One house without a device. `run` it once."""

    def __init__(
        self,
        *,
        costs: ModelCosts,
        memory: DryMemory,
        max_running: int,
        num_drafted: int,
        prefill_budget: int | Literal["auto"],
        max_gap: float = DEFAULT_MAX_GAP,
        fair_cost: float = FAIR_COST,
        hold_seconds: float,
        seed: int,
        on_submit: Callable[[RecordedTurn], None],
        emissions: Mapping[str, Sequence[int]] | None = None,
        host_memory: HostMemory | None = None,
        copier: Callable[[VirtualClock], Copier] | None = None,
    ) -> None:
        """`on_submit` sees every turn in the order of submission. `emissions`: see DryExecutor. `copier`: carries out
        what `host_memory` orders."""
        self._on_submit = on_submit
        self._costs = costs
        self._memory = memory
        self._reserved_tokens = _reserved_tokens(num_drafted)
        page_bytes = costs.kv_bytes_per_token * BLOCK_TOKENS
        clock = self.clock = VirtualClock()
        self._cache = HybridCache(
            num_rows=memory.num_rows,
            num_pages=memory.num_pages,
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
            block_tokens=BLOCK_TOKENS,
            budget_bytes=memory.cache_bytes,
            host_memory=host_memory,
            clock=clock,
        )
        running_rows = _running_rows(max_running, num_drafted)
        gate = SessionGate(
            row_bytes=rows_of_sessions(memory.num_rows - running_rows, max_running) * costs.row_bytes,
            page_bytes=(memory.num_pages - 1) * page_bytes,
            budget_bytes=None if memory.cache_bytes is None else memory.cache_bytes - running_rows * costs.row_bytes,
            hold_seconds=hold_seconds,
            clock=clock,
        )
        metrics = self._metrics = EngineMetrics()
        scheduler = Scheduler(
            cache=self._cache,
            gate=gate,
            fair=FairShare(clock, cost=fair_cost),
            metrics=metrics,
            max_running=max_running,
            max_draft_tokens=num_drafted,
            pace=GapPace(max_gap, block_tokens=BLOCK_TOKENS)
            if prefill_budget == "auto"
            else FixedPace(prefill_budget, block_tokens=BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
            hold_seconds=hold_seconds,
        )
        scripted = DryExecutor(acceptance=costs.acceptance, block_tokens=BLOCK_TOKENS, seed=seed, emissions=emissions)
        executor = TimedExecutor(scripted, costs=costs, clock=clock)
        copies = None if copier is None else copier(clock)
        self.loop = StepLoop(
            scheduler=scheduler,
            executor=executor,
            depth_policy=FixedDepth(num_drafted),
            metrics=metrics,
            overlap=True,
            copier=copies,
            clock=clock,
        )
        spec = ModelSpec(
            name=costs.name,
            vocab_size=2**31 - 1,
            num_real_tokens=2**31 - 1,
            max_context=memory.max_length,
            hidden_size=0,
            has_mtp=True,
            stop_token_ids=(),
            row_bytes=costs.row_bytes,
            page_bytes=page_bytes,
        )
        self._lanes = ClosedLoop(
            self.loop,
            clock=clock,
            turn_seconds=costs.turn_seconds,
            spec=spec,
            max_length=memory.max_length,
            on_submit=self._check,
        )

    def run(self, sessions: Sessions, num_lanes: int) -> DryRunResult:
        """Replay sessions in `num_lanes` closed loops, to the end. Raises ConfigError for a turn that can't fit."""
        self._lanes.run(sessions, num_lanes)
        metrics = self._metrics
        return DryRunResult(
            num_sessions=self._lanes.num_sessions,
            num_requests=metrics.requests,
            prompt_tokens=metrics.prompt_tokens,
            output_tokens=metrics.emitted_tokens,
            cached_tokens=metrics.cached_tokens,
            prefill_tokens=metrics.prefill_tokens,
            preemptions=metrics.preemptions,
            virtual_seconds=self.clock.now,
            cache=self._cache.stats(),
            ended=self._lanes.ended,
        )

    def _check(self, session_id: str, turn: RecordedTurn) -> None:
        num_tokens = len(turn.prompt) + len(turn.output)
        if num_tokens > self._memory.max_length:
            needed_gib = (num_tokens + self._reserved_tokens) * self._costs.kv_bytes_per_token / 2**30
            reason = f"a turn of session {session_id!r} has {num_tokens} tokens, whose keys and values alone need {needed_gib + 0.0005:.3f} GiB"
            raise ConfigError("memory", self._memory.gib, reason)
        self._on_submit(turn)
