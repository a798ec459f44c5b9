"""What columns of a decode window need in the recurrent mixer for slots with rings: queries, keys, values and gates, in
Gluon. The launch before that of gated_delta_ring.py, whose programs read the state and replay its entries meanwhile.

A program has a key head or a value head of one slot. It convolves the window's inputs behind those of the last three
tokens, norms queries and keys, and stores what columns need in a buffer, and the entries' keys, decays and inputs in
the ring. Where the slot folds, it also stores the convolution's inputs before the fold length to the fold row. That may
be the read row: no other program reads its heads' channels.

A dead column's place in the buffer is not written.

Shape letters as in gated_delta_ring.py; X what one column needs of all heads: queries and keys [KEY_HEADS, K], values
[V, D], inner products of query and key [KEY_HEADS], write strengths [V] and decays [V].
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.triton.gated_delta import L2_EPS, softplus
from agentspec.kernels.triton.gluon_names import await_previous, release_next, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED, overlapped

WindowOperands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_NUM_WARPS = 4
_L2_EPS = gl.constexpr(L2_EPS.value)
_INTERPRETED = gl.constexpr(INTERPRETED)
_EXP_OF_NEGATIVE = gl.constexpr("{ .reg .f32 x; mul.rn.f32 x, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, x; }")
_softplus = gluon.jit(softplus.fn)


def prepare_columns(
    projected_NP: Tensor,
    weights: DeltaWeights,
    conv_R3C: Tensor,
    ring: DeltaRing,
    windows: WindowOperands,
    shapes: dict[str, int],
) -> Tensor:
    """float32 [B, T, X]. windows: `window_operands`. shapes: `window_shapes`. The rest as of
    `gated_delta_ring_step`."""
    num_slots, num_heads = len(windows[0]), shapes["V"]
    sizes = num_slots, shapes["T"], shapes["X"]
    columns_BTX = torch.empty(sizes, dtype=torch.float32, device=projected_NP.device)
    _prepare_columns[(num_heads // shapes["REPEATS"] + num_heads, num_slots)](
        projected_NP,
        projected_NP.stride(0),
        weights.conv_C4,
        weights.a_log_V,
        weights.dt_bias_V,
        conv_R3C,
        conv_R3C.stride(0),
        ring.key_SCGK,
        ring.decay_SCV,
        ring.conv_SCX,
        *windows,
        columns_BTX,
        BLOCK_D=triton.next_power_of_2(shapes["D"]),
        WARPS=_NUM_WARPS,
        num_warps=_NUM_WARPS,
        **shapes,
        **overlapped(),
    )
    return columns_BTX


def window_operands(read_row_B: Tensor, window: RingWindow, live: LiveColumns | None) -> WindowOperands:
    """What both launches read of a step's windows, in the order of their parameters."""
    return (
        read_row_B,
        window.slot_B,
        window.start_B,
        window.read_length_B,
        window.fold_length_B,
        window.fold_row_B,
        *((None, None) if live is None else (live.first_B, live.count_B)),
    )


