"""The recurrent mixer of a decode window for slots with rings, in one Triton launch. See backend.Backend.

A program has a block of value dims of one slot's value head, as in gated_delta.py. It loads its tile of the state once,
advances it by the ring's entries, then by the window's columns, and stores what each column added. The tile itself is
stored only where it passes the fold length. The last program of a key head to finish norms the outputs and folds the
shared q and k convolution inputs, because the fold row may be the row that the others read.

The state is updated by one multiplication and one fused multiply-add, S <- fma(d, k, a S), in the window and in the
replay. So a replayed state has the bits of the state that the entries were computed from, however the compiler
contracts other operations.

Shape letters as in backend.py; in kernels X chunks of the key dim, L groups of lanes that hold a whole key together, D
value dims of such a group.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.slots import RingWindow
from agentspec.kernels.traffic import state_traffic, touches_pools
from agentspec.kernels.triton.gated_delta import conv_taps, convolved, queries_keys, softplus, store_gated_norms
from agentspec.kernels.triton.launch import NUM_COUNTERS, OVERLAPPED, arrival_counters, await_previous, release_next

_BLOCK_D = 32
_NUM_WARPS = 4
_CHUNK = 32
"""Key dims of a chunk: 8 lanes hold a chunk, four elements each. They have the same place of every chunk, so that a
sum over the key dim crosses only these lanes."""
_GROUPS = 16
"""Groups of such lanes in a program. Each loads its own copy of a key, in the place where the update needs it: that
takes no exchange between lanes."""
_AHEAD = 4
"""Entries whose loads are in flight while one is added to the state."""
_MAX_COLUMNS = 4
"""Most columns of a window that are in registers at a time."""
_MAX_ROWS = 16
"""Most rows (a token of a head) that the norm holds in registers at a time."""


@touches_pools
def gated_delta_ring_step(
    projected_NP: Tensor,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    ring: DeltaRing,
    read_row_B: Tensor,
    window: RingWindow,
) -> Tensor:
    """The output of the convolution stays float32; the reference rounds it to the projection's dtype.

    Counts the rows that it reads. How many it stores is not known on the host."""
    num_slots, num_columns = window.entries_BT.shape
    _, num_heads, value_dim, key_dim = ssm_RVDK.shape
    num_channels, num_values = conv_R3C.shape[2], num_heads * value_dim
    capacity, num_key_heads = ring.key_SCGK.shape[1:3]
    num_tokens = num_slots * num_columns
    assert projected_NP.shape == (num_tokens, num_channels + num_values + 2 * num_heads)
    assert num_channels == 2 * num_key_heads * key_dim + num_values
    assert projected_NP.dtype == conv_R3C.dtype == ring.conv_SCX.dtype
    parts = (ring.key_SCGK, ring.delta_SCVD, ring.decay_SCV, ring.conv_SCX)
    assert ssm_RVDK.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in parts[:3])
    assert projected_NP.stride(1) == 1
    assert all(x.is_contiguous() for x in (ssm_RVDK[0], conv_R3C[0], weights.conv_C4, *parts))
    assert num_slots * num_key_heads <= NUM_COUNTERS
    device = projected_NP.device
    o_NVD = torch.empty(num_tokens, num_values, dtype=torch.float32, device=device)
    out = torch.empty(num_tokens, num_values, dtype=projected_NP.dtype, device=device)
    block_d = min(_BLOCK_D, triton.next_power_of_2(value_dim))
    block_k = triton.next_power_of_2(key_dim)
    _gated_delta_ring_step[(num_heads * triton.cdiv(value_dim, block_d), num_slots)](
        projected_NP,
        projected_NP.stride(0),
        weights.conv_C4,
        weights.a_log_V,
        weights.dt_bias_V,
        weights.norm_D,
        weights.eps,
        ssm_RVDK,
        ssm_RVDK.stride(0),
        conv_R3C,
        conv_R3C.stride(0),
        *parts,
        read_row_B,
        window.slot_B,
        window.start_B,
        window.read_length_B,
        window.fold_length_B,
        window.fold_row_B,
        o_NVD,
        out,
        arrival_counters(device),
        CAPACITY=capacity,
        T=num_columns,
        COLUMNS=columns_at_a_time(num_columns),
        AHEAD=_AHEAD,
        V=num_heads,
        REPEATS=num_heads // num_key_heads,
        D=value_dim,
        K=key_dim,
        IS_SILU=weights.gate == "silu",
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        CHUNK=min(_CHUNK, block_k),
        GROUPS=min(_GROUPS, block_d),
        BLOCK_ROWS=min(_MAX_ROWS, triton.next_power_of_2(num_columns * num_heads // num_key_heads)),
        num_warps=_NUM_WARPS,
        **OVERLAPPED,
    )
    state_traffic.rows_read += num_slots
    return out


def columns_at_a_time(num_columns: int) -> int:
    """Columns of a window that are in registers at a time: as few as the same number of turns allows."""
    return triton.cdiv(num_columns, triton.cdiv(num_columns, _MAX_COLUMNS))


@triton.jit
def _entry(first, i, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the i-th entry from `first` on, i at most CAPACITY."""
    place = first + i
    return tl.where(place >= CAPACITY, place - CAPACITY, place)


