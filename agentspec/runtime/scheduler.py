"""Decides what runs next: continuous batching, chunked prefill, admission by rows and pages, preemption, and learning
from each step.

`plan` writes the next step; `apply` reads the outcome of an earlier one and returns the events to send. The device may
be one step behind. No torch, no model: rows, pages and tokens are integers here.

Ownership: a request's lease owns its rows and pages until they are published (then the tree does) or released. Nothing
is released while a step in flight may still write to it. The exception is a request that the *device* ended: its slot
is inert from then on, so its rows and pages are released at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentspec.cache.hybrid_cache import HybridCache, Match
from agentspec.runtime.admission import SessionGate, WorkingSet
from agentspec.runtime.fairness import FairShare
from agentspec.runtime.flight import Flight
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.pace import Pace, StepTimes
from agentspec.runtime.plan import ChunkPlan, OwnRows, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.prefill_plan import BRANCH_GAP_BLOCKS, is_promised, plan_chunk, shares, wanted_checkpoints
from agentspec.runtime.request import Phase, Request
from agentspec.runtime.turn_trust import TurnTrust
from agentspec.types import STOP_RUNNING, CheckpointKind, FinishReason, WindowShape, rows_of_request
from agentspec.wire import Event

SESSION_CHECKPOINTS = 2
"""Checkpoints that a session usually keeps between its turns: the last user message and the rolling one."""


class Scheduler:
    """Owns the queue, the slots and every request that is not done."""

    def __init__(
        self,
        *,
        cache: HybridCache,
        gate: SessionGate,
        fair: FairShare,
        metrics: EngineMetrics,
        max_running: int,
        max_draft_tokens: int,
        has_ring: bool = False,
        pace: Pace,
        block_tokens: int,
        row_bytes: int,
        page_bytes: int,
        hold_seconds: float,
    ) -> None:
        self.cache = cache
        self._gate = gate
        self._fair = fair
        self._metrics = metrics
        self._max_draft_tokens = max_draft_tokens
        self._rows_of_request = rows_of_request(max_draft_tokens, has_ring=has_ring)
        self._pace = pace
        self._block = block_tokens
        self._row_bytes = row_bytes
        self._page_bytes = page_bytes
        self._hold_seconds = hold_seconds
        self._trust = TurnTrust()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        """Requests with a lease, in order of admission."""
        self._soon_cached = partial(is_promised, running=self._running, block=block_tokens)
        self._by_id: dict[str, Request] = {}
        self._free_slots = list(range(max_running))[::-1]
        self._leaves: list[int] = []
        self._num_let_go = 0
        self._num_looked = 0
        self._full_since = -1
        """`_num_let_go` when a waiting request last found no memory."""
        self._events: list[Event] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._leaves or self._events)

    def knows(self, request_id: str) -> bool:
        """Whether the request's terminal event hasn't been returned yet."""
        return request_id in self._by_id or any(event.request_id == request_id for event in self._events)

    def add_request(self, request: Request) -> None:
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        self._gate.arrive(request.session_key)
        self._fair.arrive(request)
        self._metrics.requests += 1
        self._metrics.prompt_tokens += request.prompt_length

    def abort(self, request_id: str) -> None:
        """End a request. Its FinishEvent comes when no step in flight contains it. Unknown and ended ids are ignored:
        an abort may cross the request's end."""
        request = self._by_id.get(request_id)
        if request is not None and request.ending is None:
            self._end(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        for request_id in list(self._by_id):
            self.abort(request_id)

    def plan(self, choose_shape: Callable[[int, int], WindowShape]) -> Flight:
        """Plan the next step. `choose_shape(batch size, slots of it that matched when last known)`."""
        flight = Flight(StepPlan())
        self.cache.copy_ahead()
        holds_back = self._holds_constrained_back()
        decoding = self._grow_decoding(flight.plan, holds_back)
        self._admit()
        joined = self._plan_prefill(flight)
        decoding = [request for request in decoding if request.phase is Phase.DECODE]
        if decoding or joined:
            flight.matched = frozenset(request.slot for request in decoding if request.matched)
            flight.shape = choose_shape(len(decoding) or len(joined), len(flight.matched))
            flight.plan.num_drafted = flight.shape.num_drafted
            assert 0 <= flight.plan.num_drafted <= self._max_draft_tokens
        flight.plan.first_slots = self._take_in(flight, joined)
        flight.plan.decode_slots = self._take_in(flight, decoding)
        flight.plan.leaves, self._leaves = self._leaves, []
        flight.copies = self.cache.take_copy_orders()
        for request in flight.requests:
            request.in_flight += 1
        for request in decoding + joined:
            if request.ending is not None:
                self._end(request, request.ending)
        if not flight.plan.is_empty:
            self._metrics.steps += 1
        self._metrics.first_slots += len(flight.plan.first_slots)
        if flight.plan.decode_slots:
            self._metrics.decode_steps += 1
            self._metrics.decode_slots += len(flight.plan.decode_slots)
        return flight

    def copied(self, to_host: int, to_device: int) -> None:
        """Copy orders up to these numbers are done: requests that waited for one of them continue."""
        self.cache.complete_copies_to_host(to_host)
        for request in list(self._running):
            lease, fetch = request.lease, request.fetch
            if lease is None or fetch is None or fetch.number > to_device:
                continue
            self.cache.finish_fetch(lease, request.submit.namespace, request.sequence)
            request.promised.discard(fetch.num_tokens)
            request.state_row = lease.read_row
            self._count_cached(request)
            request.in_flight -= 1
            if request.phase is Phase.FETCHING:
                request.phase = Phase.PREFILL
            self._settle(request)

    def _holds_constrained_back(self) -> bool:
        """Whether constrained requests must not decode in this step.

        The masks of a constrained request need the outcome of its last step. While one waits for that, the others wait
        too. So they decode in the same steps (every other one under overlap), and the batch isn't split between odd and
        even steps. A first step doesn't make others wait: a stream of new requests could stall them for ever."""
        return any(request.waits_for_drafts and not request.takes_first_step for request in self._running)

    def _take_in(self, flight: Flight, requests: list[Request]) -> list[int]:
        """Add requests to the step, with their masks; returns their slots. A request whose grammar fails is left out,
        and its `ending` is set."""
        slots = []
        for request in requests:
            assert request.slot is not None
            if request.constraint is not None:
                most = self._max_draft_tokens
                masks = request.next_masks(flight.shape.most_drafts(most), width=most + 1)
                if masks is None:
                    continue
                flight.plan.masks[request.slot] = masks
            slots.append(request.slot)
            flight.occupants[request.slot] = request
            flight.requests[request] = None
        return slots

    def drain_events(self) -> list[Event]:
        """Events of requests that ended outside `apply`."""
        events, self._events = self._events, []
        return events

    def _pages_needed(self, request: Request, steps_ahead: int) -> int:
        """Pages that cover every position a request may touch within `steps_ahead` more steps, drafts included."""
        window = self._max_draft_tokens + 1
        length = min(len(request.sequence) - 1 + (steps_ahead - 1) * window, request.length_limit)
        return -(-(length + 2 * window) // self._block)

    def _grow_decoding(self, plan: StepPlan, holds_back: bool) -> list[Request]:
        """The requests that decode next, with pages for each, oldest first. Preempts the youngest when there are
        none."""
        ready = []
        for request in list(self._running):
            may_decode = request.phase is Phase.DECODE and not request.waits_for_drafts
            if may_decode and not (holds_back and request.constraint is not None) and self._grow(request, plan):
                ready.append(request)
        return ready

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        lease = request.lease
        assert lease is not None
        assert request.slot is not None
        have = len(lease.page_ids)
        need = self._pages_needed(request, request.in_flight + 1)
        while need > have and not self.cache.grow_pages(lease, need):
            if any(other.phase is Phase.LEAVING for other in self._running):
                return False  # a request is already leaving: try again next step
            assert len(self._running) > 1, "one request alone always fits: new_request checked its limit"
            victim = self._running[-1]
            self._retract(victim)
            if victim is request or victim.phase is Phase.LEAVING:
                return False
        plan.page_updates.extend(
            (request.slot, index, lease.page_ids[index]) for index in range(have, len(lease.page_ids))
        )
        return True

    def _admit(self) -> None:
        """Give waiting requests a slot, rows and pages: late ones first, then in order of arrival. A request whose
        session must wait is skipped.

        After a request found no memory, none is tried until a request has released some."""
        for request in self._late_first() if self._waiting else ():
            if not self._free_slots or self._full_since == self._num_let_go:
                return
            if request.need is not None and not self._gate_allows(request, request.need):
                continue
            match = self._match(request)
            if self.cache.enabled and self._soon_cached(request, match):
                continue
            pages = self._pages_needed(request, 2)
            new_pages = pages - match.num_tokens // self._block
            num_checkpoints = 1 if request.submit.session_id is None else SESSION_CHECKPOINTS
            request.need = WorkingSet(num_checkpoints * self._row_bytes, new_pages * self._page_bytes)
            if not self._gate_allows(request, request.need):
                continue
            if not self._take_room(request, match, pages) and not self._take_room_from_nothing(request, pages):
                self._full_since = self._num_let_go
                return
            request.turn_trusted = self._trust.judge(request)
            request.pending = wanted_checkpoints(request, match.branch_tokens, self._block)
            request.promised = {wanted.length for wanted in request.pending}
            self._fair.enter(
                request,
                goes_ahead=self._gate.is_preferred(request.session_key),
                is_first=not self._gate.has_run(request.session_key),
            )
            self._enter(request)

    def _late_first(self) -> list[Request]:
        """Waiting requests in the order in which they are tried. Late sessions also go ahead of the others' working
        sets."""
        self._num_looked += 1
        # The cache may hold more of its prompt by now, which shortens its fair wait.
        self._match(self._waiting[self._num_looked % len(self._waiting)])
        late = [self._by_id[request_id] for request_id in self._fair.late()]
        singles = {request.session_key for request in late if request.submit.session_id is None}
        self._gate.prefer((request.session_key for request in late), singles=singles, most=self._fair.may_go_ahead)
        return list(dict.fromkeys([*late, *self._waiting]))

    def _match(self, request: Request) -> Match:
        limit = 0 if request.needs_scores else len(request.sequence) - 1
        match = self.cache.match(request.submit.namespace, request.sequence, limit=limit)
        lost = match.branch_tokens - match.num_tokens
        has_lost = lost >= BRANCH_GAP_BLOCKS * self._block and self._gate.has_run(request.session_key)
        self._fair.expect(request, len(request.sequence) - match.num_tokens, lost if has_lost else 0)
        return match

    def _gate_allows(self, request: Request, need: WorkingSet) -> bool:
        """Whether the session may run. If nothing runs, the first session in order always may."""
        return self._gate.allows(request.session_key, need) or (
            not self._running and self._gate.is_next(request.session_key)
        )

    def _take_room(self, request: Request, match: Match, pages: int) -> bool:
        """Lease the match, take pages and rows, and start a fetch if needed. False, with everything given back, if
        memory is short."""
        lease = self.cache.acquire(match, session_id=request.submit.session_id)
        rows = None
        if self.cache.grow_pages(lease, pages):
            rows = self.cache.take_rows(lease, self._rows_of_request)
        # A preempted request leaves each running one a page to grow into; otherwise it would be preempted again at
        # once.
        margin = len(self._running) if request.preemptions else 0
        has_room = rows is not None and (not margin or self.cache.available_pages() >= margin)
        if not has_room or (match.host_copy is not None and self.cache.start_fetch(lease, match) is None):
            self.cache.release(lease, hold_seconds=self._hold_seconds)
            return False
        assert rows is not None
        request.lease, request.rows = lease, OwnRows.of(rows)
        request.state_row, request.computed = lease.read_row, match.num_reachable
        request.prompt_checkpoint, request.rolling = 0, ()
        return True

    def _take_room_from_nothing(self, request: Request, pages: int) -> bool:
        """If nothing runs, the matched row itself may be what is missing: then admit without the match."""
        if self._running:
            return False
        match = self.cache.match(request.submit.namespace, request.sequence, limit=0)
        has_room = self._take_room(request, match, pages)
        assert has_room, "one request alone always fits: new_request checked its limit"
        return True

    def _enter(self, request: Request) -> None:
        assert request.lease is not None
        self._waiting.remove(request)
        if request.needs_scores:
            request.scores.clear()  # a preempted request scores its prompt again
        request.slot = self._free_slots.pop()
        self._running.append(request)
        self._gate.enter(request.session_key)
        if request.fetch is None:
            request.phase = Phase.PREFILL
            self._count_cached(request)
        else:
            request.phase = Phase.FETCHING
            request.promised.add(request.fetch.num_tokens)
            request.in_flight += 1

    def _count_cached(self, request: Request) -> None:
        """Count cached tokens, at the first admission only."""
        if not request.counted_cached:
            assert request.lease is not None
            request.counted_cached = True
            request.usage.cached_tokens = request.lease.num_cached
            self._metrics.cached_tokens += request.lease.num_cached

    def _plan_prefill(self, flight: Flight) -> list[Request]:
        """Fill the step's prompt pass. Returns the requests whose prompt is complete: they join and take their first
        step at once."""
        prefilling = [
            request
            for request in self._running
            if request.phase is Phase.PREFILL and request.computed < request.prefill_end
        ]
        if not prefilling:
            return []
        room = self._pace.open(streams_run=any(request.phase is Phase.DECODE for request in self._running))
        joined = []
        for request, share in shares(prefilling, room):
            tokens = room.fit(request.computed, request.prefill_end - request.computed, share=share)
            if room.is_untouched:
                tokens = max(tokens, self._block)
            chunk, checkpoints = plan_chunk(request, tokens, self._block, self._take_row)
            if chunk is None:
                request.times_passed_over += 1
                continue
            room.take_chunk(chunk.start, len(chunk.token_ids))
            self._launch_chunk(flight, request, chunk, checkpoints)
            if request.computed == request.prefill_end and request.decodes:
                flight.plan.joins.append(request.join_slot())
                joined.append(request)
        return joined

    def _launch_chunk(
        self, flight: Flight, request: Request, chunk: ChunkPlan, checkpoints: list[tuple[int, int, CheckpointKind]]
    ) -> None:
        flight.plan.chunks.append(chunk)
        flight.chunks.append((request, checkpoints))
        flight.requests[request] = None
        request.computed += len(chunk.token_ids)
        assert request.rows is not None
        request.state_row = request.rows.prompt
        self._metrics.prefill_tokens += len(chunk.token_ids)

    def _take_row(self, request: Request) -> int | None:
        assert request.lease is not None
        rows = self.cache.take_rows(request.lease, 1)
        if rows is None:
            self._metrics.checkpoints_skipped += 1
            return None
        return rows[0]

    def apply(self, flight: Flight, outcome: StepOutcome) -> list[Event]:
        """Process a step's outcome: publish its checkpoints, extend its streams, end and release what ended."""
        events: list[Event] = []
        self._pace.observe(StepTimes.of(flight.plan, outcome))
        self._fair.serve(flight, outcome)
        for request in flight.requests:
            request.in_flight -= 1
        for request, checkpoints in flight.chunks:
            request.scores.extend(outcome.scores.get(request.request_id, ()))
            self._publish_prefill(request, checkpoints)
        for slot in outcome.slots:
            request = flight.occupants[slot.slot]
            if request.phase not in (Phase.DECODE, Phase.LEAVING):
                continue
            if request.ending is not None:
                request.rolling = slot.checkpoints  # its emitted tokens are beyond its end
                continue
            event = request.take_outcome(slot)
            if event is not None:
                events.append(event)
                self._metrics.emitted_tokens += len(event.token_ids)
            self._end_if_over(request, slot)
        for request in flight.requests:
            self._settle(request)
        return events + self.drain_events()

    def _end_if_over(self, request: Request, slot: SlotOutcome) -> None:
        """End a request that its last tokens ended. A retracted one leaves with that step anyway."""
        if request.ending is not None and request.phase is Phase.DECODE:
            self._end(request, request.ending, device_inert=slot.stop != STOP_RUNNING)

    def _settle(self, request: Request) -> None:
        """After a step or fetch has ended: let the request go, or end it, if it waited only for that."""
        if request.in_flight:
            return
        if request.phase is Phase.LEAVING:
            self._let_go(request)
        elif request.phase is Phase.PREFILL and not request.decodes and request.computed == request.prefill_end:
            self._end(request, FinishReason.LENGTH)

    def _publish_prefill(self, request: Request, checkpoints: list[tuple[int, int, CheckpointKind]]) -> None:
        lease = request.lease
        assert lease is not None, "a request with a chunk in flight still has its lease"
        for length, row, kind in checkpoints:
            request.promised.discard(length)
            if not self.cache.publish(lease, request.submit.namespace, request.sequence, length, row, kind):
                self.cache.give_rows(lease, [row])

    def _end(self, request: Request, reason: FinishReason, *, device_inert: bool = False) -> None:
        """End a request now if no step in flight can write for it, otherwise when that step is done."""
        request.ending = reason
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
            self._gate.withdraw(request.session_key)
            self._finish(request)
            return
        if request.in_flight and not device_inert:
            request.phase = Phase.LEAVING
            return
        self._let_go(request)

    def _retract(self, request: Request) -> None:
        """Preempt a request: release everything but its last checkpoint, and queue it again in order of arrival."""
        assert request.ending is None
        request.preemptions += 1
        self._metrics.preemptions += 1
        if request.in_flight:
            request.phase = Phase.LEAVING
        else:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Publish the rolling checkpoint, release the lease and the slot; then finish the request or queue it again."""
        lease = request.lease
        self._num_let_go += 1
        assert lease is not None
        assert request.slot is not None
        self._publish_rolling(request)
        row_bytes, page_bytes = self.cache.private_bytes(lease)
        working_set = WorkingSet(row_bytes - len(lease.own_rows) * self._row_bytes, page_bytes)
        named = request.submit.session_id is not None
        self._gate.leave(request.session_key, working_set, waits_again=request.ending is None, comes_back=named)
        hold = 0.0 if request.ending is FinishReason.ABORT else self._hold_seconds
        self.cache.release(lease, hold_seconds=hold)
        self._leaves.append(request.slot)
        self._free_slots.append(request.slot)
        self._running.remove(request)
        request.lease, request.slot, request.rows, request.rolling = None, None, None, ()
        request.promised.clear()
        if request.ending is not None:
            self._finish(request)
            return
        request.phase = Phase.WAITING
        self._fair.arrive(request)
        self._waiting.append(request)
        self._waiting.sort(key=lambda waiting: waiting.number)

    def _publish_rolling(self, request: Request) -> None:
        """Publish the deepest rolling checkpoint whose tokens were all kept, unless the turn ended and its next prompt
        isn't expected to contain it unchanged.

        With the host a step behind, the newer checkpoint may be beyond a stop that only the host saw; then the older
        one is published."""
        assert request.lease is not None
        if request.ending is not None:
            self._trust.record_turn(request, len(request.sequence) // self._block * self._block)
            if not request.turn_trusted:
                return
        kept = [(length, row) for row, length in request.rolling if 0 < length <= len(request.sequence)]
        if kept:
            namespace, (length, row) = request.submit.namespace, max(kept)
            self.cache.publish(request.lease, namespace, request.sequence, length, row, CheckpointKind.TURN)

    def _finish(self, request: Request) -> None:
        assert request.ending is not None
        request.phase = Phase.DONE
        del self._by_id[request.request_id]
        self._fair.leave(request)
        self._metrics.count_finished(request.ending, request.usage)
        self._events.append(request.finish(request.ending))
