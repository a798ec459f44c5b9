"""The integer bookkeeping of a decode step in Triton, one launch per operation: open a window, commit it, publish the
next drafts. See backend.Backend.

A program has one slot and one warp, because latency is all that matters here. An inert slot's row is never stored to,
so the padding slot may occur any number of times in one step.

Shape letters: as in reference/window.py; E stop ids per slot.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec import types
from agentspec.kernels import slots
from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT
from agentspec.kernels.slots import Commit, LiveColumns, OutcomeRows, RingWindow, SharedRows, Window
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.types import RingShape

_PAGES_A_PROGRAM = 1024

(
    _ACTIVE,
    _LENGTH,
    _READ_ROW,
    _NUM_VALID_DRAFTS,
    _CHECKPOINT_ROWS,
    _CHECKPOINT_LENS,
    _READ_LENGTH,
    _TOKENS,
) = (
    tl.constexpr(column)
    for column in (
        slots.ACTIVE,
        slots.LENGTH,
        slots.READ_ROW,
        slots.NUM_VALID_DRAFTS,
        slots.CHECKPOINT_ROWS,
        slots.CHECKPOINT_LENS,
        slots.READ_LENGTH,
        slots.TOKENS,
    )
)
_LENGTH_LIMIT, _SEED, _STOP_IDS = (tl.constexpr(column) for column in (slots.LENGTH_LIMIT, slots.SEED, slots.STOP_IDS))
_NUM_EMITTED, _NUM_ACCEPTED, _NUM_OFFERED, _STOP, _SCALARS = (
    tl.constexpr(column)
    for column in (slots.NUM_EMITTED, slots.NUM_ACCEPTED, slots.NUM_OFFERED, slots.STOP, slots.SCALARS)
)
_OUTCOME_TOKENS = tl.constexpr(slots.SCALARS + slots.TOKENS)
_ZERO_ROW, _SCRATCH_ROW, _SCRATCH_PAGE, _STOP_ID, _STOP_LENGTH = (
    tl.constexpr(constant)
    for constant in (types.ZERO_ROW, types.SCRATCH_ROW, types.SCRATCH_PAGE, types.STOP_ID, types.STOP_LENGTH)
)
_LIVE_RESULTS = ("first_B", "count_B", "row_BT", "cell_N", "token_N", "entry_N")
"""Tensors that opening a window fills only where its rows are shared."""
_RING_RESULTS = ("read_length_B", "fold_length_B", "fold_row_B", "entries_BT")
"""Tensors that opening a window fills only for slots with rings."""
_PURPOSE_FORCED_ACCEPT = tl.constexpr(PURPOSE_FORCED_ACCEPT)


def open_window(
    slots_SF: Tensor,
    page_table_SP: Tensor,
    slot_ids_B: Tensor,
    num_columns: int,
    ring: RingShape | None = None,
    shared: SharedRows | None = None,
) -> Window:
    num_slots, num_pages, device = slot_ids_B.shape[0], page_table_SP.shape[1], slots_SF.device

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    window = Window(
        tokens_BT=integers(num_slots, num_columns),
        start_B=integers(num_slots),
        read_row_B=integers(num_slots),
        write_rows_BT=integers(num_slots, num_columns),
        page_table_BP=torch.empty(num_slots, num_pages, dtype=torch.int32, device=device),
    )
    if ring is not None:
        window = replace(
            window,
            ring=RingWindow(
                slot_B=slot_ids_B,
                start_B=window.start_B,
                read_length_B=integers(num_slots),
                fold_length_B=integers(num_slots),
                fold_row_B=integers(num_slots),
                entries_BT=integers(num_slots, num_columns),
            ),
        )
    if shared is not None:
        assert ring is not None
        assert shared.num_rows >= num_slots * shared.own_columns
        window = replace(
            window,
            live=LiveColumns(
                first_B=integers(num_slots),
                count_B=integers(num_slots),
                row_BT=integers(num_slots, num_columns),
                cell_N=integers(shared.num_rows),
                token_N=integers(shared.num_rows),
                entry_N=integers(shared.num_rows),
            ),
        )
    _open_window[(num_slots, triton.cdiv(num_pages, _PAGES_A_PROGRAM))](
        slots_SF,
        slots_SF.stride(0),
        page_table_SP,
        page_table_SP.stride(0),
        slot_ids_B,
        window.tokens_BT,
        window.start_B,
        window.read_row_B,
        window.write_rows_BT,
        window.page_table_BP,
        num_pages,
        *(None if window.ring is None else getattr(window.ring, field) for field in _RING_RESULTS),
        *(None if window.live is None else getattr(window.live, field) for field in _LIVE_RESULTS),
        slots_SF.shape[0] - 1,
        num_slots,
        T=num_columns,
        W=_width(slots_SF),
        FOLD_TOKENS=0 if ring is None else ring.fold_tokens,
        CAPACITY=0 if ring is None else ring.capacity,
        BLOCK_T=triton.next_power_of_2(num_columns),
        BLOCK_P=min(_PAGES_A_PROGRAM, triton.next_power_of_2(num_pages)),
        BLOCK_B=triton.next_power_of_2(num_slots),
        ROWS=0 if shared is None else shared.num_rows,
        OWN=0 if shared is None else shared.own_columns,
        BLOCK_N=1 if shared is None else triton.next_power_of_2(shared.num_rows),
        num_warps=4,
        **overlapped(),
    )
    return window


def commit_window(
    slots_SF: Tensor,
    limits_SF: Tensor,
    slot_ids_B: Tensor,
    chosen_BT: Tensor,
    *,
    block_tokens: int,
    ring: RingShape | None = None,
    live: LiveColumns | None = None,
) -> Commit:
    """For an inert slot, `num_accepted_B` is 0."""
    assert chosen_BT.is_contiguous()
    (num_slots, num_columns), device = chosen_BT.shape, slots_SF.device
    num_stop_ids = limits_SF.shape[1] - slots.STOP_IDS
    commit = Commit(
        num_accepted_B=torch.empty(num_slots, dtype=torch.int64, device=device),
        draft_start_B=torch.empty(num_slots, dtype=torch.int64, device=device),
        later_TB=torch.empty(num_columns, num_slots, dtype=torch.int64, device=device),
        outcome_BF=torch.empty(num_slots, OutcomeRows.num_fields(num_columns), dtype=torch.int64, device=device),
    )
    _commit_window[(num_slots,)](
        slots_SF,
        slots_SF.stride(0),
        limits_SF,
        limits_SF.stride(0),
        slot_ids_B,
        chosen_BT,
        None if live is None else live.count_B,
        commit.num_accepted_B,
        commit.draft_start_B,
        commit.later_TB,
        commit.outcome_BF,
        F=commit.outcome_BF.shape[1],
        T=num_columns,
        W=_width(slots_SF),
        E=num_stop_ids,
        BLOCK_TOKENS=block_tokens,
        FOLD_TOKENS=0 if ring is None else ring.fold_tokens,
        BLOCK_T=triton.next_power_of_2(num_columns),
        BLOCK_W=triton.next_power_of_2(_width(slots_SF)),
        BLOCK_E=triton.next_power_of_2(max(num_stop_ids, 1)),
        num_warps=1,
        **overlapped(),
    )
    return commit


def force_acceptance(
    slots_SF: Tensor,
    limits_SF: Tensor,
    slot_ids_B: Tensor,
    chosen_BT: Tensor,
    rate_K: Tensor,
    live: LiveColumns | None = None,
) -> Tensor:
    """One launch, so that steps timed with forced acceptance are within microseconds of real ones."""
    assert chosen_BT.is_contiguous()
    assert rate_K.is_contiguous()
    num_slots, num_columns = chosen_BT.shape
    forced_BT = torch.empty_like(chosen_BT)
    _force_acceptance[(num_slots,)](
        slots_SF,
        slots_SF.stride(0),
        limits_SF,
        limits_SF.stride(0),
        slot_ids_B,
        chosen_BT,
        None if live is None else live.count_B,
        rate_K,
        forced_BT,
        T=num_columns,
        K=len(rate_K),
        BLOCK_T=triton.next_power_of_2(num_columns),
        num_warps=1,
        **overlapped(),
    )
    return forced_BT


def publish_drafts(
    slots_SF: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor | None = None
) -> None:
    num_slots, num_drafts = drafts_Bk.shape
    if num_drafts == 0:
        return
    assert outcome_BF.is_contiguous()
    _publish_drafts[(num_slots,)](
        slots_SF,
        slots_SF.stride(0),
        slot_ids_B,
        outcome_BF,
        drafts_Bk,
        drafts_Bk.stride(0),
        drafts_Bk.stride(1),
        num_valid_B,
        F=outcome_BF.shape[1],
        K=num_drafts,
        BLOCK_K=triton.next_power_of_2(num_drafts),
        num_warps=1,
        **overlapped(),
    )


def _width(slots_SF: Tensor) -> int:
    assert slots_SF.stride(1) == 1
    return (slots_SF.shape[1] - slots.TOKENS) // 2


@triton.jit
def _open_window(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    page_table_SP,
    page_table_stride,
    slot_ids_B,
    tokens_BT,
    start_B,
    read_row_B,
    write_rows_BT,
    page_table_BP,
    num_pages,
    read_length_B,
    fold_length_B,
    fold_row_B,
    entries_BT,
    first_B,
    count_B,
    row_BT,
    cell_N,
    token_N,
    entry_N,
    padding_slot,
    num_slots,
    T: tl.constexpr,
    W: tl.constexpr,
    FOLD_TOKENS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (b, i) copies chunk i of slot b's page table; the first program of a slot also copies its columns.
    FOLD_TOKENS: 0 if slots have no rings. ROWS: 0 if all columns have a row."""
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    slot_id = tl.load(slot_ids_B + b)
    slot = slots_SF + slot_id * slots_stride
    is_active = tl.load(slot + _ACTIVE) > 0
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    pages = tl.load(page_table_SP + slot_id * page_table_stride + p, mask=p < num_pages, other=_SCRATCH_PAGE)
    if tl.program_id(1) == 0:
        t = tl.arange(0, BLOCK_T)
        rows = tl.load(slot + _TOKENS + W + t, mask=t < T, other=_SCRATCH_ROW)
        tl.store(tokens_BT + b * T + t, tl.load(slot + _TOKENS + t, mask=t < T, other=0), mask=t < T)
        tl.store(start_B + b, tl.where(is_active, tl.load(slot + _LENGTH), 0))
        tl.store(read_row_B + b, tl.where(is_active, tl.load(slot + _READ_ROW), _ZERO_ROW))
        tl.store(write_rows_BT + b * T + t, tl.where(is_active, rows, _SCRATCH_ROW), mask=t < T)
        if FOLD_TOKENS > 0:
            start = tl.where(is_active, tl.load(slot + _LENGTH), 0)
            read_length = tl.where(is_active, tl.load(slot + _READ_LENGTH), 0)
            fold_length = tl.maximum(start // FOLD_TOKENS * FOLD_TOKENS, read_length)
            own_row = tl.load(slot + _TOKENS + W)
            tl.store(read_length_B + b, read_length)
            tl.store(fold_length_B + b, fold_length)
            tl.store(fold_row_B + b, tl.where(fold_length > read_length, own_row, _SCRATCH_ROW))
            entry = slot_id * CAPACITY + (start + t) % CAPACITY
            tl.store(entries_BT + b * T + t, entry, mask=t < T)
            if ROWS > 0:
                first, count, total = _share_rows(
                    slots_SF, slots_stride, slot_ids_B, b, num_slots, T, BLOCK_B, ROWS, OWN
                )
                tl.store(first_B + b, first)
                tl.store(count_B + b, count)
                row = tl.minimum(first + tl.minimum(t, tl.maximum(count - 1, 0)), ROWS - 1)
                tl.store(row_BT + b * T + t, row, mask=t < T)
                token = tl.load(slot + _TOKENS + t, mask=t < T, other=0)
                dead_from = tl.where(b == num_slots - 1, total, ROWS)
                scratch = padding_slot * CAPACITY
                _store_rows(cell_N, b * T + t, 0, first, count, dead_from, t, ROWS, BLOCK_N)
                _store_rows(token_N, token, 0, first, count, dead_from, t, ROWS, BLOCK_N)
                _store_rows(entry_N, entry, scratch, first, count, dead_from, t, ROWS, BLOCK_N)
    tl.store(page_table_BP + b * num_pages + p, tl.where(is_active, pages, _SCRATCH_PAGE), mask=p < num_pages)


@triton.jit
def _share_rows(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    slot_ids_B,
    b,
    num_slots,
    T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
):
    """Return slot b's first row and live columns, and the rows of all slots. See slots.LiveColumns."""
    i = tl.arange(0, BLOCK_B)
    slot_id = tl.load(slot_ids_B + i, mask=i < num_slots, other=0)
    is_active = tl.load(slots_SF + slot_id * slots_stride + _ACTIVE, mask=i < num_slots, other=0) > 0
    num_valid = tl.load(slots_SF + slot_id * slots_stride + _NUM_VALID_DRAFTS, mask=i < num_slots, other=0)
    wanted = tl.where(is_active, 1 + tl.minimum(num_valid, T - 1), 0)
    own = tl.minimum(wanted, OWN)
    more = wanted - own
    left = ROWS - tl.sum(own, axis=0) - (tl.cumsum(more, axis=0) - more)
    count = own + tl.minimum(more, tl.maximum(left, 0))
    first = tl.sum(tl.where(i < b, count, 0), axis=0)
    return first, tl.sum(tl.where(i == b, count, 0), axis=0), tl.sum(count, axis=0)


@triton.jit
def _store_rows(field_N, value_T, dead, first, count, dead_from, t, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store what live columns t have in their rows, and `dead` in the rows from dead_from on."""
    tl.store(field_N + first + t, value_T, mask=t < count)
    n = tl.arange(0, BLOCK_N)
    tl.store(field_N + n, tl.zeros((BLOCK_N,), tl.int64) + dead, mask=(n >= dead_from) & (n < ROWS))


@triton.jit
def _num_offered(slot, count_B, b, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Valid drafts in a slot's window; undefined for an inert slot."""
    num_offered = tl.minimum(tl.load(slot + _NUM_VALID_DRAFTS), T - 1)
    if count_B is not None:
        num_offered = tl.minimum(num_offered, tl.maximum(tl.load(count_B + b) - 1, 0))
    return num_offered


@triton.jit
def _commit_window(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    limits_SF,
    limits_stride,
    slot_ids_B,
    chosen_BT,
    count_B,
    num_accepted_B,
    draft_start_B,
    later_TB,
    outcome_BF,
    F: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FOLD_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """There is no branch on `active`, so that all loads are in flight at once: results of an inert slot are computed
    and discarded."""
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    slot_id = tl.load(slot_ids_B + b)
    slot = slots_SF + slot_id * slots_stride
    limits = limits_SF + slot_id * limits_stride
    t = tl.arange(0, BLOCK_T)
    token_T = tl.load(chosen_BT + b * T + t, mask=t < T, other=-2)
    draft_T = tl.load(slot + _TOKENS + 1 + t, mask=t < T - 1, other=-1)
    is_active = tl.load(slot + _ACTIVE) > 0
    length = tl.where(is_active, tl.load(slot + _LENGTH), 0)
    num_offered = _num_offered(slot, count_B, b, T)
    num_matched = tl.min(tl.where((token_T == draft_T) & (t < num_offered), T - 1, t), axis=0).to(tl.int64)
    num_accepted, stop = _truncate(token_T, num_matched, limits, length, T, E, BLOCK_T, BLOCK_E)
    num_kept = tl.where(is_active, num_accepted, 0)
    tl.store(num_accepted_B + b, num_kept)
    tl.store(draft_start_B + b, length + 1)
    tl.store(later_TB + t * tl.num_programs(0) + b, length + 1 + num_kept + t, mask=t < T)
    outcome = outcome_BF + b * F
    i = tl.arange(0, _SCALARS)
    counts = tl.where(i == _NUM_ACCEPTED, num_accepted, tl.where(i == _NUM_OFFERED, num_offered, 0))
    counts = tl.where(i == _NUM_EMITTED, num_accepted + 1, tl.where(i == _STOP, stop, counts))
    tl.store(outcome + i, tl.where(is_active, counts, 0))
    tl.store(outcome + _OUTCOME_TOKENS + t, token_T, mask=t < T)
    last_token = tl.sum(tl.where(t == num_accepted, token_T, 0), axis=0)
    _advance(
        slot, outcome + _SCALARS, is_active, length, num_accepted, stop, last_token,
        BLOCK_TOKENS, FOLD_TOKENS, T, W, BLOCK_W,
    )  # fmt: skip


@triton.jit
def _truncate(  # type: ignore[no-untyped-def]
    token_T, num_matched, limits, length, T: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Return (accepted drafts, stop reason or 0): cut after the first stop id and at the length limit. See
    reference/verdict.py."""
    t = tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    stop_id_E = tl.load(limits + _STOP_IDS + e, mask=e < E, other=-1)
    full = tl.load(limits + _LENGTH_LIMIT) - length - 2
    first_stop = tl.min(tl.min(tl.where(token_T[:, None] == stop_id_E[None, :], t[:, None], T), axis=1), axis=0).to(
        tl.int64
    )
    last = tl.minimum(num_matched, full)
    at_limit = tl.where(last == full, _STOP_LENGTH, 0)
    return tl.minimum(first_stop, last), tl.where(first_stop <= last, _STOP_ID, at_limit).to(tl.int64)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    slot,
    scalars,
    is_active,
    length,
    num_accepted,
    stop,
    last_token,
    BLOCK_TOKENS: tl.constexpr,
    FOLD_TOKENS: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Advance an active slot's pointers past the last accepted column. Also store the resulting scalars of any slot to
    `scalars`. FOLD_TOKENS: 0 if slots have no rings."""
    w = tl.arange(0, BLOCK_W)
    f = tl.arange(0, _TOKENS)
    row_W = tl.load(slot + _TOKENS + W + w, mask=w < W, other=0)
    old_F = tl.load(slot + f)
    newer_row = tl.load(slot + _CHECKPOINT_ROWS)
    older_row = tl.load(slot + _CHECKPOINT_ROWS + 1)
    newer_len = tl.load(slot + _CHECKPOINT_LENS)
    new_length = length + num_accepted + 1
    if FOLD_TOKENS > 0:
        old_row, old_length = tl.load(slot + _READ_ROW), tl.load(slot + _READ_LENGTH)
        own_row = tl.load(slot + _TOKENS + W)
        read_length = tl.maximum(length // FOLD_TOKENS * FOLD_TOKENS, old_length)
        read_row = tl.where(read_length > old_length, own_row, old_row)
        # A new state at a block boundary: the row that is stored to next is column 0 of the write rows.
        crossed = (read_length % BLOCK_TOKENS == 0) & (read_length != newer_len) & (read_row == own_row)
        boundary, boundary_row, column = read_length, own_row, tl.where(crossed, 0, -1)
    else:
        read_length = new_length
        read_row = tl.sum(tl.where(w == num_accepted, row_W, 0), axis=0)
        boundary = new_length // BLOCK_TOKENS * BLOCK_TOKENS
        column = boundary - length - 1
        crossed = column >= 0
        boundary_row = tl.sum(tl.where(w == column, row_W, 0), axis=0)

    new_F = tl.where(f == _ACTIVE, (stop == 0).to(tl.int64), old_F)
    new_F = tl.where(f == _LENGTH, new_length, new_F)
    new_F = tl.where(f == _READ_ROW, read_row, new_F)
    new_F = tl.where(f == _READ_LENGTH, read_length, new_F)
    new_F = tl.where(f == _NUM_VALID_DRAFTS, T - 1, new_F)
    new_F = tl.where(crossed & (f == _CHECKPOINT_ROWS), boundary_row, new_F)
    new_F = tl.where(crossed & (f == _CHECKPOINT_ROWS + 1), newer_row, new_F)
    new_F = tl.where(crossed & (f == _CHECKPOINT_LENS), boundary, new_F)
    new_F = tl.where(crossed & (f == _CHECKPOINT_LENS + 1), newer_len, new_F)
    tl.store(scalars + f, tl.where(is_active, new_F, old_F))
    tl.debug_barrier()  # every lane must read the slot before any lane stores to it
    tl.store(slot + f, new_F, mask=f < tl.where(is_active, _TOKENS, 0))
    tl.store(slot + _TOKENS, last_token, mask=is_active)
    tl.store(slot + _TOKENS + W + w, older_row, mask=w == tl.where(is_active, column, -1))


@triton.jit
def _force_acceptance(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    limits_SF,
    limits_stride,
    slot_ids_B,
    chosen_BT,
    count_B,
    rate_K,
    forced_BT,
    T: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b has one slot. An inert slot keeps its tokens and is not stored to."""
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    slot_id = tl.load(slot_ids_B + b)
    slot = slots_SF + slot_id * slots_stride
    t = tl.arange(0, BLOCK_T)
    chosen_T = tl.load(chosen_BT + b * T + t, mask=t < T, other=0)
    draft_T = tl.load(slot + _TOKENS + 1 + t, mask=t < T - 1, other=0)
    rate_T = tl.load(rate_K + t, mask=(t < T - 1) & (t < K), other=0.0).to(tl.float64)
    is_active = tl.load(slot + _ACTIVE) > 0
    num_valid = tl.where(is_active, _num_offered(slot, count_B, b, T), 0)
    seed = tl.load(limits_SF + slot_id * limits_stride + _SEED)
    is_rated = _uniform(seed, tl.load(slot + _LENGTH) + 1 + t) < rate_T
    stands_T = tl.where(t < K, is_rated, draft_T == chosen_T) & (t < num_valid)
    num_standing = tl.min(tl.where(stands_T, T, t), axis=0)
    tl.store(forced_BT + b * T + t, tl.where(t < num_standing, draft_T, chosen_T), mask=t < T)
    tl.debug_barrier()  # every lane must read the slot before any lane stores to it
    tl.store(slot + _TOKENS + 1 + t, tl.full((BLOCK_T,), -1, tl.int64), mask=(t >= num_standing) & (t < num_valid))


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """Return float64 uniforms in (0, 1): the draw of token 0 for PURPOSE_FORCED_ACCEPT at each position. See
    reference/philox.py."""
    zeros = tl.zeros_like(position).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, zeros, position.to(tl.uint32), zeros + _PURPOSE_FORCED_ACCEPT, zeros)
    return ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def _publish_drafts(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    slot_ids_B,
    outcome_BF,
    drafts_Bk,
    drafts_stride_b,
    drafts_stride_k,
    num_valid_B,
    F: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    draft_K = tl.load(drafts_Bk + b * drafts_stride_b + i * drafts_stride_k, mask=i < K, other=0)
    slot = slots_SF + tl.load(slot_ids_B + b) * slots_stride
    # Active before this step: a slot that this step has ended is inert, and its drafts are never read.
    was_active = tl.load(outcome_BF + b * F + _NUM_EMITTED) > 0
    tl.store(slot + _TOKENS + 1 + i, draft_K, mask=i < tl.where(was_active, K, 0))
    if num_valid_B is not None:
        num_valid = tl.load(num_valid_B + b)
        tl.store(slot + _NUM_VALID_DRAFTS, num_valid, mask=was_active)
        tl.store(outcome_BF + b * F + _SCALARS + _NUM_VALID_DRAFTS, num_valid, mask=was_active)
