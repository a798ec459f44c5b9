"""Products with 4-bit weights in tiles: that of a step's few tokens by linear_four_bit.py, that of a short prompt by
grouped_four_bit_hopper.py, that of a longer one by the matrix library, with weights expanded to the activations' dtype.

Owns the choice, the tilings and the expansion. Shape letters: N tokens, K input features, O output features, E extra
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.four_bit_tiles import E2M1_BITS, E5M3_BIAS, TILE_COLUMNS, TILE_ROWS, FourBitTiles
from agentspec.kernels.triton import grouped_four_bit_hopper, linear_hopper
from agentspec.kernels.triton.launch import (
    INTERPRETED,
    NUM_COUNTERS,
    arrival_counters,
    await_previous,
    overlapped,
    release_next,
)
from agentspec.kernels.triton.linear_four_bit import four_bit_kernel
from agentspec.kernels.triton.linear_plans import Plan
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.weights import Weight

FEW_TOKENS = 128
"""Most tokens that are multiplied as a step's. Up to here two blocks of 64 tokens or four of 32, as measured one by
one, take less than what the library needs: weights written and read again in 16 bits."""
_SHORT_PROMPT = 640
"""Most tokens that Hopper's matrix units multiply with weights as they are decoded. They reach 600 TFLOPS, the library
700, but it needs a fixed time for writing the weights. Measured on an H100 with the FFN of a 27B."""

_BLOCK_M = (8, 16, 32)
_EXPANDED_TILES = 4
"""Of a program."""
_ENOUGH_PROGRAMS = 640
"""Programs of four warps that fill an H100."""
_SMALL_BYTES = 40 * 2**20
"""Of weights that are read so fast that the time before their product begins counts."""
_E2M1_BITS: tl.constexpr = tl.constexpr(E2M1_BITS)
_E5M3_BIAS: tl.constexpr = tl.constexpr(E5M3_BIAS)
_TILE_COLUMNS: tl.constexpr = tl.constexpr(TILE_COLUMNS)
_TILE_ROWS: tl.constexpr = tl.constexpr(TILE_ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitPlan:
    """Tiling of one product. See linear_four_bit.py."""

    block_o: int
    block_m: int
    ahead: int
    warps: int = 4
    """At least `shares`, and at most that times block_o / 16."""
    shares: int = 4
    """Groups of warps; with `split`, at most as many as there are groups of columns."""
    split: int = 1
    far: int = 0
    max_registers: int | None = None
    """Of a lane; None: as the compiler chooses. Given where it chooses so many that not all programs run at a time, or
    so few that it has to store values to local memory."""


_TEN_AT_A_TIME = None if triton.__version__.startswith("3.6.") else 96
"""Registers with which an H100's multiprocessor holds ten programs of two warps. Triton 3.6 chooses as many by itself,
and its code is then 4 % faster than with the same number as a limit."""
_MEASURED = {
    ("int4", 34816, 5120): FourBitPlan(block_o=16, block_m=8, ahead=1),
    ("int4", 16384, 5120): FourBitPlan(block_o=32, block_m=8, ahead=1, far=4),
    ("int4", 5120, 17408): FourBitPlan(
        block_o=32, block_m=8, ahead=2, warps=2, shares=1, split=8, max_registers=_TEN_AT_A_TIME
    ),
    ("int4 zeros", 5120, 17408): FourBitPlan(block_o=64, block_m=8, ahead=2, shares=1, split=8, max_registers=96),
    ("int4 by 32", 5120, 17408): FourBitPlan(block_o=64, block_m=8, ahead=2, shares=1, split=8, max_registers=96),
    ("int4 zeros by 32", 5120, 17408): FourBitPlan(block_o=64, block_m=8, ahead=2, shares=2, split=6),
    ("int4", 18432, 2560): FourBitPlan(block_o=32, block_m=8, ahead=2, shares=2, far=4, max_registers=96),
    ("e2m1", 5120, 17408): FourBitPlan(block_o=32, block_m=8, ahead=2, warps=2, shares=1, split=8),
}
"""By (FourBitForm.format, O, K), those of int4 for all integers without their own: of up to 8 tokens, where this is
more than some 4 % faster than what the rule says. Measured on an H100 with `python -m benchmarks.four_bit --sweep`."""


_HOPPER_TOKENS = 17
"""Least tokens that are multiplied by linear_hopper.py: with 16, its products take about what the others do."""
_HOPPER_WEIGHTS = 2**24
"""Of a matrix, likewise: every program has some steps then."""
_HOPPER_STAGES = 6


def hopper_plan_for(
    num_outputs: int, depth: int, num_tokens: int, num_multiprocessors: int, *, is_swiglu: bool
) -> Plan | None:
    """The plan of linear_hopper.py for a product with integers in groups of 128 without zero points, if that takes
    less time. num_outputs: of gate and up together.

    By what `python -m benchmarks.four_bit --hopper` measured on an H100 with 32 and 64 tokens: tiles of few rows share
    the work best, whole parts of tiles for each program are worth a few idle multiprocessors, and more stages cost
    more than they hide."""
    block_o = 256 if is_swiglu else 128
    if num_tokens < _HOPPER_TOKENS or num_outputs % block_o or num_outputs * depth < _HOPPER_WEIGHTS:
        return None
    tiles = num_outputs // block_o
    in_whole_parts = num_multiprocessors // tiles * tiles
    return Plan(
        block_o=block_o,
        block_m=32 if num_tokens <= 32 else 64,
        block_k=TILE_COLUMNS,
        stages=_HOPPER_STAGES,
        warps=8,
        programs=in_whole_parts if in_whole_parts > 0.85 * num_multiprocessors else num_multiprocessors,
    )


def plan_for(num_outputs: int, depth: int, num_tokens: int, format: str) -> FourBitPlan:
    """num_outputs: of gate and up together. format: FourBitForm.format. Of more tokens than the widest block has,
    several programs read the same weights."""
    block_m = next((size for size in _BLOCK_M if size >= num_tokens), _BLOCK_M[-1])
    is_float = format == "e2m1"
    measured = _MEASURED.get((format, num_outputs, depth))
    if measured is None and not is_float:
        measured = _MEASURED.get(("int4", num_outputs, depth))
    if measured is not None and block_m == 8:
        return measured
    block_o = 16 if block_m == 8 or num_outputs % 32 else 32
    groups = depth // TILE_COLUMNS
    shares = 4 if groups >= 4 else 2 if groups >= 2 else 1
    split = 1
    while block_m < 32 and num_outputs * split < 16 * _ENOUGH_PROGRAMS and groups >= 2 * split * shares:
        split *= 2
    return FourBitPlan(
        block_o=block_o,
        block_m=block_m,
        ahead=2 if block_m == 8 and (split > 1 or is_float) else 1,
        warps=shares,
        shares=shares,
        split=split,
        far=4 if num_outputs * depth // 2 < _SMALL_BYTES else 0,
    )


def takes_decoded(weight_OK: Weight, x_NK: Tensor) -> TypeGuard[FourBitTiles]:
    """Whether the product is `decoded_product`: with tiles, of no long prompt, in bfloat16."""
    if not isinstance(weight_OK, FourBitTiles):
        return False
    if len(x_NK) <= FEW_TOKENS:
        return INTERPRETED or x_NK.dtype == torch.bfloat16
    is_short = len(x_NK) <= _SHORT_PROMPT
    return is_short and grouped_four_bit_hopper.is_matrix_supported(weight_OK, x_NK.dtype, x_NK.device)


def decoded_product(
    x_NK: Tensor,
    weight_OK: FourBitTiles,
    *,
    residual_NO: Tensor | None = None,
    extra_EK: Tensor | None = None,
    is_swiglu: bool = False,
) -> Tensor:
    """x W^T with weights as they are decoded, plus the residual, beside the extra outputs, or silu(gate) * up of
    [gate | up]. [N, O + E] or [N, O / 2] in x's dtype."""
    (num_tokens, _), (num_outputs, depth) = x_NK.shape, weight_OK.shape
    num_outputs //= 1 + is_swiglu
    num_extra = 0 if extra_EK is None else len(extra_EK)
    out = torch.empty(num_tokens, num_outputs + num_extra, dtype=x_NK.dtype, device=x_NK.device)
    if extra_EK is not None:
        torch.mm(x_NK, extra_EK.t(), out=out[:, num_outputs:])
    if num_tokens > FEW_TOKENS:
        prompt = grouped_four_bit_hopper.matrix_plan_for(num_tokens, weight_OK.form)
        in_order = grouped_four_bit_hopper.operand_order(x_NK)
        grouped_four_bit_hopper.matrix_product(prompt, in_order, weight_OK, out, residual_NO, is_swiglu=is_swiglu)
        return out
    hopper = None
    if linear_hopper.supports_four_bit(x_NK, weight_OK):
        num_multiprocessors = machine_of(x_NK.device).num_multiprocessors
        hopper = hopper_plan_for(weight_OK.shape[0], depth, num_tokens, num_multiprocessors, is_swiglu=is_swiglu)
    if hopper is not None:
        linear_hopper.launch_four_bit(hopper, x_NK, weight_OK, out, residual_NO, is_swiglu=is_swiglu)
    elif num_tokens:
        plan = plan_for(weight_OK.shape[0], depth, num_tokens, weight_OK.form.format)
        launch_product(plan, x_NK, weight_OK, out, residual_NO, is_swiglu=is_swiglu)
    return out


