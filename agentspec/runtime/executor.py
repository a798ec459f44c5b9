"""Runs step plans on a model: the only place where the host's plan meets device tensors.

Owns the slot buffers, the drafter and the order of a launch. Knows nothing of requests beyond what a plan says, and decides
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from agentspec.errors import ConfigError
from agentspec.models.protocol import StepModel
from agentspec.mtp.drafter import Drafter, NullDrafter
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import StepResult, decode_step, read_result
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
    result: StepResult | None
    """In host memory, complete when `done` has passed. None: nothing decoded."""
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
    def launch(self, plan: StepPlan) -> StepTicket:
        if plan.leaves:
            self._buffers.deactivate(plan.leaves)
        if plan.page_updates:
            self._buffers.update_pages(plan.page_updates)
        chunk_scores = run_chunks(self._model, plan.chunks, with_mtp=self._with_mtp, device=self._device) if plan.chunks else {}
        if plan.joins:
            self._join(plan.joins, plan.num_drafted)
        started = self._now()
        if not plan.decode_slots:
            return StepTicket(decode_slots=(), alternatives=(), result=None, started=started, done=started, chunk_scores=chunk_scores)
        if plan.masks:
            self._buffers.put_masks(plan.masks)
        alternatives = [self._alternatives[slot] for slot in plan.decode_slots]
        result = decode_step(
            self._model,
            self._drafter,
            self._buffers,
            stage(plan.decode_slots, torch.int64, self._device),
            num_drafted=plan.num_drafted,
            sampled=any(self._needs_sampler[slot] for slot in plan.decode_slots),
            constrained=bool(plan.masks),
            scored=any(wanted is not None for wanted in alternatives),
            forced_rate_K=self._forced_rate_K,
        )
        on_host = StepResult(happened_BF=_to_host(result.happened_BF), scores=None if result.scores is None else result.scores.map(_to_host))
        return StepTicket(
            decode_slots=tuple(plan.decode_slots),
            alternatives=alternatives,
            result=on_host,
            started=started,
            done=self._now(),
            chunk_scores=chunk_scores,
        )

    def collect(self, ticket: StepTicket) -> StepOutcome:
        outcome = StepOutcome(
            scores={request_id: rows.read(0, rows.token_N.shape[0], rows.top_ids_NA.shape[1]) for request_id, rows in ticket.chunk_scores.items()}
        )
        if ticket.result is not None:
            outcome.decode_seconds = _seconds_between(ticket.started, ticket.done)
            outcome.slots = read_result(ticket.result, ticket.decode_slots, ticket.alternatives)
        return outcome

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
        slots = self._buffers.slot_state(slot_ids_J)
        drafts_Jk = self._drafter.draft(
            slots.tokens_BW[:, :1],
            self._model.read_hidden(slots.read_row_B)[:, None],
            slots.length_B,
            torch.zeros_like(slot_ids_J),
            self._buffers.page_table_SP[slot_ids_J],
            num_drafted,
        )
        num_valid_J = stage([0 if join.constrained else num_drafted for join in paired], torch.int64, self._device)
        self._buffers.put_drafts(slot_ids_J, drafts_Jk, num_valid_J)


def _to_host(result: Tensor) -> Tensor:
    """Start the copy to the host, into memory of this step's own."""
    if result.device.type == "cpu":
        return result
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
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
