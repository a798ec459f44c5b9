"""The recurrent mixer over a prefill, block by block on the matrix units. See backend.Backend, `gated_delta_prefill`.

There are four launches: the convolution, and then the other state-independent work, for all blocks at once
(chunked_delta_blocks.py, chunked_delta_solve_hopper.py, which also has the convolution of v); the states, block after
block, and the outputs read from them (here, chunked_delta_hopper.py); the gated norm, which may round its results to 8
bits for the product that follows. A program of the third has some value dims of a value head of one span: its tile of
the state stays in registers from the read row to the last block, and is stored to save rows on the way.

Scratch tensors have the activations' type, except gates. Knows nothing of what rows mean. Shape letters as in
chunked_delta_blocks.py.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import DeltaWeights, OpenProduct, ProductInput
from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.traffic import touches_pools
from agentspec.kernels.triton import chunked_delta_hopper, chunked_delta_solve_hopper, side_stream
from agentspec.kernels.triton.chunked_delta_blocks import (
    FROM_START,
    NUM_GATES,
    TO_END,
    convolve_blocks,
    dot,
    fast_sigmoid,
    solve_blocks,
)
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, empty_scaled, group_scale, to_fp8
from agentspec.kernels.triton.fp8_prefill import RoundedTokens
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.linear_layers import takes_rounded
from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES, shared_bytes
from agentspec.kernels.triton.prefill_columns import (
    BLOCK_COUNT,
    FIRST_BLOCK,
    NUM_BLOCK_FIELDS,
    NUM_BLOCKS,
    NUM_SPAN_FIELDS,
    OFFSET,
    READ_ROW,
    SAVE_ROW,
    SECOND_SAVE_ROW,
)
from agentspec.kernels.weights import SCALE_BLOCK, Weight
from agentspec.types import BLOCK_TOKENS

_MIN_DOT = 16
"""Smallest side of a product."""
_CONVOLVE_WARPS = 4
_CONVOLVE_SIZES = {"TILE": 1024, "AT_ONCE": 8, "GATE_HEADS": 8}
"""A thread has eight channels, which 16-byte loads need, of a run of eight tokens, whose loads are all in flight."""
_SOLVE_WARPS, _SOLVE_REGISTERS = 4, 168
"""Limits registers so that three programs are resident per multiprocessor, which outweighs the few spills."""
_NARROW_FOLD_D, _WIDE_FOLD_D = 32, 64
"""Value dims per program of the third launch. Fewer spread a head over more multiprocessors, but each of them reads
all of w, q, k and `reads`."""
_NARROW_PROGRAMS = 132
"""Most narrow programs of a span: up to one per multiprocessor they are faster than wide ones."""
_FOLD_WARPS = 4
_FOLD_STAGES = 3
_FOLD_SHARED_BYTES = 120 * 1024
"""Enough shared memory for that many stages; with less there is one stage fewer, which changes no bit."""
_EXACT_FOLD_D, _EXACT_FOLD_STAGES = 32, 1
"""For float32: fits at any size."""
_NORM_ROWS = 32
"""Rows (a token of a head) per program of the norm."""


class _Scratch(NamedTuple):
    """Scratch tensors between the launches. Dims are padded to powers of two, and blocks to BLOCK_TOKENS, with
    zeros."""

    keys_METK: Tensor
    """q of every key head, then k of every key head."""
    values_MVTD: Tensor
    """v, then u. Only u if chunked_delta_solve_hopper.py solves."""
    gates_MVGT: Tensor
    """float32."""
    w_MVTK: Tensor
    reads_MVTT: Tensor


@touches_pools
def gated_delta_prefill(
    projected: Tensor | OpenProduct,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    batch: PrefillBatch,
    *,
    out_weight: Weight | None = None,
) -> Tensor | ProductInput:
    """The output of the convolution is not rounded before it is normalized; the reference rounds it to the
    projection's dtype.

    If the product with out_weight is W8A8 and value heads have 128 dims, the result is RoundedTokens.

    Rows moved are not counted in `state_traffic`: only the device knows them."""
    projected_NP = projected.values_NP if isinstance(projected, OpenProduct) else projected
    _, num_heads, value_dim, key_dim = ssm_RVDK.shape
    num_channels, num_values = conv_R3C.shape[2], num_heads * value_dim
    num_key_heads = (num_channels - num_values) // (2 * key_dim)
    num_tokens, num_blocks = len(projected_NP), len(batch.blocks_MF)
    assert projected_NP.shape == (num_tokens, num_channels + num_values + 2 * num_heads)
    assert projected_NP.dtype == conv_R3C.dtype
    assert ssm_RVDK.dtype == torch.float32
    assert projected_NP.stride(1) == 1
    assert all(x.is_contiguous() for x in (ssm_RVDK[0], conv_R3C[0], weights.conv_C4, batch.spans_UF, batch.blocks_MF))
    dtype, device = projected_NP.dtype, projected_NP.device
    padded_d, padded_k = (max(_MIN_DOT, triton.next_power_of_2(dim)) for dim in (value_dim, key_dim))
    scratch = _Scratch(
        keys_METK=torch.empty(num_blocks, 2 * num_key_heads, BLOCK_TOKENS, padded_k, dtype=dtype, device=device),
        values_MVTD=torch.empty(num_blocks, num_heads, BLOCK_TOKENS, padded_d, dtype=dtype, device=device),
        gates_MVGT=torch.empty(
            num_blocks, num_heads, NUM_GATES.value, BLOCK_TOKENS, dtype=torch.float32, device=device
        ),
        w_MVTK=torch.empty(num_blocks, num_heads, BLOCK_TOKENS, padded_k, dtype=dtype, device=device),
        reads_MVTT=torch.empty(num_blocks, num_heads, BLOCK_TOKENS, BLOCK_TOKENS, dtype=dtype, device=device),
    )
    out_NX = torch.empty(num_tokens, num_values, dtype=dtype, device=device)
    x = projected_NP, projected_NP.stride(0)
    conv = (conv_R3C, conv_R3C.stride(0))
    heads = {"V": num_heads, "REPEATS": num_heads // num_key_heads}
    dims = {"D": value_dim, "K": key_dim}
    padded = {"T": BLOCK_TOKENS, "PADDED_D": padded_d, "PADDED_K": padded_k}
    solves_on_hopper = chunked_delta_solve_hopper.is_supported(dtype, value_dim, key_dim, device)
    _convolve(x, weights, conv, batch, scratch, heads, dims | padded, has_values=not solves_on_hopper)
    if solves_on_hopper:
        _solve_on_hopper(x, weights, conv, batch, scratch, heads)
    else:
        solve_blocks[(num_heads, num_blocks)](
            batch.blocks_MF, *scratch, num_warps=_SOLVE_WARPS, maxnreg=_SOLVE_REGISTERS, **heads, **padded,
            **overlapped(),
        )  # fmt: skip
    if isinstance(projected, OpenProduct):
        # It begins when the launch above has ended. The programs of the launch below are then resident already.
        with side_stream.fork(device):
            projected.close()
    _fold(x, ssm_RVDK, conv, batch, scratch, out_NX, heads, dims | padded)
    if isinstance(projected, OpenProduct):
        side_stream.join(device)
    # A row of the norm that is as wide as a group of 8-bit floats needs one scale.
    if out_weight is not None and value_dim == SCALE_BLOCK and takes_rounded(out_weight, num_tokens, dtype):
        scaled = _norm_to_fp8(x, weights, out_NX, num_heads, num_channels)
        return RoundedTokens(scaled=scaled, num_tokens=num_tokens, dtype=dtype)
    _gated_norm[(triton.cdiv(num_tokens * num_heads, _NORM_ROWS),)](
        *x, weights.norm_D, weights.eps, out_NX, num_tokens * num_heads,
        V=num_heads, D=value_dim, C=num_channels, IS_SILU=weights.gate == "silu", BLOCK_ROWS=_NORM_ROWS,
        PADDED_D=padded_d, **overlapped(),
    )  # fmt: skip
    return out_NX


def _norm_to_fp8(
    x: tuple[Tensor, int], weights: DeltaWeights, o_NX: Tensor, num_heads: int, num_channels: int
) -> ScaledTokens:
    """The fourth launch with results in 8 bits: `quantize_tokens` of what it would leave in o_NX."""
    num_tokens, num_values = o_NX.shape
    scaled = empty_scaled(num_tokens, num_values, o_NX.device)
    num_rows = len(scaled.values_RK)
    _gated_norm_to_fp8[(num_heads, triton.cdiv(num_rows, _NORM_ROWS))](
        scaled.values_RK, scaled.scales_GR, *x, weights.norm_D, weights.eps, o_NX, num_tokens, num_rows,
        V=num_heads, C=num_channels, IS_SILU=weights.gate == "silu", BLOCK_ROWS=_NORM_ROWS, **overlapped(),
    )  # fmt: skip
    return scaled


def _convolve(
    x: tuple[Tensor, int],
    weights: DeltaWeights,
    conv: tuple[Tensor, int],
    batch: PrefillBatch,
    scratch: _Scratch,
    heads: dict[str, int],
    dims: dict[str, int],
    *,
    has_values: bool,
) -> None:
    """The first launch. has_values: v is convolved too."""
    num_heads, num_keys = heads["V"], scratch.keys_METK.shape[1]
    num_gate_programs = triton.cdiv(num_heads, _CONVOLVE_SIZES["GATE_HEADS"])
    convolve_blocks[(num_keys + has_values * num_heads + num_gate_programs, len(batch.blocks_MF))](
        *x,
        weights.conv_C4,
        weights.a_log_V,
        weights.dt_bias_V,
        *conv,
        batch.spans_UF,
        batch.blocks_MF,
        *scratch[:3],
        HAS_VALUES=has_values,
        num_warps=_CONVOLVE_WARPS,
        **_CONVOLVE_SIZES,
        **heads,
        **dims,
        **overlapped(),
    )


def _solve_on_hopper(
    x: tuple[Tensor, int],
    weights: DeltaWeights,
    conv: tuple[Tensor, int],
    batch: PrefillBatch,
    scratch: _Scratch,
    heads: dict[str, int],
) -> None:
    """The second launch, with the convolution of v."""
    chunked_delta_solve_hopper.solve_blocks[(heads["V"], len(batch.blocks_MF))](
        *x,
        weights.conv_C4,
        *conv,
        batch.spans_UF,
        batch.blocks_MF,
        *chunked_delta_solve_hopper.operands(*scratch[:2], *scratch[3:]),
        scratch.gates_MVGT,
        num_warps=chunked_delta_solve_hopper.NUM_WARPS,
        maxnreg=chunked_delta_solve_hopper.MAX_REGISTERS,
        **heads,
        **overlapped(),
    )


def _fold(
    x: tuple[Tensor, int],
    ssm_RVDK: Tensor,
    conv: tuple[Tensor, int],
    batch: PrefillBatch,
    scratch: _Scratch,
    out_NX: Tensor,
    heads: dict[str, int],
    dims: dict[str, int],
) -> None:
    """The third launch."""
    num_heads, value_dim, key_dim = ssm_RVDK.shape[1:]
    states = (*x, ssm_RVDK, ssm_RVDK.stride(0), *conv, batch.spans_UF, batch.blocks_MF)
    use_hopper = chunked_delta_hopper.is_supported(out_NX.dtype, value_dim, key_dim, out_NX.device)
    fold_d, stages = fold_plan(out_NX.dtype, num_heads, dims["PADDED_D"], shared_bytes(out_NX.device))
    num_tiles = num_heads * (dims["PADDED_D"] // (chunked_delta_hopper.BLOCK_D if use_hopper else fold_d))
    block_c = triton.next_power_of_2(triton.cdiv(conv[0].shape[2], num_tiles))
    grid = (num_tiles, len(batch.spans_UF))
    if use_hopper:
        operands = chunked_delta_hopper.operands(*scratch[:2], *scratch[3:], out_NX)
        chunked_delta_hopper.fold_blocks[grid](
            *states,
            *operands,
            scratch.gates_MVGT,
            out_NX,
            BLOCK_C=block_c,
            num_warps=chunked_delta_hopper.NUM_WARPS,
            **heads,
            **overlapped(),
        )
    else:
        _fold_blocks[grid](
            *states,
            *scratch,
            out_NX,
            BLOCK_D=fold_d,
            BLOCK_C=block_c,
            STAGES=stages,
            num_warps=_FOLD_WARPS,
            **heads,
            **dims,
            **overlapped(),
        )


def fold_plan(
    dtype: torch.dtype, num_heads: int, padded_d: int, shared_bytes: int = HOPPER_SHARED_BYTES
) -> tuple[int, int]:
    """Return (value dims per program, pipeline stages). They depend on the model's sizes and the device only, so that
    equal blocks give equal bits in any batch. shared_bytes: of a program, at most."""
    if dtype == torch.float32:
        return min(_EXACT_FOLD_D, padded_d), _EXACT_FOLD_STAGES
    is_narrow = num_heads * triton.cdiv(padded_d, _NARROW_FOLD_D) <= _NARROW_PROGRAMS
    return min(_NARROW_FOLD_D if is_narrow else _WIDE_FOLD_D, padded_d), _FOLD_STAGES - (
        shared_bytes < _FOLD_SHARED_BYTES
    )


@triton.jit
def _store_states(  # type: ignore[no-untyped-def]
    row, state_KD, in_state, is_state, ssm_RVDK, ssm_stride, x_ends, channel, conv_R3C, conv_stride, C: tl.constexpr
):
    """Store the program's tile of both states to `row`, unless it is NO_ROW. x_ends: the last three rows before the
    convolution."""
    if row >= 0:
        tl.store(ssm_RVDK + row * ssm_stride + in_state, state_KD, mask=is_state)
        for i in tl.static_range(3):
            tl.store(conv_R3C + row * conv_stride + i * C + channel, x_ends[i], mask=channel < C)


@triton.jit
def _last_rows(x, x_stride, count, past, channel, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last three input rows of the convolution after the first `count` tokens of a span. past: the three
    rows before the span; x: its first token."""
    rows = ()
    for i in tl.static_range(3):
        token = count - 3 + i
        row = tl.load(x + token * x_stride + channel, mask=channel < tl.where(token >= 0, C, 0), other=0.0)
        for j in tl.static_range(3):
            row = tl.where(token + 3 == j, past[j], row)
        rows += (row,)
    return rows


