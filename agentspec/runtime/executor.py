"""Runs step plans on a model: the only place where the host's plan meets device tensors.

Owns the slot buffers, the drafter and the order of a launch. Decode steps and short prompt chunks run eagerly until `capture` has recorded them as
CUDA graphs; everything else is always eager. Knows nothing of requests beyond what a plan says, and decides nothing.

Shape letters: B slots in the step, F fields, K forced rates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from agentspec.errors import ConfigError
from agentspec.kernels import PrefillBatch
from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import Drafter, NullDrafter
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import StepResult, decode_step, read_result, score_result
from agentspec.runtime.graphs import CountedRecorder, GraphKey, GraphReport, Recorder, StepGraphs, batch_sizes, graph_keys
from agentspec.runtime.plan import SlotJoin, SlotOutcome, StepOutcome, StepPlan
from agentspec.runtime.prefill import run_batch, run_chunks
from agentspec.runtime.prefill_graphs import PrefillGraphs, chunk_sizes, rehearsed_sizes
from agentspec.runtime.prefill_tables import PrefillTables
from agentspec.runtime.scores import ScoreRows
from agentspec.runtime.step_buffers import StepBuffers, stage
from agentspec.types import MAX_DRAFT_TOKENS, Progress, no_progress

Moment: TypeAlias = float | torch.cuda.Event
"""A point in the device's time: seconds of the host's clock where the host computes, else an event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """What a step brought some slots. In host memory, complete when the step is done."""

    slots: Sequence[int]
    alternatives: Sequence[int | None]
    """For each of them: how many come with the score of an emitted token; None: no scores."""
    happened_BF: Tensor
    """See decode_step.StepResult."""
    scores: ScoreRows | None
    """Of what was emitted. None: nobody wants any."""

    def read(self) -> list[SlotOutcome]:
        return read_result(self.happened_BF, self.scores, self.slots, self.alternatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTicket:
    """A launched plan: what `collect` reads once the device is done."""

    prefill: tuple[Moment, Moment] | None
    """Before and after the chunks."""
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
        device: torch.device | str = "cpu",
    ) -> None:
        """max_pages_per_slot: blocks of the longest sequence plus 2 * max_draft_tokens tokens, which the last step may write beyond its end.

        Raises ConfigError if the model has no MTP head to draft with, or if forced acceptance lacks a rate."""
        if not 0 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError("draft_tokens", max_draft_tokens, f"must be 0 to {MAX_DRAFT_TOKENS}")
        if max_draft_tokens > 0 and not model.spec.has_mtp:
            raise ConfigError("draft_tokens", max_draft_tokens, f"model {model.spec.name} has no MTP head; only 0 works")
        if force_acceptance is not None and len(force_acceptance) < max_draft_tokens:
            raise ConfigError("force_acceptance", force_acceptance, f"needs a rate for each of {max_draft_tokens} drafts")
        self._model = model
        self._device = torch.device(device)
        self._with_mtp = max_draft_tokens > 0
        self._drafter: Drafter = MtpDrafter(model) if self._with_mtp else NullDrafter()
        self._needs_sampler = [False] * max_running
        self._alternatives: list[int | None] = [None] * max_running
        self._graphs: StepGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        with torch.inference_mode():
            self._forced_rate_K = None if force_acceptance is None else stage(force_acceptance, torch.float32, self._device)
            self._buffers = StepBuffers.allocate(
                max_running=max_running,
                max_draft_tokens=max_draft_tokens,
                max_pages_per_slot=max_pages_per_slot,
                vocab_size=model.spec.vocab_size,
                num_model_stop_ids=len(model.spec.stop_token_ids),
                block_tokens=model.spec.block_tokens,
                device=self._device,
                allow_forced_output=allow_forced_output,
            )

    @torch.inference_mode()
    def capture(self, depths: Sequence[int], recorder: Recorder, progress: Progress = no_progress) -> GraphReport:
        """Record the decode step for every batch size, from then on each one is a replay, and short prompt chunks. Call before the first launch: the
        model's pools must stay.

        depths: every k that a plan may ask for; another one will raise KeyError. progress: told how many graphs there are."""
        sizes = chunk_sizes(self._model.spec.hidden_size)
        counted = CountedRecorder(recorder, len(graph_keys(len(self._needs_sampler), depths)) + len(sizes), progress)
        graphs = StepGraphs(self._captured_step, counted, max_running=len(self._needs_sampler), depths=depths, device=self._device)
        prefill_graphs = PrefillGraphs(
            self._prefill,
            counted,
            sizes=sizes,
            block_tokens=self._model.spec.block_tokens,
            max_pages=self._buffers.page_table_SP.shape[1],
            device=self._device,
        )
        self._graphs, self._prefill_graphs = graphs, prefill_graphs
        return replace(graphs.report, chunk_sizes=sizes, device_bytes=recorder.bytes_used(), seconds=graphs.report.seconds + prefill_graphs.seconds)

    @torch.inference_mode()
    def rehearse(self, depths: Sequence[int]) -> None:
        """Run everything that `capture` records, and what is never recorded: larger chunks, and first steps.

        For an executor on the device type "meta", where nothing is computed (runtime/rehearsal.py)."""
        max_running, max_pages = len(self._needs_sampler), self._buffers.page_table_SP.shape[1]
        for sizes in rehearsed_sizes(self._model.spec.hidden_size, block_tokens=self._model.spec.block_tokens, max_pages=max_pages):
            self._prefill(PrefillTables(sizes=sizes, words=torch.empty(sizes.num_words, dtype=torch.int64, device=self._device)).batch)
        for key in graph_keys(max_running, depths):
            self._captured_step(torch.empty(key.batch_size, dtype=torch.int64, device=self._device), key)
        for num_slots in batch_sizes(max_running):
            slot_ids_B = torch.empty(num_slots, dtype=torch.int64, device=self._device)
            for num_drafted, sampled, constrained in product(depths, (False, True), (False, True)):
                self._step(slot_ids_B, num_drafted, sampled=sampled, constrained=constrained, prefilled=True)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepTicket:
        if plan.leaves:
            self._buffers.deactivate(plan.leaves)
        if plan.page_updates:
            self._buffers.update_pages(plan.page_updates)
        chunk_scores: dict[str, ScoreRows] = {}
        prefill = decode = None
        if plan.chunks:
            started = self._now()
            with self._phase("prefill"):
                chunk_scores = run_chunks(self._model, plan.chunks, with_mtp=self._with_mtp, device=self._device, graphs=self._prefill_graphs)
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
                results.append(self._results(plan.decode_slots, self._decode(plan)))
            done = self._now()
            decode = started, done
        return StepTicket(prefill=prefill, decode=decode, done=done, results=results, chunk_scores=chunk_scores)

    def collect(self, ticket: StepTicket) -> StepOutcome:
        with self._phase("collect"):
            outcome = StepOutcome(
                scores={request_id: rows.read(0, rows.token_N.shape[0], rows.top_ids_NA.shape[1]) for request_id, rows in ticket.chunk_scores.items()}
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

    def _first(self, plan: StepPlan) -> StepResult:
        """Always eager: the device is still busy with the prompt when the host is through with this."""
        slot_ids_B = stage(plan.first_slots, torch.int64, self._device)
        sampled, constrained = self._variant(plan, plan.first_slots)
        return self._step(slot_ids_B, plan.num_drafted, sampled=sampled, constrained=constrained, prefilled=True)

    def _decode(self, plan: StepPlan) -> StepResult:
        sampled, constrained = self._variant(plan, plan.decode_slots)
        if self._graphs is not None:
            return self._graphs.run(plan.decode_slots, num_drafted=plan.num_drafted, sampled=sampled or constrained)
        return self._step(stage(plan.decode_slots, torch.int64, self._device), plan.num_drafted, sampled=sampled, constrained=constrained)

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
            happened_BF=_to_host(result.happened_BF),
            scores=score_result(result).map(_to_host) if is_scored else None,
        )

    def _step(self, slot_ids_B: Tensor, num_drafted: int, *, sampled: bool, constrained: bool, prefilled: bool = False) -> StepResult:
        return decode_step(
            self._model,
            self._drafter,
            self._buffers,
            slot_ids_B,
            num_drafted=num_drafted,
            sampled=sampled,
            constrained=constrained,
            prefilled=prefilled,
            forced_rate_K=self._forced_rate_K,
        )

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """A named range in a profiler's trace of the host."""
        return torch.cuda.nvtx.range(name) if self._device.type == "cuda" else nullcontext()

    def _now(self) -> Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _join(self, joins: Sequence[SlotJoin]) -> None:
        self._buffers.join(joins)
        for join in joins:
            self._alternatives[join.slot] = join.logprobs
            self._needs_sampler[join.slot] = not join.sampling.is_greedy or join.sampling.has_penalties or bool(join.sampling.logit_bias)


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