def window_shapes(
    *,
    capacity: int,
    num_columns: int,
    num_heads: int,
    num_key_heads: int,
    value_dim: int,
    key_dim: int,
    reads_early: bool,
) -> dict[str, int]:
    """Constants of both launches. capacity: of a ring, in entries."""
    elements = num_key_heads * (2 * key_dim + 1) + num_heads * (value_dim + 2)
    return {
        "CAPACITY": capacity,
        "T": num_columns,
        "V": num_heads,
        "REPEATS": num_heads // num_key_heads,
        "D": value_dim,
        "K": key_dim,
        "X": -(-elements // 16) * 16,  # so that every column begins at a multiple of 64 bytes
        "EARLY": reads_early,
        "BLOCK_T": triton.next_power_of_2(num_columns),
        "BLOCK_K": triton.next_power_of_2(key_dim),
    }


@gluon.constexpr_function
def rows_layout(width: int, num_warps: int, run: int = 4, max_lanes: int = 32) -> gl.BlockedLayout:
    """Rows of `width` elements, each of which lies within a warp; `run` elements in turn per lane."""
    lanes = min(max_lanes, width // run)
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _run_of(width: int) -> int:
    """Elements per lane if a warp has a row of so many."""
    return max(1, width // 32)


@gluon.jit
def float32(x):  # type: ignore[no-untyped-def]
    """x in float32. Triton's own conversion of bfloat16 takes two instructions for every other element."""
    if x.dtype == gl.bfloat16:
        x = (x.to(gl.int16, bitcast=True).to(gl.int32) << 16).to(gl.float32, bitcast=True)
    return x.to(gl.float32)


@gluon.jit
def by_ptx(PTX: gl.constexpr, x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(PTX, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def one_and_exp(x):  # type: ignore[no-untyped-def]
    """1 + e^-x. Triton's own e^-x takes three more instructions for results below 2**-126, which leave 1 as it is."""
    return 1.0 + (gl.exp(-x) if _INTERPRETED else by_ptx(_EXP_OF_NEGATIVE, x))


@gluon.jit
def wide(row):  # type: ignore[no-untyped-def]
    """The int64 of a number below 2**31, so that a product with a stride takes one instruction."""
    return row.to(gl.uint32).to(gl.int64)


@gluon.jit
def remainder(length, DIVISOR: gl.constexpr):  # type: ignore[no-untyped-def]
    return (length.to(gl.uint32, bitcast=True) % DIVISOR).to(gl.int32, bitcast=True)


@gluon.jit
def entry_place(first, i, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the i-th entry from `first` on, i at most CAPACITY."""
    place = (first + i).to(gl.uint32, bitcast=True)
    return gl.minimum(place, place - CAPACITY).to(gl.int32, bitcast=True)


@gluon.jit
def load_window(window, start_B, b, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (read row, fold row, the ring's first entry in the pool, read length, entries to replay, of these those
    before the fold length, place of the first one) of slot b. window: as of `_fold_inputs`."""
    read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B = window
    read_row, fold_row = wide(gl.load(read_row_B + b)), wide(gl.load(fold_row_B + b))
    read_length, slot = gl.load(read_length_B + b).to(gl.int32), wide(gl.load(slot_B + b)) * CAPACITY
    count = gl.maximum(gl.load(start_B + b).to(gl.int32) - read_length, 0)
    fold_at, first = gl.load(fold_length_B + b).to(gl.int32) - read_length, remainder(read_length, CAPACITY)
    return read_row, fold_row, slot, read_length, count, fold_at, first


@gluon.jit
def live_columns(b, first_B, count_B, T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of slot b's column 0, and its live columns."""
    first_row, num_columns = b * T, T
    if first_B is not None:
        first_row, num_columns = gl.load(first_B + b), gl.load(count_B + b).to(gl.int32)
    return first_row, num_columns


@gluon.jit
def column_places(  # type: ignore[no-untyped-def]
    columns, b, KEY_HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, T: gl.constexpr,
    X: gl.constexpr
):  # fmt: skip
    """Where queries, keys, products of all key heads, values, write strengths and decays of slot b's column 0 are."""
    queries = columns + b * (T * X)
    keys = queries + KEY_HEADS * K
    values = keys + KEY_HEADS * K
    products = values + V * D
    betas = products + KEY_HEADS
    return queries, keys, products, values, betas, betas + V


@gluon.jit
def _taps(  # type: ignore[no-untyped-def]
    conv_C4, begin, length, WIDTH: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr
):
    """Return the four taps of `length` channels from `begin` on, float32 [1, WIDTH], oldest token's first."""
    # A lane has the channels that it has in ROWS, and all their taps, which lie in turn in memory.
    LAYOUT: gl.constexpr = gl.BlockedLayout([4 * RUN], [32], [WARPS], [0])
    ROWS: gl.constexpr = rows_layout(WIDTH, WARPS, RUN)
    i = gl.arange(0, 4 * WIDTH, layout=LAYOUT)
    taps_C4 = float32(gl.load(conv_C4 + begin * 4 + i, mask=i < length * 4, other=0.0))
    taps_0_2, taps_1_3 = gl.split(gl.reshape(taps_C4, [WIDTH, 2, 2]))
    taps = gl.split(taps_0_2) + gl.split(taps_1_3)
    rows = ()
    for tap in gl.static_range(4):
        rows += (gl.expand_dims(gl.convert_layout(taps[tap % 2 * 2 + tap // 2], gl.SliceLayout(0, ROWS)), 0),)
    return rows


@gluon.jit
def _last_inputs(count, first, row, inputs, C: gl.constexpr, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the convolution's inputs of the last three of `count` entries begin; `row` has the three before those."""
    places = ()
    for i in gl.static_range(3):
        past = count + (i - 3)
        begin, at = gl.where(past < 0, row, inputs), gl.where(past < 0, count + i, entry_place(first, past, CAPACITY))
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
            y = float32(last) * taps[0]
        else:
            y = gl.fma(float32(last), taps[tap], y)
    return y / one_and_exp(y), last


@gluon.jit
def _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, mask, C: gl.constexpr, CAPACITY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the convolution's inputs before the fold length to the fold row, which may be the read row. window: the
    vectors of all slots."""
    read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B = window
    # Loaded again, since they would take registers all the time for what one window in several does.
    read_length = gl.load(read_length_B + b).to(gl.int32)
    count, first = gl.load(fold_length_B + b).to(gl.int32) - read_length, remainder(read_length, CAPACITY)
    row, slot = conv_R3C + wide(gl.load(read_row_B + b)) * conv_stride, wide(gl.load(slot_B + b))
    places, inputs = _last_inputs(count, first, row, conv_SCX + slot * (CAPACITY * C), C, CAPACITY), ()
    for i in gl.static_range(3):
        inputs += (gl.load(places[i] + channel, mask=mask, other=0.0),)
    place = conv_R3C + wide(gl.load(fold_row_B + b)) * conv_stride + channel
    warp_barrier()  # every lane must read its row before any lane stores to it
    for i in gl.static_range(3):
        gl.store(place + i * C, inputs[i], mask=mask)


@gluon.jit
def _prepare_key_head(  # type: ignore[no-untyped-def]
    sources, after, key_head, taps, places, ring_keys, inputs, num_columns, KEY_HEADS: gl.constexpr, K: gl.constexpr,
    C: gl.constexpr, X: gl.constexpr, CAPACITY: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr
):  # fmt: skip
    """Store every column's query and key, L2-normalized, and their inner product, and the entries' keys and inputs."""
    LAYOUT: gl.constexpr = rows_layout(BLOCK_K, WARPS)
    k = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT)), 0)
    t_T = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    t, channel = gl.expand_dims(t_T, 1), key_head * K + k
    q_TK, q_input = _convolved(t, sources, channel, taps[0], k < K, num_columns)
    k_TK, k_input = _convolved(t, sources, channel + KEY_HEADS * K, taps[1], k < K, num_columns)
    q_scale = gl.rsqrt(gl.sum(q_TK * q_TK, axis=1) + _L2_EPS) * K**-0.5
    k_scale = gl.rsqrt(gl.sum(k_TK * k_TK, axis=1) + _L2_EPS)
    k_TK *= gl.expand_dims(k_scale, 1)
    queries, keys, products = places
    is_live, is_real = t_T < num_columns, (k < K) & (t < num_columns)
    gl.store(products + t_T * X + key_head, gl.sum(q_TK * k_TK, axis=1) * q_scale, mask=is_live)
    gl.store(queries + t * X + channel, q_TK * gl.expand_dims(q_scale, 1), mask=is_real)
    gl.store(keys + t * X + channel, k_TK, mask=is_real)
    place = wide(entry_place(after, t, CAPACITY))
    gl.store(ring_keys + channel + place * (KEY_HEADS * K), k_TK, mask=is_real)
    inputs += channel + place * C
    gl.store(inputs, q_input, mask=is_real)
    gl.store(inputs + KEY_HEADS * K, k_input, mask=is_real)


@gluon.jit
def _prepare_value_head(  # type: ignore[no-untyped-def]
    sources, after, head, taps, raw, decay_terms, places, ring_decays, inputs, num_columns, V: gl.constexpr,
    KEY_CHANNELS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, X: gl.constexpr, CAPACITY: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Store every column's values and gates, and the entries' decays and inputs. raw: where a column's raw write
    strength is; its decay is V elements after it."""
    LAYOUT: gl.constexpr = rows_layout(BLOCK_D, WARPS, _run_of(BLOCK_D))
    d = gl.expand_dims(gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    t_T = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    t, is_live = gl.expand_dims(t_T, 1), t_T < num_columns
    channel, is_real = head * D + d, (d < D) & (t < num_columns)
    v_TD, v_input = _convolved(t, sources, KEY_CHANNELS + channel, taps, d < D, num_columns)
    rate, dt_bias = decay_terms
    raw += t_T * sources[1]
    beta_T = 1.0 / one_and_exp(gl.load(raw, mask=is_live, other=0.0).to(gl.float32))
    raw_decay_T = gl.load(raw + V, mask=is_live, other=0.0).to(gl.float32)
    decay_T = gl.exp(-rate * _softplus(raw_decay_T + dt_bias))
    values, betas, decays = places
    gl.store(values + t * X + channel, v_TD, mask=is_real)
    gl.store(betas + t_T * X + head, beta_T, mask=is_live)
    gl.store(decays + t_T * X + head, decay_T, mask=is_live)
    gl.store(inputs + KEY_CHANNELS + channel + wide(entry_place(after, t, CAPACITY)) * C, v_input, mask=is_real)
    gl.store(ring_decays + wide(entry_place(after, t_T, CAPACITY)) * V, decay_T, mask=is_live)


@gluon.jit
def _prepare_columns(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_C4, a_log_V, dt_bias_V, conv_R3C, conv_stride, key_SCGK, decay_SCV, conv_SCX,
    read_row_B, slot_B, start_B, read_length_B, fold_length_B, fold_row_B, first_B, count_B, columns_BTX,
    CAPACITY: gl.constexpr, T: gl.constexpr, V: gl.constexpr, REPEATS: gl.constexpr, D: gl.constexpr, K: gl.constexpr,
    X: gl.constexpr, EARLY: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Program (h, b) has key head h of slot b, or value head h - KEY_HEADS. EARLY: the window is read before the
    wait."""
    release_next(PDL)
    KEY_HEADS: gl.constexpr = V // REPEATS
    KEY_CHANNELS: gl.constexpr = 2 * KEY_HEADS * K
    C: gl.constexpr = KEY_CHANNELS + V * D
    part, b = gl.program_id(0), gl.program_id(1).to(gl.int64)
    if not EARLY:
        await_previous(PDL)
    window = (read_row_B, slot_B, read_length_B, fold_length_B, fold_row_B)
    read_row, _fold_row, slot, _read_length, count, fold_at, first = load_window(window, start_B, b, CAPACITY)
    after, inputs = entry_place(first, count, CAPACITY), conv_SCX + slot * C
    before = _last_inputs(count, first, conv_R3C + read_row * conv_stride, inputs, C, CAPACITY)
    places = column_places(columns_BTX, b, KEY_HEADS, K, V, D, T, X)
    if part < KEY_HEADS:
        q_taps = _taps(conv_C4, part * K, K, BLOCK_K, 4, WARPS)
        k_taps = _taps(conv_C4, (KEY_HEADS + part) * K, K, BLOCK_K, 4, WARPS)
        if EARLY:
            await_previous(PDL)
        first_row, num_columns = live_columns(b, first_B, count_B, T)
        _prepare_key_head(
            (projected_NP + first_row * x_stride, x_stride, before), after, part, (q_taps, k_taps), places[:3],
            key_SCGK + slot * (KEY_HEADS * K), inputs, num_columns, KEY_HEADS, K, C, X, CAPACITY, BLOCK_T, BLOCK_K,
            WARPS,
        )  # fmt: skip
        if fold_at > 0:
            c = gl.arange(0, 2 * BLOCK_K, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            channel = c // BLOCK_K * (KEY_HEADS * K) + part * K + c % BLOCK_K
            _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, channel, c % BLOCK_K < K, C, CAPACITY)
    else:
        head, begin = part - KEY_HEADS, KEY_CHANNELS + (part - KEY_HEADS) * D
        v_taps = _taps(conv_C4, begin, D, BLOCK_D, _run_of(BLOCK_D), WARPS)
        decay_terms = (gl.exp(gl.load(a_log_V + head)), gl.load(dt_bias_V + head))
        if EARLY:
            await_previous(PDL)
        first_row, num_columns = live_columns(b, first_B, count_B, T)
        x = projected_NP + first_row * x_stride
        _prepare_value_head(
            (x, x_stride, before), after, head, v_taps, x + C + V * D + head, decay_terms, places[3:],
            decay_SCV + slot * V + head, inputs, num_columns, V, KEY_CHANNELS, D, C, X, CAPACITY, BLOCK_T, BLOCK_D,
            WARPS,
        )  # fmt: skip
        if fold_at > 0:
            i = gl.arange(0, BLOCK_D, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            _fold_inputs(window, conv_R3C, conv_stride, conv_SCX, b, begin + i, i < D, C, CAPACITY)
