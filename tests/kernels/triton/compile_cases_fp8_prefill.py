"""Activations as 8-bit floats."""

from __future__ import annotations

from agentspec.kernels.triton import fp8_activations
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
]
