"""The state-independent part of the gated delta rule, for every block of a prefill at once.

With G the running sum of log decays in a block, the recurrence unrolls (reference/gated_delta.py, `_fold_block`) into

    (I + L) delta = beta (v - e^G k S^T),   L[t, j] = beta_t e^(G_t - G_j) k_t . k_j for j < t, else 0.

With X the inverse of I + L this is delta = u - w S^T, where u = X (beta v) and w = X (beta e^G k) need no state. The
output is o = e^G q S^T + reads delta, with reads[t, j] = e^(G_t - G_j) q_t . k_j for j <= t.

For heads of 128 by 128 on Hopper the second launch is chunked_delta_solve_hopper.py, which also has the convolution of
v.

Products of two bf16 operands are accumulated in float32. Rounding X to bf16 would lose too much, so it enters products
as two bf16 terms, its leading and its trailing digits. float32 operands are multiplied in float32.

Knows nothing of states and rows, except that it reads the convolution's. Shape letters as in backend.py and
prefill_batch.py; T is BLOCK_TOKENS, to which scratch tensors are padded with zeros, E the key heads.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.bfloat16_pairs import HALVES
from agentspec.kernels.triton.gated_delta import softplus
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, release_next
from agentspec.kernels.triton.prefill_columns import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    BLOCK_SPAN,
    NUM_BLOCK_FIELDS,
    NUM_SPAN_FIELDS,
    OFFSET,
    READ_ROW,
)

BETA, HIGH, LOW, FROM_START, TO_END, NUM_GATES = (tl.constexpr(i) for i in range(6))
"""Vectors over a block's tokens in the gates of a value head: write strength; G in two parts; e^G; e^(G at the block's
end - G)."""

SIGMOID = tl.constexpr(
    "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, e; }"
)
"""1 / (1 + 2^(-log2(e) x)) with one instruction per operation, precise to about 20 bits; Triton's own takes three
times as many instructions."""
_INTERPRETED = tl.constexpr(INTERPRETED)
_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def dot(a, b, acc=None):  # type: ignore[no-untyped-def]
    """a b + acc in float32. float32 operands are split into three tf32 terms, which loses less than the additions
    do."""
    if _INTERPRETED:  # the interpreter can't multiply bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Split x into a leading and a trailing bf16 half, 16 bits of precision together. The leading half is truncated:
    fewer instructions than rounding."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _product(a, b, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b of float32 operands, to 16 bits; EXACT: to float32's. A batch of products has three dimensions."""
    if EXACT:
        product = dot(a, b)
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        product = dot(a_high, b_high, dot(a_high, b_low, dot(a_low, b_high)))
    return product


