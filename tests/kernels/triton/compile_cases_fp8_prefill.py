"""Activations as 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.kernels.triton import fp8_activations, fp8_ffn, fp8_sums
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase


def _case(
    name: str, kernel: Any, signature: dict[str, str], constexprs: Mapping[str, int | None], **options: Any
) -> CompileCase:
    """signature: besides the results."""
    sizes = ("x_stride", "num_rows", "depth", "width")
    return CompileCase(
        name=name,
        targets=tuple(target for target in EVERYWHERE if target >= 89),
        kernel=kernel,
        signature={"values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", **signature},
        constexprs=constexprs,
        multiples_of_16=tuple(size for size in sizes if size in signature),
        instructions=("cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4"),
        **options,
    )


def in_constexprs(width: int) -> dict[str, int]:
    """A row's tile as constexprs of a kernel that has whole rows."""
    tile = fp8_ffn.row_tile(width)
    return {"GROUPS": tile["GROUPS"], "BLOCK_G": tile["BLOCK_G"]}


CASES = [
    _case(
        "tokens to fp8",
        fp8_activations._quantize_kernel,
        {"x_ptr": "*bf16", **dict.fromkeys(("x_stride", "num_tokens", "num_rows", "depth"), "i32")},
        {"BLOCK_R": 32},
    ),
    _case(
        "normed tokens to fp8",
        fp8_ffn.norm_tokens_kernel,
        {
            **dict.fromkeys(("x_ptr", "normed_ptr", "weight_ptr"), "*bf16"),
            **dict.fromkeys(("x_stride", "num_tokens", "num_rows"), "i32"),
            "eps": "fp32",
        },
        {"GROUPS": 40, "BLOCK_G": 64},
        num_warps=16,
    ),
    *(
        _case(
            f"sum and normed tokens to fp8 of {width} features{', in full too' if in_full else ''}",
            fp8_sums.add_norm_kernel,
            {
                **dict.fromkeys(("residual_ptr", "product_ptr", "weight_ptr"), "*bf16"),
                **({"normed_ptr": "*bf16"} if in_full else {}),
                **dict.fromkeys(("num_tokens", "num_rows"), "i32"),
                "eps": "fp32",
            },
            {**in_constexprs(width), **({} if in_full else {"normed_ptr": None})},
            num_warps=fp8_ffn.row_tile(width)["num_warps"],
        )
        for width in (2048, 5120)
        for in_full in (False, True)
    ),
    _case(
        "gated tokens to fp8",
        fp8_ffn.gate_tokens_kernel,
        {"gate_up_ptr": "*bf16", **dict.fromkeys(("num_tokens", "num_rows", "width"), "i32")},
        {"BLOCK_R": 32},
    ),
]