def four_bit_logits(x_NK: Tensor, weight_VK: FourBitTiles, num_real: int) -> Tensor:
    """float32 x W^T of any number of tokens, [N, V]; minus infinity from row `num_real` of W on."""
    (num_tokens, depth), num_rows = x_NK.shape, weight_VK.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x_NK.device)
    if not (INTERPRETED or x_NK.dtype == torch.bfloat16):
        torch.mm(x_NK.float(), expanded(weight_VK, torch.float32).t(), out=out)
    elif num_tokens:
        plan = plan_for(num_rows, depth, num_tokens, weight_VK.form.format)
        launch_product(plan, x_NK, weight_VK, out)
    out[:, num_real:] = -torch.inf
    return out


def launch_product(
    plan: FourBitPlan,
    x_NK: Tensor,
    weight_OK: FourBitTiles,
    out: Tensor,
    residual_NO: Tensor | None = None,
    *,
    is_swiglu: bool = False,
) -> None:
    """The product by a given plan, into the first columns of `out`."""
    num_tokens, (num_rows, depth) = len(x_NK), weight_OK.shape
    assert x_NK.shape[1] == depth, f"{x_NK.shape} {weight_OK.shape}"
    assert num_rows % plan.block_o == 0, f"{num_rows} rows in tiles of {plan.block_o}"
    assert x_NK.stride(1) == out.stride(1) == 1
    assert x_NK.data_ptr() % 4 == 0
    assert num_tokens == 1 or x_NK.stride(0) % 2 == 0, f"rows {x_NK.stride(0)} apart aren't whole pairs"
    assert weight_OK.values.is_contiguous()
    assert residual_NO is None or residual_NO.is_contiguous()
    tiles, blocks = num_rows // plan.block_o, triton.cdiv(num_tokens, plan.block_m)
    partial, arrivals, options = None, None, overlapped()
    if plan.split > 1:
        assert tiles * blocks <= NUM_COUNTERS, f"{tiles * blocks} tiles"
        arrivals = arrival_counters(x_NK.device)
        size = tiles * blocks * plan.split * plan.block_o * plan.block_m
        partial = torch.empty(size, dtype=torch.float32, device=x_NK.device)
    four_bit_kernel[(tiles * plan.split, blocks)](
        out,
        out.stride(0),
        x_NK,
        x_NK.stride(0) // 2,
        weight_OK.values,
        weight_OK.scales,
        weight_OK.zeros,
        weight_OK.multipliers,
        residual_NO,
        partial,
        arrivals,
        num_tokens,
        num_rows // (1 + is_swiglu),
        GROUPS=depth // TILE_COLUMNS,
        SPLIT=plan.split,
        FORMAT=weight_OK.form.format,
        SWIGLU=is_swiglu,
        BLOCK_O=plan.block_o,
        BLOCK_M=plan.block_m,
        AHEAD=plan.ahead,
        SHARES=plan.shares,
        FAR=plan.far if options["PDL"] else 0,  # the same devices have both
        WARPS=plan.warps,
        num_warps=plan.warps,
        maxnreg=plan.max_registers,
        **options,
    )


