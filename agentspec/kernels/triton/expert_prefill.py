"""The mixture of experts over many tokens, for prompts: Backend.add_experts after the router.

Pairs of token and expert are grouped by expert (expert_groups) and multiplied tile by tile (grouped_gemm; 8-bit ones
on Hopper by grouped_gemm_hopper, which gives the same bits). Each token's parts are then added in the order of its
choices. So its bits are batch-invariant, except for the shared expert, whose products may be the library's.

Shape letters: N tokens, J choices per token, P = N J pairs, H hidden size, I FFN width, X experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights, Norm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import grouped_four_bit_hopper, grouped_gemm, grouped_gemm_hopper, side_stream
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.four_bit_experts import in_plain
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, quantize_tokens
from agentspec.kernels.triton.fp8_ffn import row_gain, row_tile, store_normed
from agentspec.kernels.triton.fp8_prefill import multiply_scaled, takes_fp8
from agentspec.kernels.triton.fp8_sums import room_for_tokens
from agentspec.kernels.triton.grouped_gemm import GroupedPlan
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, overlapped, release_next
from agentspec.kernels.triton.linear_layers import add_linear, library_product, swiglu, swiglu_for
from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES, fitting_stages, has_fp8_units, shared_bytes
from agentspec.kernels.triton.norm_ahead import attach
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Plain

_SUM_BLOCK = 1024
_HOPPER_MIN_TOKENS = 17
"""Least mean tokens per expert for which the Hopper kernels are faster, measured with 256 experts: with fewer tokens
their 64 rows are mostly empty."""


def add_experts_prefill(
    residual_NH: Tensor,
    normed: Tensor | ScaledTokens,
    weights_NJ: Tensor,
    expert_ids_NJ: Tensor,
    shared_gate_N: Tensor,
    weights: MixtureWeights,
    next_norm: Norm | None = None,
) -> Tensor:
    """The residual plus its routed and its shared experts: [N, H], written over the residual, which must be
    contiguous.

    Args:
        normed: the normed residual, in its dtype [N, H]; in 8 bits only if `takes_scaled`.
        weights_NJ: float32, contiguous: the weight of each chosen expert. expert_ids_NJ: int32, contiguous; the
            number of experts for those that aren't there.
        shared_gate_N: float32, contiguous: the shared expert's gate before the sigmoid.
        next_norm: as of `add_parts`.
    """
    if len(residual_NH) == 0:
        return residual_NH
    dtype = residual_NH.dtype
    routed_fp8, shared_fp8 = _routed_is_scaled(dtype, weights), _shared_is_scaled(dtype, weights)
    scaled = quantize_tokens(normed) if isinstance(normed, Tensor) and (routed_fp8 or shared_fp8) else normed
    # Few programs group the pairs: the shared expert's first product runs beside them.
    with side_stream.fork(residual_NH.device):
        shared_NH = _shared_expert(scaled if shared_fp8 else normed, residual_NH, weights)
    parts_NJH = _routed_parts(scaled if routed_fp8 else normed, weights_NJ, expert_ids_NJ, weights, dtype)
    side_stream.join(residual_NH.device)
    return add_parts(residual_NH, parts_NJH, shared_gate_N, shared_NH, next_norm)


def takes_scaled(dtype: torch.dtype, weights: MixtureWeights) -> bool:
    """Whether the routed and the shared experts all take tokens of this type in 8 bits."""
    return _routed_is_scaled(dtype, weights) and _shared_is_scaled(dtype, weights)


def _routed_is_scaled(dtype: torch.dtype, weights: MixtureWeights) -> bool:
    """Whether the routed experts' products are W8A8."""
    if dtype.itemsize != 2 or not (INTERPRETED or has_fp8_units(weights.gate_up_X2IH.device)):
        return False
    return all(
        isinstance(weight, BlockScaled) and weight.block_rows == SCALE_BLOCK and weight.shape[-1] % SCALE_BLOCK == 0
        for weight in (weights.gate_up_X2IH, weights.down_XHI)
    )


def _shared_is_scaled(dtype: torch.dtype, weights: MixtureWeights) -> bool:
    return isinstance(weights.shared_gate_up_2IH, BlockScaled) and takes_fp8(dtype, weights.shared_gate_up_2IH)


