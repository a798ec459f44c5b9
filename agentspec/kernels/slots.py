"""Layout of a slot: the columns of the integer and float tensors that describe a running request.

All per-request state of a decode step is one row (a slot) of a few tensors. The kernels that open and commit a window,
and the sampler, read and write these rows; the runtime owns the tensors and fills them. This module knows no values
and no order of operations.

A record class names the columns of such rows. `of` returns them as views, of a device tensor or of a numpy array on
the host, so both sides use the same field names. Kernels that take addresses, and rows with single columns only, use
the constants.

Shape letters: S slots, B gathered rows, W = max k + 1, T = k + 1 columns of a step's window, k drafts, V vocabulary, E
stop ids, F fields, X = ceil(V / 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy.typing as npt
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[Any])

ACTIVE, LENGTH, READ_ROW, NUM_VALID_DRAFTS, CHECKPOINT_ROWS, CHECKPOINT_LENS, READ_LENGTH = 0, 1, 2, 3, 4, 6, 8
"""First columns of SlotState's scalars."""
TOKENS = 16
"""First column of SlotState's tokens, after its scalars: a power of two, for kernels. The write rows follow the W
tokens."""
LENGTH_LIMIT, SEED, TOP_K, STOP_IDS = range(4)
"""First columns of SlotLimits' fields."""
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE, NUM_FLOATS = range(7)
"""Columns of `sampling_SF`. Top-p off is infinity (with 1.0, the rounding of a cumulative sum could cut the tail);
min-p off is a log min-p of minus infinity."""
NUM_EMITTED, NUM_ACCEPTED, NUM_OFFERED, STOP, SCALARS = range(5)
"""First columns of OutcomeRows' fields. The slot's scalars are followed by the T tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState(Generic[Array]):
    """Rows of `slots_SF`. All int64."""

    active_B: Array
    """1: active. 0: inert (empty, finished or padding). Written by join, leave and the step."""
    length_B: Array
    """Tokens in the committed state. Written by join and the step."""
    read_row_B: Array
    """Row that holds that state; for a slot with a ring, the state that the ring starts from."""
    read_length_B: Array
    """Tokens in the state of the read row: the length, and for a slot with a ring at most that."""
    num_valid_drafts_B: Array
    """Number of leading draft columns that were drafted for this prefix. Later columns are stale."""
    checkpoint_rows_B2: Array
    """Rows of the newer and the older rolling checkpoint, or spare rows not yet used as one."""
    checkpoint_lens_B2: Array
    """Tokens in the state of each; 0 marks a spare row."""
    tokens_BW: Array
    """Column 0: the last emitted token, which is not yet in the state. Then drafts. Padding 0."""
    write_rows_BW: Array
    """The request's own rows. Padding SCRATCH_ROW. A slot with a ring uses column 0 only: the row that the next state
    is stored to."""

    @staticmethod
    def num_fields(width: int) -> int:
        """F for windows of up to `width` columns."""
        return TOKENS + 2 * width

    @classmethod
    def of(cls, rows_BF: Array) -> SlotState[Array]:
        first_row = (TOKENS + rows_BF.shape[1]) // 2
        return SlotState(
            active_B=rows_BF[:, ACTIVE],
            length_B=rows_BF[:, LENGTH],
            read_row_B=rows_BF[:, READ_ROW],
            read_length_B=rows_BF[:, READ_LENGTH],
            num_valid_drafts_B=rows_BF[:, NUM_VALID_DRAFTS],
            checkpoint_rows_B2=rows_BF[:, CHECKPOINT_ROWS:CHECKPOINT_LENS],
            checkpoint_lens_B2=rows_BF[:, CHECKPOINT_LENS:READ_LENGTH],
            tokens_BW=rows_BF[:, TOKENS:first_row],
            write_rows_BW=rows_BF[:, first_row:],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits(Generic[Array]):
    """Rows of `limits_SF`: parameters that a request keeps from start to end. All int64."""

    length_limit_B: Array
    """Sequence length at which the request ends."""
    seed_B: Array
    top_k_B: Array
    """1 to V; V: keep all."""
    stop_ids_BE: Array
    """Padding -1, which is no token id."""

    @staticmethod
    def num_fields(num_stop_ids: int) -> int:
        return STOP_IDS + num_stop_ids

    @classmethod
    def of(cls, rows_BF: Array) -> SlotLimits[Array]:
        return SlotLimits(
            length_limit_B=rows_BF[:, LENGTH_LIMIT],
            seed_B=rows_BF[:, SEED],
            top_k_B=rows_BF[:, TOP_K],
            stop_ids_BE=rows_BF[:, STOP_IDS:],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeRows(Generic[Array]):
    """Rows of `outcome_BF`: the result of a step. All int64. For an inert slot the counts and `stop_B` are 0, and its
    tokens are undefined."""

    num_emitted_B: Array
    num_accepted_B: Array
    """Accepted drafts, after the cut at stop ids and the length limit."""
    num_offered_B: Array
    """Valid drafts in the window."""
    stop_B: Array
    """STOP_RUNNING, STOP_ID or STOP_LENGTH."""
    length_B: Array
    """This and the next two: as in SlotState, after the step."""
    checkpoint_rows_B2: Array
    checkpoint_lens_B2: Array
    num_valid_drafts_B: Array
    """Drafts made for the next window; filled in by `publish_drafts`."""
    scalars_BF: Array
    """All of the slot's scalars, including the last four fields."""
    tokens_BT: Array
    """The target's token after each column; columns 0..num_accepted are emitted."""

    @staticmethod
    def num_fields(width: int) -> int:
        """F for a window of `width` columns."""
        return SCALARS + TOKENS + width

    @classmethod
    def of(cls, rows_BF: Array) -> OutcomeRows[Array]:
        first_token = SCALARS + TOKENS
        return OutcomeRows(
            num_emitted_B=rows_BF[:, NUM_EMITTED],
            num_accepted_B=rows_BF[:, NUM_ACCEPTED],
            num_offered_B=rows_BF[:, NUM_OFFERED],
            stop_B=rows_BF[:, STOP],
            length_B=rows_BF[:, SCALARS + LENGTH],
            checkpoint_rows_B2=rows_BF[:, SCALARS + CHECKPOINT_ROWS : SCALARS + CHECKPOINT_LENS],
            checkpoint_lens_B2=rows_BF[:, SCALARS + CHECKPOINT_LENS : SCALARS + READ_LENGTH],
            num_valid_drafts_B=rows_BF[:, SCALARS + NUM_VALID_DRAFTS],
            scalars_BF=rows_BF[:, SCALARS:first_token],
            tokens_BT=rows_BF[:, first_token:],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTable:
    """Sampling parameters of every slot: persistent tensors, one row per slot."""

    limits_SF: Tensor
    """int64, see SlotLimits."""
    sampling_SF: Tensor
    """float32 [S, 6]: TEMPERATURE to PRESENCE."""
    counts_SV: Tensor
    """int32 [S, V]. How often each token was generated. Stale if the slot has no penalties."""
    prompt_seen_SV: Tensor
    """bool [S, V]. Whether the token is in the prompt. Stale if the slot has no penalties."""
    bias_SV: Tensor
    """float32 [S, V]. Padding 0."""
    mask_SWX: Tensor
    """int32 [S, W, X]: bit v % 32 of word v // 32 allows token v. Padding -1 (all allowed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingWindow:
    """Where the windows of slots with rings read and write state.

    With b the read length, f the fold length and s the start: a forward takes the state after b tokens from the read
    row, and advances it by the entries of positions b..s-1. On its way it stores the state after f tokens to the fold
    row, where f > b. What the window's columns add to the state goes to their entries."""

    slot_B: Tensor
    """int64. The slot, which is also the number of its ring."""
    start_B: Tensor
    """int64. Position of column 0; 0 for an inert slot."""
    read_length_B: Tensor
    """int64. 0 for an inert slot. May be start + 1 in a first step, which runs no forward."""
    fold_length_B: Tensor
    """int64. The last multiple of F up to the start if that is above the read length, otherwise the read length."""
    fold_row_B: Tensor
    """int64. SCRATCH_ROW where nothing is folded."""
    entries_BT: Tensor
    """int64. slot * C + position % C for each column: the place of its entry among all slots' entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Inputs of a forward, gathered from the slots. An inert slot reads the zero row at length 0 and writes to
    scratch."""

    tokens_BT: Tensor
    """int64. Last emitted token, then drafts."""
    start_B: Tensor
    """int64. Position of column 0; 0 for an inert slot."""
    read_row_B: Tensor
    """int64. ZERO_ROW for an inert slot."""
    write_rows_BT: Tensor
    """int64. SCRATCH_ROW for an inert slot. Not used if the slots have rings."""
    page_table_BP: Tensor
    """int32. SCRATCH_PAGE for an inert slot."""
    ring: RingWindow | None = None
    """None: every column's whole state goes to its write row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Decisions of a step, made before it drafts."""

    num_accepted_B: Tensor
    """int64. Accepted drafts, after the cut at stop ids and the length limit; columns 0..num_accepted are emitted."""
    draft_start_B: Tensor
    """int64. Position of the first emitted token: window start + 1."""
    outcome_BF: Tensor
    """int64, see OutcomeRows."""
