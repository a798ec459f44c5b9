"""Drives a ModelExecutor with the simplest possible host: fixed rows and pages, no cache, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.state import Rings
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.plan import ChunkPlan, OwnRows, SlotJoin, SlotOutcome, StepPlan
from agentspec.types import MOST_RIDERS, SCRATCH_ROW, STOP_RUNNING, RingShape, SamplingParams, rows_of_request, tokens
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest


@dataclass(slots=True)
class Running:
    """A request in a slot, and the results of its steps."""

    request: ReferenceRequest
    slot: int
    rows: list[int]
    pages: list[int]
    emitted: list[int] = field(default_factory=list)
    outcomes: list[SlotOutcome] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *self.emitted]

    @property
    def is_done(self) -> bool:
        return bool(self.outcomes) and self.outcomes[-1].stop != STOP_RUNNING


class StepDriver:
    """One executor. Requests join after one prefill chunk of all their tokens, and every slot owns all rows and pages
    that it will need."""

    def __init__(
        self,
        model: HashChainModel | Qwen3_5Model,
        *,
        max_running: int,
        max_draft_tokens: int,
        max_copies: int = 0,
        max_length: int = 256,
        force_acceptance: tuple[float, ...] | None = None,
        most_riders: int = MOST_RIDERS,
        has_ring: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.max_draft_tokens, self.has_ring = max_draft_tokens, has_ring
        most = max_draft_tokens + max_copies
        self._rows_per_slot = rows_of_request(most, has_ring=has_ring)
        ring = RingShape.of(most + 1, model.spec.block_tokens) if has_ring else None
        self._pages_per_slot = -(-(max_length + 2 * most) // model.spec.block_tokens)
        model.allocate(
            num_rows=2 + max_running * self._rows_per_slot,
            num_pages=1 + max_running * self._pages_per_slot,
            rings=None if ring is None else Rings(max_running + 1, ring.capacity),
        )
        self.executor = ModelExecutor(
            model,
            max_running=max_running,
            max_draft_tokens=max_draft_tokens,
            max_copies=max_copies,
            max_pages_per_slot=self._pages_per_slot,
            force_acceptance=force_acceptance,
            most_riders=most_riders,
            ring=ring,
            device=device,
        )
        self.running: dict[int, Running] = {}

    def plan_join(
        self, plan: StepPlan, slot: int, request: ReferenceRequest, *, output_ids: Sequence[int] = ()
    ) -> Running:
        """Add prefill and join of `request` (prompt, then output_ids generated earlier) to a plan."""
        rows = [2 + slot * self._rows_per_slot + i for i in range(self._rows_per_slot)]
        pages = [1 + slot * self._pages_per_slot + i for i in range(self._pages_per_slot)]
        known = [*request.prompt, *output_ids]
        plan.chunks.append(
            ChunkPlan(
                request_id=f"r{slot}",
                token_ids=tokens(known),
                start=0,
                read_row=0,
                state_writes=((len(known), rows[0]),),
                page_ids=pages,
                next_token=None,
            )
        )
        plan.joins.append(
            SlotJoin(
                request_id=f"r{slot}",
                slot=slot,
                length=len(known) - 1,
                last_token=known[-1],
                rows=OwnRows.of(rows),
                page_ids=pages,
                length_limit=request.length_limit,
                stop_ids=request.stop_ids,
                seed=request.seed,
                sampling=request.sampling,
                prompt_ids=tokens(request.prompt),
                output_ids=tokens(output_ids),
            )
        )
        self.running[slot] = Running(request, slot, rows, pages, emitted=list(output_ids))
        return self.running[slot]

    def step(
        self, num_drafted: int, *, slots: Sequence[int] | None = None, plan: StepPlan | None = None
    ) -> list[SlotOutcome]:
        """Run one step over `slots` (default: all, in order) and the first step of those that join with it; record the
        outcomes."""
        plan = plan or StepPlan()
        plan.num_drafted = num_drafted
        plan.first_slots = [join.slot for join in plan.joins]
        plan.decode_slots = [
            slot for slot in (self.running if slots is None else slots) if slot not in plan.first_slots
        ]
        outcomes = self.executor.collect(self.executor.launch(plan)).slots
        for outcome in outcomes:
            running = self.running[outcome.slot]
            running.emitted.extend(outcome.emitted)
            if outcome.emitted:
                running.outcomes.append(outcome)
        return outcomes

    def run(
        self, requests: Sequence[ReferenceRequest], choose_k: Callable[[], int], *, check: bool = False
    ) -> list[list[int]]:
        """Join all requests at once and decode until each is done. check: after each step, check all device state."""
        plan = StepPlan()
        for slot, request in enumerate(requests):
            self.plan_join(plan, slot, request)
        while not all(running.is_done for running in self.running.values()):
            self.step(choose_k(), plan=plan)
            plan = StepPlan()
            if check:
                for running in self.running.values():
                    self.check(running)
        return [running.emitted for running in self.running.values()]

    def check(self, running: Running, *, with_mtp: bool = True) -> None:
        """Check that pages and rolling checkpoints equal a from-scratch prefill, and that the request still owns each
        of its rows once. For hash chains."""
        assert isinstance(self.model, HashChainModel)
        if not running.outcomes:
            return
        outcome = running.outcomes[-1]
        known = running.known
        assert outcome.length == len(known) - 1
        self.model.check_pages(running.pages, known[: outcome.length], with_mtp=with_mtp)
        (newer_row, newer_length), (older_row, older_length) = outcome.checkpoints
        assert newer_row in running.rows
        assert older_row in running.rows
        assert newer_row != older_row
        assert SCRATCH_ROW not in running.rows
        for row, length in outcome.checkpoints:
            assert length % self.model.spec.block_tokens == 0
            if length:
                self.model.check_row(row, known[:length])
        assert newer_length > older_length or newer_length == older_length == 0
        block = self.model.spec.block_tokens
        first = len(running.request.prompt) - 1
        stored = outcome.length
        if self.has_ring:
            # The step after the one that reaches a boundary stores the state there.
            stored = max(outcome.length - len(outcome.emitted), len(running.request.prompt))
        if stored // block > first // block:
            assert newer_length == stored // block * block


def greedy(
    prompt: Sequence[int], length_limit: int, *, stop_ids: tuple[int, ...] = (), seed: int = 0
) -> ReferenceRequest:
    """A greedy request."""
    return ReferenceRequest(
        prompt=prompt, sampling=SamplingParams(temperature=0.0), seed=seed, length_limit=length_limit, stop_ids=stop_ids
    )
