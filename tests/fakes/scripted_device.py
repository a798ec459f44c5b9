"""The real scheduler, step loop and cache over a device that emits scripted tokens: no torch, no model.

The device records for every row and every page cell which prefix it stands for, and fails at the first read of a wrong
one. So a test that checks only a decision also proves that rows and pages are consistent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache import invariants
from agentspec.cache.hybrid_cache import HybridCache, Lease
from agentspec.mtp.acceptance import accept
from agentspec.runtime.admission import SessionGate
from agentspec.runtime.constraint import Constraint
from agentspec.runtime.fairness import FairShare
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.pace import FixedPace, Pace
from agentspec.runtime.plan import ChunkPlan, SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.request import Request, new_request
from agentspec.runtime.scheduler import Scheduler
from agentspec.runtime.step_loop import StepLoop
from agentspec.types import (
    SCRATCH_PAGE,
    SCRATCH_ROW,
    STOP_RUNNING,
    ZERO_ROW,
    Breakpoint,
    CheckpointKind,
    ModelSpec,
    SamplingParams,
    SlotResult,
    TokenScore,
    WindowShape,
)
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent

BLOCK = 16
ROW_BYTES, PAGE_BYTES = 1000, 10
VOCABULARY = 128
TOKEN_BYTES = [bytes([token]) for token in range(VOCABULARY)]
"""Token ids are ASCII codes, so an output can be written as a text."""

FILLER = ord(".")
"""What a request emits after the end of its script."""


def prefix_tags(ids: Sequence[int]) -> list[int]:
    """tags[n]: a hash chain over the first n tokens."""
    tags = [1]
    for token in ids:
        tags.append(hash((tags[-1], token)))
    return tags


@dataclass(slots=True)
class _Slot:
    join: SlotJoin
    sequence: list[int]
    """Known tokens: those in the state, and the last one."""
    tags: list[int]
    length: int
    read_row: int
    write_rows: list[int]
    newer: tuple[int, int]
    older: tuple[int, int]
    pages: list[int]
    active: bool = True
    took_first_step: bool = False
    drafts: list[int] = field(default_factory=list)
    """Drafts of the last step: the script's next tokens."""

    def extend(self, emitted: Sequence[int]) -> None:
        for token in emitted:
            self.sequence.append(token)
            self.tags.append(hash((self.tags[-1], token)))


