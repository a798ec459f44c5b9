"""Activations as 8-bit floats."""

from __future__ import annotations

from agentspec.kernels.triton import fp8_activations, fp8_ffn
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase

CASES = [
    CompileCase(
        name="tokens to fp8",
        targets=tuple(target for target in EVERYWHERE if target >= 89),
        kernel=fp8_activations._quantize_kernel,
        signature={
            "values_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            "x_ptr": "*bf16",
            "x_stride": "i32",
            "num_tokens": "i32",
            "num_rows": "i32",
            "depth": "i32",
        },
        constexprs={"BLOCK_R": 32},
        multiples_of_16=("x_stride", "num_rows", "depth"),
        instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4"),
    ),
    CompileCase(
        name="normed tokens to fp8",
        targets=tuple(target for target in EVERYWHERE if target >= 89),
        kernel=fp8_ffn.norm_tokens_kernel,
        signature={
            "values_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            **dict.fromkeys(("x_ptr", "normed_ptr"), "*bf16"),
            "weight_ptr": "*bf16",
            **dict.fromkeys(("x_stride", "num_tokens", "num_rows"), "i32"),
            "eps": "fp32",
        },
        constexprs={"GROUPS": 40, "BLOCK_G": 64},
        num_warps=16,
        multiples_of_16=("x_stride", "num_rows"),
        instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4"),
    ),
    CompileCase(
        name="gated tokens to fp8",
        targets=tuple(target for target in EVERYWHERE if target >= 89),
        kernel=fp8_ffn.gate_tokens_kernel,
        signature={
            "values_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            "gate_up_ptr": "*bf16",
            **dict.fromkeys(("num_tokens", "num_rows", "width"), "i32"),
        },
        constexprs={"BLOCK_R": 32},
        multiples_of_16=("num_rows", "width"),
        instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4"),
    ),
]
