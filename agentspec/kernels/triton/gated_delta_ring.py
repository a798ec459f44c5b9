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
_TILE_A_WARP = 1024
"""Elements of the state per warp: 32 registers per lane, and four warps at key dim 128. With more warps than that, a
key would be loaded as if it were small, all of it by every lane."""
_CHUNK = 32
"""Key dims of a chunk: 8 lanes hold a chunk, four elements each. They have the same place of every chunk, so that a
sum over the key dim crosses only these lanes."""
_GROUPS_A_WARP = 4
"""Groups of such lanes in a warp. Each loads its own copy of a key, in the place where the update needs it: that takes
no exchange between lanes."""
_AHEAD = 3
"""Entries whose loads are in flight while one is added to the state."""
_AHEAD_WITH_COLUMNS = {3: 2, 7: 2, 8: 2}
"""Fewer where the compiler would spill registers otherwise, by the window's columns."""
_MAX_COLUMNS = 4
"""Most columns of a window that are in registers at a time."""
_MAX_REGISTERS = 168
"""Per lane of a program with four warps: three fit into a multiprocessor. Without a limit the compiler takes more than
it needs."""
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
    num_warps = max(1, block_d * block_k // _TILE_A_WARP)
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
        AHEAD=entries_ahead(num_columns),
        V=num_heads,
        REPEATS=num_heads // num_key_heads,
        D=value_dim,
        K=key_dim,
        IS_SILU=weights.gate == "silu",
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        CHUNK=min(_CHUNK, block_k),
        GROUPS=min(_GROUPS_A_WARP * num_warps, block_d),
        BLOCK_ROWS=min(_MAX_ROWS, triton.next_power_of_2(num_columns * num_heads // num_key_heads)),
        num_warps=num_warps,
        maxnreg=max_registers(num_warps),
        **OVERLAPPED,
    )
    state_traffic.rows_read += num_slots
    return out


def columns_at_a_time(num_columns: int) -> int:
    """Columns of a window that are in registers at a time: as few as the same number of turns allows."""
    num_turns = -(-num_columns // _MAX_COLUMNS)
    return -(-num_columns // num_turns)


def entries_ahead(num_columns: int) -> int:
    return _AHEAD_WITH_COLUMNS.get(num_columns, _AHEAD)


def max_registers(num_warps: int) -> int | None:
    """Limit of registers per lane; None: the hardware's."""
    return _MAX_REGISTERS if num_warps == 4 else None


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
def _load_inputs(x, x_stride, begin, channel, mask, T: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the convolution's inputs of columns begin to begin + COUNT - 1; from column T on, those of the last."""
    rows = ()
    for t in tl.static_range(COUNT):
        rows += (tl.load(x + tl.minimum(begin + t, T - 1) * x_stride + channel, mask=mask, other=0.0),)
    return rows


@triton.jit
def _load_gates(raw, x_stride, begin, V: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (write strengths, decays) of columns from `begin` on, as projected; zeros from column T on. raw: a head's
    write strength; its decay is V elements after it."""
    raw_betas, raw_decays = (), ()
    for t in tl.static_range(COLUMNS):
        place = raw + tl.minimum(begin + t, T - 1) * x_stride
        raw_betas += (tl.load(place).to(tl.float32),)
        raw_decays += (tl.load(place + V).to(tl.float32),)
    return raw_betas, raw_decays


@triton.jit
def _load_first_columns(  # type: ignore[no-untyped-def]
    x, x_stride, raw, count, row, inputs, first, channels, masks, C: tl.constexpr, CAPACITY: tl.constexpr,
    V: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return what `_prepared` needs of the first columns: windows of q, k and v, write strengths, decays. A window has
    the three inputs before its columns, then theirs."""
    windows = ()
    for part in tl.static_range(3):
        past = _inputs_before(count, row, inputs, first, channels[part], masks[part], C, CAPACITY)
        windows += (past + _load_inputs(x, x_stride, 0, channels[part], masks[part], T, COLUMNS),)
    return windows, _load_gates(raw, x_stride, 0, V, T, COLUMNS)


@triton.jit
def _load_columns(  # type: ignore[no-untyped-def]
    x, x_stride, raw, begin, channels, masks, V: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr
):
    """The same for columns from `begin` on, at least 3."""
    windows = ()
    for part in tl.static_range(3):
        windows += (_load_inputs(x, x_stride, begin - 3, channels[part], masks[part], T, 3 + COLUMNS),)
    return windows, _load_gates(raw, x_stride, begin, V, T, COLUMNS)


@triton.jit
def _prepared(loaded, taps, rate, dt_bias, K: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (queries, keys, their inner products, values, write strengths, decays) of loaded columns."""
    windows, gates = loaded
    qs, ks, qks = queries_keys(windows[0], windows[1], taps[0], taps[1], K, COLUMNS)
    vs, betas, decays = (), (), ()
    for t in tl.static_range(COLUMNS):
        vs += (convolved(windows[2], t, taps[2]),)
        betas += (tl.sigmoid(gates[0][t]),)
        decays += (tl.exp(-rate * softplus(gates[1][t] + dt_bias)),)
    return qs, ks, qks, vs, betas, decays


@triton.jit
def _updated(state_XDLK, decay, delta_DL, key_X1LK):  # type: ignore[no-untyped-def]
    """decay * state + delta key^T. The product with the decay is rounded, so that every use gives the same bits."""
    return tl.fma(delta_DL[None, :, :, None], key_X1LK, decay * state_XDLK)


@triton.jit
def _applied(state_XDLK, x_XK):  # type: ignore[no-untyped-def]
    """S x for each value dim. Chunks are added first: a lane has its place of all of them."""
    return tl.sum(tl.sum(state_XDLK * x_XK[:, None, None, :], axis=0), axis=2)


@triton.jit
def _load_entry(  # type: ignore[no-untyped-def]
    keys, deltas, decays, i, first, count, k_index, d, CAPACITY: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    KEY_HEADS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Return (key, delta, decay) of the i-th entry from the place `first` on; from entry `count` on, one that changes
    nothing. keys, deltas, decays: where the slot's ring begins, for this program."""
    place, is_entry = _entry(first, i, CAPACITY), i < count
    copies = tl.broadcast_to((keys + place * (KEY_HEADS * K))[:, None, :], keys.shape[0], d.shape[1], keys.shape[1])
    key_XLK = tl.load(copies, mask=k_index[:, None, :] < tl.where(is_entry, K, 0), other=0.0)
    delta_DL = tl.load(deltas + place * (V * D), mask=d < tl.where(is_entry, D, 0), other=0.0)
    return key_XLK, delta_DL, tl.load(decays + place * V, mask=is_entry, other=1.0)


@triton.jit
def _load_entries(  # type: ignore[no-untyped-def]
    keys, deltas, decays, first, count, k_index, d, CAPACITY: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    KEY_HEADS: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Return the first AHEAD entries."""
    entries = ()
    for i in tl.static_range(AHEAD):
        entries += (_load_entry(keys, deltas, decays, i, first, count, k_index, d, CAPACITY, V, D, KEY_HEADS, K),)
    return entries


@triton.jit
def _replayed(  # type: ignore[no-untyped-def]
    state_XDLK, entries, fold_tile, fold_at, keys, deltas, decays, first, count, k_index, d, is_real,
    CAPACITY: tl.constexpr, V: tl.constexpr, D: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr,
    AHEAD: tl.constexpr
):  # fmt: skip
    """Advance the state by `count` entries, of which `entries` has the first ones, and store the state after `fold_at`
    of them to `fold_tile` (0: nowhere).

    When an entry was added, its registers are filled with the entry AHEAD places later."""
    for begin in tl.range(0, count, AHEAD, num_stages=1):
        later = ()
        for i in tl.static_range(AHEAD):
            key_XLK, delta_DL, decay = entries[i]
            state_XDLK = _updated(state_XDLK, decay, delta_DL, key_XLK[:, None, :, :])
            if begin + i + 1 == fold_at:
                tl.store(fold_tile, state_XDLK, mask=is_real)
            later += (_load_entry(
                keys, deltas, decays, begin + AHEAD + i, first, count, k_index, d, CAPACITY, V, D, KEY_HEADS, K
            ),)  # fmt: skip
        entries = later
    return state_XDLK


@triton.jit
def _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, mask, C: tl.constexpr, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the convolution's inputs before the fold length to the fold row, which may be the read row. window: the
    vectors of all slots."""
    read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B = window
    # Loaded again, since they would take registers all the time for what one window in several does.
    read_length = tl.load(read_length_B + b)
    count, first = (tl.load(fold_length_B + b) - read_length).to(tl.int32), (read_length % CAPACITY).to(tl.int32)
    row, inputs = conv_R3C + tl.load(read_row_B + b) * conv_stride, conv_SCX + tl.load(slot_B + b) * CAPACITY * C
    rows = _inputs_before(count, row, inputs, first, channel, mask, C, CAPACITY)
    place = conv_R3C + tl.load(fold_row_B + b) * conv_stride + channel
    tl.debug_barrier()  # every lane must read its row before any lane stores to it
    for i in tl.static_range(3):
        tl.store(place + i * C, rows[i], mask=mask)


@triton.jit
def _store_inputs(  # type: ignore[no-untyped-def]
    inputs, windows, begin, after, channels, k_index, d, key_columns, CAPACITY: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the convolution's inputs of columns from `begin` on to their entries; those of q and k before column
    `key_columns`. after: the place of column 0."""
    for t in tl.static_range(COLUMNS):
        column = begin + tl.full([], t, tl.int32)
        place = inputs + _entry(after, column, CAPACITY) * C
        is_key, is_value = k_index < tl.where(column < key_columns, K, 0), d < tl.where(column < T, D, 0)
        tl.store(place + channels[0], windows[0][3 + t], mask=is_key)
        tl.store(place + channels[1], windows[1][3 + t], mask=is_key)
        tl.store(place + channels[2], windows[2][3 + t], mask=is_value)


@triton.jit
def _run_columns(  # type: ignore[no-untyped-def]
    state_XDLK, prepared, o, keys, deltas, decays, begin, after, k_index, d, key_columns, head_columns,
    CAPACITY: tl.constexpr, T: tl.constexpr, V: tl.constexpr, D: tl.constexpr, KEY_HEADS: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Advance the state by the prepared columns, which are those from `begin` on. Stores their outputs, and their
    entries but for the convolution's inputs: keys before column `key_columns`, decays before `head_columns`."""
    qs, ks, qks, vs, betas, column_decays = prepared
    for t in tl.static_range(COLUMNS):
        column, decay = begin + tl.full([], t, tl.int32), column_decays[t]
        place, is_value = _entry(after, column, CAPACITY), d < tl.where(column < T, D, 0)
        # With S' = a S + delta k^T, the output S' q is a (S q) + delta (k . q): both sums are over the same S and run
        # together.
        seen, read = _applied(state_XDLK, ks[t]), _applied(state_XDLK, qs[t])
        delta = (vs[t] - decay * seen) * betas[t]
        state_XDLK = _updated(state_XDLK, decay, delta, ks[t][:, None, None, :])
        tl.store(o + column * (V * D), decay * read + delta * qks[t], mask=is_value)
        tl.store(deltas + place * (V * D), delta, mask=is_value)
        tl.store(decays + place * V, decay, mask=column < head_columns)
        tl.store(keys + place * (KEY_HEADS * K), ks[t], mask=k_index < tl.where(column < key_columns, K, 0))
    return state_XDLK


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
    head_columns = tl.where(block == 0, T, 0)
    key_columns = tl.where(head % REPEATS == 0, head_columns, 0)
    k_index = tl.arange(0, BLOCK_K // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    d = block * BLOCK_D + tl.arange(0, BLOCK_D // GROUPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    is_key, is_value = k_index < K, d < D
    q_channel, masks = key_head * K + k_index, (is_key, is_key, is_value)
    channels = (q_channel, KEY_HEADS * K + q_channel, 2 * KEY_HEADS * K + head * D + d)
    taps = ()
    for part in tl.static_range(3):
        taps += (conv_taps(conv_C4, channels[part], masks[part]),)
    rate, dt_bias = tl.exp(tl.load(a_log_V + head)), tl.load(dt_bias_V + head)
    await_previous(PDL)

    read_row, fold_row, read_length = tl.load(read_row_B + b), tl.load(fold_row_B + b), tl.load(read_length_B + b)
    ring = tl.load(slot_B + b) * CAPACITY
    count = tl.maximum(tl.load(start_B + b) - read_length, 0).to(tl.int32)
    fold_at = (tl.load(fold_length_B + b) - read_length).to(tl.int32)
    first = (read_length % CAPACITY).to(tl.int32)
    after = _entry(first, count, CAPACITY)
    # Every load comes before the first use of one, so that all are in flight at once.
    tile, is_real = ssm_RVDK + (head * D + d[:, :, None]) * K, is_value[None, :, :, None] & is_key[:, None, None, :]
    tile = tile[None, :, :, :] + k_index[:, None, None, :]
    state_XDLK = tl.load(tile + read_row * ssm_stride, mask=is_real, other=0.0)
    x, row, inputs = projected_NP + b * T * x_stride, conv_R3C + read_row * conv_stride, conv_SCX + ring * C
    raw = x + C + V * D + head
    loaded = _load_first_columns(
        x, x_stride, raw, count, row, inputs, first, channels, masks, C, CAPACITY, V, T, COLUMNS
    )  # fmt: skip
    keys, decays = key_SCGK + ring * (KEY_HEADS * K) + q_channel, decay_SCV + ring * V + head
    deltas = delta_SCVD + ring * (V * D) + head * D + d
    entries = _load_entries(keys, deltas, decays, first, count, k_index, d, CAPACITY, V, D, KEY_HEADS, K, AHEAD)

    state_XDLK = _replayed(
        state_XDLK, entries, tile + fold_row * ssm_stride, fold_at, keys, deltas, decays, first, count, k_index,
        d, is_real, CAPACITY, V, D, KEY_HEADS, K, AHEAD,
    )  # fmt: skip
    window = (read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B)
    if fold_at > 0:
        _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channels[2], is_value, C, CAPACITY)

    o, out = o_NVD + b * T * (V * D), out_NVD + b * T * (V * D)
    o_head = o + head * D + d
    for begin in tl.range(0, T, COLUMNS, num_stages=1):
        prepared = _prepared(loaded, taps, rate, dt_bias, K, COLUMNS)
        _store_inputs(inputs, loaded[0], begin, after, channels, k_index, d, key_columns, CAPACITY, T, D, K, C, COLUMNS)
        if T > COLUMNS:
            loaded = _load_columns(x, x_stride, raw, begin + COLUMNS, channels, masks, V, T, COLUMNS)
        state_XDLK = _run_columns(
            state_XDLK, prepared, o_head, keys, deltas, decays, begin, after, k_index, d, key_columns, head_columns,
            CAPACITY, T, V, D, KEY_HEADS, K, COLUMNS,
        )  # fmt: skip

    tl.debug_barrier()  # every lane's reads and stores must precede the count
    counter = counters + b * KEY_HEADS + key_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == REPEATS * NUM_BLOCKS - 1:
        tl.store(counter, 0)
        store_gated_norms(x + C, x_stride, norm_D, eps, o, out, key_head, T, V, REPEATS, D, IS_SILU, BLOCK_ROWS)
        if fold_at > 0:
            c = tl.arange(0, 2 * BLOCK_K)
            channel, mask = c // BLOCK_K * (KEY_HEADS * K) + key_head * K + c % BLOCK_K, c % BLOCK_K < K
            _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, mask, C, CAPACITY)