def _routed_parts(
    x: Tensor | ScaledTokens, weights_NJ: Tensor, expert_ids_NJ: Tensor, weights: MixtureWeights, dtype: torch.dtype
) -> Tensor:
    """Return each choice's weighted output, [N, J, H] of `dtype`. x: in 8 bits if the experts' products are W8A8."""
    gate_up, down, is_scaled = weights.gate_up_X2IH, weights.down_XHI, isinstance(x, ScaledTokens)
    num_pairs, top_k, num_held = expert_ids_NJ.numel(), expert_ids_NJ.shape[1], gate_up.shape[0]
    all_held = weights.first_expert is None
    num_experts = num_held if all_held else weights.router_XH.shape[0]
    if (
        isinstance(x, ScaledTokens)
        and num_pairs >= _HOPPER_MIN_TOKENS * num_experts
        and grouped_gemm_hopper.is_supported(gate_up, weights_NJ.device)
    ):
        assert isinstance(gate_up, BlockScaled)
        assert isinstance(down, BlockScaled)
        groups = group_pairs(expert_ids_NJ, num_held, grouped_gemm_hopper.BLOCK_M, all_held=all_held)
        return grouped_gemm_hopper.down(
            grouped_gemm_hopper.gate_up(x, gate_up, groups, top_k), down, groups, weights_NJ, dtype
        )
    if isinstance(x, Tensor) and grouped_four_bit_hopper.is_supported(gate_up, down, dtype, weights_NJ.device):
        assert isinstance(gate_up, FourBitTiles)
        assert isinstance(down, FourBitTiles)
        plan = grouped_four_bit_hopper.plan_for(num_pairs, num_experts, gate_up.form)
        groups = group_pairs(expert_ids_NJ, num_held, plan.block_m, all_held=all_held)
        h_PI = grouped_four_bit_hopper.gate_up(plan, grouped_four_bit_hopper.operand_order(x), gate_up, groups, top_k)
        return grouped_four_bit_hopper.down(plan, h_PI, down, groups, weights_NJ, dtype)
    if not is_scaled:
        # Converts whole stacks to the activation dtype. With 8-bit weights this happens only for models too small for
        # 8-bit activations, or for float32 activations; with 4-bit ones also on other GPUs than Hopper's.
        gate_up, down = (
            in_plain(weight, dtype) if isinstance(weight, FourBitTiles) else Plain(weight.dequantize(dtype))
            for weight in (gate_up, down)
        )
    block_m = block_m_for(num_pairs, num_experts, is_scaled, dtype)
    groups = group_pairs(expert_ids_NJ, num_held, block_m, all_held=all_held)
    most = shared_bytes(weights_NJ.device)
    h = grouped_gemm.gate_up(gate_up_plan(block_m, is_scaled, dtype, most), x, gate_up, groups, top_k)
    return grouped_gemm.down(down_plan(block_m, is_scaled, dtype, most), h, down, groups, weights_NJ, dtype)


def block_m_for(num_pairs: int, num_experts: int, is_scaled: bool, dtype: torch.dtype) -> int:
    """Return the tokens per tile: the weights are read once per tile, so a tile should hold the mean expert's tokens.
    Measured with 256 experts."""
    usual = triton.cdiv(num_pairs, num_experts)
    if is_scaled:
        return 16 if usual <= 16 else 64 if usual < 128 else 128
    if dtype == torch.float32 or usual <= 8:
        return 16
    return 64 if usual <= 32 else 128


