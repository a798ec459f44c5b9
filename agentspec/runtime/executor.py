"""Runs step plans on a model: the only place where the host's plan meets device tensors.

Owns the slot buffers, the drafter and the order of a launch. Decode steps and short prompt chunks, alone or with
windows that ride, run eagerly until `capture` has recorded them as CUDA graphs; everything else is always eager. Knows
nothing of requests beyond what a plan says, and decides nothing but whether windows ride, by the rule of
runtime/ride.py.

Shape letters: B slots in the step, F fields.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from agentspec.errors import ConfigError
from agentspec.kernels import PrefillBatch
from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import Drafter, NullDrafter
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import (
    Forward,
    StepResult,
    decode_step,
    open_windows,
    read_result,
    score_result,
    verify_batch,
)
from agentspec.runtime.forcing import Forcing
from agentspec.runtime.graphs import STAGE, GraphKey, GraphReport, Recorder, StepGraphs, batch_sizes, graph_keys
from agentspec.runtime.plan import SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.prefill import run_batch, run_chunks
from agentspec.runtime.prefill_graphs import (
    CHUNK_SIZES,
    PrefillGraphs,
    chunk_room,
    chunk_sizes,
    eager_rooms,
    most_spans,
)
from agentspec.runtime.prefill_tables import PrefillSizes, build_tables
from agentspec.runtime.ride import RideGraphs, RideKey, even_batch, ride_keys, rows_beyond
from agentspec.runtime.scores import ScoreRows
from agentspec.runtime.step_buffers import StepBuffers, stage
from agentspec.types import Progress, most_drafts, no_progress

Moment: TypeAlias = float | torch.cuda.Event
"""A point in the device's time: seconds of the host's clock where the host computes, else an event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """What a step brought some slots. In host memory, complete when the step is done."""

    slots: Sequence[int]
    alternatives: Sequence[int | None]
    """For each of them: how many come with the score of an emitted token; None: no scores."""
    outcome_BF: Tensor
    """See decode_step.StepResult."""
    scores: ScoreRows | None
    """Of what was emitted. None: nobody wants any."""

    def read(self) -> list[SlotOutcome]:
        return read_result(self.outcome_BF, self.scores, self.slots, self.alternatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTicket:
    """A launched plan: what `collect` reads once the device is done."""

    prefill: tuple[Moment, Moment] | None
    """Before and after the chunks."""
    rode: bool
    """With the decode part's windows."""
    decode: tuple[Moment, Moment] | None
    """Before and after the decode part."""
    done: Moment
    results: Sequence[_Results]
    """Of first steps, and of the decode part."""
    chunk_scores: dict[str, ScoreRows]
    """By request id; still on the device."""


class ModelExecutor:
    """plan.Executor over a StepModel whose pools are allocated."""

    def __init__(
        self,
        model: StepModel,
        *,
        max_running: int,
        max_draft_tokens: int,
        max_pages_per_slot: int,
        force_acceptance: tuple[float, ...] | None = None,
        allow_forced_output: bool = False,
        most_riders: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """max_pages_per_slot: blocks of the longest sequence plus 2 * max_draft_tokens tokens, which the last step may
        write beyond its end.
        most_riders: see ride.MOST_RIDERS; 0: no window rides.

        Raises ConfigError if the model has no MTP head to draft with, or if forced acceptance lacks a rate."""
        if not 0 <= max_draft_tokens <= (most := most_drafts(model.spec.block_tokens)):
            raise ConfigError("draft_tokens", max_draft_tokens, f"must be 0 to {most}")
        if max_draft_tokens > 0 and not model.spec.has_mtp:
            raise ConfigError(
                "draft_tokens", max_draft_tokens, f"model {model.spec.name} has no MTP head; only 0 works"
            )
        if force_acceptance is not None and len(force_acceptance) < max_draft_tokens:
            raise ConfigError(
                "force_acceptance", force_acceptance, f"needs a rate for each of {max_draft_tokens} drafts"
            )
        self._model = model
        self._device = torch.device(device)
        self._with_mtp = max_draft_tokens > 0
        self._drafter: Drafter = MtpDrafter(model) if self._with_mtp else NullDrafter()
        self.draft_sources = self._drafter.sources(max_draft_tokens)
        """Of the draft at each position."""
        self._needs_sampler = [False] * max_running
        self._alternatives: list[int | None] = [None] * max_running
        self._graphs: StepGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._ride_graphs: RideGraphs | None = None
        self._pending: deque[Callable[[], object]] = deque()
        """What `capture` has left to `prepare`."""
        self.most_riders = most_riders
        """May change between two plans; what the graphs hold doesn't."""
        with torch.inference_mode():
            self._buffers = StepBuffers.allocate(
                max_running=max_running,
                max_draft_tokens=max_draft_tokens,
                max_pages_per_slot=max_pages_per_slot,
                vocab_size=model.spec.vocab_size,
                num_model_stop_ids=len(model.spec.stop_token_ids),
                block_tokens=model.spec.block_tokens,
                device=self._device,
            )
            is_forced = allow_forced_output or force_acceptance is not None
            self._forcing = (
                Forcing(self._buffers, rates=force_acceptance, allow_output=allow_forced_output) if is_forced else None
            )

    @torch.inference_mode()
    def capture(
        self, depths: Sequence[int], recorder: Recorder, progress: Progress = no_progress, *, early: bool = False
    ) -> GraphReport:
        """Record the decode step for every batch size, from then on each one is a replay, and short prompt chunks; and
        run once what is never recorded. Call before the first launch: the model's pools must stay.

        depths: every k that a plan may ask for; another one will raise KeyError. progress: told how many graphs are
        recorded. early: return as soon as a first answer can come; the rest is left to `prepare`, and to plans that
        need it sooner."""
        began = time.perf_counter()
        spec, max_running, max_pages = self._model.spec, len(self._needs_sampler), self._buffers.page_table_SP.shape[1]
        sizes, rides = chunk_sizes(spec.hidden_size), self._ride_keys(max(depths))
        graphs = self._graphs = StepGraphs(
            self._captured_step, recorder, max_running=max_running, depths=depths, device=self._device
        )
        prompts = self._prefill_graphs = PrefillGraphs(
            self._prefill,
            recorder,
            sizes=sizes,
            block_tokens=spec.block_tokens,
            max_pages=max_pages,
            device=self._device,
            most_at_need=CHUNK_SIZES[-1],
        )
        with_windows = self._ride_graphs = RideGraphs(
            partial(self._ride, num_drafted=max(depths)),
            recorder,
            keys=rides,
            padding_slot=max_running,
            num_columns=max(depths) + 1,
            block_tokens=spec.block_tokens,
            max_pages=max_pages,
            device=self._device,
        )
        of_steps, of_prompts, of_rides = graphs.recordings(), prompts.recordings(), with_windows.recordings()
        deepest = {key: record for key, record in of_steps.items() if key.num_drafted == max(depths)}
        short = {num_tokens: record for num_tokens, record in of_prompts.items() if num_tokens <= CHUNK_SIZES[-1]}
        # In the order in which they would be missed.
        soon = [*deepest.values(), *short.values()]
        recordings = list(dict.fromkeys([*soon, *of_prompts.values(), *of_rides, *of_steps.values()]))
        now = recordings
        if early:
            now = [next(record for key, record in deepest.items() if key.batch_size == 1), short[CHUNK_SIZES[0]]]
        progress(STAGE, 0, len(now))
        for num_done, record in enumerate(now, 1):
            record()
            progress(STAGE, num_done, len(now))
        left = [record for record in recordings if record not in now]
        self._pending = deque([*left[: len(soon)], *self._unrecorded(depths), *left[len(soon) :]])
        while not early and self.prepare():
            pass
        return GraphReport(
            batch_sizes=batch_sizes(max_running),
            depths=tuple(depths),
            num_graphs=len(graph_keys(max_running, depths)),
            chunk_sizes=sizes,
            num_rides=len(rides),
            num_late=len(left),
            device_bytes=recorder.bytes_used(),
            seconds=time.perf_counter() - began,
        )

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do a piece of what `capture` has left, any time between two launches: mostly of some 50 ms. Returns whether
        there was one."""
        if not self._pending:
            return False
        self._pending.popleft()()
        return True

    @torch.inference_mode()
    def rehearse(self, depths: Sequence[int]) -> None:
        """Run everything that `capture` records, and what is never recorded.

        For an executor on the device type "meta", where nothing is computed (runtime/rehearsal.py)."""
        spec = self._model.spec
        max_running, max_pages = len(self._needs_sampler), self._buffers.page_table_SP.shape[1]
        for num_tokens in chunk_sizes(spec.hidden_size):
            self._run_padding(chunk_room(num_tokens, most_spans(num_tokens), spec.block_tokens, max_pages))
        for ride in self._ride_keys(max(depths)):
            self._run_padding(
                chunk_room(ride.num_tokens, most_spans(ride.num_tokens), spec.block_tokens, max_pages),
                ride.batch_size,
                max(depths),
            )
        for key in graph_keys(max_running, depths):
            self._captured_step(self._slot_ids([], key.batch_size), key)
        for work in self._unrecorded(depths):
            work()

    def _unrecorded(self, depths: Sequence[int]) -> Iterator[Callable[[], object]]:
        """What is always eager, over nothing but padding: larger chunks, with windows and without, and first steps. Its
        first run loads kernels."""
        spec, max_pages = self._model.spec, self._buffers.page_table_SP.shape[1]
        rooms = eager_rooms(spec.hidden_size, block_tokens=spec.block_tokens, max_pages=max_pages)
        for sizes in rooms:
            yield partial(self._run_padding, sizes)
        for batch_size in sorted({ride.batch_size for ride in self._ride_keys(max(depths))}):
            yield partial(self._run_padding, rooms[0], batch_size, max(depths))
        # A graph's step has both or neither of these.
        for num_slots, num_drafted, sampled in product(batch_sizes(len(self._needs_sampler)), depths, (True, False)):
            first = partial(self._step, sampled=sampled, constrained=not sampled, forward=Forward.PREFILLED)
            yield partial(first, self._slot_ids([], num_slots), num_drafted)

    def _run_padding(self, sizes: PrefillSizes, num_windows: int = 0, num_drafted: int = 0) -> None:
        """A pass over nothing but padding, with windows of the padding slot if there are any."""
        batch = build_tables([], block_tokens=self._model.spec.block_tokens, sizes=sizes).on(self._device).batch
        if num_windows:
            self._ride(batch, self._slot_ids([], num_windows), num_drafted)
        else:
            self._prefill(batch)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepTicket:
        if plan.leaves:
            self._buffers.deactivate(plan.leaves)
        if plan.page_updates:
            self._buffers.update_pages(plan.page_updates)
        chunk_scores: dict[str, ScoreRows] = {}
        prefill = decode = None
        rides = self._rides(plan)
        if plan.chunks:
            started = self._now()
            with self._phase("ride" if rides else "prefill"):
                chunk_scores = self._run_chunks(plan, rides=rides)
            prefill = started, self._now()
        if plan.joins:
            with self._phase("join"):
                self._join(plan.joins)
        if plan.masks:
            self._buffers.put_masks(plan.masks)
        results = []
        if plan.first_slots:
            with self._phase("first"):
                results.append(self._results(plan.first_slots, self._first(plan)))
        started = done = self._now()
        if plan.decode_slots:
            with self._phase("decode"):
                results.append(self._results(plan.decode_slots, self._decode(plan, ridden=rides)))
            done = self._now()
            decode = started, done
        return StepTicket(
            prefill=prefill, rode=rides, decode=decode, done=done, results=results, chunk_scores=chunk_scores
        )

    def collect(self, ticket: StepTicket) -> StepOutcome:
        with self._phase("collect"):
            outcome = StepOutcome(
                rode=ticket.rode,
                scores={
                    request_id: rows.read(0, rows.token_N.shape[0], rows.top_ids_NA.shape[1])
                    for request_id, rows in ticket.chunk_scores.items()
                },
            )
            if isinstance(ticket.done, torch.cuda.Event):
                ticket.done.synchronize()
            if ticket.prefill is not None:
                outcome.prefill_seconds = _seconds_between(*ticket.prefill)
            if ticket.decode is not None:
                outcome.decode_seconds = _seconds_between(*ticket.decode)
            outcome.slots = [slot for results in ticket.results for slot in results.read()]
        return outcome

    def _captured_step(self, slot_ids_B: Tensor, key: GraphKey) -> StepResult:
        return self._step(slot_ids_B, key.num_drafted, sampled=key.sampled, constrained=key.sampled)

    def _prefill(self, batch: PrefillBatch) -> None:
        run_batch(self._model, batch, with_mtp=self._with_mtp)

    def _ride_keys(self, num_drafted: int) -> list[RideKey]:
        most_tokens = chunk_sizes(self._model.spec.hidden_size)[-1]
        return ride_keys(
            most_tokens, max_running=len(self._needs_sampler), num_columns=num_drafted + 1, most_riders=self.most_riders
        )

    def _ride(self, batch: PrefillBatch, slot_ids_B: Tensor, num_drafted: int) -> None:
        run_batch(
            self._model,
            batch,
            with_mtp=self._with_mtp,
            windows=verify_batch(open_windows(self._buffers, slot_ids_B, num_drafted)),
        )

    def _rides(self, plan: StepPlan) -> bool:
        """Whether the windows of the plan ride with its chunks: where that pays, by a graph, or eagerly where the pass
        has no graph anyway."""
        if (
            not self.most_riders
            or not plan.chunks
            or not plan.decode_slots
            or any(chunk.score_top is not None for chunk in plan.chunks)
        ):
            return False
        num_columns = plan.num_drafted + 1
        if self._prefill_graphs is None or self._ride_graphs is None:
            return num_columns * len(plan.decode_slots) <= self.most_riders
        alone = self._prefill_graphs.tokens_of(plan.chunks)
        if alone is None:
            return num_columns * even_batch(len(plan.decode_slots), num_columns) <= self.most_riders
        ridden = self._ride_graphs.rows_of(plan.chunks, len(plan.decode_slots), num_columns)
        return ridden is not None and rows_beyond(ridden, alone) <= self.most_riders

    def _run_chunks(self, plan: StepPlan, *, rides: bool) -> dict[str, ScoreRows]:
        windows = None
        if rides:
            if (
                self._prefill_graphs is not None
                and self._ride_graphs is not None
                and self._prefill_graphs.hold(plan.chunks)
            ):
                self._ride_graphs.run(plan.chunks, plan.decode_slots)
                return {}
            size = (
                len(plan.decode_slots)
                if self._graphs is None
                else even_batch(len(plan.decode_slots), plan.num_drafted + 1)
            )
            windows = verify_batch(
                open_windows(self._buffers, self._slot_ids(plan.decode_slots, size), plan.num_drafted)
            )
        return run_chunks(
            self._model,
            plan.chunks,
            with_mtp=self._with_mtp,
            device=self._device,
            graphs=self._prefill_graphs,
            windows=windows,
        )

    def _slot_ids(self, slots: Sequence[int], size: int) -> Tensor:
        """slot_ids_B of a batch of `size`, filled up with the padding slot."""
        return stage([*slots, *[len(self._needs_sampler)] * (size - len(slots))], torch.int64, self._device)

    def _first(self, plan: StepPlan) -> StepResult:
        """Always eager: the device is still busy with the prompt when the host is through with this."""
        slot_ids_B = stage(plan.first_slots, torch.int64, self._device)
        sampled, constrained = self._variant(plan, plan.first_slots)
        return self._step(
            slot_ids_B, plan.num_drafted, sampled=sampled, constrained=constrained, forward=Forward.PREFILLED
        )

    def _decode(self, plan: StepPlan, *, ridden: bool) -> StepResult:
        sampled, constrained = self._variant(plan, plan.decode_slots)
        if self._graphs is not None and not ridden:
            return self._graphs.run(plan.decode_slots, num_drafted=plan.num_drafted, sampled=sampled or constrained)
        size = len(plan.decode_slots)
        if self._graphs is not None:
            # What is left of the step is eager like a first step. In the sizes and variants of the graphs no kernel is
            # compiled for it.
            size, sampled, constrained = self._graphs.batch_size(size), sampled or constrained, sampled or constrained
        forward = Forward.RIDDEN if ridden else Forward.RUN
        slot_ids_B = self._slot_ids(plan.decode_slots, size)
        return self._step(
            slot_ids_B, plan.num_drafted, sampled=sampled, constrained=constrained, forward=forward
        ).first(len(plan.decode_slots))

    def _variant(self, plan: StepPlan, slots: Sequence[int]) -> tuple[bool, bool]:
        """(sampled, constrained) of a step over `slots`."""
        return any(self._needs_sampler[slot] for slot in slots), any(slot in plan.masks for slot in slots)

    def _results(self, slots: Sequence[int], result: StepResult) -> _Results:
        """Start the copies to the host."""
        alternatives = [self._alternatives[slot] for slot in slots]
        is_scored = any(wanted is not None for wanted in alternatives)
        return _Results(
            slots=tuple(slots),
            alternatives=alternatives,
            outcome_BF=_to_host(result.outcome_BF),
            scores=score_result(result).map(_to_host) if is_scored else None,
        )

    def _step(
        self, slot_ids_B: Tensor, num_drafted: int, *, sampled: bool, constrained: bool, forward: Forward = Forward.RUN
    ) -> StepResult:
        step = decode_step if self._forcing is None else self._forcing.step
        return step(
            self._model,
            self._drafter,
            self._buffers,
            slot_ids_B,
            num_drafted=num_drafted,
            sampled=sampled,
            constrained=constrained,
            forward=forward,
        )

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """A named range in a profiler's trace of the host."""
        return torch.cuda.nvtx.range(name) if self._device.type == "cuda" else nullcontext()

    def _now(self) -> Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _join(self, joins: Sequence[SlotJoin]) -> None:
        self._buffers.join(joins)
        if self._forcing is not None:
            self._forcing.join(joins)
        for join in joins:
            self._alternatives[join.slot] = join.logprobs
            self._needs_sampler[join.slot] = (
                not join.sampling.is_greedy or join.sampling.has_penalties or bool(join.sampling.logit_bias)
            )


def _to_host(result: Tensor) -> Tensor:
    """Start the copy to the host, into memory of this step's own."""
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
    return host.copy_(result, non_blocking=True)


def _seconds_between(started: Moment, done: Moment) -> float:
    """The device has passed both."""
    if isinstance(started, float):
        assert isinstance(done, float)
        return done - started
    assert isinstance(done, torch.cuda.Event)
    milliseconds: float = started.elapsed_time(done)
    return milliseconds / 1000.0
