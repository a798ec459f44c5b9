"""The recurrent mixer of a decode window for slots with rings, in Gluon. See backend.Backend.

There are two launches. The first one (gated_delta_columns.py) convolves the window's inputs and stores what columns
need: queries, keys, values and gates. A program of the second one has a block of value dims of one slot's value head,
as in gated_delta.py. Its tile of the state is loaded once and stays in registers, where it is advanced by the ring's
entries while the first launch runs, then by the window's columns. The tile itself is stored only where it passes the
fold length. Entries and columns reach all lanes through shared memory, to which they are copied; Triton's own compiler
has no way to say this.

The last program of a key head to finish norms the outputs.

A tile is held as S / c with one number c, the product of the decays: then a token costs one fused multiply-add per
element, S / c <- fma(d / c, k, S / c), and no multiplication by its decay. c becomes 1 again where the state may be
stored, at multiples of the fold length, and where it has become small. That depends on the sequence alone, and window
and replay update the tile by the same function. So a replayed state has the bits of the state that the entries were
computed from, however the compiler contracts other operations. Columns are a loop that is not unrolled: a column's bits
do not depend on its place in the window.

A dead column costs nothing: no product, no store.

Shape letters as in backend.py; in kernels E entries, T columns of the widest window.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.traffic import state_traffic, touches_pools
from agentspec.kernels.triton.gated_delta_columns import (
    by_ptx,
    column_places,
    entry_place,
    float32,
    live_columns,
    load_window,
    one_and_exp,
    prepare_columns,
    remainder,
    rows_layout,
    wide,
    window_operands,
    window_shapes,
)
from agentspec.kernels.triton.gluon_names import await_previous, copy_values, reinterpret, release_next, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED, NUM_COUNTERS, arrival_counters, overlapped
from agentspec.types import FOLD_TOKENS

_ENTRY_CHUNK = 16
"""Entries that are copied to shared memory at a time."""
_MAX_ROWS = 16
"""Most rows (a token of a head) that the norm holds in registers at a time."""


class Tiling(NamedTuple):
    """How a launch divides its work. No choice changes a bit: a head's state has the same lanes in all of them."""

    block_d: int
    """Value dims of a program."""
    lane_elements: int
    """Elements of the state that a lane holds."""
    max_registers: int
    """Per lane."""


_TILINGS = {
    4: {127: Tiling(32, 32, 96), 511: Tiling(64, 64, 168), 2**31: Tiling(64, 64, 128)},
    8: {127: Tiling(64, 16, 80), 511: Tiling(64, 64, 168), 2**31: Tiling(64, 64, 128)},
    16: {63: Tiling(64, 16, 80), 127: Tiling(64, 32, 96), 511: Tiling(64, 64, 168), 2**31: Tiling(64, 64, 128)},
}
"""By the most columns, then by the most heads of all slots together. With few heads more warps share a tile, so that
every multiprocessor has enough of them. Measured on an H100, in whole steps and with `python -m
benchmarks.delta_ring`."""

_FOLD = gl.constexpr(FOLD_TOKENS)
_LEAST_SCALE = gl.constexpr(2.0**-60)
"""The state is of the order of its deltas and values, so that what is divided by this is far from float32's limits."""
_CHUNK = gl.constexpr(_ENTRY_CHUNK)
_INTERPRETED = gl.constexpr(INTERPRETED)