class ScriptedDevice:
    """plan.Executor. Everything happens at launch; `collect` returns the result."""

    def __init__(self, *, block: int, accept: Callable[[], int]) -> None:
        self.plans: list[StepPlan] = []
        self.num_collected = 0
        self.scripts: dict[str, list[int]] = {}
        self.slots: dict[int, _Slot] = {}
        self.failure: Exception | None = None
        """Raised by the next launch."""
        self.decode_seconds = 0.0
        """Reported time of every decode part."""
        self.rides = False
        """Every window rides if there are chunks."""
        self.prefill_cost: Callable[[int, int], float] = lambda start, count: 0.0
        """(start, tokens) -> seconds of a chunk."""
        self._block = block
        self._accept = accept
        self._rows: dict[int, int] = {ZERO_ROW: prefix_tags(())[0]}
        self._cells: dict[tuple[int, int], int] = {}

    def launch(self, plan: StepPlan) -> StepOutcome:
        if self.failure is not None:
            raise self.failure
        self.plans.append(plan)
        for slot in plan.leaves:
            self.slots.pop(slot, None)
        for slot, index, page in plan.page_updates:
            pages = self.slots[slot].pages
            assert index == len(pages), f"slot {slot} has {len(pages)} pages; update for block {index}"
            pages.append(page)
        scores = {chunk.request_id: self._prefill(chunk) for chunk in plan.chunks}
        for join in plan.joins:
            self._join(join)
        taking_part = plan.first_slots + plan.decode_slots
        assert len(set(taking_part)) == len(taking_part)
        assert set(plan.first_slots) <= {join.slot for join in plan.joins}, "a first step comes with the join"
        assert set(plan.masks) == {slot for slot in taking_part if self.slots[slot].join.constrained}
        for slot, masks in plan.masks.items():
            assert len(masks) == 1 + min(plan.num_drafted, len(self.slots[slot].drafts)), (
                "a row for column 0 and for each draft"
            )
        slots = [self._first(slot, plan.num_drafted) for slot in plan.first_slots] + [
            self._decode(slot, plan.num_drafted) for slot in plan.decode_slots
        ]
        decode_seconds = self.decode_seconds if plan.decode_slots else 0.0
        rode = self.rides and bool(plan.chunks and plan.decode_slots)
        prefill_seconds = self._prefill_seconds(plan.chunks)
        return StepOutcome(
            slots=slots, scores=scores, prefill_seconds=prefill_seconds, decode_seconds=decode_seconds, rode=rode
        )

    def collect(self, ticket: StepOutcome) -> StepOutcome:
        self.num_collected += 1
        return ticket

    def check_state(self, row: int, page_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Raise AssertionError unless the row and the pages hold exactly the prefix `ids`."""
        tags = prefix_tags(ids)
        assert self._rows.get(row) == tags[-1], f"row {row} is not the state after {len(ids)} tokens"
        for position, tag in enumerate(tags[1:]):
            cell = (page_ids[position // self._block], position % self._block)
            assert self._cells.get(cell) == tag, (
                f"page {cell[0]} does not hold position {position} of these {len(ids)} tokens"
            )

    def _prefill(self, chunk: ChunkPlan) -> list[TokenScore]:
        start, end = chunk.start, chunk.start + len(chunk.token_ids)
        known = self._rows[chunk.read_row]
        tags = [known, *(0 for _ in chunk.token_ids)]
        for count, token in enumerate(chunk.token_ids, 1):
            tags[count] = hash((tags[count - 1], token))
        assert start % self._block == 0
        assert len(chunk.page_ids) * self._block >= end
        for position in range(start, end):
            self._write_cell(chunk.page_ids, position, tags[position - start + 1])
        counts = [count for count, _ in chunk.state_writes]
        assert counts == sorted(counts)
        assert counts[0] >= 1
        assert counts[-1] == len(chunk.token_ids)
        for count, row in chunk.state_writes:
            assert row not in (ZERO_ROW, SCRATCH_ROW)
            self._rows[row] = tags[count]
        if chunk.score_top is None:
            return []
        return [TokenScore(token, -float(start + place), []) for place, token in enumerate(chunk.scored_ids, 1)]

    def _prefill_seconds(self, chunks: Sequence[ChunkPlan]) -> float:
        return sum(self.prefill_cost(chunk.start, len(chunk.token_ids)) for chunk in chunks)

    def _join(self, join: SlotJoin) -> None:
        assert join.slot not in self.slots, f"slot {join.slot} is taken"
        sequence = [*join.prompt_ids, *join.output_ids]
        assert join.length == len(sequence) - 1
        assert join.last_token == sequence[-1]
        self.check_state(join.rows.prompt, join.page_ids, sequence)
        if join.checkpoint_length:
            self.check_state(join.rows.newer, join.page_ids, sequence[: join.checkpoint_length])
        self.slots[join.slot] = _Slot(
            join=join,
            sequence=sequence,
            tags=prefix_tags(sequence),
            length=join.length,
            read_row=join.rows.prompt,
            write_rows=list(join.rows.write),
            newer=(join.rows.newer, join.checkpoint_length),
            older=(join.rows.older, 0),
            pages=list(join.page_ids),
        )

    def _first(self, index: int, num_drafted: int) -> SlotOutcome:
        """Like a window without drafts whose column is already written."""
        slot = self.slots[index]
        assert not slot.took_first_step
        slot.took_first_step = True
        emitted, stop = self._emit(slot, 1)
        slot.extend(emitted)
        return self._commit(index, slot, emitted, 0, num_drafted, stop)

    def _decode(self, index: int, num_drafted: int) -> SlotOutcome:
        slot = self.slots[index]
        before = slot.length
        assert slot.took_first_step
        if not slot.active:
            return self._outcome(index, slot, [], 0, STOP_RUNNING)
        assert self._rows[slot.read_row] == slot.tags[before]
        assert len(slot.pages) * self._block >= before + 2 * num_drafted + 1, "the window is not covered by pages"
        offered = min(num_drafted, len(slot.drafts))
        emitted, stop = self._emit(slot, min(self._accept(), offered) + 1)
        slot.extend(emitted)
        for column in range(num_drafted + 1):
            true = column < len(emitted)
            tag = slot.tags[before + 1 + column] if true else hash(("rejected", index, before, column))
            self._rows[slot.write_rows[column]] = tag
            self._write_cell(slot.pages, before + column, tag)
        return self._commit(index, slot, emitted, offered, num_drafted, stop)

    def _commit(
        self, index: int, slot: _Slot, emitted: list[int], offered: int, num_drafted: int, stop: int
    ) -> SlotOutcome:
        before = slot.length
        slot.length, slot.read_row = before + len(emitted), slot.write_rows[len(emitted) - 1]
        boundary = slot.length // self._block * self._block
        if boundary > before:
            column = boundary - before - 1
            freed, slot.older = slot.older[0], slot.newer
            slot.newer, slot.write_rows[column] = (slot.write_rows[column], boundary), freed
        slot.active, slot.drafts = stop == STOP_RUNNING, [self._word(slot, ahead) for ahead in range(num_drafted)]
        return self._outcome(index, slot, emitted, offered, stop)

    def _emit(self, slot: _Slot, count: int) -> tuple[list[int], int]:
        chosen, room = [self._word(slot, ahead) for ahead in range(count)], slot.join.length_limit - len(slot.sequence)
        accepted, stop = accept(chosen, chosen[:-1], num_valid=count - 1, stop_ids=slot.join.stop_ids, room=room)
        return chosen[: accepted + 1], stop

    def _word(self, slot: _Slot, ahead: int) -> int:
        script = self.scripts[slot.join.request_id]
        said = len(slot.sequence) + ahead - len(slot.join.prompt_ids)
        return script[said] if said < len(script) else FILLER

    def _outcome(self, index: int, slot: _Slot, emitted: list[int], offered: int, stop: int) -> SlotOutcome:
        return SlotOutcome(
            slot=index,
            emitted=emitted,
            num_drafted=offered,
            num_accepted=max(0, len(emitted) - 1),
            stop=stop,
            length=slot.length,
            checkpoints=(slot.newer, slot.older),
            drafts=list(slot.drafts),
            scores=None if slot.join.logprobs is None else [TokenScore(token, -1.0, []) for token in emitted],
        )

    def _write_cell(self, pages: Sequence[int], position: int, tag: int) -> None:
        page = pages[position // self._block]
        assert page != SCRATCH_PAGE
        self._cells[page, position % self._block] = tag


class FixedDepth:
    """Satisfies step_loop.WindowPolicy and records its calls."""

    def __init__(self, num_drafted: int) -> None:
        self.num_drafted = num_drafted
        self.batches: list[int] = []
        self.observed: list[tuple[int, list[tuple[int, int]]]] = []
        self.seconds: list[float] = []

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        self.batches.append(batch_size)
        return WindowShape(self.num_drafted)

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        self.observed.append((shape.num_drafted, [(slot.offered, slot.accepted) for slot in slots]))
        self.seconds.append(seconds)


class House:
    """A small engine without a model. Checks the cache after every step, and each state that is published or resumed
    from."""

    def __init__(
        self,
        *,
        rows: int = 80,
        pages: int = 300,
        max_running: int = 4,
        drafts: int = 3,
        accept: int | Callable[[], int] = 3,
        budget: int = 64,
        pace: Pace | None = None,
        overlap: bool = True,
        hold_seconds: float = 0.0,
        gate_bytes: int = 10**9,
        caching: bool = True,
        block: int = BLOCK,
    ) -> None:
        """accept: drafts accepted in each step, at most those offered. pace: None: always `budget`."""
        self.now = 0.0
        self.device = ScriptedDevice(block=block, accept=accept if callable(accept) else lambda: accept)
        self.cache = HybridCache(
            num_rows=rows,
            num_pages=pages,
            row_bytes=ROW_BYTES,
            page_bytes=PAGE_BYTES,
            block_tokens=block,
            enabled=caching,
            clock=lambda: self.now,
        )
        self.metrics = EngineMetrics()
        self.depth = FixedDepth(drafts)
        self.scheduler = Scheduler(
            cache=self.cache,
            fair=FairShare(lambda: self.now),
            gate=SessionGate(
                row_bytes=gate_bytes,
                page_bytes=gate_bytes,
                budget_bytes=gate_bytes,
                hold_seconds=hold_seconds,
                clock=lambda: self.now,
            ),
            metrics=self.metrics,
            max_running=max_running,
            max_draft_tokens=drafts,
            pace=FixedPace(budget, block_tokens=BLOCK) if pace is None else pace,
            block_tokens=block,
            row_bytes=ROW_BYTES,
            page_bytes=PAGE_BYTES,
            hold_seconds=hold_seconds,
        )
        self.loop = StepLoop(
            scheduler=self.scheduler,
            executor=self.device,
            window_policy=self.depth,
            metrics=self.metrics,
            overlap=overlap,
        )
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[Event]] = {}
        self.published: list[tuple[str, int]] = []
        """(kind, length) of every publish, in order."""
        self.resumed: list[int] = []
        """Cached tokens of every lease, in order."""
        self._max_length = (pages - 1) * block - 2 * (drafts + 1)
        self._spec = ModelSpec(
            name="scripted",
            vocab_size=VOCABULARY,
            num_real_tokens=VOCABULARY,
            max_context=self._max_length,
            hidden_size=1,
            has_mtp=drafts > 0,
            stop_token_ids=(0,),
            row_bytes=ROW_BYTES,
            page_bytes=PAGE_BYTES,
            block_tokens=block,
        )
        self._spy()

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: str = "",
        *,
        points: Sequence[tuple[int, CheckpointKind]] = (),
        session: str | None = None,
        owner: str = "",
        namespace: str = "",
        scores: int | None = None,
        max_tokens: int | None = -1,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request that emits `output`. max_tokens: by default the output's length."""
        submit = Submit(
            request_id=request_id,
            prompt_ids=list(prompt),
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=len(output) if max_tokens == -1 else max_tokens,
                stop=stop,
                stop_token_ids=stop_ids,
            ),
            breakpoints=[Breakpoint(offset, kind) for offset, kind in points],
            session_id=session,
            owner=owner,
            namespace=namespace,
            prompt_logprobs=scores,
            logprobs=logprobs,
        )
        request = new_request(
            submit,
            number=len(self.requests),
            spec=self._spec,
            max_length=self._max_length,
            engine_seed=0,
            token_bytes=TOKEN_BYTES,
            constraint=constraint,
        )
        self.requests[request_id] = request
        self.events[request_id] = []
        self.device.scripts[request_id] = list(output.encode("ascii"))
        self.loop.submit(request)
        return request

    def step(self) -> list[Event]:
        events = self.loop.run_once()
        invariants.check(self.cache)
        for event in events:
            seen = self.events[event.request_id]
            assert not (seen and isinstance(seen[-1], FinishEvent)), f"{event} after the terminal event"
            seen.append(event)
        return events

    def run(self, max_steps: int = 2000) -> None:
        """Run until there is nothing to do; every request must have ended and released everything."""
        for _ in range(max_steps):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, f"still at work after {max_steps} steps"
        for request_id in self.requests:
            assert isinstance(self.events[request_id][-1], FinishEvent), request_id
            assert not self.scheduler.knows(request_id)
        assert not self.cache.leases

    def run_until(self, reached: Callable[[], bool], max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError("that never happened")

    def finish(self, request_id: str) -> FinishEvent:
        last = self.events[request_id][-1]
        assert isinstance(last, FinishEvent), last
        return last

    def said(self, request_id: str) -> str:
        """The tokens of all events so far, as a text."""
        return "".join(
            chr(token)
            for event in self.events[request_id]
            if isinstance(event, TokensEvent)
            for token in event.token_ids
        )

    def chunks(self, request_id: str) -> list[tuple[int, int]]:
        """(start, tokens) of every prefill chunk."""
        return [
            (chunk.start, len(chunk.token_ids))
            for plan in self.device.plans
            for chunk in plan.chunks
            if chunk.request_id == request_id
        ]

    def step_of_join(self, request_id: str) -> int:
        """Index of the plan in which the request last joined."""
        return max(
            index
            for index, plan in enumerate(self.device.plans)
            if any(join.request_id == request_id for join in plan.joins)
        )

    def _spy(self) -> None:
        cache: Any = self.cache
        match, acquire, publish = cache.match, cache.acquire, cache.publish
        looked_up: list[array[int]] = []

        def spy_match(namespace: str, ids: array[int], **keywords: Any) -> Any:
            looked_up[:] = [ids]
            return match(namespace, ids, **keywords)

        def spy_acquire(found: Any, **keywords: Any) -> Any:
            lease = acquire(found, **keywords)
            self.resumed.append(lease.num_cached)
            self.device.check_state(lease.read_row, lease.page_ids, looked_up[0][: lease.num_cached])
            return lease

        def spy_publish(
            lease: Lease, namespace: str, ids: array[int], length: int, row: int, kind: CheckpointKind
        ) -> bool:
            self.device.check_state(row, lease.page_ids, ids[:length])
            self.published.append((kind.name, length))
            taken: bool = publish(lease, namespace, ids, length, row, kind)
            return taken

        cache.match, cache.acquire, cache.publish = spy_match, spy_acquire, spy_publish


def letters(count: int, seed: int = 0) -> list[int]:
    """A prompt of `count` tokens; another seed gives another first token and another order."""
    return [97 + (seed * 7 + place * (seed % 5 + 1) + place // 26) % 26 for place in range(count)]