@triton.jit
def _inputs_before(count, row, entries, first, channel, mask, C: tl.constexpr, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the convolution's three inputs before the `count`-th entry, oldest first. row: inputs before the first
    entry. entries: the slot's inputs in the ring."""
    rows = ()
    for i in tl.static_range(3):
        past = count - 3 + i
        place = tl.where(past < 0, row + (past + 3) * C, entries + _entry(first, past, CAPACITY) * C)
        rows += (tl.load(place + channel, mask=mask, other=0.0),)
    return rows


@triton.jit
def _columns(x, x_stride, begin, channel, mask, T: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inputs of columns begin to begin + COLUMNS - 1; zeros from column T on."""
    rows = ()
    for t in tl.static_range(COLUMNS):
        rows += (tl.load(x + (begin + t) * x_stride + channel, mask=mask & (begin + t < T), other=0.0),)
    return rows


@triton.jit
def _raw_gates(raw, x_stride, begin, V: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (write strengths, decays) of these columns as projected; zeros from column T on. raw: a head's write
    strength; its decay is V elements after it."""
    bs, as_ = (), ()
    for t in tl.static_range(COLUMNS):
        place = raw + (begin + t) * x_stride
        bs += (tl.load(place, mask=begin + t < T, other=0.0),)
        as_ += (tl.load(place + V, mask=begin + t < T, other=0.0),)
    return bs, as_


@triton.jit
def _window_after(window, rows, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last three rows of a window, followed by `rows`."""
    past = ()
    for i in tl.static_range(3):
        past += (window[COLUMNS + i],)
    return past + rows


@triton.jit
def _updated(state_XDLK, decay, delta_DL, key_X1LK):  # type: ignore[no-untyped-def]
    """decay * state + delta key^T. The product with the decay is rounded, so that every use gives the same bits."""
    return tl.fma(delta_DL[None, :, :, None], key_X1LK, decay * state_XDLK)


@triton.jit
def _applied(state_XDLK, x_X11K):  # type: ignore[no-untyped-def]
    """S x for each value dim. Chunks are added first: they are in the same lane."""
    return tl.sum(tl.sum(state_XDLK * x_X11K, axis=0), axis=2)


@triton.jit
def _replayed(  # type: ignore[no-untyped-def]
    state_XDLK, fold_tile, is_real, keys, key_mask, deltas, is_value, decays, first, count, fold_at,
    CAPACITY: tl.constexpr, AHEAD: tl.constexpr, KEY_STRIDE: tl.constexpr, DELTA_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr
):  # fmt: skip
    """Advance the state by `count` entries from the place `first` on, and store the state after `fold_at` of them to
    `fold_tile` (0: nowhere). keys, deltas, decays: where the slot's ring has those of this program.

    Each entry's registers are filled with those of the entry AHEAD places later as soon as it was added."""
    key, delta, decay = (), (), ()
    for i in tl.static_range(AHEAD):
        place, is_entry = _entry(first, i, CAPACITY), i < count
        key += (tl.load(keys + place * KEY_STRIDE, mask=key_mask & is_entry, other=0.0),)
        delta += (tl.load(deltas + place * DELTA_STRIDE, mask=is_value & is_entry, other=0.0),)
        decay += (tl.load(decays + place * DECAY_STRIDE, mask=is_entry, other=1.0),)
    for begin in tl.range(0, count, AHEAD, num_stages=1):
        next_key, next_delta, next_decay = (), (), ()
        for i in tl.static_range(AHEAD):
            state_XDLK = _updated(state_XDLK, decay[i], delta[i], key[i][:, None, :, :])
            if begin + i + 1 == fold_at:
                tl.store(fold_tile, state_XDLK, mask=is_real)
            ahead = begin + AHEAD + i
            place, is_entry = _entry(first, ahead, CAPACITY), ahead < count
            next_key += (tl.load(keys + place * KEY_STRIDE, mask=key_mask & is_entry, other=0.0),)
            next_delta += (tl.load(deltas + place * DELTA_STRIDE, mask=is_value & is_entry, other=0.0),)
            next_decay += (tl.load(decays + place * DECAY_STRIDE, mask=is_entry, other=1.0),)
        key, delta, decay = next_key, next_delta, next_decay
    return state_XDLK


@triton.jit
def _fold_inputs(  # type: ignore[no-untyped-def]
    count, row, fold_row, entries, first, channel, mask, C: tl.constexpr, CAPACITY: tl.constexpr
):
    """Store the convolution's inputs before the `count`-th entry to `fold_row`, which may be `row`."""
    rows = _inputs_before(count, row, entries, first, channel, mask, C, CAPACITY)
    tl.debug_barrier()  # every lane must read its row before any lane stores to it
    for i in tl.static_range(3):
        tl.store(fold_row + i * C + channel, rows[i], mask=mask)


@triton.jit
def _gated_delta_ring_step(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_C4, a_log_V, dt_bias_V, norm_D, eps, ssm_RVDK, ssm_stride, conv_R3C, conv_stride,
    key_SCGK, delta_SCVD, decay_SCV, conv_SCX, read_row_B, slot_B, start_B, read_length_B, fold_length_B, fold_row_B,
    o_NVD, out_NVD, counters, CAPACITY: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    V: tl.constexpr, REPEATS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, IS_SILU: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    KEY_HEADS: tl.constexpr = V // REPEATS
    C: tl.constexpr = 2 * KEY_HEADS * K + V * D
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    b, head, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // NUM_BLOCKS, tl.program_id(0) % NUM_BLOCKS
    key_head = head // REPEATS
    k_index = tl.arange(0, BLOCK_K // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    d = block * BLOCK_D + tl.arange(0, BLOCK_D // GROUPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    is_key, is_value = k_index < K, d < D
    q_channel = key_head * K + k_index
    k_channel, v_channel = KEY_HEADS * K + q_channel, 2 * KEY_HEADS * K + head * D + d
    q_taps, k_taps, v_taps = (
        conv_taps(conv_C4, q_channel, is_key),
        conv_taps(conv_C4, k_channel, is_key),
        conv_taps(conv_C4, v_channel, is_value),
    )
    rate, dt_bias = tl.exp(tl.load(a_log_V + head)), tl.load(dt_bias_V + head)
    await_previous(PDL)

    read_row, fold_row, read_length = tl.load(read_row_B + b), tl.load(fold_row_B + b), tl.load(read_length_B + b)
    entry = tl.load(slot_B + b) * CAPACITY
    count = tl.maximum(tl.load(start_B + b) - read_length, 0).to(tl.int32)
    fold_at = (tl.load(fold_length_B + b) - read_length).to(tl.int32)
    first = (read_length % CAPACITY).to(tl.int32)
    # Every load comes before the first use of one, so that all are in flight at once.
    tile = ssm_RVDK + (head * D + d[None, :, :, None]) * K + k_index[:, None, None, :]
    is_real = is_value[None, :, :, None] & is_key[:, None, None, :]
    state_XDLK = tl.load(tile + read_row * ssm_stride, mask=is_real, other=0.0)
    x, row, inputs = projected_NP + b * T * x_stride, conv_R3C + read_row * conv_stride, conv_SCX + entry * C
    raw = x + C + V * D + head
    q_window = _inputs_before(count, row, inputs, first, q_channel, is_key, C, CAPACITY)
    k_window = _inputs_before(count, row, inputs, first, k_channel, is_key, C, CAPACITY)
    v_window = _inputs_before(count, row, inputs, first, v_channel, is_value, C, CAPACITY)
    q_window += _columns(x, x_stride, 0, q_channel, is_key, T, COLUMNS)
    k_window += _columns(x, x_stride, 0, k_channel, is_key, T, COLUMNS)
    v_window += _columns(x, x_stride, 0, v_channel, is_value, T, COLUMNS)
    bs, as_ = _raw_gates(raw, x_stride, 0, V, T, COLUMNS)

    keys, deltas, decays = (
        key_SCGK + entry * (KEY_HEADS * K) + tl.broadcast_to(q_channel[:, None, :], BLOCK_K // CHUNK, GROUPS, CHUNK),
        delta_SCVD + entry * (V * D) + head * D + d,
        decay_SCV + entry * V + head,
    )
    state_XDLK = _replayed(
        state_XDLK, tile + fold_row * ssm_stride, is_real, keys, is_key[:, None, :], deltas, is_value, decays, first,
        count, fold_at, CAPACITY, AHEAD, KEY_HEADS * K, V * D, V,
    )  # fmt: skip
    if fold_at > 0:
        _fold_inputs(
            fold_at, row, conv_R3C + fold_row * conv_stride, inputs, first, v_channel, is_value, C, CAPACITY
        )

    is_head, is_key_head = block == 0, (block == 0) & (head % REPEATS == 0)
    o_slot, out_slot = o_NVD + b * T * (V * D), out_NVD + b * T * (V * D)
    for begin in tl.range(0, T, COLUMNS, num_stages=1):
        if T > COLUMNS:
            next_q = _columns(x, x_stride, begin + COLUMNS, q_channel, is_key, T, COLUMNS)
            next_k = _columns(x, x_stride, begin + COLUMNS, k_channel, is_key, T, COLUMNS)
            next_v = _columns(x, x_stride, begin + COLUMNS, v_channel, is_value, T, COLUMNS)
            next_bs, next_as = _raw_gates(raw, x_stride, begin + COLUMNS, V, T, COLUMNS)
        qs, ks, qks = queries_keys(q_window, k_window, q_taps, k_taps, K, COLUMNS)
        for t in tl.static_range(COLUMNS):
            is_column = begin + t < T
            decay = tl.exp(-rate * softplus(as_[t].to(tl.float32) + dt_bias))
            q, k = qs[t][:, None, None, :], ks[t][:, None, None, :]
            seen, read = _applied(state_XDLK, k), _applied(state_XDLK, q)
            delta = (convolved(v_window, t, v_taps) - decay * seen) * tl.sigmoid(bs[t].to(tl.float32))
            state_XDLK = _updated(state_XDLK, decay, delta, k)
            # With S' = a S + delta k^T, the output S' q is a (S q) + delta (k . q).
            tl.store(
                o_slot + (begin + t) * (V * D) + head * D + d, decay * read + delta * qks[t], mask=is_value & is_column
            )
            place = _entry(first, count + begin + t, CAPACITY)
            tl.store(delta_SCVD + (entry + place) * (V * D) + head * D + d, delta, mask=is_value & is_column)
            tl.store(decay_SCV + (entry + place) * V + head, decay, mask=is_head & is_column)
            key_mask = is_key & (is_key_head & is_column)
            tl.store(key_SCGK + (entry + place) * (KEY_HEADS * K) + q_channel, ks[t], mask=key_mask)
            column = inputs + place * C
            tl.store(column + q_channel, q_window[3 + t], mask=key_mask)
            tl.store(column + k_channel, k_window[3 + t], mask=key_mask)
            tl.store(column + v_channel, v_window[3 + t], mask=is_value & is_column)
        if T > COLUMNS:
            q_window = _window_after(q_window, next_q, COLUMNS)
            k_window = _window_after(k_window, next_k, COLUMNS)
            v_window = _window_after(v_window, next_v, COLUMNS)
            bs, as_ = next_bs, next_as

    tl.debug_barrier()  # every lane's reads and stores must precede the count
    counter = counters + b * KEY_HEADS + key_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == REPEATS * NUM_BLOCKS - 1:
        tl.store(counter, 0)
        store_gated_norms(
            x + C, x_stride, norm_D, eps, o_slot, out_slot, key_head, T, V, REPEATS, D, IS_SILU, BLOCK_ROWS
        )
        if fold_at > 0:
            c = tl.arange(0, 2 * BLOCK_K)
            channel = c // BLOCK_K * (KEY_HEADS * K) + key_head * K + c % BLOCK_K
            _fold_inputs(
                fold_at, row, conv_R3C + fold_row * conv_stride, inputs, first, channel, c % BLOCK_K < K, C, CAPACITY
            )
