"""The persistent device tensors of a decode step, with one row per slot. They are allocated once and never replaced,
because CUDA graphs hold their addresses.

Owns layout, padding values and the host's writes (join, leave, page updates). Knows nothing of what a step does with
them.

The integers that a step changes are adjacent columns of `slots_SF`, so a step loads a slot with one gather and stores
it with one scatter.

Shape letters: S slots (max_running + 1), W = max k + 1, P pages per sequence, V vocabulary, E stop ids, F fields, X =
ceil(V / 32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.kernels import slots as layout
from agentspec.kernels.slots import TOKENS, SamplingTable, SlotLimits, SlotState
from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.plan import SlotJoin
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW, RingShape, SamplingParams

_MAX_REQUEST_STOP_IDS = 16

Rows: TypeAlias = npt.NDArray[Any]
"""Host rows of a slot tensor for requests that join: [J, F]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySource:
    """What the copy drafter reads."""

    text_SL: Tensor
    """int32. Each slot's tokens by position, up to the last emitted one; stale behind it. Writer: join, the step."""
    num_copies: int
    """Copies that a step makes behind the MTP drafts."""
    min_match: int
    """Fewest tokens that must occur earlier in the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBuffers:
    """One row per slot; the last slot is the padding slot, which is always inert."""

    slots_SF: Tensor
    """int64, see SlotState. Writer: join, leave, the step. Reader: the step."""
    page_table_SP: Tensor
    """int32 [S, P]. Padding SCRATCH_PAGE. Writer: join, page updates. Reader: the step."""
    sampling: SamplingTable
    """Writer: join; for requests with penalties also the sampled step (counts); for masks also the plan. Reader: the
    sampler, and the step (limits)."""
    block_tokens: int
    """Tokens in a page; checkpoints stand at multiples of it."""
    copies: CopySource | None = None
    """None: nothing is copied."""
    ring: RingShape | None = None
    """Sizes of the slots' rings; None: every column of a window has a row."""

    @classmethod
    def allocate(
        cls,
        *,
        max_running: int,
        max_draft_tokens: int,
        max_copies: int = 0,
        min_match: int = 0,
        max_pages_per_slot: int,
        vocab_size: int,
        num_model_stop_ids: int,
        block_tokens: int,
        ring: RingShape | None = None,
        device: torch.device,
    ) -> Self:
        """max_draft_tokens: of the MTP head. min_match: see CopySource; without copies it is not used."""
        num_slots, width = max_running + 1, max_draft_tokens + max_copies + 1
        slots_SF = torch.zeros(num_slots, SlotState.num_fields(width), dtype=torch.int64, device=device)
        slot = SlotState.of(slots_SF)
        slot.read_row_B.fill_(ZERO_ROW)
        slot.checkpoint_rows_B2.fill_(SCRATCH_ROW)
        slot.write_rows_BW.fill_(SCRATCH_ROW)
        num_stop_ids = _MAX_REQUEST_STOP_IDS + num_model_stop_ids
        limits_SF = torch.full((num_slots, SlotLimits.num_fields(num_stop_ids)), -1, dtype=torch.int64, device=device)
        limits = SlotLimits.of(limits_SF)
        limits.length_limit_B.fill_(torch.iinfo(torch.int64).max)
        limits.seed_B.fill_(0)
        limits.top_k_B.fill_(vocab_size)
        sampling_SF = (
            torch.from_numpy(_sampling_rows([SamplingParams(temperature=0.0)])).repeat(num_slots, 1).to(device)
        )
        return cls(
            slots_SF=slots_SF,
            page_table_SP=torch.full((num_slots, max_pages_per_slot), SCRATCH_PAGE, dtype=torch.int32, device=device),
            sampling=SamplingTable(
                limits_SF=limits_SF,
                sampling_SF=sampling_SF,
                counts_SV=torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device),
                prompt_seen_SV=torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device),
                bias_SV=torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device),
                mask_SWX=torch.full((num_slots, width, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device),
            ),
            block_tokens=block_tokens,
            copies=None
            if max_copies == 0
            else CopySource(
                text_SL=torch.zeros(num_slots, max_pages_per_slot * block_tokens, dtype=torch.int32, device=device),
                num_copies=max_copies,
                min_match=min_match,
            ),
            ring=ring,
        )

    @property
    def vocab_size(self) -> int:
        return self.sampling.counts_SV.shape[1]

    @property
    def device(self) -> torch.device:
        return self.slots_SF.device

    @property
    def width(self) -> int:
        """Most columns of a slot's window: one more than drafts."""
        return SlotState.first_row(self.slots_SF.shape[1]) - TOKENS

    @property
    def max_mtp_drafts(self) -> int:
        return self.width - 1 - (0 if self.copies is None else self.copies.num_copies)

    def put_masks(self, masks: Mapping[int, MaskRows]) -> None:
        """Write each slot's masks for the leading columns of its next window; its other columns keep their masks."""
        cells = [(slot, column) for slot, rows in masks.items() for column in range(len(rows))]
        slots, columns = stage(cells, torch.int64, self.device).unbind(1)
        self.sampling.mask_SWX[slots, columns] = stage(np.concatenate(list(masks.values())), torch.int32, self.device)

    def deactivate(self, slots: Sequence[int]) -> None:
        """Make slots inert."""
        SlotState.of(self.slots_SF).active_B[stage(slots, torch.int64, self.device)] = 0

    def update_pages(self, updates: Sequence[tuple[int, int, int]]) -> None:
        """Write page table entries: (slot, block index, page id)."""
        slots, blocks, pages = stage(updates, torch.int64, self.device).unbind(1)
        self.page_table_SP[slots, blocks] = pages.to(torch.int32)

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Fill the slots of new requests."""
        slot_ids_J = stage([join.slot for join in joins], torch.int64, self.device)
        self.slots_SF[slot_ids_J] = stage(self._slot_rows(joins), torch.int64, self.device)
        self.sampling.limits_SF[slot_ids_J] = stage(self._limits_rows(joins), torch.int64, self.device)
        self.sampling.sampling_SF[slot_ids_J] = stage(
            _sampling_rows([join.sampling for join in joins]), torch.float32, self.device
        )
        pages_JP = np.full((len(joins), self.page_table_SP.shape[1]), SCRATCH_PAGE, np.int32)
        for pages_P, join in zip(pages_JP, joins, strict=True):
            pages_P[: len(join.page_ids)] = join.page_ids
        self.page_table_SP[slot_ids_J] = stage(pages_JP, torch.int32, self.device)
        for join in joins:
            self._join_vocabulary(join)
            if self.copies is not None:
                # Arrays of types.tokens are not copied id by id.
                text = np.concatenate([np.asarray(ids, np.int32) for ids in (join.prompt_ids, join.output_ids)])
                self.copies.text_SL[join.slot, : len(text)] = stage(text, torch.int32, self.device)

    def _slot_rows(self, joins: Sequence[SlotJoin]) -> Rows:
        rows_JF = np.zeros((len(joins), self.slots_SF.shape[1]), np.int64)
        slot = SlotState.of(rows_JF)
        num_rows = self.width if self.ring is None else 1
        for join in joins:
            assert len(join.rows.write) == num_rows, (
                f"slot {join.slot} needs {num_rows} write rows, has {len(join.rows.write)}"
            )
            assert join.length + 1 < join.length_limit, (
                f"slot {join.slot} has no room to emit: {join.length} + 1 tokens, limit {join.length_limit}"
            )
        slot.active_B[:] = 1
        slot.length_B[:] = [join.length for join in joins]
        slot.read_row_B[:] = [join.rows.prompt for join in joins]
        slot.read_length_B[:] = [join.length + 1 for join in joins]
        slot.checkpoint_rows_B2[:] = [(join.rows.newer, join.rows.older) for join in joins]
        slot.checkpoint_lens_B2[:, 0] = [join.checkpoint_length for join in joins]
        slot.tokens_BW[:, 0] = [join.last_token for join in joins]
        slot.write_rows_BW[:] = SCRATCH_ROW
        slot.write_rows_BW[:, :num_rows] = [join.rows.write for join in joins]
        return rows_JF

    def _limits_rows(self, joins: Sequence[SlotJoin]) -> Rows:
        rows_JF = np.full((len(joins), self.sampling.limits_SF.shape[1]), -1, np.int64)
        limits = SlotLimits.of(rows_JF)
        limits.length_limit_B[:] = [join.length_limit for join in joins]
        limits.seed_B[:] = [join.seed for join in joins]
        limits.top_k_B[:] = [join.sampling.top_k or self.vocab_size for join in joins]
        num_stop_ids = limits.stop_ids_BE.shape[1]
        for place, join in enumerate(joins):
            assert len(join.stop_ids) <= num_stop_ids, (
                f"slot {join.slot} has {len(join.stop_ids)} stop ids, room for {num_stop_ids}"
            )
            limits.stop_ids_BE[place, : len(join.stop_ids)] = join.stop_ids
        return rows_JF

    def _join_vocabulary(self, join: SlotJoin) -> None:
        self.sampling.mask_SWX[join.slot] = -1
        self.sampling.bias_SV[join.slot] = 0
        if join.sampling.logit_bias:
            token_ids = stage(list(join.sampling.logit_bias), torch.int64, self.device)
            self.sampling.bias_SV[join.slot, token_ids] = stage(
                list(join.sampling.logit_bias.values()), torch.float32, self.device
            )
        if join.sampling.has_penalties:
            counts = np.bincount(np.array(join.output_ids, dtype=np.int64), minlength=self.vocab_size)
            seen = np.bincount(np.array(join.prompt_ids, dtype=np.int64), minlength=self.vocab_size) > 0
            self.sampling.counts_SV[join.slot] = stage(counts, torch.int32, self.device)
            self.sampling.prompt_seen_SV[join.slot] = stage(seen, torch.bool, self.device)


def stage(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy host values to the device. Each call uses host memory of its own: a reused staging buffer could be
    overwritten while its copy is still running."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def stage_into(target: Tensor, values: object) -> None:
    """As `stage`, to a tensor that there is."""
    host = torch.as_tensor(values, dtype=target.dtype)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def _sampling_rows(params: Sequence[SamplingParams]) -> Rows:
    rows_JF = np.empty((len(params), layout.NUM_FLOATS), np.float32)
    rows_JF[:, layout.TEMPERATURE] = [sampling.temperature for sampling in params]
    rows_JF[:, layout.TOP_P] = [sampling.top_p if sampling.top_p < 1.0 else np.inf for sampling in params]
    rows_JF[:, layout.LOG_MIN_P] = [np.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf for sampling in params]
    rows_JF[:, layout.REPETITION] = [sampling.repetition_penalty for sampling in params]
    rows_JF[:, layout.FREQUENCY] = [sampling.frequency_penalty for sampling in params]
    rows_JF[:, layout.PRESENCE] = [sampling.presence_penalty for sampling in params]
    return rows_JF
