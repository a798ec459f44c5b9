"""The recurrent mixer of a decode window in one Triton launch: short convolution, gated delta rule, gated norm. See
backend.Backend.

A program has a block of value dims of one slot's value head. Its tile of the state is loaded once, stays in registers
for the whole window and is stored after every column. Two things need every program of a key head to finish first: the
norm over all value dims, and the store of the shared q and k convolution state, which may overwrite the row that the
others read. The last program to finish does both; it is found with a counter, which it resets to zero.

Knows nothing of what rows mean. Shape letters as in backend.py; in kernels X chunks of the key dim.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import DeltaWeights
from agentspec.kernels.traffic import state_traffic, touches_pools
from agentspec.kernels.triton.launch import NUM_COUNTERS, arrival_counters, await_previous, overlapped, release_next

_BLOCK_D = 32
"""Value dims per program. With four warps and key dim 128 the tile takes 32 registers per lane, and one slot gives
every multiprocessor work."""
_NUM_WARPS = 4
_CHUNK = 32
"""Key dims of a chunk, which lie across lanes, four per lane. A lane has the same place of every chunk, so that a sum
over the key dim crosses few lanes."""
_MAX_ROWS = 16
"""Most rows (a token of a head) that the norm holds in registers at a time."""

L2_EPS = tl.constexpr(1e-6)


@touches_pools
def gated_delta_step(
    projected_NP: Tensor,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    read_row_B: Tensor,
    write_rows_BT: Tensor,
) -> Tensor:
    """The output of the convolution stays float32; the reference rounds it to the projection's dtype."""
    num_slots, num_columns = write_rows_BT.shape
    _, num_heads, value_dim, key_dim = ssm_RVDK.shape
    num_channels, num_values = conv_R3C.shape[2], num_heads * value_dim
    num_key_heads = (num_channels - num_values) // (2 * key_dim)
    num_tokens = num_slots * num_columns
    assert projected_NP.shape == (num_tokens, num_channels + num_values + 2 * num_heads)
    assert projected_NP.dtype == conv_R3C.dtype
    assert ssm_RVDK.dtype == torch.float32
    assert projected_NP.stride(1) == 1
    assert all(x.is_contiguous() for x in (ssm_RVDK[0], conv_R3C[0], weights.conv_C4, read_row_B, write_rows_BT))
    assert num_slots * num_key_heads <= NUM_COUNTERS
    device = projected_NP.device
    o_NVD = torch.empty(num_tokens, num_values, dtype=torch.float32, device=device)
    out = torch.empty(num_tokens, num_values, dtype=projected_NP.dtype, device=device)
    block_d = min(_BLOCK_D, triton.next_power_of_2(value_dim))
    block_k = triton.next_power_of_2(key_dim)
    _gated_delta_step[(num_heads * triton.cdiv(value_dim, block_d), num_slots)](
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
        read_row_B,
        write_rows_BT,
        o_NVD,
        out,
        arrival_counters(device),
        T=num_columns,
        V=num_heads,
        REPEATS=num_heads // num_key_heads,
        D=value_dim,
        K=key_dim,
        IS_SILU=weights.gate == "silu",
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        CHUNK=min(_CHUNK, block_k),
        BLOCK_ROWS=min(_MAX_ROWS, triton.next_power_of_2(num_columns * num_heads // num_key_heads)),
        num_warps=_NUM_WARPS,
        **overlapped(),
    )
    state_traffic.rows_read += num_slots
    state_traffic.rows_written += num_tokens
    return out


@triton.jit
def _conv_taps(conv_C4, channel, mask):  # type: ignore[no-untyped-def]
    """Return the four taps of each channel, float32, oldest token's first."""
    place = conv_C4 + channel * 4
    taps = ()
    for tap in tl.static_range(4):
        taps += (tl.load(place + tap, mask=mask, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _window(x, x_stride, past, channel, mask, C: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the three rows of `past`, then those of x: rows t to t + 3 are the convolution's input for column t, and
    rows t + 1 to t + 3 are the state after it."""
    rows = ()
    for i in tl.static_range(3):
        rows += (tl.load(past + i * C + channel, mask=mask, other=0.0),)
    for t in tl.static_range(T):
        rows += (tl.load(x + t * x_stride + channel, mask=mask, other=0.0),)
    return rows


@triton.jit
def _convolved(window, t: tl.constexpr, taps):  # type: ignore[no-untyped-def]
    """SiLU of the convolution at column t, float32."""
    y = window[t].to(tl.float32) * taps[0]
    for tap in tl.static_range(1, 4):
        y += window[t + tap].to(tl.float32) * taps[tap]
    return y / (1.0 + tl.exp(-y))


@triton.jit
def _store_conv_states(conv_R3C, conv_stride, write_rows, window, channel, mask, C: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    for t in tl.static_range(T):
        place = conv_R3C + write_rows[t] * conv_stride + channel
        for i in tl.static_range(3):
            tl.store(place + i * C, window[t + 1 + i], mask=mask)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x) = max(x, 0) + 2 artanh(s), s = e / (2 + e), e = exp(-|x|). s is at most 1/3, so eight terms of the
    series are exact to float32, and small results keep full relative precision."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 15
    for i in tl.static_range(7):
        series = series * s2 + 1.0 / (13 - 2 * i)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _gates(raw, x_stride, rate, dt_bias, V: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (write strengths, decays) of every column. raw: a head's write strength; its decay is V elements after
    it."""
    betas, decays = (), ()
    for t in tl.static_range(T):
        betas += (tl.sigmoid(tl.load(raw + t * x_stride).to(tl.float32)),)
        decays += (tl.exp(-rate * softplus(tl.load(raw + t * x_stride + V).to(tl.float32) + dt_bias)),)
    return betas, decays


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _inner_products(q_XK, k_XK):  # type: ignore[no-untyped-def]
    """Return q . q, k . k and q . k, with one exchange between warps."""
    sums = tl.reduce((q_XK * q_XK, k_XK * k_XK, q_XK * k_XK), 1, _add_three)
    return tl.reduce(sums, 0, _add_three)


@triton.jit
def _queries_keys(q_window, k_window, q_taps, k_taps, K: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (scaled queries, keys, their inner products) of every column, L2-normalized."""
    qs, ks, qks = (), (), ()
    for t in tl.static_range(T):
        q, k = _convolved(q_window, t, q_taps), _convolved(k_window, t, k_taps)
        qq, kk, qk = _inner_products(q, k)
        q_scale, k_scale = tl.rsqrt(qq + L2_EPS) * K**-0.5, tl.rsqrt(kk + L2_EPS)
        qs += (q * q_scale,)
        ks += (k * k_scale,)
        qks += (qk * q_scale * k_scale,)
    return qs, ks, qks


@triton.jit
def _store_gated_norms(  # type: ignore[no-untyped-def]
    z, z_stride, norm_D, eps, o, out, key_head, T: tl.constexpr, V: tl.constexpr, REPEATS: tl.constexpr,
    D: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Norm and gate the outputs of a key head's value heads. All pointers are this slot's."""
    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    gain = tl.load(norm_D + d, mask=d < D, other=0.0)
    for begin in tl.static_range(0, T * REPEATS, BLOCK_ROWS):
        i = begin + tl.arange(0, BLOCK_ROWS)[:, None]
        is_real = (i < T * REPEATS) & (d < D)
        value_dim = (key_head * REPEATS + i % REPEATS) * D + d
        place = i // REPEATS * (V * D) + value_dim
        # Other programs wrote o: bypass L1, which is not coherent with their stores.
        value = tl.load(o + place, mask=is_real, other=0.0, cache_modifier=".cg")
        raw_gate = tl.load(z + i // REPEATS * z_stride + value_dim, mask=is_real, other=0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / D + eps) * gain
        gate = tl.sigmoid(raw_gate)
        if IS_SILU:
            gate *= raw_gate
        tl.store(out + place, (normed * gate).to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _finish_key_head(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    norm_D,
    eps,
    past,
    conv_R3C,
    conv_stride,
    write_rows,
    o,
    out,
    key_head,
    T: tl.constexpr,
    V: tl.constexpr,
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Norm and gate the outputs of a key head's value heads, and store the convolution states of its q and k. All
    pointers are this slot's."""
    NUM_KEYS: tl.constexpr = V // REPEATS * K
    C: tl.constexpr = 2 * NUM_KEYS + V * D
    c = tl.arange(0, 2 * BLOCK_K)
    channel, mask = c // BLOCK_K * NUM_KEYS + key_head * K + c % BLOCK_K, c % BLOCK_K < K
    window = _window(x, x_stride, past, channel, mask, C, T)

    _store_gated_norms(x + C, x_stride, norm_D, eps, o, out, key_head, T, V, REPEATS, D, IS_SILU, BLOCK_ROWS)
    tl.debug_barrier()  # a write row may be the row that other lanes read
    _store_conv_states(conv_R3C, conv_stride, write_rows, window, channel, mask, C, T)


@triton.jit
def _gated_delta_step(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_C4, a_log_V, dt_bias_V, norm_D, eps, ssm_RVDK, ssm_stride, conv_R3C, conv_stride,
    read_row_B, write_rows_BT, o_NVD, out_NVD, counters, T: tl.constexpr, V: tl.constexpr, REPEATS: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    KEY_HEADS: tl.constexpr = V // REPEATS
    C: tl.constexpr = 2 * KEY_HEADS * K + V * D
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    slot, head = tl.program_id(1).to(tl.int64), tl.program_id(0) // NUM_BLOCKS
    key_head = head // REPEATS
    k_index = tl.arange(0, BLOCK_K // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    d = tl.program_id(0) % NUM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    is_key, is_value = k_index < K, d < D
    q_channel, k_channel, v_channel = (
        key_head * K + k_index,
        (KEY_HEADS + key_head) * K + k_index,
        2 * KEY_HEADS * K + head * D + d,
    )
    q_taps, k_taps, v_taps = (
        _conv_taps(conv_C4, q_channel, is_key),
        _conv_taps(conv_C4, k_channel, is_key),
        _conv_taps(conv_C4, v_channel, is_value),
    )
    rate, dt_bias = tl.exp(tl.load(a_log_V + head)), tl.load(dt_bias_V + head)
    await_previous(PDL)

    # Every load comes before the first store, so that all are in flight at once.
    read_row = tl.load(read_row_B + slot)
    tile = ssm_RVDK + (head * D + d[:, None, None]) * K + k_index[None, :, :]
    is_real = is_value[:, None, None] & is_key[None, :, :]
    state_DXK = tl.load(tile + read_row * ssm_stride, mask=is_real, other=0.0)
    x, past = projected_NP + slot * T * x_stride, conv_R3C + read_row * conv_stride
    q_window = _window(x, x_stride, past, q_channel, is_key, C, T)
    k_window = _window(x, x_stride, past, k_channel, is_key, C, T)
    v_window = _window(x, x_stride, past, v_channel, is_value, C, T)
    betas, decays = _gates(x + C + V * D + head, x_stride, rate, dt_bias, V, T)
    qs, ks, qks = _queries_keys(q_window, k_window, q_taps, k_taps, K, T)
    write_rows, vs = (), ()
    for t in tl.static_range(T):
        write_rows += (tl.load(write_rows_BT + slot * T + t),)
        vs += (_convolved(v_window, t, v_taps),)
    tl.debug_barrier()  # a write row may be the row that other lanes read
    _store_conv_states(conv_R3C, conv_stride, write_rows, v_window, v_channel, is_value, C, T)

    o_slot, out_slot = o_NVD + slot * T * (V * D), out_NVD + slot * T * (V * D)
    for t in tl.static_range(T):
        q, k = qs[t], ks[t]
        # With S' = a S + delta k^T, the output S' q is a (S q) + delta (k . q): both sums are over the same S and run
        # together.
        seen = tl.sum(tl.sum(state_DXK * k[None, :, :], axis=1), axis=1)
        read = tl.sum(tl.sum(state_DXK * q[None, :, :], axis=1), axis=1)
        delta = (vs[t] - decays[t] * seen) * betas[t]
        state_DXK = decays[t] * state_DXK + delta[:, None, None] * k[None, :, :]
        tl.store(o_slot + t * (V * D) + head * D + d, decays[t] * read + delta * qks[t], mask=is_value)
        tl.store(tile + write_rows[t] * ssm_stride, state_DXK, mask=is_real)

    tl.debug_barrier()  # every lane's reads and stores must precede the count
    counter = counters + slot * KEY_HEADS + key_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == REPEATS * NUM_BLOCKS - 1:
        tl.store(counter, 0)
        _finish_key_head(
            x, x_stride, norm_D, eps, past, conv_R3C, conv_stride, write_rows, o_slot, out_slot, key_head,
            T, V, REPEATS, D, K, IS_SILU, BLOCK_K, BLOCK_ROWS,
        )  # fmt: skip
