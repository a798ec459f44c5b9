"""The kernels of the recurrent mixer over a prefill at served shapes, for the compile check."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import (
    chunked_delta,
    chunked_delta_blocks,
    chunked_delta_hopper,
    chunked_delta_solve_hopper,
)
from agentspec.kernels.weights import SCALE_BLOCK
from agentspec.types import BLOCK_TOKENS
from tests.kernels.triton.compile_case import ELSEWHERE, EVERYWHERE, HOPPER, CompileCase, shared_bytes


def _cases(
    model: str, value_heads: int, key_heads: int, head_dim: int, activations: str = "*bf16", target: int = HOPPER
) -> list[CompileCase]:
    heads = {"V": value_heads, "REPEATS": value_heads // key_heads}
    dims = {"D": head_dim, "K": head_dim}
    padded = {"T": BLOCK_TOKENS, "PADDED_D": head_dim, "PADDED_K": head_dim}
    num_channels = (2 * key_heads + value_heads) * head_dim
    fold_d, stages = chunked_delta.fold_plan(
        torch.float32 if activations == "*fp32" else torch.bfloat16, value_heads, head_dim, shared_bytes(target)
    )
    # float32 is for accuracy, not for speed.
    stack_bytes = 512 if activations == "*fp32" else 0
    x = {"projected_NP": activations, "x_stride": "i32"}
    conv = {"conv_R3C": activations, "conv_stride": "i32"}
    tables = {"spans_UF": "*i64", "blocks_MF": "*i64"}
    scratch = {"keys_METK": activations, "values_MVTD": activations, "gates_MVGT": "*fp32"}
    # On Hopper v's convolution is a part of `_solve`, as far as that supports the heads.
    has_values = (target, activations, head_dim) != (HOPPER, "*bf16", chunked_delta_hopper.HEAD_DIM)
    solved = {"w_MVTK": activations, "reads_MVTT": activations}
    return [
        CompileCase(
            name=f"convolve_blocks {model}",
            kernel=chunked_delta_blocks.convolve_blocks,
            targets=(target,),
            signature=x | {"conv_C4": activations, "a_log_V": "*fp32", "dt_bias_V": "*fp32"} | conv | tables | scratch,
            constexprs=heads | dims | padded | chunked_delta._CONVOLVE_SIZES | {"HAS_VALUES": has_values},
            num_warps=chunked_delta._CONVOLVE_WARPS,
            multiples_of_16=("x_stride", "conv_stride"),
            instructions=("ld.global.v4.b32", "st.global.v4.b32"),
        ),
        CompileCase(
            name=f"solve_blocks {model}",
            kernel=chunked_delta_blocks.solve_blocks,
            targets=(target,),
            signature={"blocks_MF": "*i64"} | scratch | solved,
            constexprs=heads | padded,
            num_warps=chunked_delta._SOLVE_WARPS,
            stack_bytes=stack_bytes,
            instructions=("ld.global.v4.b32", "st.global.v4.b32", "wgmma.mma_async"),
        ),
        CompileCase(
            name=f"fold_blocks {model}",
            kernel=chunked_delta._fold_blocks,
            targets=(target,),
            signature=x
            | {"ssm_RVDK": "*fp32", "ssm_stride": "i32"}
            | conv
            | tables
            | scratch
            | solved
            | {"out_NX": activations},
            constexprs=heads
            | dims
            | padded
            | {
                "BLOCK_D": fold_d,
                "BLOCK_C": triton.next_power_of_2(triton.cdiv(num_channels, value_heads * (head_dim // fold_d))),
                "STAGES": stages,
            },
            num_warps=chunked_delta._FOLD_WARPS,
            multiples_of_16=("x_stride", "ssm_stride", "conv_stride"),
            stack_bytes=stack_bytes,
            instructions=("wgmma.mma_async", *(["cp.async.cg"] if stages > 1 else [])),
        ),
        CompileCase(
            name=f"gated_norm {model}",
            kernel=chunked_delta._gated_norm,
            targets=(target,),
            signature=x | {"norm_D": "*fp32", "eps": "fp32", "out_NX": activations, "num_rows": "i32"},
            constexprs={
                "V": value_heads,
                "D": head_dim,
                "C": num_channels,
                "IS_SILU": True,
                "BLOCK_ROWS": chunked_delta._NORM_ROWS,
                "PADDED_D": head_dim,
            },
            multiples_of_16=("x_stride",),
            instructions=("ld.global.v4.b32", "st.global.v4.b32"),
        ),
    ]


def _rows(columns: int) -> str:
    """The type of a TMA descriptor of bfloat16."""
    block = [BLOCK_TOKENS, columns]
    return f"tensordesc<bf16[{block[0]},{columns}],{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"


def _solve(model: str, value_heads: int, key_heads: int) -> CompileCase:
    """The second launch in bfloat16, by chunked_delta_solve_hopper.py."""
    return CompileCase(
        name=f"solve_blocks for Hopper {model}",
        kernel=chunked_delta_solve_hopper.solve_blocks,
        signature={"projected_NP": "*bf16", "x_stride": "i32", "conv_C4": "*bf16"}
        | {"conv_R3C": "*bf16", "conv_stride": "i32"}
        | {"spans_UF": "*i64", "blocks_MF": "*i64", "gates_MVGT": "*fp32"}
        | {"keys": _rows(128), "values": _rows(128), "w": _rows(128), "reads": _rows(64)},
        constexprs={"V": value_heads, "REPEATS": value_heads // key_heads},
        num_warps=chunked_delta_solve_hopper.NUM_WARPS,
        max_registers=chunked_delta_solve_hopper.MAX_REGISTERS,
        multiples_of_16=("x_stride", "conv_stride"),
        instructions=(
            "wgmma.mma_async",
            "cp.async.bulk.tensor",
            "ld.shared.v4",
            "ld.global.v4.b32",
            "st.shared.v4.b32",
        ),
    )


def _fold(model: str, value_heads: int, key_heads: int) -> CompileCase:
    """The third launch in bfloat16, by chunked_delta_hopper.py."""
    num_tiles = value_heads * chunked_delta_hopper.HEAD_DIM // chunked_delta_hopper.BLOCK_D
    num_channels = (2 * key_heads + value_heads) * chunked_delta_hopper.HEAD_DIM
    signature = {
        "projected_NP": "*bf16",
        "x_stride": "i32",
        "ssm_RVDK": "*fp32",
        "ssm_stride": "i32",
        "conv_R3C": "*bf16",
        "conv_stride": "i32",
    }
    signature |= {"spans_UF": "*i64", "blocks_MF": "*i64", "gates_MVGT": "*fp32", "out_NX": "*bf16"}
    signature |= {"keys": _rows(128), "values": _rows(64), "w": _rows(128), "reads": _rows(64), "out": _rows(64)}
    return CompileCase(
        name=f"fold_blocks for Hopper {model}",
        kernel=chunked_delta_hopper.fold_blocks,
        signature=signature,
        constexprs={
            "V": value_heads,
            "REPEATS": value_heads // key_heads,
            "BLOCK_C": triton.next_power_of_2(triton.cdiv(num_channels, num_tiles)),
        },
        num_warps=chunked_delta_hopper.NUM_WARPS,
        multiples_of_16=("x_stride", "ssm_stride", "conv_stride"),
        instructions=("wgmma.mma_async", "cp.async.bulk.tensor"),
    )


def _norm_to_fp8(model: str, value_heads: int, key_heads: int) -> CompileCase:
    return CompileCase(
        name=f"gated_norm to fp8 {model}",
        kernel=chunked_delta._gated_norm_to_fp8,
        targets=tuple(target for target in EVERYWHERE if target >= 89),
        signature={"values_RK": "*fp8e4nv", "scales_GR": "*fp32", "projected_NP": "*bf16", "x_stride": "i32"}
        | {"norm_D": "*fp32", "eps": "fp32", "o_NX": "*bf16", "num_tokens": "i32", "num_rows": "i32"},
        constexprs={
            "V": value_heads,
            "C": (2 * key_heads + value_heads) * SCALE_BLOCK,
            "IS_SILU": True,
            "BLOCK_ROWS": chunked_delta._NORM_ROWS,
        },
        multiples_of_16=("x_stride", "num_rows"),
        # A thread stores eight values of a row, as many as the norm without the rounding loads at a time.
        instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4.b32", "st.global.v2.b32"),
    )


CASES = [
    *(case(model, value_heads, 16) for model, value_heads in (("4B", 32), ("27B", 48)) for case in (_solve, _fold)),
    *_cases("4B", 32, 16, 128),
    _norm_to_fp8("27B", 48, 16),
    *_cases("tiny-agent fp32", 4, 2, 64, "*fp32"),
    *(case for target in ELSEWHERE for case in _cases("27B", 48, 16, 128, target=target)),
]
