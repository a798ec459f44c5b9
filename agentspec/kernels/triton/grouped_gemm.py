"""Grouped products: many tokens with a stack of experts' matrices, each token with the experts that it chose. Gate and
up with SwiGLU, and down.

A program multiplies a block of one expert's rows with the tokens of one tile (expert_groups), or with its share of a
tile. The matrix units need at least 64 rows: these are tokens if a program has that many, else the weights' rows, so
that tiles of 16 tokens waste no work. With 8-bit weights the tokens are 8-bit too (fp8_activations), and the sum over
each 128 of K times its two scales is added in float32; Hopper's matrix units keep about 14 bits of such a sum (the
loss is within 2^-10 of the largest result).

Shape letters: N tokens, R rows (the tokens and the padding after them), J choices per token, P = N J pairs, X experts,
H and K input features, I FFN width, O outputs, G groups of 128 features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST, ExpertGroups, empty_parts
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, group_scale, to_fp8
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPlan:
    """A program computes `block_o` outputs (with SwiGLU: that many of gate and of up) of one tile, in steps of
    `block_k` along K."""

    block_o: int
    """128 if the result is 8-bit floats: a program must see whole groups."""
    block_k: int
    """128 for 8-bit floats."""
    warps: int
    stages: int
    programs_per_tile: int = 1
    """Programs that share a tile's tokens. So products that want different numbers of tokens per program can use the
    same table of tiles."""


def gate_up(
    plan: GroupedPlan, x: Tensor | ScaledTokens, weight_X2IK: Weight, groups: ExpertGroups, top_k: int
) -> Tensor | ScaledTokens:
    """silu(gate x) * up x of every pair, in the order of the groups: [P, I], in 8 bits if x is. One launch."""
    values, scales = (x.values_RK, x.scales_GR) if isinstance(x, ScaledTokens) else (x, None)
    (num_rows, depth), width, num_pairs = values.shape, weight_X2IK.shape[1] // 2, groups.pairs_P.shape[0]
    assert values.stride(1) == 1
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=values.device)
    h_scales = (
        None if scales is None else torch.empty(width // SCALE_BLOCK, num_pairs, dtype=torch.float32, device=h.device)
    )
    _gate_up_kernel[(triton.cdiv(width, plan.block_o), groups.tiles_T4.shape[0] * plan.programs_per_tile)](
        h,
        h_scales,
        values,
        values.stride(0),
        scales,
        _rows(weight_X2IK, plan),
        _scales_of(weight_X2IK),
        groups.pairs_P,
        groups.tiles_T4,
        num_rows,
        num_pairs,
        top_k,
        width,
        depth,
        **_blocks(plan, groups),
        **overlapped(),
    )
    return h if h_scales is None else ScaledTokens(values_RK=h, scales_GR=h_scales)


def down(
    plan: GroupedPlan,
    h: Tensor | ScaledTokens,
    weight_XOI: Weight,
    groups: ExpertGroups,
    weights_NJ: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """weight * down h of every pair: [N, J, O] of `dtype`. h: as returned by `gate_up`; weights_NJ: float32. One
    launch."""
    values, scales = (h.values_RK, h.scales_GR) if isinstance(h, ScaledTokens) else (h, None)
    (num_pairs, depth), num_outputs = values.shape, weight_XOI.shape[1]
    assert (weights_NJ.dtype, weights_NJ.is_contiguous()) == (torch.float32, True)
    parts = empty_parts(groups, (*weights_NJ.shape, num_outputs), dtype, values.device)
    _down_kernel[(triton.cdiv(num_outputs, plan.block_o), groups.tiles_T4.shape[0] * plan.programs_per_tile)](
        parts,
        TensorDescriptor.from_tensor(values, [groups.block_m // plan.programs_per_tile, plan.block_k]),
        scales,
        _rows(weight_XOI, plan),
        _scales_of(weight_XOI),
        weights_NJ,
        groups.pairs_P,
        groups.tiles_T4,
        num_pairs,
        num_outputs,
        depth,
        **_blocks(plan, groups),
        **overlapped(),
    )
    return parts


def _rows(weight_XOK: Weight, plan: GroupedPlan) -> TensorDescriptor:
    """TMA descriptor of the rows of all experts."""
    values = weight_XOK.values if isinstance(weight_XOK, BlockScaled) else weight_XOK.tensor
    return TensorDescriptor.from_tensor(values.flatten(0, 1), [plan.block_o, plan.block_k])


def _scales_of(weight_XOK: Weight) -> Tensor | None:
    return weight_XOK.scales if isinstance(weight_XOK, BlockScaled) else None


def _blocks(plan: GroupedPlan, groups: ExpertGroups) -> dict[str, int | bool]:
    assert groups.block_m % plan.programs_per_tile == 0
    block_m = groups.block_m // plan.programs_per_tile
    # TOKENS_FIRST: tokens as the matrix units' rows give each thread few tokens, and so few scales.
    return {
        "BLOCK_M": block_m,
        "BLOCK_O": plan.block_o,
        "BLOCK_K": plan.block_k,
        "TOKENS_FIRST": block_m >= 64,
        "SHARERS": plan.programs_per_tile,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


@triton.jit
def _tile(tiles_ptr, BLOCK_M: tl.constexpr, SHARERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (expert, first place, number of places) of this program's share of a tile. Without places there is
    nothing to do."""
    row = tiles_ptr + tl.program_id(1) // SHARERS * FIELDS
    before = tl.program_id(1) % SHARERS * BLOCK_M
    count = tl.minimum(tl.maximum(tl.load(row + COUNT) - before, 0), BLOCK_M)
    return tl.load(row + EXPERT), tl.load(row + FIRST) + before, count