def expanded(weight: FourBitTiles, dtype: torch.dtype) -> Tensor:
    """`weight.dequantize(dtype)` of a weight [..., O, K], in one launch."""
    depth, form = weight.shape[-1], weight.form
    assert weight.values.is_contiguous()
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    num_tiles = out.numel() // (TILE_ROWS * TILE_COLUMNS)
    _expand_kernel[(triton.cdiv(num_tiles, _EXPANDED_TILES),)](
        out,
        weight.values,
        weight.scales,
        weight.zeros,
        weight.multipliers,
        num_tiles,
        depth,
        TILES=_EXPANDED_TILES,
        IS_FLOAT=form.kind == "e2m1",
        SUMS=TILE_COLUMNS // form.group if form.kind == "int4" else 1,
        num_warps=4,
        **overlapped(),
    )
    return out


@triton.jit
def _expand_kernel(  # type: ignore[no-untyped-def]
    out, words, scales, zeros, multipliers, num_tiles, depth, TILES: tl.constexpr, IS_FLOAT: tl.constexpr,
    SUMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program expands some tiles; a lane has the eight adjacent columns of a word of each. SUMS: groups of integers
    in a row of a tile."""
    release_next(PDL)
    await_previous(PDL)
    index = tl.arange(0, TILES * 128)
    tile, place = tl.program_id(0).to(tl.int64) * TILES + index // 128, index % 128
    row, t, i = place // 16, place // 4 % 4, place % 4
    is_real = tile < num_tiles
    groups = depth // _TILE_COLUMNS
    block = tile // groups
    word = tl.load(words + tl.program_id(0).to(tl.int64) * (TILES * 128) + index, mask=is_real, other=0)
    if IS_FLOAT:
        code = tl.load(scales + tile * 64 + row * 8 + t // 2 * 4 + i, mask=is_real, other=0).to(tl.int32)
        scale = ((code // 8 + (127 - _E5M3_BIAS)) * 8388608 + code % 8 * 1048576).to(tl.float32, bitcast=True)
        multiplier = tl.load(multipliers + block * _TILE_ROWS + row, mask=is_real, other=0)
        zero = multiplier
    else:
        group = tile * (8 * SUMS) + row * SUMS + i * (SUMS // 4)
        scale = tl.load(scales + group, mask=is_real, other=0).to(tl.float32)
        multiplier = scale
        zero = tl.full((TILES * 128,), 8.0, tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + group, mask=is_real, other=0).to(tl.float32)
    halves_0 = tl.join(
        _weight(word, 0, 0, scale, zero, multiplier, IS_FLOAT), _weight(word, 0, 1, scale, zero, multiplier, IS_FLOAT)
    )
    halves_1 = tl.join(
        _weight(word, 1, 0, scale, zero, multiplier, IS_FLOAT), _weight(word, 1, 1, scale, zero, multiplier, IS_FLOAT)
    )
    halves_2 = tl.join(
        _weight(word, 2, 0, scale, zero, multiplier, IS_FLOAT), _weight(word, 2, 1, scale, zero, multiplier, IS_FLOAT)
    )
    halves_3 = tl.join(
        _weight(word, 3, 0, scale, zero, multiplier, IS_FLOAT), _weight(word, 3, 1, scale, zero, multiplier, IS_FLOAT)
    )
    # Axes: word, odd, pair's bits 0 and 1.
    values = tl.join(tl.join(halves_0, halves_1), tl.join(halves_2, halves_3))
    values = values.permute((0, 3, 2, 1)).reshape((TILES * 128, 8))
    at = (block * _TILE_ROWS + row) * depth + (tile % groups) * _TILE_COLUMNS + i * 32 + t * 8
    tl.store(out + at[:, None] + tl.arange(0, 8)[None, :], values.to(out.dtype.element_ty), mask=is_real[:, None])


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    word, PAIR: tl.constexpr, ODD: tl.constexpr, scale, zero, multiplier, IS_FLOAT: tl.constexpr
):
    """One of a word's weights, float32: of column 2 PAIR + ODD."""
    half = word >> (16 * ODD)
    if IS_FLOAT:
        low = (half >> _E2M1_BITS[PAIR][0]) & 1
        exponent = ((half >> _E2M1_BITS[PAIR][1]) & 1) + ((half >> _E2M1_BITS[PAIR][2]) & 1) * 2
        half_steps = tl.where(exponent == 0, low, (low + 2) << tl.maximum(exponent - 1, 0)).to(tl.float32)
        is_negative = ((half >> _E2M1_BITS[PAIR][3]) & 1) != 0
        return tl.where(is_negative, -half_steps, half_steps) * 0.5 * scale * multiplier
    # 2^23 + code by its bits: conversions of integers take four times as long as other instructions.
    code = ((half >> (4 * PAIR)) & 15) | 0x4B000000
    return (code.to(tl.float32, bitcast=True) - (8388608.0 + zero)) * scale
