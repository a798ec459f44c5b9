"""Runs step plans on a model: the only place where the host's plan becomes device work.

Owns the slot buffers, the drafter and the order of a launch. Everything runs eagerly until `capture` has recorded
decode steps and short prompt chunks, alone or with riding windows, as CUDA graphs; everything else is always eager.
Knows nothing of requests beyond a plan, and decides only whether windows ride, by the rule of runtime/ride.py.

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
from typing import NamedTuple

import torch
from torch import Tensor

from agentspec.errors import ConfigError
from agentspec.kernels import PrefillBatch
from agentspec.kernels.slots import SlotState
from agentspec.models.protocol import StepModel, VerifyBatch
from agentspec.mtp.drafter import Drafter, NullDrafter
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import (
    Forward,
    StepResult,
    decode_step,
    open_windows,
    verify_batch,
)
from agentspec.runtime.forcing import Forcing
from agentspec.runtime.graphs import (
    MOST_FIRST,
    STAGE,
    GraphKey,
    GraphReport,
    Recorder,
    StepGraphs,
    batch_sizes,
    graph_keys,
)
from agentspec.runtime.moments import Moment, is_past, moment_on, seconds_between, wait_for
from agentspec.runtime.plan import SlotJoin, StepOutcome, StepPlan
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
from agentspec.runtime.step_results import SlotResults, score_result, to_host
from agentspec.types import DraftSource, Progress, RingShape, most_drafts, no_progress


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTicket:
    """A launched plan, for `collect` to read once the device is done."""

    prefill: tuple[Moment, Moment] | None
    """Before and after the chunks."""
    rode: bool
    """Whether the decode part's windows rode with the chunks."""
    decode: tuple[Moment, Moment] | None
    """Before and after the decode part."""
    done: Moment
    results: Sequence[SlotResults]
    """Of first steps, then of the decode part."""
    chunk_scores: dict[str, ScoreRows]
    """By request id; on the device."""


class _Graphs(NamedTuple):
    """All graphs of an executor."""

    steps: StepGraphs
    prompts: PrefillGraphs
    rides: RideGraphs


