"""The layout of a slot: which column of the step's integer and float tensors means what.

Everything that a decode step knows of a running request lies in one row (a slot) of a few tensors. The kernels that open and commit a window, and
the sampler, read and write those rows; the runtime owns the tensors and fills them. Knows no values and no order of a step.

Shape letters: S slots, B slots in the step, W = max k + 1, V vocabulary, E stop ids, F fields, X = ceil(V / 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

ACTIVE, LENGTH, READ_ROW, NUM_VALID_DRAFTS, CHECKPOINT_ROWS, CHECKPOINT_LENS, TOKENS = 0, 1, 2, 3, 4, 6, 8
"""First columns of SlotState's fields in a row of `slots_SF`. The write rows follow the W tokens."""
LENGTH_LIMIT, SEED, TOP_K, STOP_IDS = range(4)
"""First columns of SlotLimits' fields in a row of `limits_SF`."""
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE, NUM_FLOATS = range(7)
"""Columns of `sampling_SF`."""
NUM_COUNTS = 4
"""Columns of `happened_BF` (see Commit) before the slot's scalars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """Named columns of rows of `slots_SF`, as views. All int64; the letter B stands for however many rows were taken."""

    NUM_SCALARS: ClassVar[int] = TOKENS
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
        width = (slots_BF.shape[1] - TOKENS) // 2
        return cls(
            active_B=slots_BF[:, ACTIVE],
            length_B=slots_BF[:, LENGTH],
            read_row_B=slots_BF[:, READ_ROW],
            num_valid_drafts_B=slots_BF[:, NUM_VALID_DRAFTS],
            checkpoint_rows_B2=slots_BF[:, CHECKPOINT_ROWS:CHECKPOINT_LENS],
            checkpoint_lens_B2=slots_BF[:, CHECKPOINT_LENS:TOKENS],
            tokens_BW=slots_BF[:, TOKENS : TOKENS + width],
            write_rows_BW=slots_BF[:, TOKENS + width :],
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
            length_limit_B=limits_BF[:, LENGTH_LIMIT],
            seed_B=limits_BF[:, SEED],
            top_k_B=limits_BF[:, TOP_K],
            stop_ids_BE=limits_BF[:, STOP_IDS:],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTable:
    """How every slot draws its tokens: persistent tensors, one row a slot."""

    limits_SF: Tensor
    """int64 [S, 3 + E], see SlotLimits."""
    sampling_SF: Tensor
    """float32 [S, 6]: temperature, top-p (infinite: keep all), log min-p (minus infinity: keep all), repetition, frequency, presence."""
    counts_SV: Tensor
    """int32 [S, V]. Generated tokens. Stale where a slot has no penalties."""
    prompt_seen_SV: Tensor
    """bool [S, V]. Tokens of the prompt. Stale where a slot has no penalties."""
    bias_SV: Tensor
    """float32 [S, V]. Padding 0."""
    mask_SWX: Tensor
    """int32 [S, W, X]: bit v % 32 of word v // 32 allows token v. Padding -1 (all allowed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What a step reads of its slots before the forward. An inert slot reads the zero row at length 0 and writes to scratch."""

    tokens_BT: Tensor
    """int64. Last emitted token, then drafts."""
    start_B: Tensor
    """int64. Position of column 0; 0 for an inert slot."""
    read_row_B: Tensor
    """int64. ZERO_ROW for an inert slot."""
    write_rows_BT: Tensor
    """int64. SCRATCH_ROW for an inert slot."""
    page_table_BP: Tensor
    """int32. SCRATCH_PAGE for an inert slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a step decided, before it drafts."""

    tokens_BT: Tensor
    """int64. The target's choice after each column; where acceptance was forced, the accepted drafts instead."""
    num_accepted_B: Tensor
    """int64. Drafts that stand, after stop ids and the length limit; columns 0..num_accepted are emitted."""
    draft_start_B: Tensor
    """int64. Position of the first emitted token: window start + 1."""
    happened_BF: Tensor
    """int64 [B, 4 + 8 + T + k]: num_emitted, num_accepted, num_offered, stop (all 0 for an inert slot); the slot's scalars after the step, in
    SlotState's order; tokens_BT; room for the k drafts, which `publish_drafts` fills."""
