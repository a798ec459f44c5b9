"""`agentspec replay FILE --dry-run MODEL`: the real scheduler and the real cache on a recorded workload, with no
forward pass.

Rows, pages, checkpoints, admission, eviction and preemption are the engine's own; only the device is missing.
`DryExecutor` returns the recorded tokens and rotates the rolling checkpoints by the decode step's rule. The result is
what the cache would reach, to compare with the file's ideal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from agentspec.cache.host_tier import HostMemory
from agentspec.errors import ConfigError
from agentspec.mtp.window_policy import FixedWindow
from agentspec.runtime.memory_plan import MemoryPlan, running_rows
from agentspec.runtime.pace import DEFAULT_MAX_GAP, FixedPace, GapPace
from agentspec.runtime.plan import SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.step_loop import Copier, new_step_loop
from agentspec.simulate.closed_loop import ClosedLoop, EndedTurn, RecordedTurn, Sessions, TimedExecutor, VirtualClock
from agentspec.simulate.model_costs import ModelCosts
from agentspec.types import BLOCK_TOKENS, FAIR_COST, STOP_LENGTH, STOP_RUNNING, ModelSpec, WindowShape


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
    """Tokens that each further step emits; None: drawn by the acceptance rates."""


class DryExecutor:
    """An executor without a device: it follows the script and keeps the integers that the decode step would keep."""

    def __init__(
        self,
        *,
        acceptance: Sequence[float],
        block_tokens: int,
        seed: int,
        emissions: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`acceptance`: chance of each draft, given that those before it were accepted. `emissions`: by request id, how
        many tokens each of its steps emits; None: drawn by `acceptance`."""
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
        # A first step verifies nothing and emits one token.
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
        """The emissions of its remaining steps: a preempted request joins again after some of them."""
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
    """The result of one dry run. Shares are of prompt tokens."""

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
    """The memory of a dry run's cache."""

    num_rows: int
    num_pages: int
    max_length: int
    """Tokens of the longest sequence that fits when it runs alone."""
    cache_bytes: int | None = None
    """Bound on rows and pages together; None: each pool is its own bound."""
    gib: float | None = None
    """The requested bound, if there was one."""

    @classmethod
    def bounded(cls, gib: float | None, *, costs: ModelCosts, max_running: int, num_drafted: int) -> Self:
        """`gib` bounds checkpoints and pages; None: no bound. Rows of running requests are not counted against it,
        since no cache could use them. Raises ConfigError if not even two blocks fit."""
        page_bytes = costs.kv_bytes_per_token * BLOCK_TOKENS
        own_rows = running_rows(max_running, num_drafted)
        memory_bytes = UNBOUNDED_BYTES if gib is None else int(gib * 2**30)
        if memory_bytes < 2 * page_bytes:
            least = 2 * page_bytes / 2**30
            raise ConfigError(
                "memory", gib, f"not even two blocks fit; a turn of {BLOCK_TOKENS} tokens needs {least:.3f} GiB"
            )
        num_pages = min(UNBOUNDED_PAGES, memory_bytes // page_bytes)
        return cls(
            num_rows=own_rows + min(UNBOUNDED_ROWS, memory_bytes // costs.row_bytes),
            num_pages=num_pages,
            max_length=num_pages * BLOCK_TOKENS - _reserved_tokens(num_drafted),
            cache_bytes=memory_bytes + own_rows * costs.row_bytes,
            gib=gib,
        )

    @classmethod
    def of_engine(cls, plan: MemoryPlan) -> Self:
        """The memory of an engine with this plan (engine/assembly.py)."""
        return cls(num_rows=plan.num_rows, num_pages=plan.num_pages, max_length=plan.max_length)


def _reserved_tokens(num_drafted: int) -> int:
    """Tokens of the scratch page, and what a step may write beyond the end of a sequence."""
    return BLOCK_TOKENS + 2 * (num_drafted + 1)


class DryRun:
    """One engine without a device. `run` it once."""

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
        """`on_submit` gets every turn in order of submission. `emissions`: see DryExecutor. `copier`: carries out the
        copy orders of `host_memory`."""
        self._on_submit = on_submit
        self._costs = costs
        self._memory = memory
        self._reserved_tokens = _reserved_tokens(num_drafted)
        clock = self.clock = VirtualClock()
        spec = ModelSpec(
            name=costs.name,
            vocab_size=2**31 - 1,
            num_real_tokens=2**31 - 1,
            max_context=memory.max_length,
            hidden_size=0,
            has_mtp=True,
            stop_token_ids=(),
            row_bytes=costs.row_bytes,
            page_bytes=costs.kv_bytes_per_token * BLOCK_TOKENS,
        )
        scripted = DryExecutor(acceptance=costs.acceptance, block_tokens=BLOCK_TOKENS, seed=seed, emissions=emissions)
        self.loop = new_step_loop(
            spec=spec,
            num_rows=memory.num_rows,
            num_pages=memory.num_pages,
            cache_bytes=memory.cache_bytes,
            host_memory=host_memory,
            max_running=max_running,
            max_draft_tokens=num_drafted,
            pace=GapPace(max_gap, block_tokens=BLOCK_TOKENS)
            if prefill_budget == "auto"
            else FixedPace(prefill_budget, block_tokens=BLOCK_TOKENS),
            hold_seconds=hold_seconds,
            fair_cost=fair_cost,
            executor=TimedExecutor(scripted, costs=costs, clock=clock),
            window_policy=FixedWindow(WindowShape(num_drafted)),
            overlap=True,
            copier=None if copier is None else copier(clock),
            clock=clock,
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
        metrics = self.loop.metrics
        return DryRunResult(
            num_sessions=self._lanes.num_sessions,
            num_requests=metrics.requests,
            prompt_tokens=metrics.prompt_tokens,
            output_tokens=metrics.emitted_tokens,
            cached_tokens=metrics.cached_tokens,
            prefill_tokens=metrics.prefill_tokens,
            preemptions=metrics.preemptions,
            virtual_seconds=self.clock.now,
            cache=self.loop.scheduler.cache.stats(),
            ended=self._lanes.ended,
        )

    def _check(self, session_id: str, turn: RecordedTurn) -> None:
        num_tokens = len(turn.prompt) + len(turn.output)
        if num_tokens > self._memory.max_length:
            needed_gib = (num_tokens + self._reserved_tokens) * self._costs.kv_bytes_per_token / 2**30
            raise ConfigError(
                "memory",
                self._memory.gib,
                f"a turn of session {session_id!r} has {num_tokens} tokens, "
                f"whose keys and values alone need {needed_gib + 0.0005:.3f} GiB",
            )
        self._on_submit(turn)
