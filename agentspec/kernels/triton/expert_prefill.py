"""The mixture of experts over many tokens: Backend.add_experts behind the router, for prompts.

Pairs of token and expert are grouped by expert (expert_groups) and multiplied tile by tile (grouped_gemm); each token's parts are then added in the
order of its choices, so its bits do not depend on who else is in the call but for the shared expert's, whose products may be the library's.

Shape letters: N tokens, J choices a token, P = N J pairs, H hidden size, I FFN width, X experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import MixtureWeights
from agentspec.kernels.triton import grouped_gemm
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.fp8_activations import ScaledTokens, quantize_tokens
from agentspec.kernels.triton.fp8_prefill import multiply_scaled, prefill_linear, takes_fp8
from agentspec.kernels.triton.grouped_gemm import GroupedPlan
from agentspec.kernels.triton.launch import OVERLAPPED, await_previous, release_next
from agentspec.kernels.triton.linear_layers import swiglu
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Weight, dequantize

_SUM_BLOCK = 1024


def add_experts_prefill(
    residual_NH: Tensor, normed_NH: Tensor, weights_NJ: Tensor, expert_ids_NJ: Tensor, shared_gate_N: Tensor, weights: MixtureWeights
) -> Tensor:
    """The residual plus its routed and its shared experts: [N, H], written over the residual, which must be contiguous.

    Args:
        normed_NH: the normed residual, in its dtype.
        weights_NJ: float32, contiguous: what each chosen expert counts. expert_ids_NJ: int32, contiguous.
        shared_gate_N: float32, contiguous: the shared expert's gate before the sigmoid."""
    if len(normed_NH) == 0:
        return residual_NH
    dtype, shared_gate_up = normed_NH.dtype, weights.shared_gate_up_2IH
    routed_fp8 = _is_scaled(dtype, weights.gate_up_X2IH, weights.down_XHI)
    shared_fp8 = isinstance(shared_gate_up, BlockScaled) and takes_fp8(dtype, shared_gate_up)
    scaled = quantize_tokens(normed_NH) if routed_fp8 or shared_fp8 else None
    parts_NJH = _routed_parts(normed_NH, scaled if routed_fp8 else None, weights_NJ, expert_ids_NJ, weights)
    shared_NH = _product(swiglu(_product(normed_NH, shared_gate_up, scaled)), weights.shared_down_HI)
    return add_parts(residual_NH, parts_NJH, shared_gate_N, shared_NH)


def _is_scaled(dtype: torch.dtype, *weights_XOK: Weight) -> bool:
    """Whether the experts' products are W8A8."""
    return dtype.itemsize == 2 and all(
        isinstance(weight, BlockScaled) and weight.block_rows == SCALE_BLOCK and weight.shape[-1] % SCALE_BLOCK == 0 for weight in weights_XOK
    )


def _routed_parts(normed_NH: Tensor, scaled: ScaledTokens | None, weights_NJ: Tensor, expert_ids_NJ: Tensor, weights: MixtureWeights) -> Tensor:
    """Each choice's share of the result, [N, J, H]. scaled: the tokens in 8 bits, where the experts' products are W8A8."""
    gate_up, down, dtype, is_scaled = weights.gate_up_X2IH, weights.down_XHI, normed_NH.dtype, scaled is not None
    if not is_scaled:
        # Whole stacks in the activation dtype: only models too small for 8-bit activations come here with 8-bit weights, or those in float32.
        gate_up, down = dequantize(gate_up, dtype), dequantize(down, dtype)
    num_experts = gate_up.shape[0]
    block_m = block_m_for(expert_ids_NJ.numel(), num_experts, is_scaled, dtype)
    groups = group_pairs(expert_ids_NJ, num_experts, block_m)
    x = normed_NH if scaled is None else scaled
    h = grouped_gemm.gate_up(gate_up_plan(block_m, is_scaled, dtype), x, gate_up, groups, expert_ids_NJ.shape[1])
    return grouped_gemm.down(down_plan(block_m, is_scaled, dtype), h, down, groups, weights_NJ, dtype)


def block_m_for(num_pairs: int, num_experts: int, is_scaled: bool, dtype: torch.dtype) -> int:
    """Tokens of a tile: the weights are read once a tile, so a tile should hold what a usual expert gets. As measured with 256 experts."""
    usual = triton.cdiv(num_pairs, num_experts)
    if is_scaled:
        return 16 if usual <= 16 else 64 if usual < 128 else 128
    if dtype == torch.float32 or usual <= 8:
        return 16
    return 64 if usual <= 32 else 128


def down_plan(block_m: int, is_scaled: bool, dtype: torch.dtype) -> GroupedPlan:
    if dtype == torch.float32 and not is_scaled:
        return GroupedPlan(block_o=32, block_k=32, warps=4, stages=2)
    plan = GroupedPlan(block_o=128, block_k=128 if is_scaled else 64, warps=4 if block_m == 16 else 8, stages=3)
    # Half a tile each: only gate and up gain from 128 tokens.
    return replace(plan, sharers=2) if is_scaled and block_m == 128 else plan


def gate_up_plan(block_m: int, is_scaled: bool, dtype: torch.dtype) -> GroupedPlan:
    plan = down_plan(block_m, is_scaled, dtype)
    if block_m < 128:
        return plan
    return replace(plan, warps=16, sharers=1) if is_scaled else replace(plan, stages=4)


def add_parts(residual_NH: Tensor, parts_NJH: Tensor, shared_gate_N: Tensor, shared_NH: Tensor) -> Tensor:
    """residual + (sum of the parts, in their order) + sigmoid(gate) * shared, in float32 and rounded once, over the residual. One launch."""
    num_tokens, top_k, width = parts_NJH.shape
    assert residual_NH.is_contiguous()
    assert shared_NH.is_contiguous()
    assert (shared_gate_N.dtype, shared_gate_N.is_contiguous()) == (torch.float32, True)
    grid = (num_tokens, triton.cdiv(width, _SUM_BLOCK))
    _sum_kernel[grid](residual_NH, parts_NJH, shared_gate_N, shared_NH, width, TOP_K=top_k, BLOCK_H=_SUM_BLOCK, num_warps=4, **OVERLAPPED)
    return residual_NH


def _product(x_NK: Tensor, weight_OK: Weight, scaled: ScaledTokens | None = None) -> Tensor:
    """x W^T; `scaled`: x in 8 bits, if it is there already."""
    if isinstance(weight_OK, Tensor):
        return torch_linear(x_NK, weight_OK)
    out_NO = torch.empty(x_NK.shape[0], weight_OK.shape[0], dtype=x_NK.dtype, device=x_NK.device)
    if scaled is not None and takes_fp8(x_NK.dtype, weight_OK):
        multiply_scaled(scaled, weight_OK, out_NO)
    else:
        prefill_linear(x_NK, weight_OK, out_NO)
    return out_NO


@triton.jit
def _sum_kernel(residual_ptr, parts_ptr, gate_ptr, shared_ptr, width, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_real = h < width
    total = tl.zeros((BLOCK_H,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (n * TOP_K + j) * width + h, mask=is_real, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + n)))
    total += gate * tl.load(shared_ptr + n * width + h, mask=is_real, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + n * width + h, mask=is_real, other=0.0).to(tl.float32)
    tl.store(residual_ptr + n * width + h, total.to(residual_ptr.dtype.element_ty), mask=is_real)
