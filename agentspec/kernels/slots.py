"""Layout of a slot: the columns of the integer and float tensors that describe a running request.

All per-request state of a decode step is one row (a slot) of a few tensors. The kernels that open and commit a window,
and the sampler, read and write these rows; the runtime owns the tensors and fills them. This module knows no values
and no order of operations.

A record class names the columns of such rows. Its fields are views, of a device tensor or of a numpy array on the
host, so both sides use the same field names. Kernels that take addresses, and rows with single columns only, use
the constants.

Shape letters: S slots, B gathered rows, W = max k + 1, T = k + 1 columns of a step's window, k drafts, V vocabulary, E
stop ids, F fields, X = ceil(V / 32), N rows of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

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


class _Columns:
    """A field of a record class: the view of some columns of its rows."""

    def __init__(self, place: int | slice | Callable[[int], slice]) -> None:
        """place: of the columns, or a function that finds it from the number of all columns."""
        self._place = place

    def __get__(self, record: _Rows[Array], _: type) -> Array:
        rows_BF: Any = record.rows_BF
        view: Array = rows_BF[:, self._place(rows_BF.shape[1]) if callable(self._place) else self._place]
        return view


class _Rows(Generic[Array]):
    """Base of the record classes. A view is made when its field is read: a step reads few fields of each record."""

    __slots__ = ("rows_BF",)

    def __init__(self, rows_BF: Array) -> None:
        self.rows_BF: Array = rows_BF


class SlotState(_Rows[Array]):
    """Rows of `slots_SF`. All int64."""

    __slots__ = ()
    active_B = _Columns(ACTIVE)
    """1: active. 0: inert (empty, finished or padding). Written by join, leave and the step."""
    length_B = _Columns(LENGTH)
    """Tokens in the committed state. Written by join and the step."""
    read_row_B = _Columns(READ_ROW)
    """Row that holds that state; for a slot with a ring, the state that the ring starts from."""
    read_length_B = _Columns(READ_LENGTH)
    """Tokens in the state of the read row: the length, and for a slot with a ring at most that."""
    num_valid_drafts_B = _Columns(NUM_VALID_DRAFTS)
    """Number of leading draft columns that were drafted for this prefix. Later columns are stale."""
    checkpoint_rows_B2 = _Columns(slice(CHECKPOINT_ROWS, CHECKPOINT_LENS))
    """Rows of the newer and the older rolling checkpoint, or spare rows not yet used as one."""
    checkpoint_lens_B2 = _Columns(slice(CHECKPOINT_LENS, READ_LENGTH))
    """Tokens in the state of each; 0 marks a spare row."""

    tokens_BW = _Columns(lambda num_fields: slice(TOKENS, SlotState.first_row(num_fields)))
    """Column 0: the last emitted token, which is not yet in the state. Then drafts. Padding 0."""
    write_rows_BW = _Columns(lambda num_fields: slice(SlotState.first_row(num_fields), None))
    """The request's own rows. Padding SCRATCH_ROW. A slot with a ring uses column 0 only: the row that the next state
    is stored to."""

    @staticmethod
    def num_fields(width: int) -> int:
        """F for windows of up to `width` columns."""
        return TOKENS + 2 * width

    @staticmethod
    def first_row(num_fields: int) -> int:
        """First column of the write rows: behind W tokens."""
        return (TOKENS + num_fields) // 2

    @classmethod
    def of(cls, rows_BF: Array) -> SlotState[Array]:
        return SlotState(rows_BF)


class SlotLimits(_Rows[Array]):
    """Rows of `limits_SF`: parameters that a request keeps from start to end. All int64."""

    __slots__ = ()
    length_limit_B = _Columns(LENGTH_LIMIT)
    """Sequence length at which the request ends."""
    seed_B = _Columns(SEED)
    top_k_B = _Columns(TOP_K)
    """1 to V; V: keep all."""
    stop_ids_BE = _Columns(slice(STOP_IDS, None))
    """Padding -1, which is no token id."""

    @staticmethod
    def num_fields(num_stop_ids: int) -> int:
        return STOP_IDS + num_stop_ids

    @classmethod
    def of(cls, rows_BF: Array) -> SlotLimits[Array]:
        return SlotLimits(rows_BF)


class OutcomeRows(_Rows[Array]):
    """Rows of `outcome_BF`: the result of a step. All int64. For an inert slot the counts and `stop_B` are 0, and its
    tokens are undefined."""

    __slots__ = ()
    num_emitted_B = _Columns(NUM_EMITTED)
    num_accepted_B = _Columns(NUM_ACCEPTED)
    """Accepted drafts, after the cut at stop ids and the length limit."""
    num_offered_B = _Columns(NUM_OFFERED)
    """Valid drafts in the window."""
    stop_B = _Columns(STOP)
    """STOP_RUNNING, STOP_ID or STOP_LENGTH."""
    length_B = _Columns(SCALARS + LENGTH)
    """This and the next two: as in SlotState, after the step."""
    checkpoint_rows_B2 = _Columns(slice(SCALARS + CHECKPOINT_ROWS, SCALARS + CHECKPOINT_LENS))
    checkpoint_lens_B2 = _Columns(slice(SCALARS + CHECKPOINT_LENS, SCALARS + READ_LENGTH))
    num_valid_drafts_B = _Columns(SCALARS + NUM_VALID_DRAFTS)
    """Drafts made for the next window; filled in by `publish_drafts`."""
    tokens_BT = _Columns(slice(SCALARS + TOKENS, None))
    """The target's token after each column; columns 0..num_accepted are emitted."""

    @staticmethod
    def num_fields(width: int) -> int:
        """F for a window of `width` columns."""
        return SCALARS + TOKENS + width

    @classmethod
    def of(cls, rows_BF: Array) -> OutcomeRows[Array]:
        return OutcomeRows(rows_BF)


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


class SharedRows(NamedTuple):
    """The rows of a forward whose windows have different widths."""

    num_rows: int
    """At least own_columns for each slot."""
    own_columns: int
    """Leading columns of a window that always have a row, if they are live."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveColumns:
    """Which columns of which windows a forward has, where it has fewer rows than the windows have columns.

    A column is *live* if its draft was made for the slot's prefix, and there is a row for it. Each slot first gets rows
    for its own columns (SharedRows); what is left goes to the other live columns, slot by slot. Rows are in the order
    of slots and columns. Those behind the last live column are dead: whatever they hold, nothing is read or stored for
    them."""

    first_B: Tensor
    """int64. Row of column 0; for an inert slot, where it would be, which may be N."""
    count_B: Tensor
    """int64. Live columns; 0 for an inert slot, otherwise at least 1."""
    row_BT: Tensor
    """int64. Row of each column. A dead column has some other row."""
    cell_N: Tensor
    """int64. b * T + t of the row's slot and column; 0 for a dead row."""
    token_N: Tensor
    """int64. 0 for a dead row."""
    entry_N: Tensor
    """int64. Like RingWindow.entries_BT. For a dead row an entry of the padding slot."""


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
    live: LiveColumns | None = None
    """None: the forward has all columns: row b * T + t is column t of slot b."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Decisions of a step, made before it drafts."""

    num_accepted_B: Tensor
    """int64. Accepted drafts, after the cut at stop ids and the length limit; columns 0..num_accepted are emitted."""
    draft_start_B: Tensor
    """int64. Position of the first emitted token: window start + 1."""
    later_TB: Tensor
    """int64, as many rows as the window has columns. Row i: the position i tokens behind the last emitted one. Not
    defined for an inert slot, but a position of its window."""
    outcome_BF: Tensor
    """int64, see OutcomeRows."""