@touches_pools
def gated_delta_ring_step(
    projected_NP: Tensor,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    ring: DeltaRing,
    read_row_B: Tensor,
    window: RingWindow,
    live: LiveColumns | None = None,
    *,
    reads_early: bool = False,
) -> Tensor:
    """The output of the convolution stays float32; the reference rounds it to the projection's dtype.

    Counts the rows that it reads. How many it stores is not known on the host."""
    num_slots, num_columns = window.entries_BT.shape
    _, num_heads, value_dim, key_dim = ssm_RVDK.shape
    num_channels, num_values = conv_R3C.shape[2], num_heads * value_dim
    capacity, num_key_heads = ring.key_SCGK.shape[1:3]
    num_tokens = num_slots * num_columns if live is None else len(live.cell_N)
    assert projected_NP.shape == (num_tokens, num_channels + num_values + 2 * num_heads)
    assert num_channels == 2 * num_key_heads * key_dim + num_values
    assert num_slots * num_key_heads <= NUM_COUNTERS
    _check_memory(projected_NP, weights, ssm_RVDK, conv_R3C, ring)
    device = projected_NP.device
    o_NVD = torch.empty(num_tokens, num_values, dtype=torch.float32, device=device)
    out = torch.empty(num_tokens, num_values, dtype=projected_NP.dtype, device=device)
    windows = window_operands(read_row_B, window, live)
    shapes = window_shapes(
        capacity=capacity,
        num_columns=num_columns,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        value_dim=value_dim,
        key_dim=key_dim,
        reads_early=reads_early,
    )
    columns_BTX = prepare_columns(projected_NP, weights, conv_R3C, ring, windows, shapes)
    tiling = tiling_of(num_columns, num_slots * num_heads)
    block_d = min(tiling.block_d, triton.next_power_of_2(value_dim))
    num_warps = max(1, block_d * shapes["BLOCK_K"] // (32 * tiling.lane_elements))
    _gated_delta_ring_step[(num_heads * triton.cdiv(value_dim, block_d), num_slots)](
        projected_NP[:, num_channels:],
        projected_NP.stride(0),
        columns_BTX,
        weights.norm_D,
        weights.eps,
        ssm_RVDK,
        ssm_RVDK.stride(0),
        ring.key_SCGK,
        ring.delta_SCVD,
        ring.decay_SCV,
        *windows,
        num_tokens,
        o_NVD,
        out,
        arrival_counters(device),
        ENTRY_CHUNKS=entry_chunks(capacity, num_columns),
        IS_SILU=weights.gate == "silu",
        BLOCK_D=block_d,
        BLOCK_ROWS=min(_MAX_ROWS, triton.next_power_of_2(num_columns * num_heads // num_key_heads)),
        WARPS=num_warps,
        num_warps=num_warps,
        maxnreg=tiling.max_registers,
        **shapes,
        **overlapped(),
    )
    state_traffic.rows_read += num_slots
    return out


def _check_memory(
    projected_NP: Tensor, weights: DeltaWeights, ssm_RVDK: Tensor, conv_R3C: Tensor, ring: DeltaRing
) -> None:
    entries = (ring.key_SCGK, ring.delta_SCVD, ring.decay_SCV)
    assert projected_NP.dtype == conv_R3C.dtype == ring.conv_SCX.dtype
    assert all(x.dtype == torch.float32 for x in (ssm_RVDK, *entries))
    assert projected_NP.stride(1) == 1
    assert all(x.is_contiguous() for x in (ssm_RVDK[0], conv_R3C[0], weights.conv_C4, ring.conv_SCX, *entries))


def entry_chunks(capacity: int, num_columns: int) -> int:
    """Chunks of shared memory that hold every entry which a window of so many columns may follow."""
    num_chunks: int = triton.next_power_of_2(triton.cdiv(capacity - num_columns, _ENTRY_CHUNK))
    return num_chunks


def tiling_of(num_columns: int, num_heads: int) -> Tiling:
    """num_heads: of all slots together."""
    by_heads = next(tilings for most, tilings in _TILINGS.items() if num_columns <= most)
    return next(tiling for most, tiling in by_heads.items() if num_heads <= most)


@gluon.jit
def _shared(ROWS: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Allocate float32 [ROWS, WIDTH], as rows to choose from."""
    return gl.allocate_shared_memory(gl.float32, [ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _column(rows, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory, of width 1, as a vector."""
    return reinterpret(rows, gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _lines(rows, CHUNKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory, of width 1, as vectors of _CHUNK elements."""
    return reinterpret(rows, gl.float32, [CHUNKS, _CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _chunks(rows, CHUNKS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory as matrices of ROWS rows."""
    return reinterpret(rows, gl.float32, [CHUNKS, ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _fetch_entries(  # type: ignore[no-untyped-def]
    keys, deltas, decays, first, count, begin_d, CAPACITY: gl.constexpr, CHUNKS: gl.constexpr, V: gl.constexpr,
    D: gl.constexpr, KEY_HEADS: gl.constexpr, K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr
):  # fmt: skip
    """Start to copy `count` entries from the place `first` on to shared memory, and return where they will be. keys,
    deltas, decays: where the slot's ring begins, for this program's heads."""
    KEY_ROWS: gl.constexpr = rows_layout(BLOCK_K, WARPS)
    DELTA_ROWS: gl.constexpr = rows_layout(BLOCK_D, WARPS)
    entries = (_shared(CHUNKS * _CHUNK, BLOCK_K), _shared(CHUNKS * _CHUNK, BLOCK_D), _shared(CHUNKS * _CHUNK, 1))
    key_chunks = _chunks(entries[0], CHUNKS, _CHUNK, BLOCK_K)
    delta_chunks = _chunks(entries[1], CHUNKS, _CHUNK, BLOCK_D)
    decay_chunks = _lines(entries[2], CHUNKS)
    k = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, KEY_ROWS)), 0)
    d = begin_d + gl.expand_dims(gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, DELTA_ROWS)), 0)
    i_key = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, KEY_ROWS)), 1)
    i_delta = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, DELTA_ROWS)), 1)
    i_decay = gl.arange(0, _CHUNK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    for chunk in gl.static_range(CHUNKS):
        left = count - chunk * _CHUNK
        if left > 0:
            at = first + chunk * _CHUNK
            place = wide(entry_place(at, i_key, CAPACITY))
            copy_values(key_chunks.index(chunk), keys + k + place * (KEY_HEADS * K), mask=(i_key < left) & (k < K))
            place = wide(entry_place(at, i_delta, CAPACITY))
            copy_values(delta_chunks.index(chunk), deltas + d + place * (V * D), mask=(i_delta < left) & (d < D))
            place = wide(entry_place(at, i_decay, CAPACITY))
            copy_values(decay_chunks.index(chunk), decays + place * V, mask=i_decay < left)
    async_copy.commit_group()
    return entries


@gluon.jit
def _store_gated_norms(  # type: ignore[no-untyped-def]
    z, z_stride, norm_D, eps, o, out, key_head, num_columns, T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr,
    D: gl.constexpr, IS_SILU: gl.constexpr, BLOCK_ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Norm and gate the outputs of a key head's value heads. All pointers are this slot's."""
    WIDTH: gl.constexpr = triton.next_power_of_2(D)
    LAYOUT: gl.constexpr = rows_layout(WIDTH, WARPS)
    d = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.expand_dims(gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    gain = gl.load(norm_D + d, mask=d < D, other=0.0)
    for begin in gl.static_range(0, T * REPEATS, BLOCK_ROWS):
        i = begin + row
        is_real = (i < num_columns * REPEATS) & (d < D)
        value_dim = (key_head * REPEATS + i % REPEATS) * D + d
        place = i // REPEATS * (V * D) + value_dim
        # Other programs wrote o: bypass L1, which is not coherent with their stores.
        value = gl.load(o + place, mask=is_real, other=0.0, cache_modifier=".cg")
        raw_gate = float32(gl.load(z + i // REPEATS * z_stride + value_dim, mask=is_real, other=0.0))
        scale = gl.rsqrt(gl.sum(value * value, axis=1) / D + eps)
        gate = 1.0 / one_and_exp(raw_gate)
        if IS_SILU:
            gate *= raw_gate
        normed = value * gl.expand_dims(scale, 1) * gain
        gl.store(out + place, (normed * gate).to(out.dtype.element_ty), mask=is_real)


@gluon.jit
def _zero_dead_rows(  # type: ignore[no-untyped-def]
    out, key_head, num_columns, b, first_B, first_row, num_rows, V: gl.constexpr, REPEATS: gl.constexpr,
    D: gl.constexpr, BLOCK_ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Zero the outputs of a key head's value heads in the rows behind the last slot's. out: this slot's."""
    if first_B is not None:
        WIDTH: gl.constexpr = triton.next_power_of_2(D)
        LAYOUT: gl.constexpr = rows_layout(WIDTH, WARPS)
        d = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
        row = gl.expand_dims(gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
        zeros = gl.zeros([BLOCK_ROWS, WIDTH], out.dtype.element_ty, LAYOUT)
        is_last = b == gl.num_programs(1) - 1
        end = gl.where(is_last, num_rows - first_row, num_columns).to(gl.int32) * REPEATS
        for begin in range(num_columns * REPEATS, end, BLOCK_ROWS):
            i = begin + row
            place = i // REPEATS * (V * D) + (key_head * REPEATS + i % REPEATS) * D + d
            gl.store(out + place, zeros, mask=(i < end) & (d < D))


@gluon.jit
def _fetch_columns(  # type: ignore[no-untyped-def]
    places, rows, key_head, head, begin_d, T: gl.constexpr, D: gl.constexpr, K: gl.constexpr, X: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Start to copy what columns need, dead ones too, to shared memory `rows`. places: `column_places`."""
    queries, keys, products, values, betas, decays = places
    KEY_ROWS: gl.constexpr = rows_layout(BLOCK_K, WARPS)
    VALUE_ROWS: gl.constexpr = rows_layout(BLOCK_D, WARPS)
    k = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, KEY_ROWS)), 0)
    t = gl.expand_dims(gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, KEY_ROWS)), 1)
    at, is_real = t * X + (key_head * K + k), (t < T) & (k < K)
    copy_values(_chunks(rows[0], 1, BLOCK_T, BLOCK_K).index(0), queries + at, mask=is_real)
    copy_values(_chunks(rows[1], 1, BLOCK_T, BLOCK_K).index(0), keys + at, mask=is_real)
    d = begin_d + gl.expand_dims(gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, VALUE_ROWS)), 0)
    t = gl.expand_dims(gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, VALUE_ROWS)), 1)
    at, is_real = t * X + (head * D + d), (t < T) & (d < D)
    copy_values(_chunks(rows[3], 1, BLOCK_T, BLOCK_D).index(0), values + at, mask=is_real)
    async_copy.commit_group()
    t_T = gl.arange(0, BLOCK_T, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    product_T = gl.load(products + t_T * X + key_head, mask=t_T < T, other=0.0)
    beta_T = gl.load(betas + t_T * X + head, mask=t_T < T, other=0.0)
    decay_T = gl.load(decays + t_T * X + head, mask=t_T < T, other=0.0)
    _column(rows[2], BLOCK_T).store(product_T)
    _column(rows[4], BLOCK_T).store(beta_T)
    _column(rows[5], BLOCK_T).store(decay_T)


@gluon.jit
def _reciprocal(scale):  # type: ignore[no-untyped-def]
    """1 / scale, which _LEAST_SCALE and 1 bound: with these bits, the division checks for sizes that can't occur."""
    return 1.0 / scale if _INTERPRETED else by_ptx("rcp.approx.ftz.f32 $0, $1;", scale)


@gluon.jit
def _whole(tile_DK, scale):  # type: ignore[no-untyped-def]
    """The same state with scale 1. All lanes of a program come here, or none."""
    warp_barrier()  # keeps the branch around this one: as predicated instructions it would take its time at every token
    return tile_DK * gl.expand_dims(scale, 1), scale * 0.0 + 1.0


@gluon.jit
def _updated(tile_DK, scale, delta_D, key_K):  # type: ignore[no-untyped-def]
    """Return (tile, scale) of scale * tile + delta key^T. scale: [1], with the token's decay."""
    if gl.sum(scale, axis=0) < _LEAST_SCALE:
        tile_DK, scale = _whole(tile_DK, scale)
    return gl.fma(gl.expand_dims(delta_D * _reciprocal(scale), 1), gl.expand_dims(key_K, 0), tile_DK), scale


@gluon.jit
def _replayed(  # type: ignore[no-untyped-def]
    tile_DK, rows, length, count, fold_tile, fold_at, is_real, k, K: gl.constexpr, KEYS: gl.constexpr,
    VALUES: gl.constexpr
):  # fmt: skip
    """Advance the state after `length` tokens by the entries in shared memory, and store the state after `fold_at` of
    them to `fold_tile` (0: nowhere). Return (tile, scale)."""
    keys, deltas, decays = rows
    scale = gl.full([1], 1.0, gl.float32, VALUES)
    i = count * 0
    while i < count:
        whole_at = i + _FOLD - (length + i) % _FOLD
        for entry in range(i, gl.minimum(whole_at, count)):
            scale *= decays.index(entry).load(VALUES)
            delta_D, key_K = deltas.index(entry).load(VALUES), keys.index(entry).load(KEYS)
            if k.shape[0] != K:  # what was not copied is undefined
                key_K = gl.where(k < K, key_K, 0.0)
            tile_DK, scale = _updated(tile_DK, scale, delta_D, key_K)
        if whole_at <= count:
            tile_DK, scale = _whole(tile_DK, scale)
            if whole_at == fold_at:
                gl.store(fold_tile, tile_DK, mask=is_real)
        i = whole_at
    return tile_DK, scale


@gluon.jit
def _run_columns(  # type: ignore[no-untyped-def]
    tile_DK, scale, rows, length, o, ring_deltas, after, is_value, k, num_columns, V: gl.constexpr, D: gl.constexpr,
    K: gl.constexpr, CAPACITY: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """Run the window's columns behind `length` tokens. Stores their outputs, and the deltas of their entries."""
    queries, keys, products, values, betas, decays = rows
    for t in range(num_columns):
        q_K, k_K = queries.index(t).load(KEYS), keys.index(t).load(KEYS)
        if k.shape[0] != K:  # what was not copied is undefined
            q_K, k_K = gl.where(k < K, q_K, 0.0), gl.where(k < K, k_K, 0.0)
        scale *= decays.index(t).load(VALUES)
        # With S' = a S + delta k^T, the output S' q is a (S q) + delta (k . q): both sums are over the same S and run
        # together.
        seen_D = gl.sum(tile_DK * gl.expand_dims(k_K, 0), axis=1)
        read_D = gl.sum(tile_DK * gl.expand_dims(q_K, 0), axis=1)
        delta_D = gl.fma(-scale, seen_D, values.index(t).load(VALUES)) * betas.index(t).load(VALUES)
        gl.store(o + t * (V * D), gl.fma(delta_D, products.index(t).load(VALUES), scale * read_D), mask=is_value)
        gl.store(ring_deltas + wide(entry_place(after, t, CAPACITY)) * (V * D), delta_D, mask=is_value)
        if t + 1 < num_columns:  # no column reads the state behind the last one
            tile_DK, scale = _updated(tile_DK, scale, delta_D, k_K)
            if (length + t + 1) % _FOLD == 0:
                tile_DK, scale = _whole(tile_DK, scale)


@gluon.jit
def _tile_places(is_value, local_d, k, K: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (which elements of a tile are real, their offsets). Offsets are added to an address last: what differs
    between a lane's elements is then part of its instructions."""
    is_real = gl.expand_dims(is_value, 1) & gl.expand_dims(k < K, 0)
    return is_real, gl.expand_dims(local_d * K, 1) + gl.expand_dims(k, 0)


@gluon.jit
def _gated_delta_ring_step(  # type: ignore[no-untyped-def]
    z_NVD, z_stride, columns_BTX, norm_D, eps, ssm_RVDK, ssm_stride, key_SCGK, delta_SCVD, decay_SCV, read_row_B,
    slot_B, start_B, read_length_B, fold_length_B, fold_row_B, first_B, count_B, num_rows, o_NVD, out_NVD, counters,
    CAPACITY: gl.constexpr, ENTRY_CHUNKS: gl.constexpr, T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr,
    D: gl.constexpr, K: gl.constexpr, X: gl.constexpr, IS_SILU: gl.constexpr, EARLY: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """z_NVD: the raw gates. EARLY: before the wait the state is read, advanced by the entries and stored to the fold
    row."""
    release_next(PDL)
    KEY_HEADS: gl.constexpr = V // REPEATS
    NUM_BLOCKS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    # Eight lanes of a tile's row have four key dims each, of every 32: sums over the key dim cross only these lanes.
    KEYS: gl.constexpr = gl.SliceLayout(0, rows_layout(BLOCK_K, WARPS, 4, 8))
    VALUES: gl.constexpr = gl.SliceLayout(1, rows_layout(BLOCK_K, WARPS, 4, 8))
    b, head = gl.program_id(1).to(gl.int64), gl.program_id(0) // NUM_BLOCKS
    begin_d, key_head = gl.program_id(0) % NUM_BLOCKS * BLOCK_D, head // REPEATS
    if not EARLY:
        await_previous(PDL)

    window = (read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B)
    read_row, fold_row, slot, read_length, count, fold_at, first = load_window(window, start_B, b, CAPACITY)
    local_d, k = gl.arange(0, BLOCK_D, layout=VALUES), gl.arange(0, BLOCK_K, layout=KEYS)
    is_value = begin_d + local_d < D
    is_real, lanes = _tile_places(is_value, local_d, k, K)
    tile = ssm_RVDK + (head * D + begin_d) * K
    tile_DK = gl.load(tile + read_row * ssm_stride + lanes, mask=is_real, other=0.0)
    ring_deltas = delta_SCVD + slot * (V * D) + head * D
    entries = _fetch_entries(
        key_SCGK + slot * (KEY_HEADS * K) + key_head * K, ring_deltas, decay_SCV + slot * V + head, first, count,
        begin_d, CAPACITY, ENTRY_CHUNKS, V, D, KEY_HEADS, K, BLOCK_D, BLOCK_K, WARPS,
    )  # fmt: skip
    async_copy.wait_group(0)
    warp_barrier()
    length, fold_tile = remainder(read_length, _FOLD), tile + fold_row * ssm_stride + lanes
    tile_DK, scale = _replayed(tile_DK, entries, length, count, fold_tile, fold_at, is_real, k, K, KEYS, VALUES)

    if EARLY:
        await_previous(PDL)
    first_row, num_columns = live_columns(b, first_B, count_B, T)
    columns = (
        _shared(BLOCK_T, BLOCK_K), _shared(BLOCK_T, BLOCK_K), _shared(BLOCK_T, 1), _shared(BLOCK_T, BLOCK_D),
        _shared(BLOCK_T, 1), _shared(BLOCK_T, 1),
    )  # fmt: skip
    _fetch_columns(
        column_places(columns_BTX, b, KEY_HEADS, K, V, D, T, X), columns, key_head, head, begin_d, T, D, K, X, BLOCK_T,
        BLOCK_D, BLOCK_K, WARPS,
    )  # fmt: skip
    async_copy.wait_group(0)
    warp_barrier()
    o, out = o_NVD + first_row * (V * D), out_NVD + first_row * (V * D)
    _run_columns(
        tile_DK, scale, columns, length + count, o + (head * D + begin_d) + local_d, ring_deltas + begin_d + local_d,
        entry_place(first, count, CAPACITY), is_value, k, num_columns, V, D, K, CAPACITY, KEYS, VALUES,
    )  # fmt: skip

    warp_barrier()  # every lane's reads and stores must precede the count
    counter = counters + b * KEY_HEADS + key_head
    if gl.atomic_add(counter, 1, sem="acq_rel") == REPEATS * NUM_BLOCKS - 1:
        gl.store(counter, 0)
        _store_gated_norms(
            z_NVD + first_row * z_stride, z_stride, norm_D, eps, o, out, key_head, num_columns, T, V, REPEATS, D,
            IS_SILU, BLOCK_ROWS, WARPS,
        )  # fmt: skip
        _zero_dead_rows(out, key_head, num_columns, b, first_B, first_row, num_rows, V, REPEATS, D, BLOCK_ROWS, WARPS)