@triton.jit
def _add_product(sums, x, weight, TOKENS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + x W^T, as [M, O] or as [O, M]."""
    return (
        tl.dot(x, weight.T, sums, input_precision="ieee")
        if TOKENS_FIRST
        else tl.dot(weight, x.T, sums, input_precision="ieee")
    )


@triton.jit
def _add_scaled_product(sums, x, weight, scale, TOKENS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + scale[m] (x W^T), as [M, O] or as [O, M]."""
    return sums + (tl.dot(x, weight.T) * scale[:, None] if TOKENS_FIRST else tl.dot(weight, x.T) * scale[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "top_k"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    h_ptr,
    h_scales_ptr,
    x_ptr,
    x_stride,
    x_scales_ptr,
    weight_tiles,
    weight_scales_ptr,
    pairs_ptr,
    tiles_ptr,
    num_rows,
    num_pairs,
    top_k,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    SHARERS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    expert, first, count = _tile(tiles_ptr, BLOCK_M, SHARERS)
    if count == 0:
        return
    m = tl.arange(0, BLOCK_M)
    first_i = tl.program_id(0) * BLOCK_O
    i = first_i + tl.arange(0, BLOCK_O)
    # Places past the end repeat the last pair; their results are not stored.
    token = tl.load(pairs_ptr + first + tl.minimum(m, count - 1)) // top_k
    x_rows = x_ptr + token.to(tl.int64) * x_stride
    gate_row = expert * 2 * width + first_i
    gate = tl.zeros((BLOCK_M, BLOCK_O) if TOKENS_FIRST else (BLOCK_O, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_O) if TOKENS_FIRST else (BLOCK_O, BLOCK_M), tl.float32)
    if x_scales_ptr is not None:
        num_groups = depth // GROUP
        gate_scales = weight_scales_ptr + gate_row // GROUP * num_groups
        up_scales = gate_scales + width // GROUP * num_groups
        next_x_scale, next_gate_scale, next_up_scale = (
            tl.load(x_scales_ptr + token),
            tl.load(gate_scales),
            tl.load(up_scales),
        )
    for step in range(tl.cdiv(depth, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        gate_weight = weight_tiles.load([gate_row, step * BLOCK_K])
        up_weight = weight_tiles.load([gate_row + width, step * BLOCK_K])
        if x_scales_ptr is not None:
            x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
            # Loaded one step ahead: too small for an asynchronous copy, and too slow to wait for.
            further = tl.minimum(step + 1, num_groups - 1)
            next_x_scale = tl.load(x_scales_ptr + further.to(tl.int64) * num_rows + token)
            next_gate_scale, next_up_scale = tl.load(gate_scales + further), tl.load(up_scales + further)
            x = tl.load(x_rows[:, None] + k[None, :])
            gate = _add_scaled_product(gate, x, gate_weight, gate_scale * x_scale, TOKENS_FIRST)
            up = _add_scaled_product(up, x, up_weight, up_scale * x_scale, TOKENS_FIRST)
        else:
            x = tl.load(x_rows[:, None] + k[None, :], mask=(k < depth)[None, :], other=0.0)
            gate = _add_product(gate, x, gate_weight, TOKENS_FIRST)
            up = _add_product(up, x, up_weight, TOKENS_FIRST)
    release_next(PDL)
    h = gate / (1.0 + tl.exp(-gate)) * up
    if not TOKENS_FIRST:
        h = h.T
    if x_scales_ptr is not None:
        scale, inverse = group_scale(tl.max(tl.abs(h), axis=1))
        tl.store(h_scales_ptr + (first_i // GROUP).to(tl.int64) * num_pairs + first + m, scale, mask=m < count)
        rounded = to_fp8(h * inverse[:, None])
    else:
        rounded = h.to(h_ptr.dtype.element_ty)
    is_real = (m < count)[:, None] & (i < width)[None, :]
    tl.store(h_ptr + (first + m).to(tl.int64)[:, None] * width + i[None, :], rounded, mask=is_real)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    h_tiles,
    h_scales_ptr,
    weight_tiles,
    weight_scales_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_outputs,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    SHARERS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    expert, first, count = _tile(tiles_ptr, BLOCK_M, SHARERS)
    if count == 0:
        return
    m = tl.arange(0, BLOCK_M)
    # Places past the end multiply other experts' tokens; their results are not stored.
    place = first + tl.minimum(m, count - 1)
    first_o = tl.program_id(0) * BLOCK_O
    o = first_o + tl.arange(0, BLOCK_O)
    row = expert * num_outputs + first_o
    acc = tl.zeros((BLOCK_M, BLOCK_O) if TOKENS_FIRST else (BLOCK_O, BLOCK_M), tl.float32)
    if h_scales_ptr is not None:
        num_groups = depth // GROUP
        weight_scales = weight_scales_ptr + (expert * tl.cdiv(num_outputs, GROUP) + first_o // GROUP) * num_groups
        next_scale = tl.load(h_scales_ptr + place) * tl.load(weight_scales)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        weight = weight_tiles.load([row, step * BLOCK_K])
        h = h_tiles.load([first, step * BLOCK_K])
        if h_scales_ptr is not None:
            scale = next_scale
            further = tl.minimum(step + 1, num_groups - 1)
            next_scale = tl.load(h_scales_ptr + further.to(tl.int64) * num_pairs + place) * tl.load(
                weight_scales + further
            )
            acc = _add_scaled_product(acc, h, weight, scale, TOKENS_FIRST)
        else:
            acc = _add_product(acc, h, weight, TOKENS_FIRST)
    release_next(PDL)
    # Loaded only now: held in registers during the loop, they would reduce occupancy.
    pair = tl.load(pairs_ptr + place)
    if not TOKENS_FIRST:
        acc = acc.T
    acc *= tl.load(weights_ptr + pair)[:, None]
    is_real = (m < count)[:, None] & (o < num_outputs)[None, :]
    tl.store(
        parts_ptr + pair.to(tl.int64)[:, None] * num_outputs + o[None, :],
        acc.to(parts_ptr.dtype.element_ty),
        mask=is_real,
    )
