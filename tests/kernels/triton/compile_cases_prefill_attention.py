"""Prefill attention kernels at served shapes, for the compile check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import (
    page_expansion,
    prefill_attention,
    prefill_attention_groups_hopper,
    prefill_attention_hopper,
)
from agentspec.kernels.triton.attention import dot_precision
from tests.kernels.triton.compile_case import ELSEWHERE, EVERYWHERE, HOPPER, CompileCase, shared_bytes

_PAGE = 64
_ELEMENTS = {"u8": gl.uint8, "bf16": gl.bfloat16}
_LINE = {"spans_UF": "*i64", "line_4I": "*i32", "most_tiles": "i32", "cuts_2C": "*i32"}


def _prepare(
    model: str,
    heads: tuple[int, int],
    head_dim: int,
    half_rope: int,
    dtype: torch.dtype,
    num_spans: int,
    block_rows: int,
    target: int,
    *,
    fp8: bool,
) -> CompileCase:
    activations = "*fp32" if dtype == torch.float32 else "*bf16"
    expands = fp8 and target == HOPPER
    return CompileCase(
        name=f"norm_and_store {model} U={num_spans}{' FP8 pages' if fp8 else ''}",
        kernel=prefill_attention._norm_and_store,
        targets=(target,),
        signature={
            "projected_NP": activations,
            "keys_values_NK": activations,
            "num_tokens": "i32",
            "row_stride": "i32",
            "q_norm_D": activations,
            "q_eps": "fp32",
            "k_norm_D": activations,
            "k_eps": "fp32",
            "cos_LA": "*fp32",
            "sin_LA": "*fp32",
            "kv_P2SGD": "*u8" if fp8 else activations,
            "position_N": "*i64",
            "spans_UF": "*i64",
            "num_spans": "i32",
            "page_table_UP": "*i32",
            "num_pages": "i32",
            "queries_NQD": activations,
            "line_4I": "*i32",
            "most_tiles": "i32",
            "num_programs": "i32",
        }
        | ({"exponent_P2GS": "*i8"} if fp8 else {})
        | ({"first_U": "*i32", "capacity": "i32"} if expands else {}),
        constexprs={
            "G": heads[1],
            "SHARES": heads[0] // heads[1],
            "D": head_dim,
            "A": half_rope,
            "PAGE": _PAGE,
            "BLOCK_M": block_rows,
            "BLOCK_N": prefill_attention._BLOCK_N,
            "BLOCK_D": head_dim,
        }
        | ({} if fp8 else {"exponent_P2GS": None})
        | ({} if expands else {"first_U": None, "capacity": 0})
        | prefill_attention.line_blocks(num_spans),
        num_warps=4,
        multiples_of_16=("row_stride",),
        instructions=("ld.global.v4",),
    )


def _descriptor(head_dim: int, element: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([_PAGE, head_dim], _ELEMENTS[element])
    return f"tensordesc<{element}[{_PAGE},{head_dim}],{layout!r}>"


def _expand(model: str, num_kv_heads: int, head_dim: int) -> CompileCase:
    return CompileCase(
        name=f"expand_pages {model}",
        kernel=page_expansion._expand,
        targets=EVERYWHERE,
        signature={
            "pool_E2SGD": "*bf16",
            "page_E": "*i32",
            "first_U": "*i32",
            "kv_P2SGD": "*u8",
            "exponent_P2GS": "*i8",
            "page_table_UP": "*i32",
            "spans_UF": "*i64",
            "num_spans": "i32",
            "num_pages": "i32",
        },
        constexprs={"G": num_kv_heads, "D": head_dim, "PAGE": _PAGE, "ROWS": page_expansion._ROWS, "BLOCK_U": 64},
        num_warps=4,
        instructions=("ld.global.v4", "st.global.v4"),
    )


def _cases(
    model: str,
    heads: tuple[int, int],
    head_dim: int,
    half_rope: int,
    dtype: torch.dtype,
    num_spans: int,
    target: int = HOPPER,
    *,
    fp8: bool = False,
    expands: bool = False,
) -> Iterator[CompileCase]:
    """expands: pages in FP8 are written out before (page_expansion.py)."""
    activations = "*fp32" if dtype == torch.float32 else "*bf16"
    plan = prefill_attention.attend_plan(
        dtype, head_dim, _PAGE, is_hopper=target == HOPPER, shared_bytes=shared_bytes(target), fp8=fp8
    )
    shapes = {"G": heads[1], "SHARES": heads[0] // heads[1], "D": head_dim, "BLOCK_M": plan.block_rows}
    options: dict[str, int | str | None] = {}
    kernel: Any = prefill_attention._attend
    if plan.is_hopper and not fp8:
        kernel, pool, options = prefill_attention_groups_hopper.attend, {"pool": _descriptor(head_dim, "bf16")}, {}
        options |= prefill_attention_groups_hopper.REGISTERS
    elif plan.is_hopper:
        kernel, pool = prefill_attention_hopper.attend, {"pool": _descriptor(head_dim, "u8")}
        if expands:
            pool |= {"scratch": _descriptor(head_dim, "bf16"), "page_E": "*i32", "first_U": "*i32"}
        else:
            options |= {"scratch": None, "page_E": None, "first_U": None}
    else:
        pool = {"kv_P2SGD": "*u8" if fp8 else activations}
        options |= {"BLOCK_D": head_dim, "PRECISION": dot_precision(dtype)} | ({} if fp8 else {"exponent_P2GS": None})
    pool |= {"exponent_P2GS": "*i8"} if fp8 else {}
    yield _prepare(model, heads, head_dim, half_rope, dtype, num_spans, plan.block_rows, target, fp8=fp8)
    yield CompileCase(
        name=f"attend_prompt {model}{' FP8 pages' if fp8 else ''}{', written out' if expands else ''}",
        kernel=kernel,
        targets=(target,),
        signature={"queries_NQD": activations, "projected_NP": activations, "row_stride": "i32"}
        | pool
        | {"page_table_UP": "*i32", "num_pages": "i32"}
        | _LINE
        | {"scale": "fp32", "sums_CMD": "*fp32", "scores_2CM": "*fp32", "out_NX": activations},
        constexprs=shapes | options | {"PAGE": _PAGE},
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        multiples_of_16=("row_stride",),
        # None of them in the loop over whole pages that were written out, or are in 16 bits. Of the latter Triton 3.6
        # has 32; 3.9 keeps places of queries in shared memory there, from tile to tile.
        stack_bytes=(256 if expands else 128 if fp8 else 216) if plan.is_hopper else 0,
        instructions=("wgmma.mma_async", "cp.async.bulk.tensor") if plan.is_hopper else (),
    )
    yield CompileCase(
        name=f"combine_prompt {model}",
        kernel=prefill_attention._combine,
        targets=(target,),
        signature={"sums_CMD": "*fp32", "scores_2CM": "*fp32", "projected_NP": activations, "row_stride": "i32"}
        | _LINE
        | {"out_NX": activations},
        constexprs=shapes | {"BLOCK_R": prefill_attention._COMBINE_ROWS, "BLOCK_C": 256, "BLOCK_D": head_dim},
        num_warps=4,
        multiples_of_16=("row_stride",),
        instructions=("ld.global.v4",),
    )


CASES = [
    _expand("27B", 4, 256),
    list(_cases("27B", (24, 4), 256, 32, torch.bfloat16, 64, fp8=True, expands=True))[1],
    *list(_cases("27B", (24, 4), 256, 32, torch.bfloat16, 64, fp8=True))[:2],
    *(
        case
        for target in ELSEWHERE
        for case in list(_cases("27B", (24, 4), 256, 32, torch.bfloat16, 64, target, fp8=True))[:2]
    ),
    *_cases("4B", (16, 4), 256, 32, torch.bfloat16, 4),
    *_cases("27B", (24, 4), 256, 32, torch.bfloat16, 64),
    *_cases("tiny-agent fp32", (4, 2), 64, 8, torch.float32, 4),
    list(_cases("tiny-agent", (4, 2), 64, 8, torch.bfloat16, 4))[1],
    *(case for target in ELSEWHERE for case in _cases("27B", (24, 4), 256, 32, torch.bfloat16, 64, target)),
]
