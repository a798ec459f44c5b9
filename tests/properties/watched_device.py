"""A device wrapper that checks ownership: it may run behind the host, and every write must go to a row or page that the
writer owns.

Steps run in launch order, but a late device runs a step only when the host waits for it: until then the host must not
publish, resume from or hand out anything that depends on it. Only a lease that owns a row or page at that moment may
write it, and a lease may resume only from a row that it owns or locks, whatever the host released since the launch.
Scratch and the zero row are exempt.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from agentspec.cache.hybrid_cache import HybridCache, Lease
from agentspec.kernels import PrefillBatch, RingWindow
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.slots import SlotState
from agentspec.models.protocol import VerifyBatch
from agentspec.mtp.shared_rows import share_rows
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.graphs import MOST_FIRST
from agentspec.runtime.plan import Executor, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.ranks.leader import LedExecutor
from agentspec.runtime.request import Request
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW, has_copies
from tests.fakes.hash_chain import HashChainModel


def own_executor(executor: Executor) -> ModelExecutor:
    """That of this rank, where there are several."""
    own = executor.own if isinstance(executor, LedExecutor) else executor
    assert isinstance(own, ModelExecutor)
    return own


@dataclass(slots=True)
class _Step:
    """A launched plan, and the requests of its slots and chunks."""

    plan: StepPlan
    by_slot: dict[int, Request]
    first: list[Lease]
    decoding: list[Lease]
    chunks: list[Lease]
    drafting: deque[tuple[list[Lease], int]] = field(default_factory=deque)
    """Leases and columns of the windows that are still to be drafted for, in order."""
    made: dict[int, list[int]] = field(default_factory=dict)
    """The valid drafts that each slot has after the step."""
    num_live: dict[int, int] = field(default_factory=dict)
    """Live columns of each slot, if the step's windows share its rows."""
    ticket: Any = None
    has_run: bool = False


