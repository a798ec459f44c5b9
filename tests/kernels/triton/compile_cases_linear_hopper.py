"""The products of linear_hopper.py at the shapes of a 27B with block-scaled weights or 4-bit integers."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import linear_hopper
from agentspec.kernels.triton.four_bit_layers import hopper_plan_for
from agentspec.kernels.triton.linear_hopper import ROWS
from agentspec.kernels.triton.linear_plans import Plan
from benchmarks.four_bit import SHAPES
from benchmarks.linear import hopper_plans
from benchmarks.linear_results import MODELS
from tests.kernels.triton.compile_case import CompileCase

NUM_MULTIPROCESSORS = 132
_NORMS = ("squares", "next_norm", "next_gained", "next_squares")
_NAMES = {gl.bfloat16: "bf16", gl.uint16: "u16", gl.int32: "i32"}


def _blocks(rows: int, columns: int, dtype: Any) -> str:
    block = [rows, 4, columns] if dtype == gl.int32 else [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return f"tensordesc<{_NAMES[dtype]}{str(block).replace(' ', '')},{layout!r}>"


def _case(
    name: str, plan: Plan, signature: dict[str, str], *, instructions: tuple[str, ...], stack_bytes: int, **given: Any
) -> CompileCase:
    """signature: of what not every product has; what neither it nor `given` has is None."""
    signature = {
        "out": "*bf16",
        "x": _blocks(plan.block_m, 128, gl.bfloat16),
        "partial_ptr": "*fp32",
        "arrivals_ptr": "*i32",
        "eps": "fp32",
        **dict.fromkeys(("out_stride", "num_tokens", "num_outputs", "tiles", "groups", "release"), "i32"),
    } | signature
    constexprs = (
        {"PARTS": 1}
        | given
        | {
            "BLOCKS": plan.block_o // (2 * ROWS),
            "BLOCK_M": plan.block_m,
            "STAGES": plan.stages,
            "REGISTERS": linear_hopper._REGISTERS,
            "FETCH_REGISTERS": linear_hopper._FETCH_REGISTERS,
        }
    )
    absent = {*_NORMS, "residual", "num_parts"} - signature.keys()
    return CompileCase(
        name=name,
        kernel=linear_hopper.product_kernel,
        signature=signature,
        constexprs=constexprs | dict.fromkeys(absent),
        multiples_of_16=("out_stride", "num_outputs"),
        stack_bytes=stack_bytes,
        instructions=("wgmma.mma_async", *instructions),
    )


def layer(name: str, num_tokens: int, *, stack_bytes: int = 0) -> list[CompileCase]:
    """A case for each height of a tile."""
    shape = MODELS["27B-FP8"].shapes()[name]
    plans = {plan.block_o: plan for plan in hopper_plans(shape, num_tokens, NUM_MULTIPROCESSORS)}
    signature = {"weights": _blocks(ROWS, 64, gl.uint16), "scales": "*fp32"}
    if shape.kind == "add_linear":
        signature |= {"residual": "*bf16", "next_norm": "*bf16", "next_gained": "*bf16", "next_squares": "*fp32"}
    else:
        signature |= {"squares": "*fp32", "num_parts": "i32"}
    return [
        _case(
            f"{shape.kind} for Hopper 27B M={num_tokens} fp8, tiles of {plan.block_o}",
            plan,
            signature,
            instructions=("cp.async.bulk.tensor", "prmt.b32 pair"),
            stack_bytes=stack_bytes,
            PARTS=1 if shape.kind == "add_linear" else triton.next_power_of_2(shape.depth // ROWS),
            BLOCK_ROWS=128,
            SWIGLU=shape.kind == "norm_swiglu",
        )
        for plan in plans.values()
    ]


def four_bit_layer(name: str, num_tokens: int, *, stack_bytes: int = 0) -> CompileCase:
    """By the plan that a step uses."""
    is_swiglu = name == "27B ffn in"
    plan = hopper_plan_for(*SHAPES[name], num_tokens, NUM_MULTIPROCESSORS, is_swiglu=is_swiglu)
    assert plan is not None
    return _case(
        f"{name} for Hopper M={num_tokens} int4",
        plan,
        {"weights": _blocks(8, 32, gl.int32), "scales": "*bf16"} | ({} if is_swiglu else {"residual": "*bf16"}),
        instructions=("cp.async.bulk.tensor.3d", "lop3.b32 s", "ld.shared.v4.b32"),
        stack_bytes=stack_bytes,
        BLOCK_ROWS=1,
        SWIGLU=is_swiglu,
    )


CASES = [
    four_bit_layer("27B ffn in", 32),
    # With Triton 3.9 addresses are kept in local memory, from one tile to the next; the loops over steps have none.
    four_bit_layer("27B ffn in", 64, stack_bytes=56),
    four_bit_layer("27B ffn out", 32),
    four_bit_layer("27B ffn out", 64),
    *layer("ffn in", 16),
    *layer("ffn out", 16),
    *layer("attention in", 32),
    *layer("ffn in", 32),
    *layer("ffn out", 32),
    *layer("attention in", 64),
    *layer("ffn in", 64),
    *layer("ffn out", 64),
]