def down_plan(
    block_m: int, is_scaled: bool, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES
) -> GroupedPlan:
    """shared_bytes: of a program, at most."""
    plan = _down_plan(block_m, is_scaled, dtype)
    return _fitting(plan, plan.block_o + block_m // plan.programs_per_tile, is_scaled, dtype, shared_bytes)


def gate_up_plan(
    block_m: int, is_scaled: bool, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES
) -> GroupedPlan:
    """As `down_plan`."""
    plan = _down_plan(block_m, is_scaled, dtype)
    if block_m == 128:
        plan = replace(plan, warps=16, programs_per_tile=1) if is_scaled else replace(plan, stages=4)
    return _fitting(plan, 2 * plan.block_o + block_m, is_scaled, dtype, shared_bytes)


def _down_plan(block_m: int, is_scaled: bool, dtype: torch.dtype) -> GroupedPlan:
    if dtype == torch.float32 and not is_scaled:
        return GroupedPlan(block_o=32, block_k=32, warps=4, stages=2)
    plan = GroupedPlan(block_o=128, block_k=128 if is_scaled else 64, warps=4 if block_m == 16 else 8, stages=3)
    # Half a tile per program: only gate and up gain from 128 tokens.
    return replace(plan, programs_per_tile=2) if is_scaled and block_m == 128 else plan


def _fitting(plan: GroupedPlan, rows: int, is_scaled: bool, dtype: torch.dtype, shared_bytes: int) -> GroupedPlan:
    """The plan with the stages that fit. rows: of weights and tokens together."""
    stage_bytes = rows * plan.block_k * (1 if is_scaled else dtype.itemsize)
    return replace(plan, stages=fitting_stages(plan.stages, stage_bytes, shared_bytes))


def add_parts(
    residual_NH: Tensor,
    parts_NJH: Tensor,
    shared_gate_N: Tensor,
    shared_NH: Tensor,
    next_norm: Norm | None = None,
) -> Tensor:
    """residual + (sum of the parts, in their order) + sigmoid(gate) * shared, in float32 and rounded once, written
    over the residual. One launch. next_norm: what fp8_sums.py's `room_for_tokens` allows is left with the result."""
    num_tokens, top_k, width = parts_NJH.shape
    assert residual_NH.is_contiguous()
    assert shared_NH.is_contiguous()
    assert (shared_gate_N.dtype, shared_gate_N.is_contiguous()) == (torch.float32, True)
    operands = residual_NH, parts_NJH, shared_gate_N, shared_NH
    ahead = room_for_tokens(next_norm, residual_NH)
    if ahead is None:
        grid = (num_tokens, triton.cdiv(width, _SUM_BLOCK))
        _sum_kernel[grid](*operands, width, TOP_K=top_k, BLOCK_H=_SUM_BLOCK, num_warps=4, **overlapped())
    else:
        num_rows = len(ahead.scaled.values_RK)
        _sum_norm_kernel[(num_rows,)](
            *operands, *ahead.operands, num_tokens, num_rows, TOP_K=top_k, **row_tile(width), **overlapped()
        )
    return attach(residual_NH, ahead)


def _shared_expert(x: Tensor | ScaledTokens, like_NH: Tensor, weights: MixtureWeights) -> Tensor:
    """Return the shared expert's output, [N, H] with the number of tokens and the dtype of `like`. x: in 8 bits if its
    first product is W8A8."""
    gate_up = weights.shared_gate_up_2IH
    if isinstance(x, Tensor):
        return library_product(swiglu(library_product(x, gate_up)), weights.shared_down_HI)
    assert isinstance(gate_up, BlockScaled)
    gate_up_N2I = like_NH.new_empty(len(like_NH), gate_up.shape[0])
    multiply_scaled(x, gate_up, gate_up_N2I)
    return add_linear(None, swiglu_for(gate_up_N2I, weights.shared_down_HI), weights.shared_down_HI)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    residual_ptr, parts_ptr, gate_ptr, shared_ptr, width, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    release_next(PDL)
    await_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_real = h < width
    gate = tl.load(gate_ptr + n)
    x = _sum_of(residual_ptr, parts_ptr, gate, shared_ptr, n, h, is_real, width, TOP_K)
    tl.store(residual_ptr + n * width + h, x, mask=is_real)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_norm_kernel(  # type: ignore[no-untyped-def]
    residual_ptr, parts_ptr, gate_ptr, shared_ptr, values_ptr, scales_ptr, normed_ptr, weight_ptr, eps, num_tokens,
    num_rows, TOP_K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`_sum_kernel`, and fp8_ffn.py's `norm_tokens_kernel` of its result."""
    release_next(PDL)
    g, h, gain = row_gain(weight_ptr, GROUPS, BLOCK_G)
    await_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    is_token = (g < tl.where(n < num_tokens, GROUPS, 0))[:, None]
    gate = tl.load(gate_ptr + n, mask=n < num_tokens, other=0.0)
    x = _sum_of(residual_ptr, parts_ptr, gate, shared_ptr, n, h, is_token, GROUPS * GROUP, TOP_K)
    tl.store(residual_ptr + n * (GROUPS * GROUP) + h, x, mask=is_token)
    store_normed(values_ptr, scales_ptr, normed_ptr, x, gain, eps, n, num_rows, g, h, is_token, GROUPS)


@triton.jit
def _sum_of(  # type: ignore[no-untyped-def]
    residual_ptr, parts_ptr, gate, shared_ptr, n, h, is_real, width, TOP_K: tl.constexpr
):  # fmt: skip
    """Some features of a token's sum, in the residual's dtype, [.] like h."""
    # All loads are in flight together.
    parts = ()
    for j in tl.static_range(TOP_K):
        parts += (tl.load(parts_ptr + (n * TOP_K + j) * width + h, mask=is_real, other=0.0),)  # type: ignore[assignment]
    shared = tl.load(shared_ptr + n * width + h, mask=is_real, other=0.0)
    residual = tl.load(residual_ptr + n * width + h, mask=is_real, other=0.0)
    total = tl.zeros(h.shape, tl.float32)
    for j in tl.static_range(TOP_K):
        total += parts[j].to(tl.float32)
    total += 1.0 / (1.0 + tl.exp(-gate)) * shared.to(tl.float32)
    total += residual.to(tl.float32)
    return total.to(residual_ptr.dtype.element_ty)