@triton.jit
def _fold_blocks(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, ssm_RVDK, ssm_stride, conv_R3C, conv_stride, spans_UF, blocks_MF, keys_METK, values_MVTD,
    gates_MVGT, w_MVTK, reads_MVTT, out_NX, V: tl.constexpr, REPEATS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, PADDED_D: tl.constexpr, PADDED_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program has BLOCK_D value dims of a value head of one span. It also has BLOCK_C channels of the convolution's
    state, which it only copies."""
    release_next(PDL)
    await_previous(PDL)
    KEY_HEADS: tl.constexpr = V // REPEATS
    C: tl.constexpr = 2 * KEY_HEADS * K + V * D
    span = spans_UF + tl.program_id(1).to(tl.int64) * NUM_SPAN_FIELDS
    num_blocks = tl.load(span + NUM_BLOCKS)
    if num_blocks == 0:
        return
    offset, read_row, first_block = tl.load(span + OFFSET), tl.load(span + READ_ROW), tl.load(span + FIRST_BLOCK)
    head, first_d = tl.program_id(0) // (PADDED_D // BLOCK_D), tl.program_id(0) % (PADDED_D // BLOCK_D) * BLOCK_D
    t, k_dim, d = tl.arange(0, T), tl.arange(0, PADDED_K), first_d + tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = keys_METK.dtype.element_ty

    in_state, is_state = (head * D + d)[None, :] * K + k_dim[:, None], (d < D)[None, :] & (k_dim < K)[:, None]
    state_KD = tl.load(ssm_RVDK + read_row * ssm_stride + in_state, mask=is_state, other=0.0)
    # Loaded at the start, because a save row may be the read row.
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    past = ()
    for i in tl.static_range(3):
        past += (tl.load(conv_R3C + read_row * conv_stride + i * C + channel, mask=channel < C, other=0.0),)
    tl.debug_barrier()  # a lane may store a place that another lane loads

    in_keys, in_values = t[:, None] * PADDED_K + k_dim[None, :], t[:, None] * PADDED_D + d[None, :]
    in_reads = t[:, None] * T + t[None, :]
    in_out = t[:, None] * (V * D) + head * D + d[None, :]
    begin = offset
    for m in tl.range(first_block, first_block + num_blocks, num_stages=STAGES):
        head_block, queries = m * V + head, keys_METK + (m * (2 * KEY_HEADS) + head // REPEATS) * (T * PADDED_K)
        w = tl.load(w_MVTK + head_block * (T * PADDED_K) + in_keys)
        q, k = tl.load(queries + in_keys), tl.load(queries + KEY_HEADS * (T * PADDED_K) + in_keys)
        u = tl.load(values_MVTD + head_block * (T * PADDED_D) + in_values)
        reads = tl.load(reads_MVTT + head_block * (T * T) + in_reads)
        gates = gates_MVGT + head_block * (NUM_GATES * T)
        from_start, to_end, decay = (
            tl.load(gates + FROM_START * T + t),
            tl.load(gates + TO_END * T + t),
            tl.load(gates + FROM_START * T + T - 1),
        )
        block = blocks_MF + m * NUM_BLOCK_FIELDS
        count = tl.load(block + BLOCK_COUNT)
        save_row, second_row = tl.load(block + SAVE_ROW), tl.load(block + SECOND_SAVE_ROW)

        seen = state_KD.to(dtype)
        delta = u.to(tl.float32) - dot(w, seen)
        o = dot(reads, delta.to(dtype), dot(q, seen) * from_start[:, None])
        state_KD = dot(k.T, (delta * to_end[:, None]).to(dtype), state_KD * decay)

        tl.store(out_NX + begin * (V * D) + in_out, o.to(dtype), mask=(t < count)[:, None] & (d < D)[None, :])
        begin += count
        if save_row >= 0:
            x = projected_NP + offset * x_stride
            x_ends = _last_rows(x, x_stride, begin - offset, past, channel, C)
            _store_states(
                save_row, state_KD, in_state, is_state, ssm_RVDK, ssm_stride, x_ends, channel, conv_R3C, conv_stride, C
            )
            _store_states(
                second_row,
                state_KD,
                in_state,
                is_state,
                ssm_RVDK,
                ssm_stride,
                x_ends,
                channel,
                conv_R3C,
                conv_stride,
                C,
            )


@triton.jit
def _gated_norm(  # type: ignore[no-untyped-def]
    projected_NP,
    x_stride,
    norm_D,
    eps,
    out_NX,
    num_rows,
    V: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PADDED_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm every row (a token of a head) of out_NX, in place, and gate it with z."""
    release_next(PDL)
    d = tl.arange(0, PADDED_D)
    gain = tl.load(norm_D + d, mask=d < D, other=0.0)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_real = (row < num_rows)[:, None] & (d < D)[None, :]
    place = out_NX + row[:, None] * D + d[None, :]
    z_row = projected_NP + row // V * x_stride + C + row % V * D
    o = tl.load(place, mask=is_real, other=0.0)
    z = tl.load(z_row[:, None] + d[None, :], mask=is_real, other=0.0)
    tl.store(place, _gated(o, z, gain, eps, D, IS_SILU), mask=is_real)


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_norm_to_fp8(  # type: ignore[no-untyped-def]
    values_RK, scales_GR, projected_NP, x_stride, norm_D, eps, o_NX, num_tokens, num_rows, V: tl.constexpr,
    C: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`_gated_norm` of a head of some tokens, rounded to 8 bits. A head has the dims of a group. R: rows, of which
    num_tokens are real and the others zeros."""
    release_next(PDL)
    d = tl.arange(0, GROUP)
    gain = tl.load(norm_D + d)
    await_previous(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_token, is_row = (row < num_tokens)[:, None], row < num_rows
    # A thread then has as many values of a row as in `_gated_norm`, so sums are added in the same order.
    in_values = tl.max_contiguous(row[:, None] * (V * GROUP) + head * GROUP + d[None, :], [1, 8])
    o = tl.load(o_NX + in_values, mask=is_token, other=0.0)
    z_row = projected_NP + row * x_stride + C + head * GROUP
    z = tl.load(z_row[:, None] + d[None, :], mask=is_token, other=0.0)
    y = tl.where(is_token, _gated(o, z, gain, eps, GROUP, IS_SILU).to(tl.float32), 0.0)
    scale, inverse = group_scale(tl.max(tl.abs(y), axis=1))
    tl.store(values_RK + in_values, to_fp8(y * inverse[:, None]), mask=is_row[:, None])
    tl.store(scales_GR + head.to(tl.int64) * num_rows + row, scale, mask=is_row)


@triton.jit
def _gated(o, z, gain, eps, D: tl.constexpr, IS_SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norm the rows of o over their D values, and gate them with z. In o's dtype."""
    wide, z = o.to(tl.float32), z.to(tl.float32)
    gate = fast_sigmoid(z)
    if IS_SILU:
        gate *= z
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / D + eps) * gain[None, :]
    return (normed * gate).to(o.dtype)