class WatchedDevice:
    """A plan.Executor around another one and its model."""

    def __init__(
        self,
        executor: ModelExecutor | LedExecutor,
        model: HashChainModel,
        cache: HybridCache,
        *,
        lateness: random.Random | None,
        times: random.Random,
        requests: Callable[[], Sequence[Request]],
        on_outcome: Callable[[Request, SlotOutcome, list[int], bool], None],
        paths: Counter[str],
    ) -> None:
        """lateness: None: every step runs at its launch. times: of the device's passes and steps. requests: those in
        the engine. on_outcome: called before the scheduler gets the outcome, with the drafts that were made for the
        next window, and whether copies were looked for if all MTP drafts were made."""
        self._executor = executor
        self._buffers = own_executor(executor)._buffers
        self._cache = cache
        self._lateness = lateness
        self._times = times
        self._requests = requests
        self._on_outcome = on_outcome
        self._paths = paths
        self._block = model.spec.block_tokens
        self._ring_capacity = model.ring_capacity
        self._queue: deque[_Step] = deque()
        self._running: _Step | None = None
        self._drafting: list[Lease] = []
        self._watch(model)

    @property
    def is_behind(self) -> bool:
        """A launched step has not run yet."""
        return bool(self._queue)

    def launch(self, plan: StepPlan) -> _Step:
        requests = [request for request in self._requests() if request.lease is not None]
        leases = {request.request_id: request.lease for request in requests if request.lease is not None}
        by_slot = {request.slot: request for request in requests if request.slot is not None}
        step = _Step(
            plan,
            by_slot,
            first=[leases[by_slot[slot].request_id] for slot in plan.first_slots],
            decoding=[leases[by_slot[slot].request_id] for slot in plan.decode_slots],
            chunks=[leases[chunk.request_id] for chunk in plan.chunks],
        )
        self._queue.append(step)
        if self._lateness is None or self._lateness.random() < 0.3:
            self._run_through(step)
        return step

    def collect(self, step: _Step) -> StepOutcome:
        self._run_through(step)
        outcome = self._executor.collect(step.ticket)
        # Some decisions depend on measured times. With these, a seed gives the same run on every machine.
        outcome.prefill_seconds = self._times.uniform(0.001, 0.004) * bool(step.plan.chunks)
        outcome.decode_seconds = self._times.uniform(0.001, 0.004) * bool(step.plan.decode_slots)
        if step.plan.decode_slots:
            self._paths[f"k={step.plan.num_drafted}"] += 1
        if step.plan.decode_slots and step.plan.chunks:
            self._paths["windows ride" if outcome.rode else "windows beside chunks"] += 1
        if outcome.rode and step.plan.first_slots:
            self._paths["windows ride with a last chunk"] += 1
        for slot in outcome.slots:
            if count := step.num_live.get(slot.slot, 0):
                assert slot.num_drafted == count - 1, f"{slot.num_drafted} drafts in {count} live columns"
            looked = self._looks_for_copies(step.plan, slot.slot)
            self._on_outcome(step.by_slot[slot.slot], slot, step.made[slot.slot], looked)
        return outcome

    def _run_through(self, step: _Step) -> None:
        while not step.has_run:
            first = self._queue.popleft()
            self._running, self._drafting = first, []
            width = first.plan.num_drafted + 1
            first_width = min(width, self._buffers.max_mtp_drafts + 1)
            if self._shares_rows(first.plan):
                width = self._buffers.width
            eager_first = [] if self._replays_first(first.plan) else first.first
            for leases, num_columns in ((eager_first, first_width), (first.decoding, width)):
                if leases:
                    first.drafting.append((leases, num_columns))
            first.ticket = self._executor.launch(first.plan)
            self._running, first.has_run = None, True
            slots = [*first.plan.first_slots, *first.plan.decode_slots]
            made = SlotState.of(self._buffers.slots_SF[slots])
            rows = zip(slots, made.num_valid_drafts_B.tolist(), made.tokens_BW.tolist(), strict=True)
            first.made = {slot: row[1 : 1 + num_valid] for slot, num_valid, row in rows}

    def _watch(self, model: Any) -> None:
        verify, prefill, mtp = model.verify, model.prefill, model.mtp

        def watched_verify(batch: VerifyBatch) -> Tensor:
            step = self._running
            if step is not None:
                assert len(batch.tokens_BT) == len(step.decoding), (
                    f"{len(batch.tokens_BT)} windows of a step in which {len(step.decoding)} slots decode"
                )
                if batch.ring is None:
                    written = batch.write_rows_BT.tolist()
                else:
                    written = batch.ring.fold_row_B[:, None].tolist()
                    assert batch.ring.slot_B.tolist() == step.plan.decode_slots
                    self._check_entries(batch.ring)
                self._check_live_columns(step, batch)
                self._check_rows(step.decoding, batch.read_row_B.tolist(), written)
                self._check_pages(step.decoding, batch.page_table_BP, batch.length_B, batch.tokens_BT.shape[1])
            result: Tensor = verify(batch)
            return result

        def watched_prefill(batch: PrefillBatch) -> Tensor:
            step, self._running = self._running, None  # prefill's own call of verify writes to scratch
            assert step is not None
            spans = read_spans(batch)
            saved = [[row for block in span.blocks for row in block.save_rows] for span in spans]
            self._check_rows(step.chunks, [span.read_row for span in spans], saved)
            for lease, span in zip(step.chunks, spans, strict=True):
                first, end = span.start // self._block, -(-(span.start + span.end - span.begin) // self._block)
                self._check_owned(lease, span.page_ids_P[first:end].tolist(), lease.own_pages, "page")
            result: Tensor = prefill(batch)
            self._running = step
            return result

        def watched_mtp(
            tokens_BT: Tensor,
            hidden_BTH: Tensor,
            start_B: Tensor,
            page_table_BP: Tensor,
            *,
            last_B: Tensor | None = None,
        ) -> Tensor:
            step = self._running
            if step is not None and step.drafting and tokens_BT.shape[1] == step.drafting[0][1]:
                self._drafting, _ = step.drafting.popleft()  # a whole window, so the next draft begins
            self._check_pages(self._drafting, page_table_BP, start_B, tokens_BT.shape[1])
            result: Tensor = mtp(tokens_BT, hidden_BTH, start_B, page_table_BP, last_B=last_B)
            return result

        model.verify, model.prefill, model.mtp = watched_verify, watched_prefill, watched_mtp

    def _replays_first(self, plan: StepPlan) -> bool:
        """Whether the first steps run from a graph, in which no method of the model is called."""
        return own_executor(self._executor)._graphs is not None and len(plan.first_slots) <= MOST_FIRST

    def _shares_rows(self, plan: StepPlan) -> bool:
        """Whether the windows of a step share its forward's rows."""
        return self._buffers.ring is not None and plan.num_drafted > self._buffers.max_mtp_drafts

    def _looks_for_copies(self, plan: StepPlan, slot: int) -> bool:
        """Whether a step makes copies for a slot: unless so many slots decode that their next windows have none."""
        num_mtp = self._buffers.max_mtp_drafts
        if slot in plan.first_slots:
            return has_copies(len(plan.first_slots), num_mtp)
        return plan.num_drafted > num_mtp or has_copies(len(plan.decode_slots), num_mtp)

    def _check_live_columns(self, step: _Step, batch: VerifyBatch) -> None:
        """The forward has the columns that were drafted for each slot's prefix, as many as the rule gives."""
        live, plan = batch.live, step.plan
        assert (live is not None) == self._shares_rows(plan)
        if live is None:
            return
        slot = SlotState.of(self._buffers.slots_SF[plan.decode_slots])
        wanted = [
            (1 + num_valid) * is_active
            for num_valid, is_active in zip(slot.num_valid_drafts_B.tolist(), slot.active_B.tolist(), strict=True)
        ]
        num_rows, own_columns = len(wanted) * (plan.num_drafted + 1), self._buffers.max_mtp_drafts + 1
        counts = share_rows(wanted, num_rows=num_rows, own_columns=own_columns)
        assert live.count_B.tolist() == counts, f"live columns: {live.count_B.tolist()}, by the rule {counts}"
        cells = [place * self._buffers.width + t for place, count in enumerate(counts) for t in range(count)]
        assert live.cell_N.tolist() == cells + [0] * (num_rows - len(cells)), "rows are in the order of columns"
        for place, count in enumerate(counts):
            begin = cells.index(place * self._buffers.width) if count else 0
            assert live.row_BT[place, :count].tolist() == list(range(begin, begin + count)), "a column has its row"
        step.num_live = dict(zip(plan.decode_slots, counts, strict=True))
        self._paths["too few rows for all copies"] += counts != wanted
        self._paths["dead rows"] += len(cells) < num_rows
        self._paths["wider than the mean"] += max(counts) > plan.num_drafted + 1

    def _check_entries(self, ring: RingWindow) -> None:
        """A window's entries are in its slot's ring, and none is the entry of a position that it reads."""
        capacity = self._ring_capacity
        assert (ring.entries_BT // capacity == ring.slot_B[:, None]).all(), "a window writes to another slot's ring"
        span = int((ring.start_B - ring.read_length_B).max()) + ring.entries_BT.shape[1]
        assert span <= capacity, f"{span} entries in a ring of {capacity}"
        self._paths["fold"] += int((ring.fold_row_B != SCRATCH_ROW).sum())

    def _check_rows(self, leases: list[Lease], read: list[int], written: list[list[int]]) -> None:
        for lease, source, rows in zip(leases, read, written, strict=True):
            if rows[0] != SCRATCH_ROW or len(set(rows)) > 1:
                assert len(set(rows)) == len(rows), f"a step writes one row twice: {rows}"
                self._check_owned(lease, rows, lease.own_rows, "row")
            is_locked = lease.locked is not None and lease.locked.row == source
            assert source == ZERO_ROW or source in lease.own_rows or is_locked, (
                f"a step reads row {source}, which its lease neither owns nor locks"
            )

    def _check_pages(self, leases: list[Lease], page_table_BP: Tensor, first_B: Tensor, num_columns: int) -> None:
        """Entries after the leases are padding of the batch."""
        for place, (pages, first) in enumerate(zip(page_table_BP.tolist(), first_B.tolist(), strict=True)):
            written = pages[first // self._block : (first + num_columns - 1) // self._block + 1]
            if written != [SCRATCH_PAGE]:
                assert place < len(leases), f"a step writes pages {written} for padding"
                self._check_owned(leases[place], written, leases[place].own_pages, "page")

    def _check_owned(self, lease: Lease, written: list[int], owned: set[int], what: str) -> None:
        foreign = [unit for unit in written if unit not in owned]
        assert not foreign, f"a step writes {what}s {foreign}, which its lease doesn't own"
        assert lease in self._cache.leases, f"a step writes {what}s {written} of a lease that was released"
