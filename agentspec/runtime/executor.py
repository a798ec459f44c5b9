"""Runs step plans on a model: the only place where the host's plan meets device tensors.

Owns the slot buffers, the drafter and the order of a launch. Decode steps run eagerly until `capture` has recorded them as CUDA graphs; everything
else is always eager. Knows nothing of requests beyond what a plan says, and decides nothing.

Shape letters: B slots in the step, F fields; J joins, k drafts, K forced rates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import ConfigError
from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import Drafter, NullDrafter
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import StepResult, decode_step, read_result, score_result
from agentspec.runtime.graphs import GraphReport, Recorder, StepGraphs
from agentspec.runtime.plan import SlotJoin, StepOutcome, StepPlan
from agentspec.runtime.prefill import run_chunks
from agentspec.runtime.scores import ScoreRows
from agentspec.runtime.step_buffers import StepBuffers, stage
from agentspec.types import MAX_DRAFT_TOKENS

Moment: TypeAlias = float | torch.cuda.Event
"""A point in the device's time: seconds of the host's clock where the host computes, else an event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTicket:
    """A launched plan: what `collect` reads once the device is done."""

    decode_slots: Sequence[int]
    alternatives: Sequence[int | None]
    """For each of them: how many come with the score of an emitted token; None: no scores."""
    happened_BF: Tensor | None
    """See decode_step.StepResult. In host memory, complete when `done` has passed. None: nothing decoded."""
    scores: ScoreRows | None
    """Of what was emitted, where the same holds. None: nobody wants any."""
    started: Moment
    """Before the decode part."""
    done: Moment
    """After it."""
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
            )

    @torch.inference_mode()
    def capture(self, depths: Sequence[int], recorder: Recorder) -> GraphReport:
        """Record the decode step for every batch size; from then on each one is a replay. Call before the first launch: the model's pools must stay.

        depths: every k that a plan may ask for; another one will raise KeyError."""
        graphs = StepGraphs(
            lambda slot_ids_B, key: self._step(slot_ids_B, key.num_drafted, sampled=key.sampled, constrained=key.sampled),
            recorder,
            max_running=len(self._needs_sampler),
            depths=depths,
            device=self._device,
        )
        self._graphs = graphs
        return graphs.report

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepTicket:
        if plan.leaves:
            self._buffers.deactivate(plan.leaves)
        if plan.page_updates:
            self._buffers.update_pages(plan.page_updates)
        chunk_scores: dict[str, ScoreRows] = {}
        if plan.chunks:
            with self._phase("prefill"):
                chunk_scores = run_chunks(self._model, plan.chunks, with_mtp=self._with_mtp, device=self._device)
        if plan.joins:
            with self._phase("join"):
                self._join(plan.joins, plan.num_drafted)
        started = done = self._now()
        happened_BF, scores = None, None
        alternatives = [self._alternatives[slot] for slot in plan.decode_slots]
        if plan.decode_slots:
            with self._phase("decode"):
                result = self._decode(plan)
                happened_BF = _to_host(result.happened_BF)
                if any(wanted is not None for wanted in alternatives):
                    scores = score_result(result).map(_to_host)
            done = self._now()
        return StepTicket(
            decode_slots=tuple(plan.decode_slots),
            alternatives=alternatives,
            happened_BF=happened_BF,
            scores=scores,
            started=started,
            done=done,
            chunk_scores=chunk_scores,
        )

    def collect(self, ticket: StepTicket) -> StepOutcome:
        with self._phase("collect"):
            outcome = StepOutcome(
                scores={request_id: rows.read(0, rows.token_N.shape[0], rows.top_ids_NA.shape[1]) for request_id, rows in ticket.chunk_scores.items()}
            )
            if ticket.happened_BF is not None:
                outcome.decode_seconds = _seconds_between(ticket.started, ticket.done)
                outcome.slots = read_result(ticket.happened_BF, ticket.scores, ticket.decode_slots, ticket.alternatives)
        return outcome

    def _decode(self, plan: StepPlan) -> StepResult:
        if plan.masks:
            self._buffers.put_masks(plan.masks)
        constrained = bool(plan.masks)
        sampled = any(self._needs_sampler[slot] for slot in plan.decode_slots)
        if self._graphs is not None:
            return self._graphs.run(plan.decode_slots, num_drafted=plan.num_drafted, sampled=sampled or constrained)
        return self._step(stage(plan.decode_slots, torch.int64, self._device), plan.num_drafted, sampled=sampled, constrained=constrained)

    def _step(self, slot_ids_B: Tensor, num_drafted: int, *, sampled: bool, constrained: bool) -> StepResult:
        return decode_step(
            self._model,
            self._drafter,
            self._buffers,
            slot_ids_B,
            num_drafted=num_drafted,
            sampled=sampled,
            constrained=constrained,
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

    def _join(self, joins: Sequence[SlotJoin], num_drafted: int) -> None:
        """Fill the slots, and draft from the pair that ends each prompt, so that the first decode step verifies drafts already.

        A constrained slot needs that pair's K/V all the same, but offers no drafts: nobody knows the masks after them yet."""
        self._buffers.join(joins)
        for join in joins:
            self._alternatives[join.slot] = join.logprobs
            self._needs_sampler[join.slot] = not join.sampling.is_greedy or join.sampling.has_penalties or bool(join.sampling.logit_bias)
        # The first token of a sequence pairs with nothing: no drafts from it.
        paired = [join for join in joins if join.length > 0]
        if not (self._with_mtp and paired):
            return
        slot_ids_J = stage([join.slot for join in paired], torch.int64, self._device)
        window = kernels.backend(self._device).open_window(self._buffers.slots_SF, self._buffers.page_table_SP, slot_ids_J, 1)
        hidden_J1H = self._model.read_hidden(window.read_row_B)[:, None]
        first_J = torch.zeros_like(slot_ids_J)
        drafts_Jk = self._drafter.draft(window.tokens_BT, hidden_J1H, window.start_B, first_J, window.page_table_BP, num_drafted)
        num_valid_J = stage([0 if join.constrained else num_drafted for join in paired], torch.int64, self._device)
        self._buffers.put_drafts(slot_ids_J, drafts_Jk, num_valid_J)


def _to_host(result: Tensor) -> Tensor:
    """Start the copy to the host, into memory of this step's own."""
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
    return host.copy_(result, non_blocking=True)


def _seconds_between(started: Moment, done: Moment) -> float:
    """Waits until `done` has passed."""
    if isinstance(started, float):
        assert isinstance(done, float)
        return done - started
    assert isinstance(done, torch.cuda.Event)
    done.synchronize()
    milliseconds: float = started.elapsed_time(done)
    return milliseconds / 1000.0
