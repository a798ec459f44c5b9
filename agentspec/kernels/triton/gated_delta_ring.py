"""The recurrent mixer of a decode window for slots with rings, in one launch, in Gluon. See backend.Backend.

A program has a block of value dims of one slot's value head, as in gated_delta.py. Its tile of the state is loaded once
and stays in registers, where it is advanced by the ring's entries, then by the window's columns. The tile itself is
stored only where it passes the fold length. What a column needs (query, key, values, gates) is computed for all columns
at once, each element by one lane, and handed to all lanes through shared memory; so are the entries, which are copied
there while the tile is loaded. Triton's own compiler has no way to say this: there every group of lanes computes every
query and key itself, which takes longer than the recurrence.

The last program of a key head to finish norms the outputs and folds the shared q and k convolution inputs, because the
fold row may be the row that the others read.

A tile is held as S / c with one number c, the product of the decays: then a token costs one fused multiply-add per
element, S / c <- fma(d / c, k, S / c), and no multiplication by its decay. c becomes 1 again where the state may be
stored, at multiples of the fold length, and where it has become small. That depends on the sequence alone, and window
and replay update the tile by the same function. So a replayed state has the bits of the state that the entries were
computed from, however the compiler contracts other operations. Columns are a loop that is not unrolled: a column's bits
do not depend on its place in the window.

A dead column costs nothing but its share of what is prepared at once: no product, no store.

Shape letters as in backend.py; in kernels E entries, T columns of the widest window.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.traffic import state_traffic, touches_pools
from agentspec.kernels.triton.gated_delta import L2_EPS, softplus
from agentspec.kernels.triton.launch import (
    INTERPRETED,
    NUM_COUNTERS,
    arrival_counters,
    await_previous,
    overlapped,
    release_next,
)
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
    4: {256: Tiling(32, 32, 96), 511: Tiling(64, 64, 168), 2**31: Tiling(64, 64, 128)},
    8: {511: Tiling(32, 32, 128), 2**31: Tiling(64, 64, 168)},
    16: {127: Tiling(32, 16, 96), 160: Tiling(64, 32, 128), 2**31: Tiling(64, 64, 168)},
}
"""By the most columns, then by the most heads of all slots together. A larger tile shares more of what a window costs
once. A smaller one gives every multiprocessor work, and a wide window's columns, which warps prepare, to more of them.
Measured on an H100 with `python -m benchmarks.delta_ring`; the smallest has no more registers than five programs on a
multiprocessor leave it."""

_L2_EPS = gl.constexpr(L2_EPS.value)
_FOLD = gl.constexpr(FOLD_TOKENS)
_LEAST_SCALE = gl.constexpr(2.0**-60)
"""The state is of the order of its deltas and values, so that what is divided by this is far from float32's limits."""
_CHUNK = gl.constexpr(_ENTRY_CHUNK)
_INTERPRETED = gl.constexpr(INTERPRETED)
_EXP_OF_NEGATIVE = gl.constexpr("{ .reg .f32 x; mul.rn.f32 x, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, x; }")
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Its name in Triton 3.9, and in earlier versions."""
_descriptor = gl.shared_memory_descriptor
_view = _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret
"""Likewise."""
_barrier = tl.debug_barrier
_softplus = gluon.jit(softplus.fn)
_release_next = gluon.jit(release_next.fn)
_await_previous = gluon.jit(await_previous.fn)


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
    tiling = tiling_of(num_columns, num_slots * num_heads)
    block_d = min(tiling.block_d, triton.next_power_of_2(value_dim))
    block_k = triton.next_power_of_2(key_dim)
    num_warps = max(1, block_d * block_k // (32 * tiling.lane_elements))
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
        *((None, None) if live is None else (live.first_B, live.count_B)),
        num_tokens,
        o_NVD,
        out,
        arrival_counters(device),
        CAPACITY=capacity,
        ENTRY_CHUNKS=entry_chunks(capacity, num_columns),
        T=num_columns,
        V=num_heads,
        REPEATS=num_heads // num_key_heads,
        D=value_dim,
        K=key_dim,
        IS_SILU=weights.gate == "silu",
        EARLY=reads_early,
        BLOCK_T=triton.next_power_of_2(num_columns),
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        BLOCK_ROWS=min(_MAX_ROWS, triton.next_power_of_2(num_columns * num_heads // num_key_heads)),
        WARPS=num_warps,
        num_warps=num_warps,
        maxnreg=tiling.max_registers,
        **overlapped(),
    )
    state_traffic.rows_read += num_slots
    return out


def entry_chunks(capacity: int, num_columns: int) -> int:
    """Chunks of shared memory that hold every entry which a window of so many columns may follow."""
    num_chunks: int = triton.next_power_of_2(triton.cdiv(capacity - num_columns, _ENTRY_CHUNK))
    return num_chunks


def tiling_of(num_columns: int, num_heads: int) -> Tiling:
    """num_heads: of all slots together."""
    by_heads = next(tilings for most, tilings in _TILINGS.items() if num_columns <= most)
    return next(tiling for most, tiling in by_heads.items() if num_heads <= most)


@gluon.constexpr_function
def _rows_layout(width: int, num_warps: int, run: int = 4, max_lanes: int = 32) -> gl.BlockedLayout:
    """Rows of `width` elements, each of which lies within a warp; `run` elements in turn per lane."""
    lanes = min(max_lanes, width // run)
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _run_of(width: int) -> int:
    """Elements per lane if a warp has a row of so many."""
    return max(1, width // 32)


@gluon.jit
def _shared(ROWS: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Allocate float32 [ROWS, WIDTH], as rows to choose from."""
    return gl.allocate_shared_memory(gl.float32, [ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _matrix(rows, ROWS: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory as one matrix."""
    return _view(rows, gl.float32, [ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _column(rows, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory, of width 1, as a vector."""
    return _view(rows, gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _lines(rows, CHUNKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory, of width 1, as vectors of _CHUNK elements."""
    return _view(rows, gl.float32, [CHUNKS, _CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _chunks(rows, CHUNKS: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory as matrices of _CHUNK rows."""
    return _view(rows, gl.float32, [CHUNKS, _CHUNK, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _float32(x):  # type: ignore[no-untyped-def]
    """x in float32. Triton's own conversion of bfloat16 takes two instructions for every other element."""
    if x.dtype == gl.bfloat16:
        x = (x.to(gl.int16, bitcast=True).to(gl.int32) << 16).to(gl.float32, bitcast=True)
    return x.to(gl.float32)


@gluon.jit
def _by_ptx(PTX: gl.constexpr, x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(PTX, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _one_and_exp(x):  # type: ignore[no-untyped-def]
    """1 + e^-x. Triton's own e^-x takes three more instructions for results below 2**-126, which leave 1 as it is."""
    return 1.0 + (gl.exp(-x) if _INTERPRETED else _by_ptx(_EXP_OF_NEGATIVE, x))


@gluon.jit
def _wide(row):  # type: ignore[no-untyped-def]
    """The int64 of a number below 2**31, so that a product with a stride takes one instruction."""
    return row.to(gl.uint32).to(gl.int64)


@gluon.jit
def _remainder(length, DIVISOR: gl.constexpr):  # type: ignore[no-untyped-def]
    return (length.to(gl.uint32, bitcast=True) % DIVISOR).to(gl.int32, bitcast=True)


@gluon.jit
def _entry(first, i, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the i-th entry from `first` on, i at most CAPACITY."""
    place = (first + i).to(gl.uint32, bitcast=True)
    return gl.minimum(place, place - CAPACITY).to(gl.int32, bitcast=True)


@gluon.jit
def _prefetch_tile(  # type: ignore[no-untyped-def]
    rows, count, K: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr
):
    """Ask for rows of a state, at most `count` of K elements each, to be in L2. To load them would take the registers
    in which queries, keys and values are prepared."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if PDL:
        line = gl.arange(0, triton.next_power_of_2(triton.cdiv(BLOCK_D * K, 32)), layout=LAYOUT)
        at = rows + gl.minimum(line * 32, count * K - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _fetch_entries(  # type: ignore[no-untyped-def]
    keys, deltas, decays, first, count, begin_d, CAPACITY: gl.constexpr, CHUNKS: gl.constexpr, V: gl.constexpr,
    D: gl.constexpr, KEY_HEADS: gl.constexpr, K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr
):  # fmt: skip
    """Start to copy `count` entries from the place `first` on to shared memory, and return where they will be. keys,
    deltas, decays: where the slot's ring begins, for this program's heads."""
    KEY_ROWS: gl.constexpr = _rows_layout(BLOCK_K, WARPS)
    DELTA_ROWS: gl.constexpr = _rows_layout(BLOCK_D, WARPS)
    entries = (_shared(CHUNKS * _CHUNK, BLOCK_K), _shared(CHUNKS * _CHUNK, BLOCK_D), _shared(CHUNKS * _CHUNK, 1))
    key_chunks, delta_chunks = _chunks(entries[0], CHUNKS, BLOCK_K), _chunks(entries[1], CHUNKS, BLOCK_D)
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
            place = _wide(_entry(at, i_key, CAPACITY))
            _copy(key_chunks.index(chunk), keys + k + place * (KEY_HEADS * K), mask=(i_key < left) & (k < K))
            place = _wide(_entry(at, i_delta, CAPACITY))
            _copy(delta_chunks.index(chunk), deltas + d + place * (V * D), mask=(i_delta < left) & (d < D))
            place = _wide(_entry(at, i_decay, CAPACITY))
            _copy(decay_chunks.index(chunk), decays + place * V, mask=i_decay < left)
    async_copy.commit_group()
    return entries


@gluon.jit
def _taps(  # type: ignore[no-untyped-def]
    conv_C4, begin, length, WIDTH: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr
):
    """Return the four taps of `length` channels from `begin` on, float32 [1, WIDTH], oldest token's first."""
    # A lane has the channels that it has in ROWS, and all their taps, which lie in turn in memory.
    LAYOUT: gl.constexpr = gl.BlockedLayout([4 * RUN], [32], [WARPS], [0])
    ROWS: gl.constexpr = _rows_layout(WIDTH, WARPS, RUN)
    i = gl.arange(0, 4 * WIDTH, layout=LAYOUT)
    taps_C4 = _float32(gl.load(conv_C4 + begin * 4 + i, mask=i < length * 4, other=0.0))
    taps_0_2, taps_1_3 = gl.split(gl.reshape(taps_C4, [WIDTH, 2, 2]))
    taps = gl.split(taps_0_2) + gl.split(taps_1_3)
    rows = ()
    for tap in gl.static_range(4):
        rows += (gl.expand_dims(gl.convert_layout(taps[tap % 2 * 2 + tap // 2], gl.SliceLayout(0, ROWS)), 0),)
    return rows


@gluon.jit
def _load_weights(  # type: ignore[no-untyped-def]
    conv_C4, a_log_V, dt_bias_V, head, begin_d, KEY_HEADS: gl.constexpr, REPEATS: gl.constexpr, D: gl.constexpr,
    K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Return (taps of q and of k, taps of v, (rate, bias) of decays)."""
    q_taps = _taps(conv_C4, head // REPEATS * K, K, BLOCK_K, 4, WARPS)
    k_taps = _taps(conv_C4, (KEY_HEADS + head // REPEATS) * K, K, BLOCK_K, 4, WARPS)
    v_taps = _taps(conv_C4, 2 * KEY_HEADS * K + head * D + begin_d, D - begin_d, BLOCK_D, _run_of(BLOCK_D), WARPS)
    return (q_taps, k_taps), v_taps, (gl.exp(gl.load(a_log_V + head)), gl.load(dt_bias_V + head))


@gluon.jit
def _last_inputs(count, first, row, inputs, C: gl.constexpr, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the convolution's inputs of the last three of `count` entries begin; `row` has the three before those."""
    places = ()
    for i in gl.static_range(3):
        past = count + (i - 3)
        begin, at = gl.where(past < 0, row, inputs), gl.where(past < 0, count + i, _entry(first, past, CAPACITY))
        places += (begin + at.to(gl.int64) * C,)
    return places


@gluon.jit
def _convolved(t, sources, channel, taps, mask, num_columns):  # type: ignore[no-untyped-def]
    """Return (SiLU of the convolution, its last input) of columns t [T, 1] at channels [1, X]. sources: inputs of the
    window, their stride, `_last_inputs` before it."""
    x, x_stride, before = sources
    for tap in gl.static_range(4):
        place = x + (t + (tap - 3)) * x_stride
        for i in gl.static_range(3 - tap):
            place = gl.where(t == i, before[tap + i], place)
        last = gl.load(place + channel, mask=mask & (t < num_columns), other=0.0)
        if tap == 0:
            y = _float32(last) * taps[0]
        else:
            y = gl.fma(_float32(last), taps[tap], y)
    return y / _one_and_exp(y), last


@gluon.jit
def _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, mask, C: gl.constexpr, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the convolution's inputs before the fold length to the fold row, which may be the read row. window: the
    vectors of all slots."""
    read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B = window
    # Loaded again, since they would take registers all the time for what one window in several does.
    read_length = gl.load(read_length_B + b).to(gl.int32)
    count, first = gl.load(fold_length_B + b).to(gl.int32) - read_length, _remainder(read_length, CAPACITY)
    row, slot = conv_R3C + _wide(gl.load(read_row_B + b)) * conv_stride, _wide(gl.load(slot_B + b))
    places, inputs = _last_inputs(count, first, row, conv_SCX + slot * (CAPACITY * C), C, CAPACITY), ()
    for i in gl.static_range(3):
        inputs += (gl.load(places[i] + channel, mask=mask, other=0.0),)
    place = conv_R3C + _wide(gl.load(fold_row_B + b)) * conv_stride + channel
    _barrier()  # every lane must read its row before any lane stores to it
    for i in gl.static_range(3):
        gl.store(place + i * C, inputs[i], mask=mask)


@gluon.jit
def _store_gated_norms(  # type: ignore[no-untyped-def]
    z, z_stride, norm_D, eps, o, out, key_head, num_columns, T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr,
    D: gl.constexpr, IS_SILU: gl.constexpr, BLOCK_ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Norm and gate the outputs of a key head's value heads. All pointers are this slot's."""
    WIDTH: gl.constexpr = triton.next_power_of_2(D)
    LAYOUT: gl.constexpr = _rows_layout(WIDTH, WARPS)
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
        raw_gate = _float32(gl.load(z + i // REPEATS * z_stride + value_dim, mask=is_real, other=0.0))
        scale = gl.rsqrt(gl.sum(value * value, axis=1) / D + eps)
        gate = 1.0 / _one_and_exp(raw_gate)
        if IS_SILU:
            gate *= raw_gate
        normed = value * gl.expand_dims(scale, 1) * gain
        gl.store(out + place, (normed * gate).to(out.dtype.element_ty), mask=is_real)


@gluon.jit
def _live_columns(b, first_B, count_B, T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of slot b's column 0, and its live columns."""
    first_row, num_columns = b * T, T
    if first_B is not None:
        first_row, num_columns = gl.load(first_B + b), gl.load(count_B + b).to(gl.int32)
    return first_row, num_columns


@gluon.jit
def _zero_dead_rows(  # type: ignore[no-untyped-def]
    out, key_head, num_columns, b, first_B, first_row, num_rows, V: gl.constexpr, REPEATS: gl.constexpr,
    D: gl.constexpr, BLOCK_ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Zero the outputs of a key head's value heads in the rows behind the last slot's. out: this slot's."""
    if first_B is not None:
        WIDTH: gl.constexpr = triton.next_power_of_2(D)
        LAYOUT: gl.constexpr = _rows_layout(WIDTH, WARPS)
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
def _prepare_keys(  # type: ignore[no-untyped-def]
    sources, after, key_head, taps, rows, num_columns, KEY_HEADS: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    CAPACITY: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Put every column's query and key, L2-normalized, and their inner product into shared memory `rows`. Return what
    `_store_keys` stores."""
    LAYOUT: gl.constexpr = _rows_layout(BLOCK_K, WARPS)
    k = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT)), 0)
    t = gl.expand_dims(gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT)), 1)
    channel = key_head * K + k
    q_TK, q_input = _convolved(t, sources, channel, taps[0], k < K, num_columns)
    k_TK, k_input = _convolved(t, sources, channel + KEY_HEADS * K, taps[1], k < K, num_columns)
    q_scale = gl.rsqrt(gl.sum(q_TK * q_TK, axis=1) + _L2_EPS) * K**-0.5
    k_scale = gl.rsqrt(gl.sum(k_TK * k_TK, axis=1) + _L2_EPS)
    k_TK *= gl.expand_dims(k_scale, 1)
    queries, keys, products = rows
    _matrix(queries, BLOCK_T, BLOCK_K).store(q_TK * gl.expand_dims(q_scale, 1))
    _matrix(keys, BLOCK_T, BLOCK_K).store(k_TK)
    _column(products, BLOCK_T).store(gl.sum(q_TK * k_TK, axis=1) * q_scale)
    place = _wide(_entry(after, t, CAPACITY))
    return place, channel, (k < K) & (t < num_columns), k_TK, q_input, k_input


@gluon.jit
def _store_keys(prepared, ring_keys, inputs, KEY_HEADS: gl.constexpr, K: gl.constexpr, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the window's keys and its inputs of queries and keys to the ring."""
    place, channel, is_real, k_TK, q_input, k_input = prepared
    gl.store(ring_keys + channel + place * (KEY_HEADS * K), k_TK, mask=is_real)
    inputs += channel + place * C
    gl.store(inputs, q_input, mask=is_real)
    gl.store(inputs + KEY_HEADS * K, k_input, mask=is_real)


@gluon.jit
def _prepare_values(  # type: ignore[no-untyped-def]
    sources, after, head, begin_d, taps, raw, decay_terms, rows, ring, is_first, num_columns, V: gl.constexpr,
    KEY_CHANNELS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, CAPACITY: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_D: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Put every column's values and gates into shared memory `rows`, and store decays and inputs to the ring; the
    head's first program stores the decays. raw: where a column's raw write strength is; its decay is V elements after
    it."""
    LAYOUT: gl.constexpr = _rows_layout(BLOCK_D, WARPS, _run_of(BLOCK_D))
    d = gl.expand_dims(begin_d + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    t_T = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    t = gl.expand_dims(t_T, 1)
    channel = KEY_CHANNELS + head * D + d
    v_TD, v_input = _convolved(t, sources, channel, taps, d < D, num_columns)
    rate, dt_bias = decay_terms
    raw += t_T * sources[1]
    beta_T = 1.0 / _one_and_exp(gl.load(raw, mask=t_T < num_columns, other=0.0).to(gl.float32))
    raw_decay_T = gl.load(raw + V, mask=t_T < num_columns, other=0.0).to(gl.float32)
    decay_T = gl.exp(-rate * _softplus(raw_decay_T + dt_bias))
    values, betas, decays = rows
    _matrix(values, BLOCK_T, BLOCK_D).store(v_TD)
    _column(betas, BLOCK_T).store(beta_T)
    _column(decays, BLOCK_T).store(decay_T)
    ring_decays, inputs = ring
    place = _wide(_entry(after, t, CAPACITY))
    gl.store(inputs + channel + place * C, v_input, mask=(d < D) & (t < num_columns))
    if is_first:
        gl.store(ring_decays + _wide(_entry(after, t_T, CAPACITY)) * V, decay_T, mask=t_T < num_columns)


@gluon.jit
def _reciprocal(scale):  # type: ignore[no-untyped-def]
    """1 / scale, which _LEAST_SCALE and 1 bound: with these bits, the division checks for sizes that can't occur."""
    return 1.0 / scale if _INTERPRETED else _by_ptx("rcp.approx.ftz.f32 $0, $1;", scale)


@gluon.jit
def _whole(tile_DK, scale):  # type: ignore[no-untyped-def]
    """The same state with scale 1. All lanes of a program come here, or none."""
    _barrier()  # keeps the branch around this one: as predicated instructions it would take its time at every token
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
    tile_DK, scale, rows, length, o, ring_deltas, after, is_value, num_columns, V: gl.constexpr, D: gl.constexpr,
    CAPACITY: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """Run the window's columns behind `length` tokens. Stores their outputs, and the deltas of their entries."""
    queries, keys, products, values, betas, decays = rows
    for t in range(num_columns):
        q_K, k_K = queries.index(t).load(KEYS), keys.index(t).load(KEYS)
        scale *= decays.index(t).load(VALUES)
        # With S' = a S + delta k^T, the output S' q is a (S q) + delta (k . q): both sums are over the same S and run
        # together.
        seen_D = gl.sum(tile_DK * gl.expand_dims(k_K, 0), axis=1)
        read_D = gl.sum(tile_DK * gl.expand_dims(q_K, 0), axis=1)
        delta_D = gl.fma(-scale, seen_D, values.index(t).load(VALUES)) * betas.index(t).load(VALUES)
        gl.store(o + t * (V * D), gl.fma(delta_D, products.index(t).load(VALUES), scale * read_D), mask=is_value)
        gl.store(ring_deltas + _wide(_entry(after, t, CAPACITY)) * (V * D), delta_D, mask=is_value)
        tile_DK, scale = _updated(tile_DK, scale, delta_D, k_K)
        if (length + t + 1) % _FOLD == 0:
            tile_DK, scale = _whole(tile_DK, scale)


@gluon.jit
def _fold_key_inputs(  # type: ignore[no-untyped-def]
    window, conv_R3C, conv_stride, conv_SCX, b, key_head, KEY_HEADS: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    CAPACITY: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """`_fold_inputs` of a key head's q and k."""
    c = gl.arange(0, 2 * BLOCK_K, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    channel = c // BLOCK_K * (KEY_HEADS * K) + key_head * K + c % BLOCK_K
    _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, c % BLOCK_K < K, C, CAPACITY)


@gluon.jit
def _fold_value_inputs(  # type: ignore[no-untyped-def]
    window, conv_R3C, conv_stride, conv_SCX, b, begin, count, C: gl.constexpr, CAPACITY: gl.constexpr,
    BLOCK_D: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """`_fold_inputs` of `count` channels from `begin` on."""
    i = gl.arange(0, BLOCK_D, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, begin + i, i < count, C, CAPACITY)


@gluon.jit
def _load_window(window, start_B, b, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (read row, fold row, the ring's first entry in the pool, read length, entries to replay, of these those
    before the fold length, place of the first one) of slot b. window: as of `_fold_inputs`."""
    read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B = window
    read_row, fold_row = _wide(gl.load(read_row_B + b)), _wide(gl.load(fold_row_B + b))
    read_length, slot = gl.load(read_length_B + b).to(gl.int32), _wide(gl.load(slot_B + b)) * CAPACITY
    count = gl.maximum(gl.load(start_B + b).to(gl.int32) - read_length, 0)
    fold_at, first = gl.load(fold_length_B + b).to(gl.int32) - read_length, _remainder(read_length, CAPACITY)
    return read_row, fold_row, slot, read_length, count, fold_at, first


@gluon.jit
def _tile_places(is_value, local_d, k, K: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (which elements of a tile are real, their offsets). Offsets are added to an address last: what differs
    between a lane's elements is then part of its instructions."""
    is_real = gl.expand_dims(is_value, 1) & gl.expand_dims(k < K, 0)
    return is_real, gl.expand_dims(local_d * K, 1) + gl.expand_dims(k, 0)


@gluon.jit
def _end_key_head(  # type: ignore[no-untyped-def]
    z, z_stride, norm_D, eps, o, out, key_head, rows, window, fold_at, conv_R3C, conv_stride, conv_SCX,
    T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr, D: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    CAPACITY: gl.constexpr, IS_SILU: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """What the last program of a key head does. rows: (slot, first rows or None, the slot's first row, rows of all
    slots, live columns)."""
    b, first_B, first_row, num_rows, num_columns = rows
    _store_gated_norms(
        z, z_stride, norm_D, eps, o, out, key_head, num_columns, T, V, REPEATS, D, IS_SILU, BLOCK_ROWS, WARPS
    )
    _zero_dead_rows(out, key_head, num_columns, b, first_B, first_row, num_rows, V, REPEATS, D, BLOCK_ROWS, WARPS)
    if fold_at > 0:
        _fold_key_inputs(
            window, conv_R3C, conv_stride, conv_SCX, b, key_head, V // REPEATS, K, C, CAPACITY, BLOCK_K, WARPS
        )


@gluon.jit
def _gated_delta_ring_step(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_C4, a_log_V, dt_bias_V, norm_D, eps, ssm_RVDK, ssm_stride, conv_R3C, conv_stride,
    key_SCGK, delta_SCVD, decay_SCV, conv_SCX, read_row_B, slot_B, start_B, read_length_B, fold_length_B, fold_row_B,
    first_B, count_B, num_rows, o_NVD, out_NVD, counters, CAPACITY: gl.constexpr, ENTRY_CHUNKS: gl.constexpr,
    T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr, D: gl.constexpr, K: gl.constexpr,
    IS_SILU: gl.constexpr, EARLY: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """EARLY: what the previous kernels don't write is read before the wait: the window, its entries and the state."""
    _release_next(PDL)
    KEY_HEADS: gl.constexpr = V // REPEATS
    C: gl.constexpr = 2 * KEY_HEADS * K + V * D
    NUM_BLOCKS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    # Eight lanes of a tile's row have four key dims each, of every 32: sums over the key dim cross only these lanes.
    KEYS: gl.constexpr = gl.SliceLayout(0, _rows_layout(BLOCK_K, WARPS, 4, 8))
    VALUES: gl.constexpr = gl.SliceLayout(1, _rows_layout(BLOCK_K, WARPS, 4, 8))
    b, head = gl.program_id(1).to(gl.int64), gl.program_id(0) // NUM_BLOCKS
    begin_d, key_head = gl.program_id(0) % NUM_BLOCKS * BLOCK_D, head // REPEATS
    value_channel, is_first = 2 * KEY_HEADS * K + head * D + begin_d, begin_d == 0
    key_taps, value_taps, decay_terms = _load_weights(
        conv_C4, a_log_V, dt_bias_V, head, begin_d, KEY_HEADS, REPEATS, D, K, BLOCK_D, BLOCK_K, WARPS
    )
    if not EARLY:
        _await_previous(PDL)

    window = (read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B)
    read_row, fold_row, slot, read_length, count, fold_at, first = _load_window(window, start_B, b, CAPACITY)
    ring_keys, ring_decays = key_SCGK + slot * (KEY_HEADS * K), decay_SCV + slot * V + head
    ring_deltas, inputs = delta_SCVD + slot * (V * D) + head * D, conv_SCX + slot * C
    entries = _fetch_entries(
        ring_keys + key_head * K, ring_deltas, ring_decays, first, count, begin_d, CAPACITY, ENTRY_CHUNKS, V, D,
        KEY_HEADS, K, BLOCK_D, BLOCK_K, WARPS,
    )  # fmt: skip
    local_d, k = gl.arange(0, BLOCK_D, layout=VALUES), gl.arange(0, BLOCK_K, layout=KEYS)
    is_value = begin_d + local_d < D
    is_real, lanes = _tile_places(is_value, local_d, k, K)
    tile = ssm_RVDK + (head * D + begin_d) * K
    if EARLY:
        _prefetch_tile(tile + read_row * ssm_stride, D - begin_d, K, BLOCK_D, WARPS, PDL)
        _await_previous(PDL)
    tile_DK = gl.load(tile + read_row * ssm_stride + lanes, mask=is_real, other=0.0)
    first_row, num_columns = _live_columns(b, first_B, count_B, T)
    x = projected_NP + first_row * x_stride
    sources = (x, x_stride, _last_inputs(count, first, conv_R3C + read_row * conv_stride, inputs, C, CAPACITY))
    key_rows = (_shared(BLOCK_T, BLOCK_K), _shared(BLOCK_T, BLOCK_K), _shared(BLOCK_T, 1))
    value_rows = (_shared(BLOCK_T, BLOCK_D), _shared(BLOCK_T, 1), _shared(BLOCK_T, 1))
    after = _entry(first, count, CAPACITY)
    prepared = _prepare_keys(
        sources, after, key_head, key_taps, key_rows, num_columns, KEY_HEADS, K, C, CAPACITY, BLOCK_T, BLOCK_K, WARPS
    )
    _prepare_values(
        sources, after, head, begin_d, value_taps, x + C + V * D + head, decay_terms, value_rows,
        (ring_decays, inputs), is_first, num_columns, V, 2 * KEY_HEADS * K, D, C, CAPACITY, BLOCK_T, BLOCK_D, WARPS,
    )  # fmt: skip
    if is_first & (head % REPEATS == 0):  # behind all loads, which would wait for a store of what is computed
        _store_keys(prepared, ring_keys, inputs, KEY_HEADS, K, C)
    if fold_at > 0:
        _fold_value_inputs(
            window, conv_R3C, conv_stride, conv_SCX, b, value_channel, D - begin_d, C, CAPACITY, BLOCK_D, WARPS
        )

    async_copy.wait_group(0)
    _barrier()
    length, fold_tile = _remainder(read_length, _FOLD), tile + fold_row * ssm_stride + lanes
    tile_DK, scale = _replayed(tile_DK, entries, length, count, fold_tile, fold_at, is_real, k, K, KEYS, VALUES)
    o, out = o_NVD + first_row * (V * D), out_NVD + first_row * (V * D)
    _run_columns(
        tile_DK, scale, key_rows + value_rows, length + count, o + (head * D + begin_d) + local_d,
        ring_deltas + begin_d + local_d, after, is_value, num_columns, V, D, CAPACITY, KEYS, VALUES,
    )  # fmt: skip

    _barrier()  # every lane's reads and stores must precede the count
    counter = counters + b * KEY_HEADS + key_head
    if gl.atomic_add(counter, 1, sem="acq_rel") == REPEATS * NUM_BLOCKS - 1:
        gl.store(counter, 0)
        _end_key_head(
            x + C, x_stride, norm_D, eps, o, out, key_head, (b, first_B, first_row, num_rows, num_columns), window,
            fold_at, conv_R3C, conv_stride, conv_SCX, T, V, REPEATS, D, K, C, CAPACITY, IS_SILU, BLOCK_ROWS, BLOCK_K,
            WARPS,
        )  # fmt: skip
