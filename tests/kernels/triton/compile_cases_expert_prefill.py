"""The mixture of experts over many tokens at the sizes of 35B-A3B (256 experts, 8 a token, 2048 x 512), by the plans
that these have."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import expert_prefill, grouped_gemm, grouped_gemm_hopper
from agentspec.kernels.triton.fp8_ffn import row_tile
from agentspec.kernels.triton.grouped_gemm import GroupedPlan
from tests.kernels.triton.compile_case import ELSEWHERE, EVERYWHERE, HOPPER, CompileCase, shared_bytes
from tests.kernels.triton.compile_cases_fp8_prefill import in_constexprs

WGMMA, COPIES = "wgmma.mma_async", "cp.async.bulk.tensor"


def grouped(
    kernel: Any, name: str, plan: GroupedPlan, block_m: int, dtype: str, *instructions: str, target: int
) -> CompileCase:
    """block_m: of the tiles; dtype: of the operands."""
    block_m //= plan.programs_per_tile
    is_scaled = dtype == "fp8e4nv"
    pointer, scales = f"*{dtype}", "*fp32" if is_scaled else "constexpr"
    tiles = f"tensordesc<{dtype}[{{}}, {plan.block_k}]>"
    signature = {
        "weight_tiles": tiles.format(plan.block_o),
        "weight_scales_ptr": scales,
        "pairs_ptr": "*i32",
        "tiles_ptr": "*i32",
    }
    if kernel is grouped_gemm._gate_up_kernel:
        signature |= {
            "h_ptr": pointer,
            "h_scales_ptr": scales,
            "x_ptr": pointer,
            "x_stride": "i32",
            "x_scales_ptr": scales,
        }
        signature |= {"num_rows": "i32", "num_pairs": "i32", "top_k": "i32", "width": "i32", "depth": "i32"}
    else:
        signature |= {
            "parts_ptr": "*fp32" if dtype == "fp32" else "*bf16",
            "h_tiles": tiles.format(block_m),
            "h_scales_ptr": scales,
        }
        signature |= {"weights_ptr": "*fp32", "num_pairs": "i32", "num_outputs": "i32", "depth": "i32"}
    absent = {argument: None for argument, kind in signature.items() if kind == "constexpr"}
    return CompileCase(
        name=f"{name} {dtype} M={block_m} {plan.block_o} x {plan.block_k} warps {plan.warps} stages {plan.stages} "
        f"programs a tile {plan.programs_per_tile}",
        kernel=kernel,
        targets=(target,),
        signature={argument: kind for argument, kind in signature.items() if argument not in absent},
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_O": plan.block_o,
            "BLOCK_K": plan.block_k,
            "TOKENS_FIRST": block_m >= 64,
            "SHARERS": plan.programs_per_tile,
            **absent,
        },
        num_warps=plan.warps,
        num_stages=plan.stages,
        multiples_of_16=tuple(
            argument for argument in ("x_stride", "width", "depth", "num_outputs") if argument in signature
        ),
        # 512 threads have 128 registers each: Triton 3.9 spills two more here; 3.6, with which this plan was measured,
        # spills none.
        stack_bytes=8 if plan.warps == 16 else 0,
        instructions=instructions,
    )


def layer(block_m: int, dtype: str, *instructions: str, target: int = HOPPER) -> list[CompileCase]:
    is_scaled = dtype == "fp8e4nv"
    activations = torch.float32 if dtype == "fp32" else torch.bfloat16
    return [
        grouped(
            grouped_gemm._gate_up_kernel,
            "experts' gate and up",
            expert_prefill.gate_up_plan(block_m, is_scaled, activations, shared_bytes(target)),
            block_m,
            dtype,
            *instructions,
            target=target,
        ),
        grouped(
            grouped_gemm._down_kernel,
            "experts' down",
            expert_prefill.down_plan(block_m, is_scaled, activations, shared_bytes(target)),
            block_m,
            dtype,
            *instructions,
            target=target,
        ),
    ]


def hoppers(kernel: Any, name: str) -> CompileCase:
    """8-bit operands, by grouped_gemm_hopper.py."""

    def tiles(rows: int) -> str:
        return f"tensordesc<fp8e4nv[{rows},128],{gl.NVMMASharedLayout.get_default_for([rows, 128], gl.float8e4nv)!r}>"

    scales = {
        "weight_scales_ptr": "*fp32",
        "pairs_ptr": "*i32",
        "counters_ptr": "*i32",
        "num_pairs": "i32",
        "depth": "i32",
    }
    if kernel is grouped_gemm_hopper.gate_up_kernel:
        registers = grouped_gemm_hopper._GATE_UP_REGISTERS
        signature = {
            "h_ptr": "*fp8e4nv",
            "h_scales_ptr": "*fp32",
            "x_ptr": "*fp8e4nv",
            "x_stride": "i32",
            "x_scales_ptr": "*fp32",
        }
        signature |= {"tiles_ptr": "*i32", "top_k": "i32", "width": "i32"}
    else:
        registers = grouped_gemm_hopper._DOWN_REGISTERS
        signature = {
            "parts_ptr": "*bf16",
            "h": tiles(64),
            "h_scales_ptr": "*fp32",
            "runs_ptr": "*i32",
            "weights_ptr": "*fp32",
            "num_outputs": "i32",
        }
    signature |= {"weights": tiles(128)} | scales
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=registers,
        multiples_of_16=tuple(
            argument for argument in ("x_stride", "width", "depth", "num_outputs") if argument in signature
        ),
        # Triton 3.6, with which they were measured, spills nothing here; what 3.9 spills is used once per tile.
        stack_bytes=40,
        instructions=(WGMMA, COPIES, "setmaxnreg"),
    )


CASES = [
    hoppers(grouped_gemm_hopper.gate_up_kernel, "experts' gate and up for Hopper"),
    hoppers(grouped_gemm_hopper.down_kernel, "experts' down for Hopper"),
    *layer(16, "bf16", WGMMA, COPIES),
    *layer(64, "bf16", WGMMA, COPIES),
    *layer(128, "bf16", WGMMA, COPIES),
    *(case for target in ELSEWHERE for case in layer(128, "bf16", target=target)),
    *layer(16, "fp8e4nv", WGMMA, COPIES),
    *layer(64, "fp8e4nv", WGMMA, COPIES),
    *layer(128, "fp8e4nv", WGMMA, COPIES),
    *(case for target in (89, 120) for case in layer(128, "fp8e4nv", target=target)),
    *layer(16, "fp32", COPIES),
    CompileCase(
        name="experts' sum",
        targets=EVERYWHERE,
        kernel=expert_prefill._sum_kernel,
        signature={
            "residual_ptr": "*bf16",
            "parts_ptr": "*bf16",
            "gate_ptr": "*fp32",
            "shared_ptr": "*bf16",
            "width": "i32",
        },
        constexprs={"TOP_K": 8, "BLOCK_H": 1024},
        multiples_of_16=("width",),
        instructions=("ld.global.v4",),
    ),
    *(
        CompileCase(
            name=f"experts' sum and normed tokens to fp8 of {width} features{', in full too' if in_full else ''}",
            targets=tuple(target for target in EVERYWHERE if target >= 89),
            kernel=expert_prefill._sum_norm_kernel,
            signature={
                **dict.fromkeys(("residual_ptr", "parts_ptr", "shared_ptr", "weight_ptr"), "*bf16"),
                **dict.fromkeys(("gate_ptr", "scales_ptr"), "*fp32"),
                "values_ptr": "*fp8e4nv",
                **({"normed_ptr": "*bf16"} if in_full else {}),
                "eps": "fp32",
                **dict.fromkeys(("num_tokens", "num_rows"), "i32"),
            },
            constexprs={"TOP_K": 8, **in_constexprs(width), **({} if in_full else {"normed_ptr": None})},
            num_warps=row_tile(width)["num_warps"],
            multiples_of_16=("num_rows",),
            instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4"),
        )
        for width in (2048, 3072)
        for in_full in (False, True)
    ),
]