@triton.jit
def _applied(inverse, x, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`_product` with x in the activations' type. The inverse is not rounded to that type: its rows nearly cancel if
    keys are alike."""
    if EXACT:
        product = dot(inverse, x)
    else:
        high, low = _halves(inverse)
        product = dot(high, x, dot(low, x))
    return product


@triton.jit
def _join_pairs(inverse, coupling, row, column, SIZE: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine the inverses of the diagonal blocks of SIZE to those of 2 SIZE: [[A, 0], [C, B]] has the inverse [[A',
    0], [-B' C A', B']]."""
    is_between = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    between = tl.where(is_between, coupling, 0.0)
    return inverse - _product(_product(inverse, between, EXACT), inverse, EXACT)


@triton.jit
def _inverse(coupling_TT, T: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inverse of I + coupling, which is strictly lower triangular. Each step is as stable as substitution,
    so equal keys do no harm.

    Blocks of 16, the least that a matrix unit supports, are inverted as a batch; after that whole matrices are
    multiplied."""
    NUM_BLOCKS: tl.constexpr = T // 16
    block = tl.arange(0, NUM_BLOCKS)
    is_diagonal = (block[:, None] == block[None, :])[:, :, None, None]
    tiles = tl.permute(tl.reshape(coupling_TT, (NUM_BLOCKS, 16, NUM_BLOCKS, 16)), (0, 2, 1, 3))
    diagonal = tl.sum(tl.where(is_diagonal, tiles, 0.0), axis=1)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, diagonal, 0.0)
    for level in tl.static_range(1, 4):
        inverse = _join_pairs(inverse, diagonal, row, column, 2**level, EXACT)

    tiles = tl.where(is_diagonal, inverse[:, None, :, :], 0.0)
    inverse_TT = tl.reshape(tl.permute(tiles, (0, 2, 1, 3)), (T, T))
    row, column = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    inverse_TT = _join_pairs(inverse_TT, coupling_TT, row, column, 16, EXACT)
    return _join_pairs(inverse_TT, coupling_TT, row, column, 32, EXACT)


@triton.jit
def fast_sigmoid(x):  # type: ignore[no-untyped-def]
    """Of float32, by SIGMOID."""
    if _INTERPRETED:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
    else:
        sigmoid = tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return sigmoid


@triton.jit
def _in_float32(x):  # type: ignore[no-untyped-def]
    """Convert to float32."""
    if _INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(HALVES, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def _taps(conv_C4, channel, is_channel):  # type: ignore[no-untyped-def]
    """Return the four weights of every channel, float32: vectors for the rows t - 3, t - 2, t - 1 and t."""
    weights = tl.load(
        conv_C4 + channel[:, None] * 4 + tl.arange(0, 4)[None, :], mask=is_channel[:, None], other=0.0
    ).to(tl.float32)
    even, odd = tl.split(tl.reshape(weights, (weights.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _store_tokens(y, scale, place, IS_KEY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store SiLU of the convolution's y, for a key head normed and times `scale`."""
    y *= fast_sigmoid(y)
    if IS_KEY:
        y *= tl.rsqrt(tl.sum(y * y, axis=1, keep_dims=True) + _L2_EPS) * scale
    tl.store(place, y.to(place.dtype.element_ty))


@triton.jit
def _store_runs(  # type: ignore[no-untyped-def]
    rows, place_x, x_stride, taps, start, count, is_channel, scale, out, BLOCK: tl.constexpr, RUN: tl.constexpr,
    AT_ONCE: tl.constexpr, IS_WHOLE: tl.constexpr, IS_KEY: tl.constexpr
):  # fmt: skip
    """Convolve and store every run, AT_ONCE tokens of it at a time, whose loads are in flight together.

    rows: x of the three tokens before each run. place_x, out: of a run's first token. IS_WHOLE: `count` and is_channel
    exclude nothing."""
    for first in tl.range(0, RUN, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            mask = None if IS_WHOLE else (start + (first + i) < count) & is_channel
            rows += (tl.load(place_x + (first + i) * x_stride, mask=mask, other=None if IS_WHOLE else 0.0),)
        for i in tl.static_range(AT_ONCE):
            y = tl.zeros(rows[0].shape, tl.float32)
            for tap in tl.static_range(4):
                y += _in_float32(rows[i + tap]) * taps[tap][None, :]
            if not IS_WHOLE:
                y = tl.where(start + (first + i) < count, y, 0.0)
            _store_tokens(y, scale, out + (first + i) * BLOCK, IS_KEY)
        rows = (rows[AT_ONCE], rows[AT_ONCE + 1], rows[AT_ONCE + 2])


@triton.jit
def _convolve_head(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_C4, conv_R3C, conv_stride, spans_UF, blocks_MF, m, first_channel, scale, out,
    C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, IS_KEY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store the convolution of a head, its SIZE channels from first_channel on, in block m to out [T, BLOCK]; zeros
    after the last channel and the last token.

    A tensor has TILE values: a row for each run of adjacent tokens. So a thread has the tokens of a run one after the
    other, and loads each row of x once for the four outputs that it enters."""
    GROUPS: tl.constexpr = TILE // BLOCK
    RUN: tl.constexpr = T // GROUPS
    STEP: tl.constexpr = AT_ONCE if RUN > AT_ONCE else RUN
    c, start = tl.arange(0, BLOCK), (tl.arange(0, GROUPS) * RUN)[:, None]
    channel, is_channel = first_channel + c, (c < SIZE)[None, :]
    taps = _taps(conv_C4, channel, c < SIZE)
    await_previous(PDL)
    release_next(PDL)
    # All that decides about the usual case is loaded at once: its rows wait for nothing else.
    block = blocks_MF + m * NUM_BLOCK_FIELDS
    count, offset, span = tl.load(block + BLOCK_COUNT), tl.load(block + BLOCK_OFFSET), tl.load(block + BLOCK_SPAN)
    earlier_span = tl.load(block - NUM_BLOCK_FIELDS + BLOCK_SPAN, mask=m > 0, other=-1)
    earlier_count = tl.load(block - NUM_BLOCK_FIELDS + BLOCK_COUNT, mask=m > 0, other=0)
    x = projected_NP + offset * x_stride
    place_x, out = x + start * x_stride + channel[None, :], out + start * BLOCK + c[None, :]
    if (SIZE == BLOCK) & (count == T) & (earlier_span == span) & (earlier_count >= 3):  # usual in a long prompt
        rows = (tl.load(place_x - 3 * x_stride), tl.load(place_x - 2 * x_stride), tl.load(place_x - x_stride))
        _store_runs(rows, place_x, x_stride, taps, start, count, is_channel, scale, out, BLOCK, RUN, STEP, True, IS_KEY)
    elif count > 0:
        before = offset - tl.load(spans_UF + span * NUM_SPAN_FIELDS + OFFSET)
        past = conv_R3C + tl.load(spans_UF + span * NUM_SPAN_FIELDS + READ_ROW) * conv_stride + channel[None, :]
        ragged = ()
        for i in tl.static_range(3):
            source = start + (i - 3)
            is_in_span = source + before >= 0
            row = tl.load(place_x + (i - 3) * x_stride, mask=is_in_span & (source < count) & is_channel, other=0.0)
            ragged += (tl.load(past + (source + before + 3) * C, mask=~is_in_span & is_channel, other=row),)
        _store_runs(
            ragged, place_x, x_stride, taps, start, count, is_channel, scale, out, BLOCK, RUN, STEP, False, IS_KEY
        )


@triton.jit
def _store_gates(  # type: ignore[no-untyped-def]
    raw, x_stride, count, first_head, a_log_V, dt_bias_V, gates_VGT, V: tl.constexpr, T: tl.constexpr,
    HEADS: tl.constexpr
):  # fmt: skip
    """Store the NUM_GATES vectors of HEADS value heads in one block. raw: write strength of head 0 at its first token;
    the decays are V elements after it.

    G is constant after the last token. It is stored as two float32, the second being the rounding error of the first,
    because differences of long sums nearly cancel."""
    t, head = tl.arange(0, T)[:, None], first_head + tl.arange(0, HEADS)[None, :]
    is_head = head < V
    is_real = (t < count) & is_head
    place = raw + t * x_stride + head
    beta = tl.sigmoid(tl.load(place, mask=is_real, other=0.0).to(tl.float32))
    a = tl.load(place + V, mask=is_real, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_V + head, mask=is_head, other=0.0))
    dt_bias = tl.load(dt_bias_V + head, mask=is_head, other=0.0)
    total = tl.cumsum(tl.where(is_real, -rate * softplus(a + dt_bias), 0.0).to(tl.float64), 0)
    high = total.to(tl.float32)
    to_end = tl.sum(tl.where(t == T - 1, total, 0.0), axis=0, keep_dims=True) - total
    gates = gates_VGT + head * (NUM_GATES * T) + t
    tl.store(gates + BETA * T, tl.where(is_real, beta, 0.0), mask=is_head)
    tl.store(gates + HIGH * T, high, mask=is_head)
    tl.store(gates + LOW * T, (total - high.to(tl.float64)).to(tl.float32), mask=is_head)
    tl.store(gates + FROM_START * T, tl.exp(high), mask=is_head)
    tl.store(gates + TO_END * T, tl.exp(to_end.to(tl.float32)), mask=is_head)


@triton.jit
def convolve_blocks(  # type: ignore[no-untyped-def]
    projected_NP,
    x_stride,
    conv_C4,
    a_log_V,
    dt_bias_V,
    conv_R3C,
    conv_stride,
    spans_UF,
    blocks_MF,
    keys_METK,
    values_MVTD,
    gates_MVGT,
    V: tl.constexpr,
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATE_HEADS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one head of q, of k or, if HAS_VALUES, of v in one block: the convolution, then for q and k the
    norm (and q's scale). Or, the last ones, the gates of GATE_HEADS value heads: no convolution waits for them.

    The next launch is released after the wait for the previous one, so that it may read at once what is older than this
    one."""
    KEY_HEADS: tl.constexpr = V // REPEATS
    C: tl.constexpr = 2 * KEY_HEADS * K + V * D
    NUM_CONVOLVED: tl.constexpr = 2 * KEY_HEADS + (V if HAS_VALUES else 0)
    m, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if head < 2 * KEY_HEADS:
        keys = keys_METK + (m * (2 * KEY_HEADS) + head) * (T * PADDED_K)
        scale = tl.where(head < KEY_HEADS, K**-0.5, 1.0)
        _convolve_head(
            projected_NP, x_stride, conv_C4, conv_R3C, conv_stride, spans_UF, blocks_MF, m, head * K, scale, keys,
            C, K, PADDED_K, T, TILE, AT_ONCE, True, PDL
        )  # fmt: skip
    elif head < NUM_CONVOLVED:
        head -= 2 * KEY_HEADS
        values = values_MVTD + (m * V + head) * (T * PADDED_D)
        _convolve_head(
            projected_NP, x_stride, conv_C4, conv_R3C, conv_stride, spans_UF, blocks_MF, m,
            2 * KEY_HEADS * K + head * D, 1.0, values, C, D, PADDED_D, T, TILE, AT_ONCE, False, PDL
        )  # fmt: skip
    else:
        await_previous(PDL)
        release_next(PDL)
        first_head = (head - NUM_CONVOLVED) * GATE_HEADS
        count = tl.load(blocks_MF + m * NUM_BLOCK_FIELDS + BLOCK_COUNT)
        raw = projected_NP + tl.load(blocks_MF + m * NUM_BLOCK_FIELDS + BLOCK_OFFSET) * x_stride + (C + V * D)
        if count > 0:
            gates = gates_MVGT + m * (V * NUM_GATES * T)
            _store_gates(raw, x_stride, count, first_head, a_log_V, dt_bias_V, gates, V, T, GATE_HEADS)


@triton.jit
def solve_blocks(  # type: ignore[no-untyped-def]
    blocks_MF,
    keys_METK,
    values_MVTD,
    gates_MVGT,
    w_MVTK,
    reads_MVTT,
    V: tl.constexpr,
    REPEATS: tl.constexpr,
    T: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one value head in one block. It computes w and reads; u, which overwrites v."""
    release_next(PDL)
    await_previous(PDL)
    KEY_HEADS: tl.constexpr = V // REPEATS
    m, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if tl.load(blocks_MF + m * NUM_BLOCK_FIELDS + BLOCK_COUNT) == 0:
        return
    t, k_dim, d = tl.arange(0, T), tl.arange(0, PADDED_K), tl.arange(0, PADDED_D)
    row, column = t[:, None], t[None, :]
    queries = keys_METK + (m * (2 * KEY_HEADS) + head // REPEATS) * (T * PADDED_K) + row * PADDED_K + k_dim[None, :]
    values = values_MVTD + (m * V + head) * (T * PADDED_D) + row * PADDED_D + d[None, :]
    gates = gates_MVGT + (m * V + head) * (NUM_GATES * T)
    q, k, v = tl.load(queries), tl.load(queries + KEY_HEADS * (T * PADDED_K)), tl.load(values)
    dtype: tl.constexpr = k.dtype

    high, low = gates + HIGH * T, gates + LOW * T
    difference = (tl.load(high + row) - tl.load(high + column)) + (tl.load(low + row) - tl.load(low + column))
    ratio = tl.exp(tl.where(row >= column, difference, float("-inf")))
    tl.store(reads_MVTT + (m * V + head) * (T * T) + row * T + column, (ratio * dot(q, k.T)).to(dtype))
    coupling = tl.where(row > column, tl.load(gates + BETA * T + row) * ratio * dot(k, k.T), 0.0)
    EXACT: tl.constexpr = dtype == tl.float32
    inverse = _inverse(coupling, T, EXACT)

    beta = tl.load(gates + BETA * T + column)
    u = _applied(inverse * beta, v, EXACT)
    w = _applied(inverse * (beta * tl.load(gates + FROM_START * T + column)), k, EXACT)
    tl.store(w_MVTK + (m * V + head) * (T * PADDED_K) + row * PADDED_K + k_dim[None, :], w.to(dtype))
    tl.debug_barrier()  # every lane must have loaded v
    tl.store(values, u.to(dtype))
