"""The products of grouped_gemm.py with 4-bit experts for Hopper's matrix units, in Gluon: gate and up with SwiGLU, and
down, one launch each. The same for one matrix and all tokens, with the residual added to the result.

A program multiplies some rows of one expert with the tokens of a tile (expert_groups). Its lanes load codes as they are
stored and decode them in registers, from which the matrix units take them: a warp's 16 rows lie in a tile as they do in
these operands (kernels/four_bit_tiles.py). Only the columns of each 32 come in another order, that of `operand_order`,
and so the tokens' must. While the units multiply one half of a program's rows, its warps decode the other.

A weight is rounded to bfloat16: integers times their scale, which is itself rounded to bfloat16 if it has another type,
unlike in other products. Floats times their scale are exact; a row's sum is multiplied by its multiplier in float32.

Shape letters as in grouped_gemm.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from agentspec.kernels.four_bit import FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST, ExpertGroups, empty_parts
from agentspec.kernels.triton.gluon_names import await_previous, copy_values, release_next, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED, overlapped
from agentspec.kernels.triton.linear_four_bit import (
    E2M1,
    INT4_SCALED,
    INT4_ZEROS_SCALED,
    block_of_tile,
    gated,
    has_zeros,
    index_along,
    layout_of,
    scales_of,
    sums_of,
    words_layout,
)
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.weights import Weight

_WARPS, _ROWS_OF_A_WARP = 4, 32
ROWS = _WARPS * _ROWS_OF_A_WARP
"""Of a program."""
BLOCKS_M = (32, 64, 128)
"""Tokens that a program may have."""
_MOST_OF_SMALL_TILES = 256
"""Tokens of one matrix, from which tiles of 128 are faster than of 64."""
_COLUMNS = tl.constexpr(128)
_TWO_STEPS = 256
"""Columns."""
_HALF = tl.constexpr(64)
"""Columns of a step's first half, and of its second."""
_WORDS = tl.constexpr(128)
_STAGES = tl.constexpr(3)
"""Steps whose tokens have room. A step's are asked for one step ahead: its room was read two steps ago, so that no warp
still reads it."""
_ORDER = (4, 2, 2, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPlan:
    """A program has 32 rows for each of its warps."""

    block_m: int
    """Tokens of a tile."""
    warps: int

    @property
    def rows(self) -> int:
        return _ROWS_OF_A_WARP * self.warps


def is_supported(gate_up_X2IH: Weight, down_XHI: Weight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels multiply experts of these shapes with activations of this type on this device."""
    return all(is_matrix_supported(weight, dtype, device) for weight in (gate_up_X2IH, down_XHI))


def is_matrix_supported(weight: Weight, dtype: torch.dtype, device: torch.device) -> TypeGuard[FourBitTiles]:
    """The same for a weight [..., O, K]."""
    # Triton 3.6 fails to compile a loop of a single step.
    if not isinstance(weight, FourBitTiles) or weight.shape[-2] % ROWS or weight.shape[-1] < _TWO_STEPS:
        return False
    return INTERPRETED or (dtype == torch.bfloat16 and _is_hopper(device))


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return machine_of(device).capability[0] == 9


def plan_for(num_pairs: int, num_experts: int, form: FourBitForm) -> PromptPlan:
    """A tile should have the mean expert's tokens."""
    usual = triton.cdiv(num_pairs, num_experts)
    return PromptPlan(block_m=32 if usual <= 20 else 64 if usual <= 80 else _most_tokens(form), warps=_WARPS)


def matrix_plan_for(num_tokens: int, form: FourBitForm) -> PromptPlan:
    # With 128 tokens, gate and up of floats would spill in the loop.
    is_small = num_tokens <= _MOST_OF_SMALL_TILES or form.kind == "e2m1"
    return PromptPlan(block_m=64 if is_small else _most_tokens(form), warps=_WARPS)


def _most_tokens(form: FourBitForm) -> int:
    # With so many scales, 128 tokens need more registers than there are.
    return 64 if form.group == 32 else 128


def operand_order(x_NK: Tensor) -> Tensor:
    """The columns of each 32 in the order in which the matrix units meet them: column 8 t + 4 j + 2 h + e at 16 j + 8 h
    + 2 t + e, as four_bit_columns.in_order_of_words has them."""
    num_tokens, depth = x_NK.shape
    return x_NK.view(num_tokens, depth // 32, *_ORDER).permute(0, 1, 3, 4, 2, 5).reshape(num_tokens, depth)


def gate_up(plan: PromptPlan, x_NK: Tensor, weight_X2IK: FourBitTiles, groups: ExpertGroups, top_k: int) -> Tensor:
    """silu(gate x) * up x of every pair, in the order of the groups: [P, I] in operand order, as x must be."""
    width, num_pairs = weight_X2IK.shape[1] // 2, groups.pairs_P.shape[0]
    h_PI = torch.empty(num_pairs, width, dtype=x_NK.dtype, device=x_NK.device)
    _launch(plan, h_PI, x_NK, weight_X2IK, groups=groups, top_k=top_k, is_swiglu=True)
    return h_PI


def down(
    plan: PromptPlan,
    h_PI: Tensor,
    weight_XOI: FourBitTiles,
    groups: ExpertGroups,
    weights_NJ: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """weight * down h of every pair: [N, J, O] of `dtype`. h: as returned by `gate_up`; weights_NJ: float32."""
    assert (weights_NJ.dtype, weights_NJ.is_contiguous()) == (torch.float32, True)
    parts = empty_parts(groups, (*weights_NJ.shape, weight_XOI.shape[1]), dtype, h_PI.device)
    _launch(plan, parts.flatten(0, 1), h_PI, weight_XOI, weights_NJ=weights_NJ, groups=groups)
    return parts


def matrix_product(
    plan: PromptPlan,
    x_NK: Tensor,
    weight_OK: FourBitTiles,
    out: Tensor,
    residual_NO: Tensor | None = None,
    *,
    is_swiglu: bool = False,
) -> None:
    """x W^T, plus the residual, or silu(gate) * up of [gate | up], into the first columns of `out`. x in operand
    order; the result in its own."""
    assert residual_NO is None or residual_NO.is_contiguous()
    _launch(plan, out, x_NK, weight_OK, residual_NO=residual_NO, is_swiglu=is_swiglu)


def _launch(
    plan: PromptPlan,
    out: Tensor,
    x: Tensor,
    weight: FourBitTiles,
    *,
    residual_NO: Tensor | None = None,
    weights_NJ: Tensor | None = None,
    groups: ExpertGroups | None = None,
    top_k: int = 1,
    is_swiglu: bool = False,
) -> None:
    """groups: None: of one matrix."""
    num_tokens, (num_rows, depth) = len(x), weight.shape[-2:]
    assert groups is None or groups.block_m == plan.block_m
    assert (num_rows % plan.rows, x.shape[1], x.stride(1)) == (0, depth, 1), f"{weight.shape} {x.shape} {plan}"
    assert weight.values.is_contiguous()
    assert out.stride(1) == 1
    num_tiles = triton.cdiv(num_tokens, plan.block_m) if groups is None else groups.tiles_T4.shape[0]
    four_bit_prompt_kernel[(num_rows // plan.rows, num_tiles)](
        out,
        out.stride(0),
        x,
        x.stride(0),
        weight.values,
        weight.scales,
        weight.zeros,
        weight.multipliers,
        residual_NO,
        weights_NJ,
        None if groups is None else groups.pairs_P,
        None if groups is None else groups.tiles_T4,
        num_tokens,
        top_k,
        num_rows // (1 + is_swiglu),
        GROUPS=depth // _COLUMNS.value,
        FORMAT=weight.form.format,
        SWIGLU=is_swiglu,
        BLOCK_M=plan.block_m,
        WARPS=plan.warps,
        num_warps=plan.warps,
        **overlapped(),
    )


@gluon.constexpr_function
def _sums_layout(block_m: int, num_warps: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, block_m, 16])


@gluon.jit(do_not_specialize=["num_tokens", "top_k"])
def four_bit_prompt_kernel(  # type: ignore[no-untyped-def]
    out, out_stride, x, x_stride, words, scales, zeros, multipliers, residual, weights, pairs, tiles, num_tokens, top_k,
    num_outputs, GROUPS: gl.constexpr, FORMAT: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """num_outputs: of SwiGLU, those of gate alone. GROUPS: of 128 columns, of a row. FORMAT: as in linear_four_bit.py.
    A program has two blocks of 16 WARPS rows; of SwiGLU they are rows of gate and of up, eight in turn. weights: of
    pairs, without SwiGLU. pairs, tiles: None: of one matrix. residual: of one matrix."""
    await_previous(PDL)
    release_next(PDL)
    first = gl.program_id(1) * BLOCK_M
    count = gl.minimum(num_tokens - first, BLOCK_M)
    if tiles is not None:
        row = tiles + gl.program_id(1) * FIELDS
        first, count = gl.load(row + FIRST), gl.load(row + COUNT)
    if count > 0:
        if tiles is not None:
            expert = gl.load(row + EXPERT)
            num_rows = num_outputs * 2 if SWIGLU else num_outputs
            first_tile = expert.to(gl.int64) * (num_rows // 8) * GROUPS
            words += first_tile * _WORDS
            scales += first_tile * scales_of(FORMAT)
            if has_zeros(FORMAT):
                zeros += first_tile * scales_of(FORMAT)
            if FORMAT == "e2m1":
                multipliers += expert.to(gl.int64) * num_rows
        tile = gl.program_id(0) * 2
        sums, other_sums = _products(
            x, x_stride, words, scales, zeros, pairs, first, count, tile, top_k, num_outputs, GROUPS, FORMAT, SWIGLU,
            BLOCK_M, WARPS,
        )  # fmt: skip
        _finish(
            out, out_stride, sums, multipliers, residual, weights, pairs, first, count, tile, num_outputs, FORMAT,
            SWIGLU, BLOCK_M, WARPS,
        )  # fmt: skip
        _finish(
            out, out_stride, other_sums, multipliers, residual, weights, pairs, first, count, tile + 1, num_outputs,
            FORMAT, SWIGLU, BLOCK_M, WARPS,
        )  # fmt: skip


@gluon.jit
def _products(  # type: ignore[no-untyped-def]
    x, x_stride, words, scales, zeros, pairs, first, count, tile, top_k, num_outputs, GROUPS: gl.constexpr,
    FORMAT: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Return the sums of two blocks of rows, float32 [16 WARPS, BLOCK_M] each."""
    SUMS: gl.constexpr = _sums_layout(BLOCK_M, WARPS)
    W: gl.constexpr = words_layout(1, 2 * WARPS, WARPS)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    buffers = gl.allocate_shared_memory(
        gl.bfloat16, [2 * _STAGES, BLOCK_M, _HALF], gl.NVMMASharedLayout.get_default_for([BLOCK_M, _HALF], gl.bfloat16)
    )
    # Places past the end repeat the last pair; their results are not stored.
    m = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS)), count - 1)
    m += first
    if SWIGLU and pairs is not None:
        m = gl.load(pairs + m) // top_k
    k = gl.arange(0, _HALF, layout=gl.SliceLayout(0, ROWS))
    x_at = x + gl.expand_dims(m.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
    block = block_of_tile(tile, index_along(2 * WARPS, 1, 5, W), num_outputs, 2 * WARPS, SWIGLU)
    other_block = block_of_tile(tile + 1, index_along(2 * WARPS, 1, 5, W), num_outputs, 2 * WARPS, SWIGLU)
    g, t, i = index_along(8, 2, 5, W), index_along(4, 3, 5, W), index_along(4, 4, 5, W)
    lane = g * 16 + t * 4 + i
    _ask_for(x_at, buffers, 0, GROUPS)
    w_next, s_next, z_next = _load(words, scales, zeros, block, lane, g, t, i, 0, GROUPS, FORMAT)
    v_next, r_next, y_next = _load(words, scales, zeros, other_block, lane, g, t, i, 0, GROUPS, FORMAT)
    sums = gl.zeros([16 * WARPS, BLOCK_M], gl.float32, SUMS)
    other_sums = warpgroup_mma_init(gl.zeros([16 * WARPS, BLOCK_M], gl.float32, SUMS))
    for step in range(GROUPS):
        w, s, z, v, r, y = w_next, s_next, z_next, v_next, r_next, y_next
        async_copy.wait_group(0)
        fence_async_shared()
        warp_barrier()
        _ask_for(x_at, buffers, step + 1, GROUPS)
        later = gl.minimum(step + 1, GROUPS - 1)
        w_next, s_next, z_next = _load(words, scales, zeros, block, lane, g, t, i, later, GROUPS, FORMAT)
        v_next, r_next, y_next = _load(words, scales, zeros, other_block, lane, g, t, i, later, GROUPS, FORMAT)
        low = buffers.index(step % _STAGES * 2).permute((1, 0))
        high = buffers.index(step % _STAGES * 2 + 1).permute((1, 0))
        # One product is under way while the next operand is decoded.
        w, w_high = _halves(w, WARPS)
        v, v_high = _halves(v, WARPS)
        s, s_high, z, z_high = _pairs(s, z, FORMAT, WARPS)
        r, r_high, y, y_high = _pairs(r, y, FORMAT, WARPS)
        sums = warpgroup_mma(_operand(w, s, z, FORMAT, WARPS, SUMS), low, sums, is_async=True)
        other_sums = warpgroup_mma_wait(1, deps=[other_sums])
        other_sums = warpgroup_mma(_operand(v, r, y, FORMAT, WARPS, SUMS), low, other_sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        sums = warpgroup_mma(_operand(w_high, s_high, z_high, FORMAT, WARPS, SUMS), high, sums, is_async=True)
        other_sums = warpgroup_mma_wait(1, deps=[other_sums])
        other_sums = warpgroup_mma(
            _operand(v_high, r_high, y_high, FORMAT, WARPS, SUMS), high, other_sums, is_async=True
        )
        sums = warpgroup_mma_wait(1, deps=[sums])
    other_sums = warpgroup_mma_wait(0, deps=[other_sums])
    return sums, other_sums


@gluon.jit
def _ask_for(x_at, buffers, step, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the tokens of a step to its room. A group of copies even if there is no such step."""
    if step < GROUPS:
        copy_values(buffers.index(step % _STAGES * 2), x_at + step * _COLUMNS)
        copy_values(buffers.index(step % _STAGES * 2 + 1), x_at + (step * _COLUMNS + _HALF))
    async_copy.commit_group()


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    words, scales, zeros, block, lane, g, t, i, group, GROUPS: gl.constexpr, FORMAT: gl.constexpr
):
    """(words, scales, zero points) of a group. Without zero points, the scales once more."""
    tile = block * GROUPS + group
    of_word = g * sums_of(FORMAT) + t * 0 + i * (sums_of(FORMAT) // 4)
    w = gl.load(words + tile * _WORDS + lane)
    if FORMAT == "e2m1":
        s = gl.load(scales + tile * 64 + (g * 8 + t // 2 * 4 + i))
    else:
        s = gl.load(scales + tile * scales_of(FORMAT) + of_word)
    z = s
    if has_zeros(FORMAT):
        z = gl.load(zeros + tile * scales_of(FORMAT) + of_word)
    return w, s, z


@gluon.jit
def _pairs(scales, zeros, FORMAT: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """As two bfloat16 in a word, for the two halves of a group: the scale, rounded, of floats times 2^118; -(128 +
    zero)."""
    if FORMAT == "e2m1":
        pair = scales.to(gl.int32) * 0x00100010 + 0x76007600
    else:
        pair = (scales.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x00010001
    offset = pair
    if has_zeros(FORMAT):
        offset = zeros.to(gl.int32) * 0x00010001 - 0x3CFF3D00
    low, high = _halves(pair, WARPS)
    offset_low, offset_high = _halves(offset, WARPS)
    return low, high, offset_low, offset_high


@gluon.jit
def _halves(x, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a value for each word, those of a group's first 64 columns and of the others."""
    return gl.split(x.reshape((2 * WARPS, 8, 4, 2, 2)).permute((0, 1, 2, 4, 3)))


@gluon.jit
def _decoded(words, scales, offset, FORMAT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Decode words [..., 2]: eight tensors [..., 2], the four pairs of the first word and those of the second one."""
    return gl.inline_asm_elementwise(
        E2M1 if FORMAT == "e2m1" else INT4_ZEROS_SCALED if has_zeros(FORMAT) else INT4_SCALED,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
        [words, scales, offset],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _operand(words, scales, offset, FORMAT: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words [blocks, 8, 4, 2] as the operand [rows, 64], in operand order. Moves nothing."""
    parts = _decoded(words, scales, offset, FORMAT)
    w = gl.join(
        gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6])),
        gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7])),
    )
    # rows, lane of four, half of a register, word, pair's bits 1 and 0
    w = w.reshape((16 * WARPS, 4, 2, 2, 2, 2)).permute((0, 3, 4, 5, 1, 2))
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    return gl.convert_layout(w.reshape((16 * WARPS, _HALF)), LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(  # type: ignore[no-untyped-def]
    out, out_stride, sums, multipliers, residual, weights, pairs, first, count, tile, num_outputs, FORMAT: gl.constexpr,
    SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Store the outputs of a block of rows. Those of experts' gate and up in operand order."""
    ALL: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = ALL // 2 if SWIGLU else ALL
    LAYOUT: gl.constexpr = layout_of(sums)
    if FORMAT == "e2m1":
        o = index_along(ALL, 0, 2, LAYOUT)
        at = block_of_tile(tile, o // 8, num_outputs, 2 * WARPS, SWIGLU) * 8 + o % 8
        sums *= gl.load(multipliers + at) * 256.0
    y = sums
    if SWIGLU:
        y = gated(sums, ALL, BLOCK_M).to(out.dtype.element_ty)
    if SWIGLU and pairs is not None:
        # Column 8 t + 4 j + 2 h + e of each 32 goes to 16 j + 8 h + 2 t + e.
        y = y.reshape((ROWS // 32, 4, 2, 2, 2, BLOCK_M)).permute((5, 0, 2, 3, 1, 4)).reshape((BLOCK_M, ROWS))
    else:
        y = y.permute((1, 0))
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORED))
    o = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    place = first + gl.minimum(m, count - 1)
    y = gl.convert_layout(y, STORED)
    is_real = gl.expand_dims(m < count, 1)
    if weights is not None:
        place = gl.load(pairs + place)
        y *= gl.expand_dims(gl.load(weights + place), 1)
    place = gl.expand_dims(place.to(gl.int64), 1)
    if residual is not None:
        y += gl.load(residual + place * num_outputs + gl.expand_dims(o, 0), mask=is_real, other=0.0).to(gl.float32)
    at = place * out_stride + gl.expand_dims(o, 0)
    gl.store(out + at, y.to(out.dtype.element_ty), mask=is_real)
