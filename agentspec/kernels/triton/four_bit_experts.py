"""Experts in 4 bits: those of few tokens by experts_four_bit.py, in the place of experts.gate_up and experts.down.

Owns the tilings. Shape letters as in experts.py.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
import triton
from torch import Tensor

from agentspec.kernels.four_bit_tiles import TILE_COLUMNS, FourBitTiles
from agentspec.kernels.triton.experts import Visits, lists_of
from agentspec.kernels.triton.experts_four_bit import four_bit_down_kernel, four_bit_gate_up_kernel
from agentspec.kernels.triton.four_bit_layers import FourBitPlan, expanded
from agentspec.kernels.triton.launch import INTERPRETED, overlapped
from agentspec.kernels.weights import Plain, Weight

_MEASURED = {
    ("int4", 1024, 4096): FourBitPlan(block_o=64, block_m=8, ahead=2, shares=1, max_registers=96),
    ("int4", 4096, 512): FourBitPlan(block_o=64, block_m=8, ahead=2, shares=1, max_registers=88),
}
"""By (FourBitForm.format, rows and columns of an expert's matrix): of up to 8 visits, where this is faster than the
rule, which is that of 35B-A3B on an H100. In whole steps of 397B-A17B on two H200."""
_MOST_STEPS = 8
"""Steps along K up to which the loop is unrolled."""


def takes_decoded(weight: Weight, dtype: torch.dtype) -> TypeGuard[FourBitTiles]:
    """Whether a step multiplies activations of this type with a stack of experts as it decodes them."""
    return isinstance(weight, FourBitTiles) and (INTERPRETED or dtype == torch.bfloat16)


def in_plain(weight: Weight, dtype: torch.dtype) -> Weight:
    """A weight as the other kernels take it: one in 4 bits is expanded as a whole. For activations in float32."""
    return Plain(expanded(weight, dtype)) if isinstance(weight, FourBitTiles) else weight


def gate_up_plan(width: int, depth: int, block_m: int, format: str = "int4") -> FourBitPlan:
    """width: of an expert. depth: that of its inputs. format: FourBitForm.format."""
    block_o = 32 if block_m > 8 and width % 16 == 0 else 16
    return _measured(format, 2 * width, depth, block_m) or _plan(block_o, depth, block_m, ahead=2)


def down_plan(num_outputs: int, depth: int, block_m: int, format: str = "int4") -> FourBitPlan:
    """As `gate_up_plan`."""
    block_o = 32 if num_outputs % 32 == 0 else 16
    return _measured(format, num_outputs, depth, block_m) or _plan(block_o, depth, block_m, ahead=1)


def _measured(format: str, rows: int, depth: int, block_m: int) -> FourBitPlan | None:
    return _MEASURED.get((format, rows, depth)) if block_m == 8 else None


def _plan(block_o: int, depth: int, block_m: int, *, ahead: int) -> FourBitPlan:
    groups = depth // TILE_COLUMNS
    shares = math.gcd(groups, 4)
    ahead = ahead if groups % (shares * ahead) == 0 else 1
    return FourBitPlan(block_o=block_o, block_m=block_m, ahead=ahead, warps=shares, shares=shares)


def gate_up(
    plan: FourBitPlan, x_NH: Tensor, weight_X2IH: FourBitTiles, shared_2IH: Weight | None, visits: Visits
) -> Tensor:
    """As experts.gate_up."""
    (num_tokens, num_visits), depth, width = visits.ids_NC.shape, x_NH.shape[1], weight_X2IH.shape[1] // 2
    assert x_NH.is_contiguous()
    assert (2 * width % plan.block_o, depth % TILE_COLUMNS) == (0, 0), f"{weight_X2IH.shape} in tiles of {plan}"
    h_PI = torch.empty(num_tokens * num_visits, width, dtype=x_NH.dtype, device=x_NH.device)
    four_bit_gate_up_kernel[(2 * width // plan.block_o, visits.num_blocks)](
        h_PI,
        x_NH,
        *_operands(weight_X2IH),
        *_operands(shared_2IH),
        *lists_of(visits),
        num_tokens,
        weight_X2IH.shape[0],
        width,
        **_blocks(plan, visits, weight_X2IH),
    )
    return h_PI


def down(plan: FourBitPlan, h_PI: Tensor, weight_XHI: FourBitTiles, shared_HI: Weight | None, visits: Visits) -> Tensor:
    """As experts.down."""
    num_experts, num_outputs, depth = weight_XHI.shape
    assert (num_outputs % plan.block_o, h_PI.shape[1]) == (0, depth), f"{weight_XHI.shape} in tiles of {plan}"
    empty = torch.empty if visits.all_held else torch.zeros
    parts_PH = empty(h_PI.shape[0], num_outputs, dtype=torch.float32, device=h_PI.device)
    four_bit_down_kernel[(num_outputs // plan.block_o, visits.num_blocks)](
        parts_PH,
        h_PI,
        *_operands(weight_XHI),
        *_operands(shared_HI),
        *lists_of(visits),
        visits.weights_NC,
        visits.ids_NC.shape[0],
        num_experts,
        num_outputs,
        **_blocks(plan, visits, weight_XHI),
    )
    return parts_PH


def _operands(weight: Weight | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes, scales, zero points, multipliers."""
    if weight is None:
        return None, None, None, None
    assert isinstance(weight, FourBitTiles)
    assert weight.values.is_contiguous()
    return weight.values, weight.scales, weight.zeros, weight.multipliers


def _blocks(plan: FourBitPlan, visits: Visits, weight: FourBitTiles) -> dict[str, int | bool | str | None]:
    assert (plan.split, plan.far) == (1, 0)
    assert plan.block_m >= visits.block_m, f"{visits.block_m} visits of a program in tiles of {plan.block_m}"
    groups = weight.shape[-1] // TILE_COLUMNS
    assert groups >= plan.shares, f"{groups} groups for {plan.shares} groups of warps"
    num_steps = triton.cdiv(groups, plan.shares * plan.ahead)
    return {
        "C": visits.ids_NC.shape[1],
        "GROUPS": groups,
        "FORMAT": weight.form.format,
        "BLOCK_O": plan.block_o,
        "BLOCK_M": plan.block_m,
        "AHEAD": plan.ahead,
        "SHARES": plan.shares,
        "UNROLL": num_steps <= _MOST_STEPS,
        "WARPS": plan.warps,
        "num_warps": plan.warps,
        "maxnreg": plan.max_registers,
        **overlapped(),
    }