class ModelExecutor:
    """plan.Executor over a StepModel whose pools are allocated."""

    def __init__(
        self,
        model: StepModel,
        *,
        max_running: int,
        max_draft_tokens: int,
        max_copies: int = 0,
        max_pages_per_slot: int,
        force_acceptance: tuple[float, ...] | None = None,
        allow_forced_output: bool = False,
        most_riders: int = 0,
        ring: RingShape | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """max_draft_tokens: of the MTP head. max_copies: drafts behind them that are copied from the slot's own text.
        max_pages_per_slot: blocks of the longest sequence plus 2 * (max_draft_tokens + max_copies) tokens, which the
        last step may write beyond its end. most_riders: see ride.MOST_RIDERS; 0: no window rides. ring: sizes
        of the slots' rings, with which the model's pools were allocated; None: it has no rings.

        Raises ConfigError if the model has no MTP head to draft with, or if forced acceptance lacks a rate."""
        if (
            not 0
            <= max_draft_tokens + max_copies
            <= (most := most_drafts(model.spec.block_tokens, has_ring=ring is not None))
        ):
            raise ConfigError("draft_tokens", max_draft_tokens + max_copies, f"must be 0 to {most}, copies included")
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
        self.draft_sources = (*self._drafter.sources(max_draft_tokens), *(DraftSource.COPY,) * max_copies)
        """Where the draft at each position comes from."""
        self._needs_sampler = [False] * max_running
        self._is_constrained = [False] * max_running
        self._alternatives: list[int | None] = [None] * max_running
        self._graphs: _Graphs | None = None
        self._pending: deque[Callable[[], object]] = deque()
        """Work that `capture` has left to `prepare`."""
        self.most_riders = most_riders
        """May change between two plans; the graphs stay."""
        with torch.inference_mode():
            self._buffers = StepBuffers.allocate(
                max_running=max_running,
                max_draft_tokens=max_draft_tokens,
                max_copies=max_copies,
                min_match=model.spec.min_copy_match,
                max_pages_per_slot=max_pages_per_slot,
                vocab_size=model.spec.vocab_size,
                num_model_stop_ids=len(model.spec.stop_token_ids),
                block_tokens=model.spec.block_tokens,
                ring=ring,
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
        """Record the decode step for every batch size, and short prompt chunks; both are replayed from then on. Run
        once, with padding only, what is never recorded. Call before the first launch: the model's pools must not move
        afterwards.

        depths: every k that a plan may ask for; any other raises KeyError. progress: told how many graphs are recorded.
        early: return as soon as a first answer is possible; the rest is left to `prepare`, and to plans that need it
        sooner."""
        began = time.perf_counter()
        spec, max_running, max_pages = self._model.spec, len(self._needs_sampler), self._buffers.page_table_SP.shape[1]
        num_riding = self._num_riding(depths)
        sizes, rides = chunk_sizes(spec.hidden_size), self._ride_keys(num_riding)
        graphs = self._graphs = _Graphs(
            steps=StepGraphs(
                self._captured_step,
                recorder,
                max_running=max_running,
                depths=depths,
                max_mtp_drafts=self._buffers.max_mtp_drafts,
                device=self._device,
            ),
            prompts=PrefillGraphs(
                partial(self._run_pass, None),
                recorder,
                sizes=sizes,
                block_tokens=spec.block_tokens,
                max_pages=max_pages,
                device=self._device,
                most_at_need=CHUNK_SIZES[-1],
            ),
            rides=RideGraphs(
                partial(self._run_pass, num_drafted=num_riding),
                recorder,
                keys=rides,
                padding_slot=max_running,
                num_columns=num_riding + 1,
                block_tokens=spec.block_tokens,
                max_pages=max_pages,
                device=self._device,
            ),
        )
        of_steps, of_prompts = graphs.steps.recordings(), graphs.prompts.recordings()
        deepest = {key: record for key, record in of_steps.items() if key.num_drafted == num_riding}
        short = {num_tokens: record for num_tokens, record in of_prompts.items() if num_tokens <= CHUNK_SIZES[-1]}
        # In the order in which they are needed.
        soon = [*deepest.values(), *short.values()]
        recordings = list(dict.fromkeys([*soon, *of_prompts.values(), *graphs.rides.recordings(), *of_steps.values()]))
        now = recordings
        if early:
            now = [
                *(record for key, record in deepest.items() if key.batch_size == 1 and key.sampled),
                short[CHUNK_SIZES[0]],
            ]
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
            num_graphs=sum(not key.is_first for key in of_steps),
            num_first=sum(key.is_first for key in of_steps),
            chunk_sizes=sizes,
            num_rides=len(rides),
            num_late=len(left),
            device_bytes=recorder.bytes_used(),
            seconds=time.perf_counter() - began,
        )

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do one piece of what `capture` has left, usually about 50 ms. May be called between any two launches. Returns
        whether there was one."""
        if not self._pending:
            return False
        self._pending.popleft()()
        return True

    @property
    def has_deferred(self) -> bool:
        """Whether `prepare` would do anything."""
        return bool(self._pending)

    def is_done(self, ticket: StepTicket) -> bool:
        """Whether `collect` would not wait for the device."""
        return is_past(ticket.done)

    @torch.inference_mode()
    def rehearse(self, depths: Sequence[int]) -> None:
        """Run everything that `capture` records or runs, without recording.

        For an executor on the device type "meta", where nothing is computed (runtime/rehearsal.py)."""
        spec = self._model.spec
        max_running, max_pages = len(self._needs_sampler), self._buffers.page_table_SP.shape[1]
        alone = [(num_tokens, 0) for num_tokens in chunk_sizes(spec.hidden_size)]
        num_riding = self._num_riding(depths)
        ridden = [(ride.num_tokens, ride.batch_size) for ride in self._ride_keys(num_riding)]
        for num_tokens, num_windows in alone + ridden:
            room = chunk_room(num_tokens, most_spans(num_tokens), spec.block_tokens, max_pages)
            self._run_padding(room, num_windows, num_riding)
        for key in graph_keys(max_running, depths, max_mtp_drafts=self._buffers.max_mtp_drafts):
            self._captured_step(self._slot_ids([], key.batch_size), key)
        for work in self._unrecorded(depths):
            work()

    def _unrecorded(self, depths: Sequence[int]) -> Iterator[Callable[[], object]]:
        """Runs, with padding only, of what is always eager: larger chunks, with and without windows, and first steps.
        The first run loads the kernels."""
        spec, max_pages = self._model.spec, self._buffers.page_table_SP.shape[1]
        rooms = eager_rooms(spec.hidden_size, block_tokens=spec.block_tokens, max_pages=max_pages)
        for sizes in rooms:
            yield partial(self._run_padding, sizes)
        num_riding = self._num_riding(depths)
        for batch_size in sorted({ride.batch_size for ride in self._ride_keys(num_riding)}):
            yield partial(self._run_padding, rooms[0], batch_size, num_riding)
        # A graph's variant samples and masks, or does neither; first steps also occur with only one of the two.
        for num_slots, num_drafted, sampled in product(batch_sizes(len(self._needs_sampler)), depths, (True, False)):
            if num_drafted > self._buffers.max_mtp_drafts or num_slots <= MOST_FIRST:
                continue
            first = partial(self._step, sampled=sampled, constrained=not sampled, forward=Forward.PREFILLED)
            yield partial(first, self._slot_ids([], num_slots), num_drafted)

    def _run_padding(self, sizes: PrefillSizes, num_windows: int = 0, num_drafted: int = 0) -> None:
        """Run a pass over padding only, with `num_windows` windows of the padding slot."""
        batch = build_tables([], block_tokens=self._model.spec.block_tokens, sizes=sizes).on(self._device).batch
        self._run_pass(self._slot_ids([], num_windows) if num_windows else None, batch, num_drafted)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepTicket:
        chunk_scores: dict[str, ScoreRows] = {}
        prefill = decode = None
        rides = self._rides(plan)
        if rides:
            self._update_slots(plan)
        if plan.chunks:
            started = moment_on(self._device)
            with self._phase("ride" if rides else "prefill"):
                chunk_scores = self._run_chunks(plan, rides=rides)
            prefill = started, moment_on(self._device)
        if not rides:
            # Behind the chunks, which don't read slots: the device then has work while the host does this.
            self._update_slots(plan)
        if plan.joins:
            with self._phase("join"):
                self._join(plan.joins)
        if plan.masks:
            self._buffers.put_masks(plan.masks)
        results = []
        if plan.first_slots:
            with self._phase("first"):
                results.append(self._results(plan.first_slots, self._first(plan)))
        started = done = moment_on(self._device)
        if plan.decode_slots:
            with self._phase("decode"):
                results.append(self._results(plan.decode_slots, self._decode(plan, ridden=rides)))
            done = moment_on(self._device)
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
            wait_for(ticket.done)
            if ticket.prefill is not None:
                outcome.prefill_seconds = seconds_between(*ticket.prefill)
            if ticket.decode is not None:
                outcome.decode_seconds = seconds_between(*ticket.decode)
            outcome.slots = [slot for results in ticket.results for slot in results.read()]
        return outcome

    def _update_slots(self, plan: StepPlan) -> None:
        """End the slots that leave, and give the others their pages."""
        if plan.leaves:
            self._buffers.deactivate(plan.leaves)
        if plan.page_updates:
            self._buffers.update_pages(plan.page_updates)

    def _captured_step(self, slot_ids_B: Tensor, key: GraphKey) -> StepResult:
        forward = Forward.PREFILLED if key.is_first else Forward.RUN
        return self._step(slot_ids_B, key.num_drafted, sampled=key.sampled, constrained=key.sampled, forward=forward)

    def _run_pass(self, slot_ids_B: Tensor | None, batch: PrefillBatch, num_drafted: int = 0) -> None:
        """A prompt pass, in which the windows of `slot_ids_B` ride; None: no windows."""
        windows = None if slot_ids_B is None else self._windows(slot_ids_B, num_drafted)
        run_batch(self._model, batch, with_mtp=self._with_mtp, windows=windows)

    def _windows(self, slot_ids_B: Tensor, num_drafted: int) -> VerifyBatch:
        return verify_batch(open_windows(self._buffers, slot_ids_B, num_drafted))

    def _num_riding(self, depths: Sequence[int]) -> int:
        """Drafts of the windows that ride. Windows with copies don't: a pass is no place for columns that are often
        dead."""
        return min(max(depths), self._buffers.max_mtp_drafts)

    def _ride_keys(self, num_drafted: int) -> list[RideKey]:
        most_tokens = chunk_sizes(self._model.spec.hidden_size)[-1]
        return ride_keys(
            most_tokens, max_running=len(self._needs_sampler), num_columns=num_drafted + 1, most_riders=self.most_riders
        )

    def _rides(self, plan: StepPlan) -> bool:
        """Whether the plan's windows ride with its chunks: only where it saves time, and where a graph holds both or
        the pass is eager anyway."""
        if not (self.most_riders and plan.chunks and plan.decode_slots) or _is_scored(plan):
            return False
        if plan.num_drafted > self._buffers.max_mtp_drafts:
            return False
        num_slots, num_columns = len(plan.decode_slots), plan.num_drafted + 1
        if self._graphs is None:
            return num_columns * num_slots <= self.most_riders
        alone = self._graphs.prompts.tokens_of(plan.chunks)
        if alone is None:
            return num_columns * even_batch(num_slots, num_columns) <= self.most_riders
        ridden = self._graphs.rides.rows_of(plan.chunks, num_slots, num_columns)
        return ridden is not None and rows_beyond(ridden, alone) <= self.most_riders

    def _run_chunks(self, plan: StepPlan, *, rides: bool) -> dict[str, ScoreRows]:
        """Run the plan's chunks, by a graph if one holds them. Returns the requested scores, by request id."""
        graphs, num_slots, num_drafted = self._graphs, len(plan.decode_slots), plan.num_drafted
        if graphs is not None and not _is_scored(plan) and graphs.prompts.tokens_of(plan.chunks) is not None:
            if rides:
                graphs.rides.run(plan.chunks, plan.decode_slots)
            else:
                graphs.prompts.run(plan.chunks)
            return {}
        batch_size = num_slots if graphs is None else even_batch(num_slots, num_drafted + 1)
        windows = self._windows(self._slot_ids(plan.decode_slots, batch_size), num_drafted) if rides else None
        riders = batch_size * (num_drafted + 1) if rides else 0
        return run_chunks(
            self._model,
            plan.chunks,
            with_mtp=self._with_mtp,
            device=self._device,
            sizes=None if graphs is None else graphs.prompts.eager_sizes(plan.chunks, riders=riders),
            windows=windows,
        )

    def _slot_ids(self, slots: Sequence[int], size: int) -> Tensor:
        """slot_ids_B of a batch of `size`, padded with the padding slot."""
        return stage([*slots, *[len(self._needs_sampler)] * (size - len(slots))], torch.int64, self._device)

    def _first(self, plan: StepPlan) -> StepResult:
        """Run first steps. Those of many slots are eager: their prompts keep the device busy while the host launches
        this."""
        sampled, constrained = self._variant(plan, plan.first_slots)
        num_drafted = min(plan.num_drafted, self._buffers.max_mtp_drafts)  # they verify nothing
        if self._graphs is not None and len(plan.first_slots) <= MOST_FIRST:
            return self._graphs.steps.run(
                plan.first_slots, num_drafted=num_drafted, sampled=sampled or constrained, is_first=True
            )
        slot_ids_B = stage(plan.first_slots, torch.int64, self._device)
        return self._step(slot_ids_B, num_drafted, sampled=sampled, constrained=constrained, forward=Forward.PREFILLED)

    def _decode(self, plan: StepPlan, *, ridden: bool) -> StepResult:
        sampled, constrained = self._variant(plan, plan.decode_slots)
        size = len(plan.decode_slots)
        if self._graphs is not None:
            steps = self._graphs.steps
            if not ridden:
                return steps.run(plan.decode_slots, num_drafted=plan.num_drafted, sampled=sampled or constrained)
            # The rest of the step runs eagerly, like a first step. It takes the graphs' sizes and variants, so no
            # further kernel is compiled.
            size = steps.batch_size(size)
            sampled = constrained = sampled or constrained
        forward = Forward.RIDDEN if ridden else Forward.RUN
        slot_ids_B = self._slot_ids(plan.decode_slots, size)
        return self._step(
            slot_ids_B, plan.num_drafted, sampled=sampled, constrained=constrained, forward=forward
        ).first(len(plan.decode_slots))

    def _variant(self, plan: StepPlan, slots: Sequence[int]) -> tuple[bool, bool]:
        """(sampled, constrained) of a step over `slots`."""
        return any(self._needs_sampler[slot] for slot in slots), any(slot in plan.masks for slot in slots)

    def _results(self, slots: Sequence[int], result: StepResult) -> SlotResults:
        """Start copying a step's results to the host."""
        alternatives = [self._alternatives[slot] for slot in slots]
        drafts_Bk = None
        if any(self._is_constrained[slot] for slot in slots):
            slot_ids_B = stage(slots, torch.int64, self._device)
            drafts_Bk = SlotState.of(self._buffers.slots_SF.index_select(0, slot_ids_B)).tokens_BW[:, 1:]
        is_scored = any(wanted is not None for wanted in alternatives)
        return SlotResults(
            slots=tuple(slots),
            alternatives=alternatives,
            outcome_BF=to_host(result.outcome_BF),
            drafts_Bk=None if drafts_Bk is None else to_host(drafts_Bk),
            max_mtp_drafts=self._buffers.max_mtp_drafts,
            scores=score_result(result).map(to_host) if is_scored else None,
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
        """A named range in a profiler's trace of the host (NVTX); does nothing on a CPU."""
        return torch.cuda.nvtx.range(name) if self._device.type == "cuda" else nullcontext()

    def _join(self, joins: Sequence[SlotJoin]) -> None:
        self._buffers.join(joins)
        if self._forcing is not None:
            self._forcing.join(joins)
        for join in joins:
            self._alternatives[join.slot] = join.logprobs
            self._is_constrained[join.slot] = join.constrained
            self._needs_sampler[join.slot] = (
                not join.sampling.is_greedy or join.sampling.has_penalties or bool(join.sampling.logit_bias)
            )


def _is_scored(plan: StepPlan) -> bool:
    return any(chunk.score_top is not None for chunk in plan.chunks)
