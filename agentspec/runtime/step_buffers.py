"""The persistent device tensors of a decode step, one row a slot: allocated once, never replaced, so that a graph may hold their addresses.

Owns layout, padding values and the host's writes (join, leave, page updates). Knows nothing of what a step does with them.

The integers that a step changes live side by side in `slots_SF`: a step loads a slot with one gather and stores it with one scatter.

Shape letters: S slots (max_running + 1), W = max k + 1, P pages a sequence, V vocabulary, E stop ids, F fields, X = ceil(V / 32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from agentspec.kernels.reference.sampling import DrawInputs, PenaltyInputs
from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.plan import SlotJoin
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW, SamplingParams

_ACTIVE, _LENGTH, _READ_ROW, _NUM_VALID_DRAFTS, _CHECKPOINT_ROWS, _CHECKPOINT_LENS, _TOKENS = 0, 1, 2, 3, 4, 6, 8
_TEMPERATURE, _TOP_P, _LOG_MIN_P, _REPETITION, _FREQUENCY, _PRESENCE, _NUM_FLOATS = range(7)
_LENGTH_LIMIT, _SEED, _TOP_K, _STOP_IDS = range(4)
_MAX_REQUEST_STOP_IDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """Named columns of rows of `slots_SF`, as views. All int64; the letter B stands for however many rows were taken."""

    NUM_SCALARS: ClassVar[int] = _TOKENS
    """Columns before the tokens, in the order of the fields."""

    active_B: Tensor
    """1: decodes. 0: inert (empty, finished or padding). Written by join, leave and the step."""
    length_B: Tensor
    """Tokens in the committed state. Written by join and the step."""
    read_row_B: Tensor
    """Row that holds that state."""
    num_valid_drafts_B: Tensor
    """Leading draft columns that were drafted for this very prefix; columns after them are left-overs."""
    checkpoint_rows_B2: Tensor
    """Newer and older rolling checkpoint, or the spare rows that wait to become one."""
    checkpoint_lens_B2: Tensor
    """Tokens in the state of each; 0: a spare row."""
    tokens_BW: Tensor
    """Column 0: the last emitted token, not yet in the state. Then drafts. Padding 0."""
    write_rows_BW: Tensor
    """The request's own rows. Padding SCRATCH_ROW."""

    @classmethod
    def of(cls, slots_BF: Tensor) -> Self:
        width = (slots_BF.shape[1] - _TOKENS) // 2
        return cls(
            active_B=slots_BF[:, _ACTIVE],
            length_B=slots_BF[:, _LENGTH],
            read_row_B=slots_BF[:, _READ_ROW],
            num_valid_drafts_B=slots_BF[:, _NUM_VALID_DRAFTS],
            checkpoint_rows_B2=slots_BF[:, _CHECKPOINT_ROWS:_CHECKPOINT_LENS],
            checkpoint_lens_B2=slots_BF[:, _CHECKPOINT_LENS:_TOKENS],
            tokens_BW=slots_BF[:, _TOKENS : _TOKENS + width],
            write_rows_BW=slots_BF[:, _TOKENS + width :],
        )

    def packed(self) -> Tensor:
        """The same columns as one new tensor [B, F]."""
        scalars_B4 = torch.stack((self.active_B, self.length_B, self.read_row_B, self.num_valid_drafts_B), dim=1)
        return torch.cat((scalars_B4, self.checkpoint_rows_B2, self.checkpoint_lens_B2, self.tokens_BW, self.write_rows_BW), dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """What a request brings for the whole of its stay, as views of rows of `limits_SF`. All int64."""

    length_limit_B: Tensor
    """Sequence length at which the request ends."""
    seed_B: Tensor
    top_k_B: Tensor
    """1 to V; V: keep all."""
    stop_ids_BE: Tensor
    """Padding -1, which no token has."""

    @classmethod
    def of(cls, limits_BF: Tensor) -> Self:
        return cls(
            length_limit_B=limits_BF[:, _LENGTH_LIMIT],
            seed_B=limits_BF[:, _SEED],
            top_k_B=limits_BF[:, _TOP_K],
            stop_ids_BE=limits_BF[:, _STOP_IDS:],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBuffers:
    """One row a slot; the last slot is the padding slot, always inert."""

    slots_SF: Tensor
    """int64 [S, 8 + 2W], see SlotState. Writer: join, leave, the step. Reader: the step."""
    limits_SF: Tensor
    """int64 [S, 3 + E], see SlotLimits. Writer: join. Reader: the step."""
    sampling_SF: Tensor
    """float32 [S, 6]: temperature, top-p (infinite: keep all), log min-p, repetition, frequency, presence. Writer: join. Reader: the sampler."""
    page_table_SP: Tensor
    """int32 [S, P]. Padding SCRATCH_PAGE. Writer: join, page updates. Reader: the step."""
    counts_SV: Tensor
    """int32 [S, V]. Generated tokens. Writer: join (requests with penalties), the sampled step. Reader: the sampler. Stale without penalties."""
    prompt_seen_SV: Tensor
    """bool [S, V]. Tokens of the prompt. Writer: join (requests with penalties). Reader: the sampler. Stale without penalties."""
    bias_SV: Tensor
    """float32 [S, V]. Padding 0. Writer: join. Reader: the sampler."""
    mask_SWX: Tensor
    """int32 [S, W, X], bits as in constraint.MaskRows. Padding -1 (all allowed). Writer: join, masks of a plan. Reader: the constrained step."""
    block_tokens: int
    """Tokens in a page, and the grid of checkpoints."""

    @classmethod
    def allocate(
        cls,
        *,
        max_running: int,
        max_draft_tokens: int,
        max_pages_per_slot: int,
        vocab_size: int,
        num_model_stop_ids: int,
        block_tokens: int,
        device: torch.device,
    ) -> Self:
        num_slots, width = max_running + 1, max_draft_tokens + 1
        slots_SF = torch.zeros(num_slots, _TOKENS + 2 * width, dtype=torch.int64, device=device)
        slots_SF[:, _READ_ROW] = ZERO_ROW
        slots_SF[:, _CHECKPOINT_ROWS:_CHECKPOINT_LENS] = SCRATCH_ROW
        slots_SF[:, _TOKENS + width :] = SCRATCH_ROW
        limits_SF = torch.full((num_slots, _STOP_IDS + _MAX_REQUEST_STOP_IDS + num_model_stop_ids), -1, dtype=torch.int64, device=device)
        limits_SF[:, _LENGTH_LIMIT] = torch.iinfo(torch.int64).max
        limits_SF[:, _SEED] = 0
        limits_SF[:, _TOP_K] = vocab_size
        sampling_SF = torch.tensor([_sampling_row(SamplingParams(temperature=0.0))], dtype=torch.float32).repeat(num_slots, 1).to(device)
        return cls(
            slots_SF=slots_SF,
            limits_SF=limits_SF,
            sampling_SF=sampling_SF,
            page_table_SP=torch.full((num_slots, max_pages_per_slot), SCRATCH_PAGE, dtype=torch.int32, device=device),
            counts_SV=torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device),
            prompt_seen_SV=torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device),
            bias_SV=torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device),
            mask_SWX=torch.full((num_slots, width, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device),
            block_tokens=block_tokens,
        )

    @property
    def vocab_size(self) -> int:
        return self.counts_SV.shape[1]

    @property
    def device(self) -> torch.device:
        return self.slots_SF.device

    @property
    def width(self) -> int:
        """Columns of a slot's window at most: max k + 1."""
        return (self.slots_SF.shape[1] - _TOKENS) // 2

    def slot_state(self, slot_ids_B: Tensor) -> SlotState:
        """A copy of the slots' state."""
        return SlotState.of(self.slots_SF[slot_ids_B])

    def put_drafts(self, slot_ids_B: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor) -> None:
        """Enter drafts for the next step. num_valid_B: int64, how many of them each slot offers, 0 to k."""
        self.slots_SF[slot_ids_B, _NUM_VALID_DRAFTS] = num_valid_B
        self.slots_SF[slot_ids_B, _TOKENS + 1 : _TOKENS + 1 + drafts_Bk.shape[1]] = drafts_Bk

    def put_masks(self, masks: Mapping[int, MaskRows]) -> None:
        """Enter what each of these slots may say after the leading columns of its next window, and leave its other columns as they are."""
        cells = [(slot, column) for slot, rows in masks.items() for column in range(len(rows))]
        slots, columns = stage(cells, torch.int64, self.device).unbind(1)
        self.mask_SWX[slots, columns] = stage(np.concatenate(list(masks.values())), torch.int32, self.device)

    def draw_inputs(self, sampling_BF: Tensor, limits: SlotLimits) -> DrawInputs:
        return DrawInputs(
            temperature_B=sampling_BF[:, _TEMPERATURE],
            top_k_B=limits.top_k_B,
            top_p_B=sampling_BF[:, _TOP_P],
            log_min_p_B=sampling_BF[:, _LOG_MIN_P],
            seed_B=limits.seed_B,
        )

    def penalty_inputs(self, slot_ids_B: Tensor, sampling_BF: Tensor) -> PenaltyInputs:
        return PenaltyInputs(
            counts_BV=self.counts_SV[slot_ids_B],
            prompt_seen_BV=self.prompt_seen_SV[slot_ids_B],
            bias_BV=self.bias_SV[slot_ids_B],
            repetition_B=sampling_BF[:, _REPETITION],
            frequency_B=sampling_BF[:, _FREQUENCY],
            presence_B=sampling_BF[:, _PRESENCE],
        )

    def deactivate(self, slots: Sequence[int]) -> None:
        """Make slots inert."""
        self.slots_SF[stage(slots, torch.int64, self.device), _ACTIVE] = 0

    def update_pages(self, updates: Sequence[tuple[int, int, int]]) -> None:
        """Enter pages: (slot, block index, page id)."""
        slots, blocks, pages = stage(updates, torch.int64, self.device).unbind(1)
        self.page_table_SP[slots, blocks] = pages.to(torch.int32)

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Fill the slots of new requests."""
        slot_ids_J = stage([join.slot for join in joins], torch.int64, self.device)
        self.slots_SF[slot_ids_J] = stage([self._slot_row(join) for join in joins], torch.int64, self.device)
        self.limits_SF[slot_ids_J] = stage([self._limits_row(join) for join in joins], torch.int64, self.device)
        self.sampling_SF[slot_ids_J] = stage([_sampling_row(join.sampling) for join in joins], torch.float32, self.device)
        num_pages = self.page_table_SP.shape[1]
        page_rows = [join.page_ids + [SCRATCH_PAGE] * (num_pages - len(join.page_ids)) for join in joins]
        self.page_table_SP[slot_ids_J] = stage(page_rows, torch.int32, self.device)
        for join in joins:
            self._join_vocabulary(join)

    def _slot_row(self, join: SlotJoin) -> list[int]:
        assert len(join.write_rows) == self.width, f"slot {join.slot} needs {self.width} write rows, has {len(join.write_rows)}"
        assert join.length + 1 < join.length_limit, f"slot {join.slot} has no room to emit: {join.length} + 1 tokens, limit {join.length_limit}"
        drafts = [0] * (self.width - 1)
        return [1, join.length, join.read_row, 0, *join.spare_rows, join.checkpoint_length, 0, join.last_token, *drafts, *join.write_rows]

    def _limits_row(self, join: SlotJoin) -> list[int]:
        num_stop_ids = self.limits_SF.shape[1] - _STOP_IDS
        assert len(join.stop_ids) <= num_stop_ids, f"slot {join.slot} has {len(join.stop_ids)} stop ids, room for {num_stop_ids}"
        padding = [-1] * (num_stop_ids - len(join.stop_ids))
        return [join.length_limit, join.seed, join.sampling.top_k or self.vocab_size, *join.stop_ids, *padding]

    def _join_vocabulary(self, join: SlotJoin) -> None:
        self.mask_SWX[join.slot] = -1
        self.bias_SV[join.slot] = 0
        if join.sampling.logit_bias:
            token_ids = stage(list(join.sampling.logit_bias), torch.int64, self.device)
            self.bias_SV[join.slot, token_ids] = stage(list(join.sampling.logit_bias.values()), torch.float32, self.device)
        if join.sampling.has_penalties:
            counts = np.bincount(np.array(join.output_ids, dtype=np.int64), minlength=self.vocab_size)
            seen = np.bincount(np.array(join.prompt_ids, dtype=np.int64), minlength=self.vocab_size) > 0
            self.counts_SV[join.slot] = stage(counts, torch.int32, self.device)
            self.prompt_seen_SV[join.slot] = stage(seen, torch.bool, self.device)


def stage(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values as a device tensor, through memory of this call's own: a reused staging buffer would race the copy still in flight."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _sampling_row(sampling: SamplingParams) -> list[float]:
    """Columns of `sampling_SF`."""
    return [
        sampling.temperature,
        sampling.top_p if sampling.top_p < 1.0 else np.inf,
        float(np.log(sampling.min_p)) if sampling.min_p > 0.0 else -np.inf,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    ]
